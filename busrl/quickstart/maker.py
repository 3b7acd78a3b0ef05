"""Makes a quickstart folder: tokenizer, model, warm-up and data files.

Talks to torch, transformers and tokenizers, and to `cache` for the lock and the atomic rename. Model and tokenizer are
an ordinary Hugging Face folder that any tool can load. Knows nothing of runs.

The warm-up first teaches the task, then teaches mistakes over it: most targets get one wrong digit, until about a third
of the answers is right. Reinforcement learning then has something to undo within a minute on a CPU; it shows that the
loop works, not that a new skill is learnt.

- Both phases end on a computed pass rate: the probability that the model gives right answers to held-out prompts,
  judged like the run's reward. A warm-up that does not reach it is an error.
- The same recipe on the same machine and libraries gives the same weights (seeded, one thread).
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from busrl.errors import MachineError
from busrl.quickstart import task
from busrl.quickstart.cache import Paths, make_once
from busrl.quickstart.task import END_TOKEN, PAD_TOKEN, UNKNOWN_TOKEN, VOCABULARY, Recipe, find
from busrl.states import TINY_POSITIONS

WIDTH = 24
QUIET_S = 5.0  # between two lines when stderr is no terminal


def progress(title: str) -> Callable[[float, str], None]:
    """A function that shows the share done (0 to 1) and a text on stderr: one line, or one now and then, in a file."""
    terminal, started, shown = sys.stderr.isatty(), time.monotonic(), 0.0

    def show(share: float, text: str) -> None:
        nonlocal shown
        now = time.monotonic()
        if not terminal and now - shown < QUIET_S and share < 1.0:
            return
        shown = now
        filled = round(WIDTH * min(max(share, 0.0), 1.0))
        line = f"{title} [{'#' * filled}{'.' * (WIDTH - filled)}] {text}, {now - started:.0f} s"
        print(f"\r{line:<78}" if terminal else line, end="" if terminal else "\n", file=sys.stderr, flush=True)

    return show


# -- the optimiser -------------------------------------------


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Near a matrix of the same singular vectors whose singular values are all about 1 (five Newton-Schulz steps)."""
    tall = matrix.shape[-2] > matrix.shape[-1]
    near: torch.Tensor = matrix.mT if tall else matrix
    near = near / (near.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = near @ near.mT
        near = 3.4445 * near + (2.0315 * square @ square - 4.775 * square) @ near
    return near.mT if tall else near


class Muon:
    """Muon (Jordan and others, 2024) for the matrices of the layers, AdamW for the rest. It needs a third of the steps
    that AdamW alone does."""

    MOMENTUM = 0.95

    def __init__(self, model: torch.nn.Module, recipe: Recipe) -> None:
        named = list(model.named_parameters())
        matrices = {name for name, weights in named if weights.dim() > 1 and "embed" not in name and "head" not in name}
        self._matrices = [(weights, torch.zeros_like(weights)) for name, weights in named if name in matrices]
        rest = [weights for name, weights in named if name not in matrices]
        self._rest = torch.optim.AdamW(rest, lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0)
        self._lr, self._matrix_lr = recipe.lr, recipe.matrix_lr

    @torch.no_grad()
    def step(self, share: float) -> None:
        """An update at this share of the learning rates."""
        for group in self._rest.param_groups:
            group["lr"] = self._lr * share
        self._rest.step()
        for weights, mean in self._matrices:
            if weights.grad is not None:
                mean.lerp_(weights.grad, 1.0 - self.MOMENTUM)
                size = self._matrix_lr * share * max(1.0, weights.shape[-2] / weights.shape[-1]) ** 0.5
                weights.sub_(orthogonal(weights.grad.lerp(mean, self.MOMENTUM)), alpha=size)


# -- the warm-up ---------------------------------------------


POOL_BATCHES = 8  # drawn together, sorted by length (padding would be half of the work), then shuffled as batches
CHECKED = 128  # prompts of a check that are computed together
IGNORED = -100
RIGHT = re.compile(task.EXTRACT)
Row = tuple[list[int], list[int]]  # ids of a prompt, and of what comes behind it


def padded(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids of all rows, and those to predict: IGNORED where there is a prompt or nothing."""
    width = max(len(prompt) + len(target) for prompt, target in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), width), IGNORED)
    for row, (prompt, target) in enumerate(rows):
        ids[row, : len(prompt) + len(target)] = torch.tensor(prompt + target)
        labels[row, len(prompt) : len(prompt) + len(target)] = torch.tensor(target)
    return ids, labels


class WarmUp:
    """A warm-up: `teach()` until the skill is there, then `mask()` until it is hidden under mistakes."""

    def __init__(self, recipe: Recipe, tokenizer: Any, model: Any, held_out: list[str]) -> None:
        self._recipe, self._tokenizer, self._model, self._held_out = recipe, tokenizer, model, held_out
        self._show = progress(f"making {recipe.name}")
        self._prompts = task.warm_up_prompts(recipe, held_out)
        self._rng = random.Random(f"{recipe.seed}/targets")
        self._pool: list[list[Row]] = []
        self._ids = {token: index for index, token in enumerate(task.VOCABULARY)}
        self._optimizer = Muon(model, recipe)
        self._steps = {"teach": 0, "mask": 0}

    def teach(self) -> float:
        """Train on right answers until the pass rate is the recipe's `skill`; the rate reached."""
        recipe, passed = self._recipe, 0.0
        while passed < recipe.skill and self._steps["teach"] < recipe.skill_steps_max:
            for _ in range(recipe.check_every):
                self._steps["teach"] += 1
                self._step(0.0, self._teaching_rate(self._steps["teach"]))
            passed = self.pass_rate()
            self._show(0.8 * passed / recipe.skill if recipe.skill else 0.8, f"learning, pass rate {passed:.2f}")
        if passed < recipe.skill:
            raise _missed("the skill", passed, f"at least {recipe.skill}", recipe.skill_steps_max)
        return round(passed, 4)

    def mask(self) -> float:
        """Train on mostly wrong answers until the pass rate is no higher than `pass_high`; the rate reached."""
        recipe, passed = self._recipe, float("inf")
        self._pool.clear()
        while passed > recipe.pass_high and self._steps["mask"] < recipe.mask_steps_max:
            for _ in range(recipe.mask_check_every):
                self._steps["mask"] += 1
                self._step(recipe.wrong, recipe.mask_rate)
            passed = self.pass_rate()
            self._show(1.0 if passed <= recipe.pass_high else 0.9, f"unlearning, pass rate {passed:.2f}")
        if not recipe.pass_low <= passed <= recipe.pass_high:
            raise _missed("the pass rate", passed, f"{recipe.pass_low} to {recipe.pass_high}", self._steps["mask"])
        return round(passed, 4)

    def pass_rate(self) -> float:
        """The probability of the right answers to the first `check_samples` held-out prompts, behind fillers drawn as
        the task draws them."""
        recipe, rng = self._recipe, random.Random(f"{self._recipe.seed}/check")
        rows = [self._answered(prompt, rng) for prompt in self._held_out[: recipe.check_samples]]
        rows.sort(key=lambda row: len(row[0]) + len(row[1]))
        return sum(self._right(rows[at : at + CHECKED]) for at in range(0, len(rows), CHECKED)) / len(rows)

    @torch.no_grad()
    def facts(self) -> dict[str, Any]:
        """Facts of the warm-up: its steps, and of completions sampled at temperature 1, one for each held-out prompt,
        the share that is right and the lengths in tokens."""
        texts, lengths = self._sample()
        answers = [(RIGHT.search(text), task.answer_of(prompt)) for prompt, text in zip(self._held_out, texts)]
        right = sum(match is not None and bool(match[1] == answer) for match, answer in answers)
        return {
            "steps": dict(self._steps),
            "sampled_pass_rate": round(right / len(texts), 4),
            "length_mean": round(lengths.mean().item(), 2),
            "length_p5_p50_p95": torch.quantile(lengths, torch.tensor([0.05, 0.5, 0.95])).tolist(),
        }

    def _step(self, wrong: float, rate: float) -> None:
        ids, labels = self._batch(wrong)
        logits = self._model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        self._model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step(rate)

    def _teaching_rate(self, step: int) -> float:
        """The share of the learning rates: it rises, stays, and from 0.6 of `skill_steps` on falls to `lr_end`."""
        falling = min(max(step / self._recipe.skill_steps - 0.6, 0.0) / 0.4, 1.0)
        return float(min(1.0, step / self._recipe.lr_rise) * self._recipe.lr_end**falling)

    def _batch(self, wrong: float) -> tuple[torch.Tensor, torch.Tensor]:
        size = self._recipe.batch
        if not self._pool:
            examples = [self._example(wrong) for _ in range(size * POOL_BATCHES)]
            examples.sort(key=lambda row: len(row[0]) + len(row[1]))
            self._pool = [examples[start : start + size] for start in range(0, len(examples), size)]
            self._rng.shuffle(self._pool)
        return padded(self._pool.pop())

    def _example(self, wrong: float) -> Row:
        prompt = next(self._prompts)
        return self._row(prompt, task.draw_completion(self._recipe, prompt, wrong, self._rng))

    def _row(self, prompt: str, target: str) -> Row:
        ids = self._ids
        return [ids[char] for char in prompt], [*(ids[char] for char in target), ids[task.END_TOKEN]]

    def _answered(self, prompt: str, rng: random.Random) -> Row:
        """A prompt with a filler, and the right answer."""
        filler = task.draw_filler(self._recipe, prompt, rng)
        return self._row(prompt + filler, task.BAR + task.answer_of(prompt))

    @torch.no_grad()
    def _right(self, rows: list[Row]) -> float:
        """The sum of the probabilities of what is behind each prompt, given that its first token is."""
        ids, labels = padded(rows)
        for row, (prompt, _) in enumerate(rows):
            labels[row, len(prompt)] = IGNORED  # the bar: its place is the filler's matter
        logits = self._model(input_ids=ids[:, :-1], use_cache=False).logits
        surprise = functional.cross_entropy(logits.mT, labels[:, 1:], ignore_index=IGNORED, reduction="none").sum(1)
        return float(surprise.neg().exp().sum())

    def _sample(self) -> tuple[list[str], torch.Tensor]:
        inputs = self._tokenizer(self._held_out, return_tensors="pt", padding=True)
        options = {"max_new_tokens": self._recipe.max_new_tokens, "do_sample": True, "top_k": 0, "top_p": 1.0}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._recipe.seed)
            self._model.eval()
            rows = self._model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], **options)
            self._model.train()
        completions = rows[:, inputs["input_ids"].shape[1] :]
        texts = [text.replace(task.PAD_TOKEN, "") for text in self._tokenizer.batch_decode(completions)]
        return texts, (completions != self._tokenizer.pad_token_id).sum(1).float()


