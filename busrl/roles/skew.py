"""Whether the answers that are trained are as long as those that were drawn: lengths side by side, and an alarm.

Pure counting over the last steps; fed by `StepMetrics`. Knows nothing of the ring.

- *dispatched*: the samples of every group that ended, whatever became of it. *consumed*: the trained ones.
- *drawn*: the dispatched ones in the order of the loader. Its newest group is the last before the oldest draw that is
  still open, so a group that takes long is missing from it together with everything drawn after it.
- A window of steps is lost with its process: the figures begin anew then.
- Of more than `MOST_GROUPS` that end without a step the newest stand for all: there may never be a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Shares = npt.NDArray[np.float64]
QUARTILES = 4
MOST_GROUPS = 10_000


class Skew:
    """`ended` for every group that ends, `step` after every step. `alarm` 0 = never."""

    def __init__(self, steps: int, alarm: float) -> None:
        self.alarm = alarm
        self._consumed: deque[Ints] = deque(maxlen=steps)
        self._dispatched: deque[Ints] = deque(maxlen=steps)
        self._drawn: deque[Ints] = deque(maxlen=steps)
        self._groups: deque[npt.NDArray[np.float64]] = deque(maxlen=steps)  # rows of mean length, fate as a number
        self._behind: dict[int, Ints] = {}  # ended groups after the oldest open draw
        self._now: deque[tuple[Ints, str]] = deque(maxlen=MOST_GROUPS)
        self._told = False

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
        self._drawn.append(_joined(self._behind.pop(draw) for draw in ready))
        self._dispatched.append(_joined(lengths for lengths, _ in self._now))
        self._consumed.append(_joined(lengths for lengths, fate in self._now if fate == "T"))
        groups = [(lengths.sum() / len(lengths), ord(fate)) for lengths, fate in self._now if len(lengths)]
        self._groups.append(np.array(groups, np.float64).reshape(-1, 2))
        self._now.clear()
        return self._figures()

    def _figures(self) -> dict[str, Any]:
        parts = {"drawn": self._drawn, "dispatched": self._dispatched, "consumed": self._consumed}
        lengths = {name: _joined(part) for name, part in parts.items()}
        shares = {name: distribution(values) for name, values in lengths.items()}
        row: dict[str, Any] = {}
        for name, values in lengths.items():
            if len(values):
                row[f"length_{name}_mean"] = float(values.mean())
                row[f"length_{name}_p95"] = int(np.searchsorted(shares[name], 0.95))
        row["length_ks_drawn"] = ks_distance(shares["consumed"], shares["drawn"])
        row["length_ks_dispatched"] = ks_distance(shares["consumed"], shares["dispatched"])
        row["length_ratio"] = self._ratio(lengths)
        groups = np.concatenate(self._groups)
        fates = groups[np.argsort(groups[:, 0], kind="stable"), 1]
        row["untrained_share"] = float((fates != ord("T")).mean()) if len(fates) else 0.0
        row["old_by_length"] = [int((part == ord("o")).sum()) for part in np.array_split(fates, QUARTILES)]
        return row

    @staticmethod
    def _ratio(lengths: dict[str, Ints]) -> float | None:
        consumed, dispatched = lengths["consumed"], lengths["dispatched"]
        if not len(consumed) or not len(dispatched) or not dispatched.any():
            return None
        return float(consumed.mean() / dispatched.mean())

    def warning(self, row: dict[str, Any]) -> str:
        """The text of the alarm when it begins, else "". It begins anew after the ratio was in order."""
        full, ratio = len(self._groups) == self._groups.maxlen, row["length_ratio"]
        short = full and ratio is not None and ratio < self.alarm
        begins, self._told = short and not self._told, short
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
