"""Which group is opened next: the order of dispatch, within a horizon, behind one interface.

`fifo`, `sjf` and `ljf` (`ordered`), `adaptive`. They talk to a predictor of answer lengths and know nothing of slots,
credit, workers or clocks: how long a group has waited is how early it was drawn, so that a simulated and a live
scheduler decide alike. When a group's siblings are dispatched is `probes`; in which order workers take what is
dispatched is `slotorder`.

- Reordering stays within a horizon of H draws: a draw is opened only while it is less than H beyond the oldest draw
  that is still waiting.
- Nothing starves: between the moment a draw comes within the horizon and its opening, at most 2H - 2 other groups are
  opened. (They are draws from o to d + H - 1, o being the oldest waiting then, and d <= o + H - 1.) Aging makes
  the wait shorter, the horizon makes it bounded. `adaptive` in rounds of n groups: at most n - 1.
- Same offers, looks and feedback, same order. A new scheduler starts without what the old one had learned.

Shortest-first raises no throughput in a closed loop with bounded slots; it makes the first groups of a stream ready
earlier.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from busrl.scheduling.adaptive import Adaptive
from busrl.scheduling.fifo import Fifo
from busrl.scheduling.inflight import Record
from busrl.scheduling.ordered import Ljf, Sjf
from busrl.scheduling.predictors import Candidate, Predictor, make_predictor
from busrl.scheduling.strength import LearnerState

POLICIES = ("fifo", "sjf", "ljf", "adaptive")


class Policy(Protocol):
    """Order of the waiting groups. The caller keeps it supplied with the oldest draws that have no fate yet.

    `offer` and `next` are all that an order needs. `look` before them (what is open, what workers can run) and
    `finished` (what came out) make it better informed; a policy that is not told goes on with what was predicted.
    """

    name: str
    horizon: int
    learns: bool  # False: neither `look` nor `finished` changes anything

    def missing(self, draws: Iterable[int]) -> list[int]:
        """Those of `draws` that do not wait here, so that only their prompts need to be read."""
        ...

    def offer(self, candidates: Sequence[Candidate]) -> None:
        """Add waiting groups; one that is offered again (its dispatch failed) has lost nothing."""
        ...

    def next(self) -> Candidate | None:
        """The group to open now; it leaves the pool. None if the pool is empty."""
        ...

    def feedback(self, state: LearnerState) -> None:
        """A learner state, in the order of its steps."""
        ...

    def unknown(self, draws: Iterable[int]) -> list[int]:
        """Those of these open groups that an earlier scheduler opened, and that should be given to `adopt`."""
        ...

    def adopt(self, candidates: Sequence[Candidate]) -> None:
        """Groups that are open already."""
        ...

    def look(self, draws: Sequence[int], running: Sequence[int], rows: int) -> None:
        """All open groups now, how many members of each run or are due, and the rows of all workers (0: unknown)."""
        ...

    def finished(self, draws: Sequence[int], tokens: Sequence[int]) -> None:
        """Members of open groups that were finished since the last call: draw and tokens of each. Told once each.

        The policy hands them on to its predictor.
        """
        ...

    def priority(self, draw: int, admission: int, probe: bool = False) -> int:
        """Priority of a slot with a member of this open group; larger goes first."""
        ...

    def take_records(self) -> list[Record]:
        """What was predicted of groups that ended since the last call, and what came out."""
        ...

    def told(self) -> dict[str, float]:
        """A few numbers about itself, for people."""
        ...


def make_policy(
    name: str,
    horizon: int,
    predictor: str | Predictor = "rules",
    aging: float = 0.5,
    *,
    tail_share: float = 0.25,
    round_groups: int = 0,
    window: int = 1,
    group_size: int = 1,
) -> Policy:
    """The policy that `scheduler.policy` names.

    `round_groups`: groups of a synchronous round, 0 in a stream; `window`: the learner's W; `group_size`: G.
    """
    if name == "fifo":
        return Fifo(horizon)
    if name not in POLICIES:
        raise ValueError(f"policy = {name!r}: must be one of {', '.join(POLICIES)}")
    found = make_predictor(predictor) if isinstance(predictor, str) else predictor
    if name == "adaptive":
        return Adaptive(
            horizon, found, aging,
            tail_share=tail_share, round_groups=round_groups, window=window, group_size=group_size,
        )  # fmt: skip
    kind = Sjf if name == "sjf" else Ljf
    return kind(horizon, found, aging, window=window, group_size=group_size)
