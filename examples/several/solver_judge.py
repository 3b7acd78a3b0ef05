"""A solver adds two digits, a judge says whether the answer is right: an episode of two models (`solver_judge.toml`).

Each is rewarded for its own part: the solver for a right answer, the judge for a right verdict. `made/` has the models
and the tasks, after `python make_several.py`.
"""

from __future__ import annotations

from typing import Any

RIGHT, WRONG = "|", "."  # what the judge says


async def episode(task: dict[str, Any], llm: Any) -> dict[str, float]:
    """Call each model once. The judge reads `47=1=`: the task, and the solver's answer."""
    answer = await llm["solver"].complete(task["prompt"], max_tokens=1)
    verdict = await llm["judge"].complete(f"{task['prompt']}{answer.text}=", max_tokens=1)
    right = answer.text == task["answer"]
    return {"solver": float(right), "judge": float(verdict.text == (RIGHT if right else WRONG))}


async def believed(task: dict[str, Any], llm: Any) -> float:
    """The solver is rewarded for what the judge believes, which is not trained (`frozen_judge.toml`)."""
    answer = await llm["solver"].complete(task["prompt"], max_tokens=1)
    verdict = await llm["judge"].complete(f"{task['prompt']}{answer.text}=", max_tokens=1)
    return float(verdict.text == RIGHT)
