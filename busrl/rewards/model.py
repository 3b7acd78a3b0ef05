"""A part of kind `model`: the first output of a sequence classifier of transformers is the reward of an answer.

Runs in a child of its own (`busrl.rewards.child`); no other module of rewards imports torch. Talks to transformers and
to the device of the reward process. Knows nothing of other parts.

- Prompt and answer are written by the classifier's own chat template; without one they are concatenated.
- Rows are padded at the right, and a forward pass has at most `batch_tokens` tokens, padding included. So a score does
  not depend on the other rows of its batch, up to rounding.
- A text that is longer than the classifier's context loses its beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from busrl.data.prompts import normalised, plain_text
from busrl.errors import RewardNotLoaded
from busrl.rewards.base import Setup
from busrl.system import device

CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length")


class Scorer:
    """The classifier, called with lists of records, completions and token ids. It ignores the ids: they are those of
    the policy's tokenizer."""

    takes_lists = True

    def __init__(self, setup: Setup) -> None:
        self.prompt_key, self.batch_tokens = setup.prompt_key, setup.batch_tokens
        self.device = device.choose(setup.device)
        path = Path(setup.path)
        try:
            from transformers import AutoModelForSequenceClassification, AutoTokenizer

            self.tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
            dtype = torch.bfloat16 if device.has_bfloat16(self.device.type) else torch.float32
            load = AutoModelForSequenceClassification.from_pretrained
            model, info = load(path, local_files_only=True, dtype=dtype, output_loading_info=True)
        except Exception as problem:
            raise RewardNotLoaded(f"{setup.place}.path = {setup.path!r}: {type(problem).__name__}: {problem}") from None
        if missing := sorted(info["missing_keys"]):
            # Otherwise random weights would give the score.
            raise RewardNotLoaded(f"{setup.place}.path = {setup.path!r}: it has no weights {', '.join(missing[:5])}")
        self.model: Any = model.to(self.device).eval()
        self.pad = _padding(self.model.config, self.tokenizer)
        self.model.config.pad_token_id = self.pad
        self.context = next((length for name in CONTEXT if (length := getattr(self.model.config, name, 0))), 0)

    def __call__(self, records: list[Any], completions: list[str], token_ids: list[list[int]]) -> list[float]:
        rows = [self.ids(record, text) for record, text in zip(records, completions)]
        scores = [0.0] * len(rows)
        for places in batches([len(row) for row in rows], self.batch_tokens):
            for place, score in zip(places, self._scores([rows[place] for place in places])):
                scores[place] = score
        return scores

    def ids(self, record: dict[str, Any], completion: str) -> list[int]:
        """Prompt and answer as the classifier reads them, cut at the beginning to fit its context."""
        prompt = record.get(self.prompt_key, "")
        if self.tokenizer.chat_template:
            prompt = normalised(prompt) if isinstance(prompt, list) else plain_text(prompt)
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
    """Positions in batches of similar lengths. The rows of a batch, padded to the longest, have at most `tokens`
    tokens; a row that is longer than that is alone."""
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: lengths[place]):
        if batch and lengths[place] * (len(batch) + 1) > tokens:  # it is the longest so far
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def _padding(config: Any, tokenizer: Any) -> int:
    """The id that rows are padded with. The model scores at the last token with another id, so the end token is the
    last choice."""
    ids = (tokenizer.pad_token_id, config.pad_token_id, tokenizer.eos_token_id)
    return int(next((token for token in ids if token is not None), 0))
