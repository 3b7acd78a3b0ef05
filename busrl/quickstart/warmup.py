"""The supervised warm-up of a quickstart model, and the sampling that measures its pass rate.

Talks to torch and to the model it is given. Knows nothing of files or of the cache.

- The pass rate is that of completions sampled at temperature 1 on held-out prompts, judged like the run's reward.
- Batches hold examples of like length, since padding would be half of the work otherwise.
"""

from __future__ import annotations

import math
import random
import re
from typing import Any

import torch
from torch.nn import functional

from busrl.quickstart import sort_task
from busrl.quickstart.progress import Progress
from busrl.quickstart.recipe import Recipe

POOL_BATCHES = 8  # drawn together, sorted by length, then shuffled as batches
IGNORED = -100
RIGHT = re.compile(sort_task.EXTRACT)


class WarmUp:
    """One warm-up: `teach()` until the skill is there, then `mask()` until it is hidden under mistakes."""

    def __init__(self, recipe: Recipe, tokenizer: Any, model: Any, held_out: list[str], progress: Progress) -> None:
        self._recipe, self._tokenizer, self._model, self._progress = recipe, tokenizer, model, progress
        self._held_out = held_out
        self._prompts = sort_task.warm_up_prompts(recipe, held_out)
        self._rng = random.Random(f"{recipe.seed}/targets")
        self._pool: list[list[tuple[list[int], list[int]]]] = []
        self._ids = {token: index for index, token in enumerate(sort_task.VOCABULARY)}
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
            self._progress.show(0.7 * passed / recipe.skill, f"learning, pass rate {passed:.2f}")
        return passed

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
            self._progress.show(min(0.7 + 0.3 * done, 1.0), f"unlearning, pass rate {passed:.2f}")
            if done >= 1.0 and recipe.pass_low <= passed <= recipe.pass_high:
                break
        return passed

    def facts(self) -> dict[str, Any]:
        """What was needed, and the completion lengths (in tokens) that version 0 samples."""
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
            drawn = [self._example(wrong) for _ in range(size * POOL_BATCHES)]
            drawn.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
            self._pool = [drawn[start : start + size] for start in range(0, len(drawn), size)]
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
        target = sort_task.draw_completion(self._recipe, prompt, wrong, self._rng)
        end = self._ids[sort_task.END_TOKEN]
        return [self._ids[char] for char in prompt], [*(self._ids[char] for char in target), end]

    @torch.no_grad()
    def pass_rate(self) -> float:
        """Sample one completion for each of `check_samples` held-out prompts; the share that is right."""
        recipe, tokenizer = self._recipe, self._tokenizer
        prompts = (self._held_out * math.ceil(recipe.check_samples / len(self._held_out)))[: recipe.check_samples]
        asked = tokenizer(prompts, return_tensors="pt", padding=True)
        options = {"max_new_tokens": recipe.max_new_tokens, "do_sample": True, "top_k": 0, "top_p": 1.0}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            self._model.eval()
            rows = self._model.generate(asked["input_ids"], attention_mask=asked["attention_mask"], **options)
            self._model.train()
        completions = rows[:, asked["input_ids"].shape[1] :]
        self._lengths = (completions != tokenizer.pad_token_id).sum(1).float()
        texts = [text.replace(sort_task.PAD_TOKEN, "") for text in tokenizer.batch_decode(completions)]
        return sum(map(self._right, prompts, texts)) / len(prompts)

    def _right(self, prompt: str, text: str) -> bool:
        found = RIGHT.search(text)
        return found is not None and found[1] == sort_task.answer_of(prompt)
