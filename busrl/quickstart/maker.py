"""Makes a quickstart folder: tokenizer, model, warm-up and data files.

Talks to torch and transformers, which it imports when it works, and to `cache` for the lock and the atomic rename.
The warm-up first teaches the task, then teaches mistakes over it: most targets get one wrong digit, until the
pass rate sampled at temperature 1 is well below one half. Reinforcement learning then has something to undo within
minutes on a CPU; it shows that the loop works, not that a new skill is learnt. Knows nothing of runs.

- Both phases end on a measured pass rate on held-out prompts; a warm-up that does not get there is an error.
- The same recipe on the same machine and libraries gives the same weights (seeded, one thread).
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from busrl.errors import MachineError
from busrl.quickstart import sort_task
from busrl.quickstart.cache import Paths, make_once
from busrl.quickstart.progress import Progress
from busrl.quickstart.recipe import Recipe, find


def make(name: str, *, force: bool = False) -> Paths:
    """Make the quickstart of that name in the cache, unless it is there."""
    recipe = find(name)
    return make_once(recipe, lambda folder: _fill(folder, recipe), force=force)


def _fill(folder: Path, recipe: Recipe) -> None:
    train, validation = sort_task.splits(recipe)
    _write_jsonl(folder / "train.jsonl", train)
    _write_jsonl(folder / "validation.jsonl", validation)
    facts = _make_model(folder / "model", recipe, validation)
    (folder / "made.json").write_text(json.dumps({"name": recipe.name, **facts}, indent=1) + "\n")


def _write_jsonl(path: Path, prompts: list[str]) -> None:
    with path.open("w", encoding="utf-8") as lines:
        for prompt in prompts:
            lines.write(json.dumps({"prompt": prompt, "answer": sort_task.answer_of(prompt)}) + "\n")


def _make_model(folder: Path, recipe: Recipe, validation: list[str]) -> dict[str, Any]:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]

    from busrl.quickstart.model import new_model, new_tokenizer, save
    from busrl.quickstart.warmup import WarmUp

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        started = time.monotonic()
        tokenizer, model = new_tokenizer(recipe), new_model(recipe)
        with Progress(f"making {recipe.name}") as progress:
            warm_up = WarmUp(recipe, tokenizer, model, validation, progress)
            facts = _warm(warm_up, recipe)
        save(folder, recipe, tokenizer, model)
    finally:
        torch.set_num_threads(threads)
    facts["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    return {**facts, "seconds": round(time.monotonic() - started, 1), "torch": torch.__version__}


def _warm(warm_up: Any, recipe: Recipe) -> dict[str, Any]:
    """Both phases; the facts that `made.json` keeps."""
    skill = warm_up.teach()
    if skill < recipe.skill:
        raise MachineError(_missed("the skill", skill, f"at least {recipe.skill}", recipe.skill_steps_max))
    passed = warm_up.mask()
    if not recipe.pass_low <= passed <= recipe.pass_high:
        wanted = f"{recipe.pass_low} to {recipe.pass_high}"
        raise MachineError(_missed("the pass rate", passed, wanted, recipe.mask_steps_max))
    return {"skill": round(skill, 4), "pass_rate": round(passed, 4), **warm_up.facts()}


def _missed(what: str, value: float, wanted: str, steps: int) -> str:
    return (
        f"quickstart warm-up: {what} is {value:.3f} after {steps} steps, and must be {wanted}; this torch build "
        "computes otherwise than the ones tested: please report torch.__config__.show()"
    )
