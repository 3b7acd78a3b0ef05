"""A part of kind `model`: a sequence classifier of transformers says what an answer is worth, as its first output.

Runs in a child of its own (`busrl.rewards.child`), the one place of rewards that imports torch. Talks to transformers
and to the device that the reward process was given. Knows nothing of other parts.

- Prompt and answer are written by the classifier's own chat template; without one they stand one after the other.
- Rows are padded at the right, and a forward pass has at most `batch_tokens` tokens, padding included. So a score does
  not depend on what it is computed beside, up to rounding.
- Of a text that is longer than the model takes, the end is what it sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from busrl.data.prompts import asked, plain_text
from busrl.errors import RewardNotLoaded
from busrl.rewards.base import Setup
from busrl.system import device

CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length")


class Scorer:
    """Called with lists: records, completions and their token ids, which are the policy's and not looked at."""

    def __init__(self, setup: Setup) -> None:
        self.prompt_key, self.batch_tokens = setup.prompt_key, setup.batch_tokens
        self.device = device.choose(setup.device)
        path = Path(setup.path)
        try:
            from transformers import AutoModelForSequenceClassification, AutoTokenizer

            self.tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
            dtype = torch.bfloat16 if device.has_bfloat16(self.device.type) else torch.float32
            load = AutoModelForSequenceClassification.from_pretrained
            model, told = load(path, local_files_only=True, dtype=dtype, output_loading_info=True)
        except Exception as problem:
            raise RewardNotLoaded(f"{setup.place}.path = {setup.path!r}: {type(problem).__name__}: {problem}") from None
        if missing := sorted(told["missing_keys"]):
            # Else the score would be that of random weights.
            raise RewardNotLoaded(f"{setup.place}.path = {setup.path!r}: it has no weights {', '.join(missing[:5])}")
        self.model: Any = model.to(self.device).eval()
        self.pad = _padding(self.model.config, self.tokenizer)
        self.model.config.pad_token_id = self.pad
        self.context = next((found for name in CONTEXT if (found := getattr(self.model.config, name, 0))), 0)

    def __call__(self, records: list[Any], completions: list[str], token_ids: list[list[int]]) -> list[float]:
        rows = [self.ids(record, text) for record, text in zip(records, completions)]
        scores = [0.0] * len(rows)
        for places in batches([len(row) for row in rows], self.batch_tokens):
            for place, score in zip(places, self._scores([rows[place] for place in places])):
                scores[place] = score
        return scores

    def ids(self, record: dict[str, Any], completion: str) -> list[int]:
        """Prompt and answer as the classifier reads them; the end of what is too long."""
        prompt = record.get(self.prompt_key, "")
        if self.tokenizer.chat_template:
            prompt = asked(prompt) if isinstance(prompt, list) else plain_text(prompt)
            messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
            messages = [*messages, {"role": "assistant", "content": completion}]
            ids = self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        else:
            ids = self.tokenizer(plain_text(prompt) + completion).input_ids
        return list(ids[-self.context :] if self.context else ids) or [self.pad]

    @torch.inference_mode()
    def _scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """The first output for each row."""
        width = max(map(len, rows))
        ids = torch.tensor([[*row, *[self.pad] * (width - len(row))] for row in rows], device=self.device)
        lengths = torch.tensor([len(row) for row in rows], device=self.device)
        mask = torch.arange(width, device=self.device)[None, :] < lengths[:, None]
        logits = self.model(input_ids=ids, attention_mask=mask.long()).logits
        scores: list[float] = logits[:, 0].float().tolist()
        return scores


def batches(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Positions in batches of like lengths, whose rows, padded to the longest, have at most `tokens` tokens; a row that
    is longer is alone."""
    own: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: lengths[place]):
        if own and lengths[place] * (len(own) + 1) > tokens:  # it is the longest so far
            yield own
            own = []
        own.append(place)
    if own:
        yield own


def _padding(config: Any, tokenizer: Any) -> int:
    """The id that rows are padded with. The model looks for the last one that is another, so that an end token will do
    only where there is nothing else."""
    known = (tokenizer.pad_token_id, config.pad_token_id, tokenizer.eos_token_id)
    return int(next((one for one in known if one is not None), 0))
