"""A run that makes no step: groups that end one after another without being trained, and the error that ends it.

Used by the learner; `Idling` reads the tails of errors.jsonl and groups.jsonl. Knows nothing of the ring and of the
bus: what it finds is a text for a warning, or an error.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from busrl.config import Topology
from busrl.files import TAIL_BYTES, json_lines
from busrl.paths import RunPaths
from busrl.scheduling.groups import GroupView
from busrl.states import ACCIDENTS, Fate, Finish, fate_name

AUTO, LEAST = 4, 32  # x n_min, and at least so many: a few flat groups in a row are chance
RARE = 32  # a streak in which so many usable groups were to be expected is no chance
QUARTERS = 4
BY_RULE = (Fate.FLAT.letter, Fate.OLD.letter, Fate.LONG.letter)  # in the order in which they explain a group
WHERE = {  # the role that reports a fate
    Fate.REWARD_RAISED.letter: "reward", Fate.REWARD_HUNG.letter: "reward",
    Fate.UNRENDERED.letter: "rollout", Fate.LONG.letter: "rollout",
}
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
    Fate.FLAT.letter: "look at what the reward compares (reward.extract or the function, data.answer_key) and at the "
    "answers in samples.jsonl; a task that is too easy or too hard for this model has no signal either",
    Fate.OLD.letter: "raise weights.max_staleness, or generate less ahead of training",
    Fate.LONG.letter: "raise generation.max_prompt_tokens, or shorten the prompts",
    Fate.REWARD_RAISED.letter: "correct the reward function",
    Fate.REWARD_HUNG.letter: "correct the reward function, or raise reward.timeout_s",
    Fate.UNRENDERED.letter: "look at data.template and data.prompt_key",
    Fate.POISON.letter: "look at the engine's log",
    Fate.MALFORMED.letter: "look at the process that wrote it",
    Fate.INCOMPLETE.letter: "look at errors.jsonl",
}


@dataclass
class FlatStreak:
    """The flat groups of a streak: their lowest and highest reward, and how many answers had each."""

    low: float = np.inf
    high: float = -np.inf
    answers: int = 0
    counts: Counter[float] = field(default_factory=Counter)  # of answers, at the lowest and at the highest reward
    cut: int = 0  # at the length limit
    last: dict[str, object] | None = None  # an answer, as in samples.jsonl

    def text(self) -> str:
        worth = f"every reward was {self.low:g}"
        if self.low < self.high:
            worth = (
                "all rewards of each group were equal: every prompt always gets the same reward, "
                f"{self.counts[self.high] / self.answers:.0%} of the answers the highest ({self.high:g}), "
                f"{self.counts[self.low] / self.answers:.0%} the lowest ({self.low:g})"
            )
        cut = f", {self.cut / self.answers:.0%} of the answers were cut at generation.max_new_tokens"
        return f"{worth}{cut if self.cut else ''}"

    def add(self, rewards: npt.NDArray[np.float64]) -> None:
        """The rewards of a group, which are all the same."""
        self.answers += len(rewards)
        self.counts.update(rewards.tolist())
        self.low, self.high = min(self.counts), max(self.counts)
        self.counts = Counter({edge: self.counts[edge] for edge in (self.low, self.high)})


class Idling:
    """A run that ends groups and trains none: counts them, names the commonest cause, says when to warn and to end.

    - Counted is a streak: groups that ended since the last step and since the last group that could be trained. A task
      of which most groups are flat is slow, not idle: where groups that can be trained were rare before, the limit is
      what RARE of them would have taken on average.
    - What ended before this process looked for the first time is not counted: a start after a correction begins at 0.
      How rare groups that can be trained are, and which rewards there were, is known from the steps before it too.
    - A streak of flat groups at the best reward that was ever seen, where others were lower, ends the run as one that
      has reached its goal. Whether a better reward exists is not known here, so the text says what was seen, and that a
      collapse to one kind of answer looks the same.
    """

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
        self.streak, self._reported = 0, 0
        self.causes: Counter[str] = Counter()
        self.flat = FlatStreak()

    def _recall(self) -> None:
        """What the steps before this life saw: a streak after the last of them is another start's business."""
        ended, seen = 0, set[float]()
        for row in json_lines(self.paths.groups, MOST_LINES_BYTES):
            with contextlib.suppress(KeyError, TypeError, ValueError):
                found = [float(reward) for rewards in row["rewards"] for reward in rewards]
                seen |= {min(found), max(found)}
                ended += len(row["fates"])
                if usable := row["fates"].count(Fate.TRAINED.letter):
                    self._usable, self._ended = self._usable + usable, self._ended + ended - usable
                    self.add_rewards([*seen])
                    ended, seen = 0, set()

    def look(self, view: GroupView, asides: Collection[int]) -> None:
        """Groups that ended since the last view, and such as can be trained now (`asides` are just being dropped)."""
        if self._looked:
            for fates in view.ended_fates:
                if not ((fates == Fate.TRAINED) | (fates == Fate.SKIPPED)).any():
                    self.streak += 1
                    self.causes[cause_of(fates)] += 1
        self._looked = True
        ready = {*view.draws[view.usable & ~view.flat].tolist()} - {*asides}
        if new := len(ready - self._ready):
            self._usable += new
            self.end_streak()
        self._ready = ready

    def add_rewards(self, rewards: Sequence[float]) -> None:
        if len(rewards):
            self._worst, self._best = min(self._worst, *rewards), max(self._best, *rewards)

    def set_aside(self, lines: npt.NDArray[Any], fate: str, sample: Callable[[], dict[str, object]]) -> None:
        """A group is about to be dropped; of a flat one `sample` gives an answer to show."""
        self.add_rewards(lines["reward"].tolist())
        if fate == Fate.FLAT.letter and len(lines):
            own = self.flat
            own.add(lines["reward"])
            own.cut += int(np.count_nonzero(lines["finish"] == Finish.LENGTH))
            own.last = sample()

    def end_streak(self) -> None:
        """A step was made, or there is a group for one."""
        self._ended += self.streak
        self._begin()

    @property
    def patience(self) -> int:
        """Groups in a row without one that can be trained until the run ends; 0 = it never does."""
        if not self.limit:
            return 0
        seen = self._usable + self._ended + self._n_min
        return max(self.limit, RARE * seen // self._usable if self._usable else 0)

    def quarters(self) -> range:
        """The quarters of the patience that were reached since the last call; the last one ends the run."""
        reached = min(QUARTERS, self.streak * QUARTERS // self.patience) if self.patience else 0
        before, self._reported = self._reported, max(reached, self._reported)
        return range(before + 1, reached + 1)

    @property
    def solved(self) -> bool:
        """Whether all answers of the streak had the best reward of the run, which is not the only one there was."""
        flat = self.flat
        level = flat.answers > 0 and flat.low == flat.high == self._best > self._worst
        return level and self.causes[Fate.FLAT.letter] >= MOSTLY * self.streak

    def text(self, step: int) -> str:
        """What ended the groups: the commonest cause with its count, and the last error or answer behind it."""
        cause, count = self.causes.most_common(1)[0] if self.causes else (Fate.INCOMPLETE.letter, 0)
        share = f"all {self.streak}" if count == self.streak else f"{count} of {self.streak}"
        since = f"since step {step}" if step else "since the start"
        head = f"{share} groups that ended {since} had the fate {cause} ({fate_name(cause)})"
        if self.solved:
            head = f"{share} groups that ended {since} were flat with a reward of {self.flat.low:g}"
            parts = [f"{head}, {SOLVED}", self._answer()]
        elif cause == Fate.FLAT.letter:
            always = self.flat.answers > 0 and self._worst == self._best > 0
            seen = self.flat.text() if self.flat.answers else ""
            parts = [head, seen, ALWAYS if always else REMEDY[cause], self._answer()]
        else:
            error = last_error(self.paths, WHERE.get(cause, ""))
            parts = [head, error and f"the last error: {error}", REMEDY[cause]]
        return "; ".join(part for part in parts if part)

    def _answer(self) -> str:
        last = self.flat.last
        if last is None:
            return ""
        return f"the last: {_short(last['prompt'])} was answered {_short(last['completion'])}, worth {last['reward']:g}"


def cause_of(fates: npt.NDArray[np.uint8]) -> str:
    """The fate of a group, from those of its members: the rule that ended it, else its commonest accident."""
    counts = Counter(chr(int(fate)) for fate in fates if fate)
    accidents = Counter({fate: count for fate, count in counts.items() if ord(fate) in ACCIDENTS})
    rule = next((fate for fate in BY_RULE if counts[fate]), "")
    return rule or (accidents.most_common(1)[0][0] if accidents else Fate.INCOMPLETE.letter)


def last_error(paths: RunPaths, where: str) -> str:
    """The newest line of errors.jsonl that is about samples, of that role; of any with `where` empty. "" if none."""
    with contextlib.suppress(OSError):
        for row in reversed(list(json_lines(paths.errors, TAIL_BYTES))):
            if row.get("uids") and "text" in row and where in ("", row.get("where")):
                return _short(row["text"], quoted=False)
    return ""


def _short(text: object, quoted: bool = True) -> str:
    whole = repr(text) if quoted else str(text)
    return whole if len(whole) <= MOST_TEXT else f"{whole[:MOST_TEXT]} ..."
