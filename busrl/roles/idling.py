"""A run that ends groups and trains none: counts them, names the commonest cause, and says when to warn and to end.

Used by the learner with each look at the groups. Talks to the tails of errors.jsonl, for the last error behind the
cause, and of groups.jsonl, for what an earlier life saw. Knows nothing of the ring or of tensors.

- Counted is a streak: groups that ended, by whatever process, since the last step and since the last group that could
  be trained. A task of which most groups are flat is slow, not idle: where groups that can be trained were rare before,
  the limit is what RARE of them would have taken on average.
- What ended before this process looked for the first time is not counted: a start after a correction begins at 0. How
  rare groups that can be trained are, and the rewards there were, is known from the steps before it too.
- A streak of nothing but flat groups at the best reward that was ever seen, where others were lower, ends the run as
  one that has reached its goal. Whether a better reward exists nobody here knows, so the words say what was seen, and
  that a collapse to one kind of answer looks the same.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from busrl.inference.base import LENGTH
from busrl.ledger.fates import name_of
from busrl.ledger.files import json_lines, tail
from busrl.paths import RunPaths
from busrl.scheduling.groups import ACCIDENTS, GroupView
from busrl.topology import Topology

AUTO, LEAST = 4, 32  # x n_min, and at least so many: a few flat groups in a row are chance
RARE = 32  # a streak in which so many usable groups were to be expected is no chance
QUARTERS = 4
TRAINED = ord("T")
WHERE = {"R": "reward", "H": "reward", "X": "rollout", "l": "rollout"}  # who tells of a fate
MOST_TEXT = 200
MOST_LINES_BYTES = 1 << 20  # of groups.jsonl, at a start
MOSTLY = 0.9  # of a streak: the rest may be accidents
SOLVED = (
    "the best that this run has seen: nothing is left to learn from these prompts. If a better reward exists, the "
    "policy has collapsed to one kind of answer: see samples.jsonl; else the task is solved: train on harder prompts"
)
ALWAYS = (
    "no answer ever had another reward: either the prompts are too easy for this model, or the reward gives this to "
    "every answer (reward.extract or the function, data.answer_key); see the answers in samples.jsonl"
)
REMEDY = {
    "f": "look at what the reward compares (reward.extract or the function, data.answer_key) and at the answers in "
         "samples.jsonl; a task that is too easy or too hard for this model has no signal either",
    "o": "raise weights.max_staleness, or generate less ahead of training",
    "l": "raise generation.max_prompt_tokens, or shorten the prompts",
    "R": "mend the reward function", "H": "mend the reward function, or raise reward.timeout_s",
    "X": "look at data.template and data.prompt_key", "P": "look at the engine's log",
    "M": "look at the process that wrote it", "i": "look at errors.jsonl",
}  # fmt: skip


@dataclass
class Flat:
    """Of the flat groups of a streak: the lowest and highest reward, answers, those that were cut, and the last one."""

    low: float = np.inf
    high: float = -np.inf
    answers: int = 0
    top: int = 0  # answers with the highest reward, and the lowest
    bottom: int = 0
    cut: int = 0
    last: dict[str, object] | None = None

    def text(self) -> str:
        worth = f"every reward was {self.low:g}"
        if self.low < self.high:
            worth = (
                "all rewards of each group were equal: every prompt always gets the same reward, "
                f"{self.top / self.answers:.0%} of the answers the highest ({self.high:g}), "
                f"{self.bottom / self.answers:.0%} the lowest ({self.low:g})"
            )
        cut = f", {self.cut / self.answers:.0%} of the answers were cut at generation.max_new_tokens"
        return f"{worth}{cut if self.cut else ''}"


    def add(self, rewards: npt.NDArray[np.float64]) -> None:
        """The rewards of a group, which are all the same."""
        low, high = float(rewards.min()), float(rewards.max())
        self.bottom = self.bottom if low >= self.low else 0
        self.top = self.top if high <= self.high else 0
        self.low, self.high, self.answers = min(self.low, low), max(self.high, high), self.answers + len(rewards)
        self.bottom += int(np.count_nonzero(rewards == self.low))
        self.top += int(np.count_nonzero(rewards == self.high))


class Idling:
    """`look` with each view, `set_aside` for flat groups, `stepped` after a step; `quarters` say what is to be done."""

    def __init__(self, topology: Topology, paths: RunPaths) -> None:
        wanted, n_min = topology.limits.idle_groups, topology.learner.trigger.n_min
        self.limit = max(LEAST, AUTO * n_min) if isinstance(wanted, str) else wanted
        self.paths, self._n_min = paths, n_min
        self._usable = self._ended = 0  # groups in this life; those that ended unused, without the streak
        self._ready: set[int] = set()
        self._looked = False
        self._worst, self._best = np.inf, -np.inf  # rewards of the run
        self._recall()
        self._begin()

    def _begin(self) -> None:
        self.streak, self._told = 0, 0
        self.causes: Counter[str] = Counter()
        self.flat = Flat()

    def _recall(self) -> None:
        """What the steps before this life saw: a streak after the last of them is another start's business."""
        ended, seen = 0, set[float]()
        for row in json_lines(self.paths.groups, MOST_LINES_BYTES):
            with contextlib.suppress(KeyError, TypeError, ValueError):
                found = [float(reward) for rewards in row["rewards"] for reward in rewards]
                seen |= {min(found), max(found)}
                ended += len(row["fates"])
                if usable := row["fates"].count("T"):
                    self._usable, self._ended = self._usable + usable, self._ended + ended - usable
                    self.saw([*seen])
                    ended, seen = 0, set()

    # -- what happens ---------------------------------------------------------------------------------------------

    def look(self, view: GroupView, asides: Collection[int]) -> None:
        """Groups that ended since the last view, and such as can be trained now (`asides` are just being dropped)."""
        if self._looked:
            for fates in view.ended_fates:
                if not (fates == TRAINED).any():
                    self.streak += 1
                    self.causes[cause_of(fates)] += 1
        self._looked = True
        ready = {*view.draws[view.usable & ~view.flat].tolist()} - {*asides}
        if new := len(ready - self._ready):
            self._usable += new
            self.stepped()
        self._ready = ready

    def saw(self, rewards: Sequence[float]) -> None:
        """Rewards of samples that ended, trained or not."""
        if len(rewards):
            self._worst, self._best = min(self._worst, *rewards), max(self._best, *rewards)

    def set_aside(self, lines: npt.NDArray[Any], fate: str, sample: Callable[[], dict[str, object]]) -> None:
        """A group's survivors are about to be dropped; of a flat one `sample` gives an answer, for people."""
        self.saw(lines["reward"].tolist())
        if fate == "f" and len(lines):
            own = self.flat
            own.add(lines["reward"])
            own.cut += int(np.count_nonzero(lines["finish"] == LENGTH))
            own.last = sample()

    def stepped(self) -> None:
        """A step was made, or there is a group for one."""
        self._ended += self.streak
        self._begin()

    # -- what follows ---------------------------------------------------------------------------------------------

    @property
    def patience(self) -> int:
        """Groups in a row without one that can be trained until the run ends; 0 = it never does."""
        if not self.limit:
            return 0
        seen = self._usable + self._ended + self._n_min
        return max(self.limit, RARE * seen // self._usable if self._usable else 0)

    def quarters(self) -> range:
        """The quarters of the patience that were reached since the last call; with the last one the run is to end."""
        reached = min(QUARTERS, self.streak * QUARTERS // self.patience) if self.patience else 0
        told, self._told = self._told, max(reached, self._told)
        return range(told + 1, reached + 1)

    @property
    def solved(self) -> bool:
        """Whether all answers of the streak had the best reward of the run, which is not the only one there was."""
        flat = self.flat
        level = flat.answers > 0 and flat.low == flat.high == self._best > self._worst
        return level and self.causes["f"] >= MOSTLY * self.streak

    def _flat(self) -> list[str]:
        """What the flat groups had in common, and what to do about it."""
        flat = self.flat
        always = flat.answers > 0 and self._worst == self._best > 0
        return [flat.text() if flat.answers else "", ALWAYS if always else REMEDY["f"]]

    def text(self, step: int) -> str:
        """What ended the groups, in words: the commonest cause with its count, the last error or answer behind it."""
        cause, count = self.causes.most_common(1)[0] if self.causes else ("i", 0)
        share = f"all {self.streak}" if count == self.streak else f"{count} of {self.streak}"
        since = f"since step {step}" if step else "since the start"
        head = f"{share} groups that ended {since} had the fate {cause} ({name_of(cause)})"
        if self.solved:
            head = f"{share} groups that ended {since} were flat with a reward of {self.flat.low:g}"
            parts = [f"{head}, {SOLVED}", self._answer()]
        elif cause == "f":
            parts = [head, *self._flat(), self._answer()]
        else:
            parts = [head, self._error(cause), REMEDY[cause]]
        return "; ".join(part for part in parts if part)

    def _answer(self) -> str:
        last = self.flat.last
        if last is None:
            return ""
        return f"the last: {_short(last['prompt'])} was answered {_short(last['completion'])}, worth {last['reward']:g}"

    def _error(self, cause: str) -> str:
        found = last_error(self.paths, WHERE.get(cause, ""))
        return f"the last error: {found}" if found else ""


def cause_of(fates: npt.NDArray[np.uint8]) -> str:
    """The fate of a group, from those of its members: the rule that ended it, else its commonest accident."""
    counts = Counter(chr(int(fate)) for fate in fates if fate)
    accidents = Counter({fate: count for fate, count in counts.items() if ord(fate) in ACCIDENTS})
    rule = next((fate for fate in "fol" if counts[fate]), "")
    return rule or (accidents.most_common(1)[0][0] if accidents else "i")


def last_error(paths: RunPaths, where: str) -> str:
    """The newest line of errors.jsonl that is about samples, of that role; of any with `where` empty. "" if none."""
    for line in reversed(tail(paths.errors)):
        try:
            row = json.loads(line)
            if row.get("uids") and where in ("", row["where"]):
                return _short(row["text"], quoted=False)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return ""


def _short(text: object, quoted: bool = True) -> str:
    whole = repr(text) if quoted else str(text)
    return whole if len(whole) <= MOST_TEXT else f"{whole[:MOST_TEXT]} ..."
