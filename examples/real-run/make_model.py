"""Makes the model of the real run: `python make_model.py FOLDER [--seed N]`, from nothing that has to be downloaded.

FOLDER/model becomes an ordinary Hugging Face folder: a Qwen2 of 10 million parameters with Qwen's whole vocabulary of
151,643 tokens, which the package dashscope has, and ChatML as its chat template. After a supervised warm-up it gives
right answers to a share of the questions. FOLDER/short.jsonl and long.jsonl have the held-out questions. Uses plain
torch and transformers, and nothing of busrl.

- The warm-up ends on a measured share of right answers, drawn at temperature 1 on questions that it is not trained on.
- It sees no question that is held out (task.py).
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import random
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from task import KINDS, questions
from torch.nn import functional

# -- Qwen's tokenizer -----

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # 151643 to 151645, as in Qwen2
ROWS = 151_936  # of the embedding: Qwen's own number, above the vocabulary
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def vocabulary() -> dict[bytes, int]:
    """Bytes and rank of each token. The package is not imported: its client is not needed."""
    package = find_spec("dashscope")
    if package is None or not package.origin:
        raise SystemExit("Qwen's vocabulary comes with a package: pip install --no-deps dashscope")
    lines = (Path(package.origin).parent / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}


def make_tokenizer() -> Any:
    """Make a byte-level BPE tokenizer, which first joins the two neighbours whose joint token has the lowest rank."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    ranks, shown = vocabulary(), bytes_to_unicode()
    text = {token: "".join(shown[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [(ranks[left], ranks[right], left, right) for left, right in cuts if left in ranks and right in ranks]
        merges += [(text[left], text[right]) for *_, left, right in sorted(pairs)]
    core = Tokenizer(models.BPE({text[token]: rank for token, rank in ranks.items()}, merges, ignore_merges=True))
    core.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False),
    ])
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL))
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left",
    )
    tokenizer.chat_template = CHATML
    return tokenizer


# -- the model and its warm-up -----

IGNORED = -100


def make_model(tokenizer: Any, seed: int) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    model: Any = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=ROWS, hidden_size=64, intermediate_size=288, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=end, pad_token_id=pad,
    ))
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = [end, pad], pad
    return model


def prompted(tokenizer: Any, row: dict[str, Any]) -> str:
    turn = [{"role": "user", "content": row["prompt"]}]
    text: str = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return text


class WarmUp:
    """Supervised steps on right answers, half of them bare (`12`), half in the reward's form (`<answer>12</answer>`).

    Only the embedding's rows of the task's tokens are trained. The others stay as they were drawn, so small that each
    adds about 1 to the sum under the softmax: they are counted there and not computed, at a hundredth of the cost. The
    measurement of right answers, and the run itself, compute all of them.
    """

    def __init__(self, model: Any, tokenizer: Any, rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
        self.model, self.tokenizer, self.options = model, tokenizer, options
        self.chance = random.Random(options.seed)
        self.prompts = tokenizer([prompted(tokenizer, row) for row in rows])["input_ids"]
        ends = tokenizer.eos_token
        plain = tokenizer([f"{row['answer']}{ends}" for row in rows])["input_ids"]
        formed = tokenizer([f"<answer>{row['answer']}</answer>{ends}" for row in rows])["input_ids"]
        self.answers = (plain, formed)
        ids_of_task = torch.tensor(sorted({index for row in (*self.prompts, *plain, *formed) for index in row}))
        self.ids_of_task, self.place = ids_of_task, torch.full((ROWS,), -1)
        self.place[ids_of_task] = torch.arange(len(ids_of_task))
        self.table = model.get_input_embeddings().weight
        self.rows = torch.nn.Parameter(torch.randn(len(ids_of_task), self.table.shape[1]) * 0.1)
        layers = [weights for weights in model.parameters() if weights is not self.table]
        self.optimizer = torch.optim.AdamW([*layers, self.rows], lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, number: int) -> float:
        ids, labels = self._batch()
        embedded = functional.embedding(self.place[ids[:, :-1]], self.rows)
        hidden = self.model.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
        chosen = labels[:, 1:] != IGNORED
        logits = hidden[chosen] @ self.rows.T
        others = torch.full((len(logits), 1), math.log(ROWS - len(self.ids_of_task)))
        loss = functional.cross_entropy(torch.cat([logits, others], 1), self.place[labels[:, 1:][chosen]])
        self.optimizer.param_groups[0]["lr"] = self.options.lr * min(1.0, number / 50)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.optimizer.param_groups[0]["params"], 1.0)
        self.optimizer.step()
        return loss.item()

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = [self.chance.randrange(len(self.prompts)) for _ in range(self.options.batch)]
        pairs = [(self.prompts[place], self.chance.choice(self.answers)[place]) for place in drawn]
        width = max(len(prompt) + len(answer) for prompt, answer in pairs)
        ids = torch.full((len(pairs), width), self.tokenizer.eos_token_id)
        labels = torch.full((len(pairs), width), IGNORED)
        for row, (prompt, answer) in enumerate(pairs):
            ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        return ids, labels

    @torch.no_grad()
    def right(self, rows: list[dict[str, Any]]) -> float:
        """The share of right answers, with one per question, drawn at temperature 1 from the whole vocabulary."""
        self.table[self.ids_of_task] = self.rows
        inputs = self.tokenizer([prompted(self.tokenizer, row) for row in rows], return_tensors="pt", padding=True)
        longest = max(map(len, self.answers[1])) + 2
        drawn = self.model.generate(**inputs, max_new_tokens=longest, do_sample=True, top_k=0, top_p=1.0)
        texts = self.tokenizer.batch_decode(drawn[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        wanted = [(row["answer"], f"<answer>{row['answer']}</answer>") for row in rows]
        return sum(text in both for text, both in zip(texts, wanted)) / len(rows)


def warm_up(model: Any, tokenizer: Any, options: argparse.Namespace) -> None:
    """Train until a share of `--until` is right, or `--steps` are done."""
    rows = [row for kind in KINDS for row in questions(kind, options.questions, 10**6, held=False)]
    random.Random(0).shuffle(rows)
    check, rows = rows[:128], rows[128:]
    work, began = WarmUp(model, tokenizer, rows, options), time.monotonic()
    for number in range(1, options.steps + 1):
        loss = work.step(number)
        if number % options.check == 0 or number == options.steps:
            share = work.right(check)
            seconds = time.monotonic() - began
            print(f"warm-up step {number}: loss {loss:.3f}, {share:.2f} right, {seconds:.0f} s", flush=True)
            if share >= options.until:
                break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--until", type=float, default=0.28, help="end at this share of right answers")
    parser.add_argument("--steps", type=int, default=1500, help="... or after so many steps")
    parser.add_argument("--check", type=int, default=50, help="look at the share every so many steps")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--questions", type=int, default=8000, help="of each kind, for the warm-up")
    parser.add_argument("--held-out", type=int, default=250, help="of each kind, for validation")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        lines = (json.dumps(row) + "\n" for row in questions(kind, options.held_out, 2 * 10**6, held=True))
        (options.folder / f"{kind}.jsonl").write_text("".join(lines), encoding="utf-8")
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, options.seed)
    size = sum(weights.numel() for weights in model.parameters())
    print(f"{size:,} parameters, {len(tokenizer):,} tokens", flush=True)
    warm_up(model, tokenizer, options)
    model.save_pretrained(options.folder / "model")
    tokenizer.save_pretrained(options.folder / "model")


if __name__ == "__main__":
    main()