# -- model and tokenizer -------------------------------------


def new_tokenizer(recipe: Recipe) -> Any:
    """Make a tokenizer with a token per character; decoding joins them without spaces."""
    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN_TOKEN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    make: Any = PreTrainedTokenizerFast  # untyped in transformers
    return make(
        tokenizer_object=core, pad_token=PAD_TOKEN, eos_token=END_TOKEN, unk_token=UNKNOWN_TOKEN, padding_side="left",
        model_max_length=TINY_POSITIONS, clean_up_tokenization_spaces=False,
    )


def new_model(recipe: Recipe) -> Any:
    """A Qwen3 with fresh float32 weights, seeded by the recipe."""
    config = Qwen3Config(
        vocab_size=len(VOCABULARY), hidden_size=recipe.hidden, intermediate_size=recipe.mlp,
        num_hidden_layers=recipe.layers, num_attention_heads=recipe.heads, num_key_value_heads=recipe.heads,
        head_dim=recipe.head_dim, max_position_embeddings=TINY_POSITIONS, tie_word_embeddings=True,
        pad_token_id=VOCABULARY.index(PAD_TOKEN), eos_token_id=VOCABULARY.index(END_TOKEN), bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model: Any = Qwen3ForCausalLM(config)
    return model.to(torch.float32)


def save(folder: Path, recipe: Recipe, tokenizer: Any, model: Any) -> None:
    make: Any = GenerationConfig  # untyped in transformers
    model.generation_config = make(
        do_sample=True, temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=recipe.max_new_tokens,
        eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    # Newer transformers write a class name that older ones cannot load; both can load this one.
    config = {**json.loads(path.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2) + "\n")


# -- the folder ----------------------------------------------


def make(name: str, *, force: bool = False) -> Paths:
    recipe = find(name)
    return make_once(recipe, lambda folder: _fill(folder, recipe), force=force)


def _fill(folder: Path, recipe: Recipe) -> None:
    train, validation = task.splits(recipe)
    for name, prompts in (("train", train), ("validation", validation)):
        lines = (json.dumps({"prompt": prompt, "answer": task.answer_of(prompt)}) + "\n" for prompt in prompts)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    facts = _make_model(folder / "model", recipe, validation)
    (folder / "made.json").write_text(json.dumps({"name": recipe.name, **facts}, indent=1) + "\n")


def _make_model(folder: Path, recipe: Recipe, validation: list[str]) -> dict[str, Any]:
    disable_progress_bar()  # type: ignore[no-untyped-call]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        started = time.monotonic()
        tokenizer, model = new_tokenizer(recipe), new_model(recipe)
        warm_up = WarmUp(recipe, tokenizer, model, validation)
        facts = {"skill": warm_up.teach(), "pass_rate": warm_up.mask(), **warm_up.facts()}
        save(folder, recipe, tokenizer, model)
    finally:
        torch.set_num_threads(threads)
        if sys.stderr.isatty():
            print(file=sys.stderr, flush=True)  # below the line that was redrawn
    facts["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    return {**facts, "seconds": round(time.monotonic() - started, 1), "torch": torch.__version__}


def _missed(what: str, value: float, wanted: str, steps: int) -> MachineError:
    return MachineError(
        f"quickstart warm-up: {what} is {value:.3f} after {steps} steps, and must be {wanted}; this torch build "
        "computes other values than the tested ones: please report torch.__config__.show()"
    )
