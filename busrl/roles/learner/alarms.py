"""Warnings from the numbers that training brings anyway.

Used by the learner: `LengthSkew` compares the answers that are trained with those that were drawn, `Alarms` watches the
newest steps. Knows nothing of the ring and of the bus: what it finds is a text for a warning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from math import isfinite
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from busrl.states import Fate

Ints = npt.NDArray[np.int64]
Shares = npt.NDArray[np.float64]

# -- lengths of drawn, ended and trained answers ------------------------------

QUARTILES = 4
MOST_GROUPS = 10_000


class LengthSkew:
    """Whether the answers that are trained are as long as those that were drawn: lengths side by side, and an alarm.

    *Dispatched* are the samples of every group that ended, *consumed* the trained ones. *Drawn* are the dispatched ones
    in the order of the loader, up to the oldest draw that is still open: a slow group is missing from it together with
    everything drawn after it. `alarm` 0 = never. A window of steps is lost with its process. Of more than `MOST_GROUPS`
    that end without a step the newest stand for all.
    """

    def __init__(self, steps: int, alarm: float) -> None:
        self.alarm = alarm
        self._lengths: deque[dict[str, Ints]] = deque(maxlen=steps)
        self._groups: deque[Shares] = deque(maxlen=steps)  # rows of mean length, fate as a number
        self._behind: dict[int, Ints] = {}  # ended groups after the oldest open draw
        self._now: deque[tuple[Ints, str]] = deque(maxlen=MOST_GROUPS)
        self._reported = False

    def ended(self, draw: int, lengths: Iterable[int], fate: str) -> None:
        """A group ended with this fate (T: trained), with the lengths of its survivors."""
        found = np.fromiter(lengths, np.int64)
        self._behind[draw] = found
        if len(self._behind) > MOST_GROUPS:
            del self._behind[next(iter(self._behind))]
        self._now.append((found, fate))

    def step(self, open_draws: Iterable[int]) -> dict[str, Any]:
        """Close a step. `open_draws`: draws that may not have ended. Returns the figures over the window."""
        oldest = min((draw for draw in open_draws if draw not in self._behind), default=None)
        ready = sorted(draw for draw in self._behind if oldest is None or draw < oldest)
        self._lengths.append({
            "drawn": _joined(self._behind.pop(draw) for draw in ready),
            "dispatched": _joined(lengths for lengths, _ in self._now),
            "consumed": _joined(lengths for lengths, fate in self._now if fate == Fate.TRAINED.letter),
        })
        groups = [(lengths.sum() / len(lengths), ord(fate)) for lengths, fate in self._now if len(lengths)]
        self._groups.append(np.array(groups, np.float64).reshape(-1, 2))
        self._now.clear()
        return self._figures()

    def _figures(self) -> dict[str, Any]:
        lengths = {name: _joined(step[name] for step in self._lengths) for name in self._lengths[-1]}
        shares = {name: distribution(values) for name, values in lengths.items()}
        row: dict[str, Any] = {}
        for name, values in lengths.items():
            if len(values):
                row[f"length_{name}_mean"] = float(values.mean())
                row[f"length_{name}_p95"] = int(np.searchsorted(shares[name], 0.95))
        row["length_ks_drawn"] = ks_distance(shares["consumed"], shares["drawn"])
        row["length_ks_dispatched"] = ks_distance(shares["consumed"], shares["dispatched"])
        consumed, dispatched = row.get("length_consumed_mean"), row.get("length_dispatched_mean")
        row["length_ratio"] = consumed / dispatched if consumed is not None and dispatched else None
        groups = np.concatenate(self._groups)
        fates = groups[np.argsort(groups[:, 0], kind="stable"), 1]
        row["untrained_share"] = float((fates != Fate.TRAINED).mean()) if len(fates) else 0.0
        row["old_by_length"] = [int((part == Fate.OLD).sum()) for part in np.array_split(fates, QUARTILES)]
        return row

    def warning(self, row: dict[str, Any]) -> str:
        """The text of the alarm when it begins, else "". It may begin again after the ratio was in order."""
        full, ratio = len(self._groups) == self._groups.maxlen, row["length_ratio"]
        short = full and ratio is not None and ratio < self.alarm
        begins, self._reported = short and not self._reported, short
        if not begins:
            return ""
        return (
            f"trained answers are {ratio:.2f} as long as all that ended (below {self.alarm:g} over "
            f"{len(self._groups)} steps): {row['length_consumed_mean']:.1f} against "
            f"{row['length_dispatched_mean']:.1f} tokens; {row['untrained_share']:.0%} of the groups were not trained"
        )


def distribution(lengths: Ints) -> Shares:
    """For each length from 0 the share of answers that are not longer; empty if there is none. Needs no sorting."""
    return np.cumsum(np.bincount(lengths)) / max(1, len(lengths))


def ks_distance(a: Shares, b: Shares) -> float:
    """Largest distance between two distributions (Kolmogorov-Smirnov), 0 if one is empty."""
    if not len(a) or not len(b):
        return 0.0
    size = max(len(a), len(b))
    left, right = (np.pad(one, (0, size - len(one)), constant_values=1.0) for one in (a, b))
    return float(np.abs(left - right).max())


def _joined(parts: Iterable[Ints]) -> Ints:
    found = list(parts)
    return np.concatenate(found) if found else np.empty(0, np.int64)


# -- the newest steps ----------------------------------------------------------

K3_HIGH, MOVED_STEPS = 0.3, 3
FLAT_HIGH, FLAT_GROUPS = 0.9, 64  # of at least so many groups
CUT_HIGH, CUT_ANSWERS = 0.99, 64  # of at least so many answers
STEPS = 10


class Alarms:
    """A policy that left the one that sampled, or that learns nothing more, from the newest lines of metrics.jsonl.

    One step decides nothing: two of the newest three, or the groups and answers of the newest ten, do. Each alarm is
    reported when it begins, and again only after it was over. The limits are far from what healthy runs show (ess above
    0.9, k3 below 0.05). `ess`: the least that is no alarm.
    """

    def __init__(self, ess: float = 0.3) -> None:
        self._ess = ess
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=STEPS)
        self._on: set[str] = set()

    def step(self, row: Mapping[str, Any]) -> list[str]:
        """The texts of the alarms that begin with this step."""
        self._rows.append(row)
        found = {"moved": self._left(row), "flat": self._flat(row), "cut": self._cut(row)}
        begun = [text for name, text in found.items() if text and name not in self._on]
        self._on = {name for name, text in found.items() if text}
        return [f"step {row['step']}: {text}" for text in begun]

    def _left(self, row: Mapping[str, Any]) -> str:
        # A step without trained tokens has 0 in both; one that is no number was reported already.
        moved = [
            (one["ess"], one["k3"])
            for one in self._rows if one["tokens"] and isfinite(one["ess"]) and isfinite(one["k3"])
        ][-MOVED_STEPS:]
        if len(moved) < MOVED_STEPS:
            return ""
        ess, k3 = (median(values) for values in zip(*moved))
        if ess >= self._ess and k3 <= K3_HIGH:
            return ""
        return (
            f"the policy has left the one that drew the answers: ess {ess:.2g} (below {self._ess:g} is too far, "
            f"learner.ess_alarm), k3 {k3:.2g} (above {K3_HIGH:g}), entropy {row['entropy']:.2g}, lr {row['lr']:.2g}; "
            "lower learner.lr or weights.max_staleness, and continue from an earlier checkpoint"
        )

    def _flat(self, row: Mapping[str, Any]) -> str:
        ended, flat = self._of_all("groups_ended", "flat_share")
        if ended < FLAT_GROUPS or flat <= FLAT_HIGH:
            return ""
        return (
            f"{flat:.0%} of the last {ended:g} groups were flat (all rewards of a group equal, nothing to learn from), "
            f"at a mean reward of {self._of_all('groups_ended', 'reward')[1]:.3g} and entropy {row['entropy']:.2g}: "
            "the task is solved, too hard for this model, or its answers have become all the same; see samples.jsonl"
        )

    def _cut(self, row: Mapping[str, Any]) -> str:
        answers, cut = self._of_all("samples", "cut_share")
        if answers < CUT_ANSWERS or cut < CUT_HIGH or row.get("episodes"):  # a turn may be short on purpose
            return ""
        return (
            f"{cut:.0%} of the last {answers:g} answers were cut at their limit, {row['length_mean']:.0f} tokens on "
            "average: is the model's end token the one that its generation_config.json and tokenizer name? Else raise "
            "generation.max_new_tokens"
        )

    def _of_all(self, count: str, value: str) -> tuple[float, float]:
        """The sum of a count over the newest steps, and the mean of a value weighted with it."""
        total = sum(row[count] for row in self._rows)
        return total, sum(row[count] * row[value] for row in self._rows) / max(1, total)
