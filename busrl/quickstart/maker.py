"""Makes a quickstart folder: tokenizer, model, warm-up and data files.

Talks to torch, transformers and tokenizers, and to `cache` for the lock and the atomic rename. Model and tokenizer are
an ordinary Hugging Face folder that any tool can load. Knows nothing of runs.

The warm-up first teaches the task, then teaches mistakes over it: most targets get one wrong digit, until the pass rate
sampled at temperature 1 is well below one half. Reinforcement learning then has something to undo within minutes on a
CPU; it shows that the loop works, not that a new skill is learnt.

- Both phases end on a measured pass rate: that of completions sampled at temperature 1 on held-out prompts, judged like
  the run's reward. A warm-up that does not reach it is an error.
- The same recipe on the same machine and libraries gives the same weights (seeded, one thread).
"""

from __future__ import annotations

import json
import math
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


# -- the warm-up ---------------------------------------------


POOL_BATCHES = 8  # drawn together, sorted by length (padding would be half of the work), then shuffled as batches
IGNORED = -100
RIGHT = re.compile(task.EXTRACT)


class WarmUp:
    """A warm-up: `teach()` until the skill is there, then `mask()` until it is hidden under mistakes."""

    def __init__(self, recipe: Recipe, tokenizer: Any, model: Any, held_out: list[str]) -> None:
        self._recipe, self._tokenizer, self._model = recipe, tokenizer, model
        self._show = progress(f"making {recipe.name}")
        self._held_out = held_out
        self._prompts = task.warm_up_prompts(recipe, held_out)
        self._rng = random.Random(f"{recipe.seed}/targets")
        self._pool: list[list[tuple[list[int], list[int]]]] = []
        self._ids = {token: index for index, token in enumerate(task.VOCABULARY)}
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0)
        self._steps = {"teach": 0, "mask": 0}
        self._lengths = torch.zeros(1)

    def teach(self) -> float:
        """Train on right answers until the sampled pass rate is the recipe's `skill`; the rate reached."""
        recipe, passed = self._recipe, 0.0
        while passed < recipe.skill and self._steps["teach"] < recipe.skill_steps_max:
            for _ in range(recipe.check_every):
                self._steps["teach"] += 1
                self._step(0.0, recipe.lr * min(1.0, self._steps["teach"] / recipe.lr_rise))
            passed = self.pass_rate()
            self._show(0.7 * passed / recipe.skill, f"learning, pass rate {passed:.2f}")
        if passed < recipe.skill:
            raise _missed("the skill", passed, f"at least {recipe.skill}", recipe.skill_steps_max)
        return round(passed, 4)

    def mask(self) -> float:
        """Train on mostly wrong answers, for `mask_steps` and until the pass rate is in its range; the rate reached."""
        recipe, passed = self._recipe, 0.0
        self._pool.clear()
        while self._steps["mask"] < recipe.mask_steps_max:
            for _ in range(recipe.check_every):
                self._steps["mask"] += 1
                done = min(1.0, self._steps["mask"] / recipe.mask_steps)
                self._step(recipe.wrong, recipe.lr * (recipe.lr_end / recipe.lr) ** done)
            passed = self.pass_rate()
            done = self._steps["mask"] / recipe.mask_steps
            self._show(min(0.7 + 0.3 * done, 1.0), f"unlearning, pass rate {passed:.2f}")
            if done >= 1.0 and recipe.pass_low <= passed <= recipe.pass_high:
                return round(passed, 4)
        raise _missed("the pass rate", passed, f"{recipe.pass_low} to {recipe.pass_high}", recipe.mask_steps_max)

    def facts(self) -> dict[str, Any]:
        """Facts of the warm-up: what was needed, and the completion lengths (in tokens) that version 0 samples."""
        quantiles = torch.quantile(self._lengths, torch.tensor([0.05, 0.5, 0.95])).tolist()
        return {
            "steps": dict(self._steps),
            "length_mean": round(self._lengths.mean().item(), 2),
            "length_p5_p50_p95": quantiles,
        }

    def _step(self, wrong: float, lr: float) -> None:
        ids, labels = self._batch(wrong)
        logits = self._model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()

    def _batch(self, wrong: float) -> tuple[torch.Tensor, torch.Tensor]:
        size = self._recipe.batch
        if not self._pool:
            examples = [self._example(wrong) for _ in range(size * POOL_BATCHES)]
            examples.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
            self._pool = [examples[start : start + size] for start in range(0, len(examples), size)]
            self._rng.shuffle(self._pool)
        pairs = self._pool.pop()
        width = max(len(prompt) + len(target) for prompt, target in pairs)
        ids = torch.zeros(size, width, dtype=torch.long)
        labels = torch.full((size, width), IGNORED)
        for row, (prompt, target) in enumerate(pairs):
            ids[row, : len(prompt) + len(target)] = torch.tensor(prompt + target)
            labels[row, len(prompt) : len(prompt) + len(target)] = torch.tensor(target)
        return ids, labels

    def _example(self, wrong: float) -> tuple[list[int], list[int]]:
        prompt = next(self._prompts)
        target = task.draw_completion(self._recipe, prompt, wrong, self._rng)
        end = self._ids[task.END_TOKEN]
        return [self._ids[char] for char in prompt], [*(self._ids[char] for char in target), end]

    @torch.no_grad()
    def pass_rate(self) -> float:
        """Sample one completion for each of `check_samples` held-out prompts; the share that is right."""
        recipe, tokenizer = self._recipe, self._tokenizer
        prompts = (self._held_out * math.ceil(recipe.check_samples / len(self._held_out)))[: recipe.check_samples]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True)
        options = {"max_new_tokens": recipe.max_new_tokens, "do_sample": True, "top_k": 0, "top_p": 1.0}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            self._model.eval()
            rows = self._model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], **options)
            self._model.train()
        completions = rows[:, inputs["input_ids"].shape[1] :]
        self._lengths = (completions != tokenizer.pad_token_id).sum(1).float()
        texts = [text.replace(task.PAD_TOKEN, "") for text in tokenizer.batch_decode(completions)]
        answers = [(RIGHT.search(text), task.answer_of(prompt)) for prompt, text in zip(prompts, texts)]
        return sum(match is not None and bool(match[1] == answer) for match, answer in answers) / len(prompts)


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
