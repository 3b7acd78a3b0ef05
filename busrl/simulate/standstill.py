"""When a simulated run can not get on: nothing is under way any more, or nothing of what is made can be trained.

Pure: is told of groups, and makes the texts. Knows nothing of events, rings or traces.

- A trace may be repeated for ever, so groups that train nothing would be made for ever too. That is ended after so many
  in a row that it is no chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

FATES = {"f": "flat", "o": "too old", "i": "incomplete"}
LEAST, STEPS = 2000, 50  # groups in a row, and in steps of n_min: with 99 % flat ones it happens once in 10^8 groups


class InVain:
    """Groups in a row whose members all have one reward."""

    def __init__(self, n_min: int) -> None:
        self.limit, self.groups = max(LEAST, STEPS * n_min), 0

    def ended(self, rewards: Sequence[float]) -> bool:
        """One more group has ended; whether it is one too many."""
        self.groups = self.groups + 1 if len(set(rewards)) == 1 else 0
        return self.groups >= self.limit


def all_flat(groups: int, step: int, now: float, answers: str, flat_share: float) -> str:
    """The text for a run that makes nothing but flat groups."""
    return (
        f"the simulated run does not get on: after step {step}, at {now:.1f} s, {groups} groups in a row ended with "
        f"equal rewards for all their members, and such a group trains nothing; correct the rewards of the {answers}"
        + (f", or lower simulate.flat_share = {flat_share:g}" if flat_share else "")
    )


def nothing_under_way(reason: str, step: int, now: float, groups: int, aside: Mapping[str, int]) -> str:
    """The text for a run in which everybody waits."""
    gone = ", ".join(f"{count} {FATES.get(fate, fate)}" for fate, count in aside.items()) or "none"
    return (
        f"the simulated run stands still at step {step} after {now:.1f} s: the learner waits for {reason}, {groups} "
        f"groups are open, and nothing is under way (groups set aside: {gone}); are all groups flat "
        "(simulate.flat_share, rewards of the trace), or is learner.trigger.n_min above what can be admitted?"
    )
