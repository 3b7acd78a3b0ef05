"""Alarms over the numbers of the newest steps: a policy that left the one that sampled, or that learns nothing more.

Used by the learner with each line of metrics.jsonl. Pure; knows nothing of the bus or of files.

- One step decides nothing: two of the newest three, or the groups and answers of the newest ten, do.
- Each alarm is told when it begins, and again only after it was over.
- The limits are far from what healthy runs show (ess above 0.9, k3 below 0.05), and are no settings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import isfinite
from statistics import median
from typing import Any

ESS_LOW, K3_HIGH, MOVED_STEPS = 0.3, 0.3, 3
FLAT_HIGH, FLAT_STEPS, FLAT_GROUPS = 0.9, 10, 64  # of at least so many groups
CUT_HIGH, CUT_ANSWERS = 0.99, 64  # of at least so many answers


class Alarms:
    """`step` after each step."""

    def __init__(self) -> None:
        self._moved: deque[tuple[float, float]] = deque(maxlen=MOVED_STEPS)
        self._groups: deque[tuple[float, float, float]] = deque(maxlen=FLAT_STEPS)  # ended, of them flat, reward
        self._answers: deque[tuple[float, float]] = deque(maxlen=FLAT_STEPS)  # trained, of them cut
        self._on: set[str] = set()

    def step(self, row: Mapping[str, Any]) -> list[str]:
        """The texts of the alarms that begin with this step."""
        # Of a step that trained no token both are 0; one that was no number has been told of already.
        if row["tokens"] and isfinite(row["ess"]) and isfinite(row["k3"]):
            self._moved.append((row["ess"], row["k3"]))
        ended = row["groups_ended"]
        self._groups.append((ended, row["flat_share"] * ended, row["reward"]))
        self._answers.append((row["samples"], row["cut_share"] * row["samples"]))
        found = {"moved": self._left(row), "flat": self._flat(row), "cut": self._cut(row)}
        begun = [text for name, text in found.items() if text and name not in self._on]
        self._on = {name for name, text in found.items() if text}
        return begun

    def _left(self, row: Mapping[str, Any]) -> str:
        if len(self._moved) < MOVED_STEPS:
            return ""
        ess, k3 = (median(values) for values in zip(*self._moved))
        if ess >= ESS_LOW and k3 <= K3_HIGH:
            return ""
        return (
            f"step {row['step']}: the policy has left the one that drew the answers: ess {ess:.2g} (below {ESS_LOW:g} "
            f"is too far), k3 {k3:.2g} (above {K3_HIGH:g}), entropy {row['entropy']:.2g}, lr {row['lr']:.2g}; lower "
            "learner.lr or weights.max_staleness, and go on from a checkpoint before this"
        )

    def _flat(self, row: Mapping[str, Any]) -> str:
        ended, flat = sum(one[0] for one in self._groups), sum(one[1] for one in self._groups)
        if ended < FLAT_GROUPS or flat <= FLAT_HIGH * ended:
            return ""
        reward = sum(one[0] * one[2] for one in self._groups) / ended
        return (
            f"step {row['step']}: {flat / ended:.0%} of the last {ended:g} groups were flat (all rewards of a group "
            f"equal, nothing to learn from), at a mean reward of {reward:.3g} and entropy {row['entropy']:.2g}: the "
            "task is solved, too hard for this model, or its answers have become all the same; see samples.jsonl"
        )

    def _cut(self, row: Mapping[str, Any]) -> str:
        answers, cut = (sum(values) for values in zip(*self._answers))
        if answers < CUT_ANSWERS or cut < CUT_HIGH * answers:
            return ""
        return (
            f"step {row['step']}: {cut / answers:.0%} of the last {answers:g} answers were cut at their limit, "
            f"{row['length_mean']:.0f} tokens on average: is the model's end token the one that its "
            "generation_config.json and tokenizer name? Else raise generation.max_new_tokens"
        )
