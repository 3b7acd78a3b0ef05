"""Whether the answers that are trained are as long as those that were drawn: lengths side by side, and an alarm.

Pure counting over the last steps; fed by `StepMetrics`. Knows nothing of the ring.

- *dispatched*: the samples of every group that ended, whatever became of it. *consumed*: the trained ones.
- *drawn*: the dispatched ones in the order of the loader. Its newest group is the last before the oldest draw that is
  still open, so a group that takes long is missing from it together with everything drawn after it.
- A window of steps is lost with its process: the figures begin anew then.
- Of more than `MOST_GROUPS` that end without a step the newest stand for all: there may never be a step.

Alarms over the numbers of the newest steps: a policy that left the one that sampled, or that learns nothing more.

Used by the learner with each line of metrics.jsonl. Pure; knows nothing of the bus or of files.

- One step decides nothing: two of the newest three, or the groups and answers of the newest ten, do.
- Each alarm is told when it begins, and again only after it was over.
- The limits are far from what healthy runs show (ess above 0.9, k3 below 0.05), and are no settings.

A run that ends groups and trains none: counts them, names the commonest cause, and says when to warn and to end.

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

What the learner writes down per step: one line of metrics.jsonl, one of samples.jsonl, and LEARNER_STATE_UPDATE; and
a line for groups that end without a step.

Pure counting plus append-only files. Knows nothing of the ring or of torch. `reward` is the mean over all samples
of all groups that ended since the last step, flat ones included; `reward_trained` over the trained ones.

- A group that is set aside has its line in groups.jsonl before its first sample is dropped; a step's own groups have
  theirs when it is made. Who starts again after a death reads back what no step's line has counted yet, so the headline
  reward counts each group that ended once.
- Of groups set aside only sums are held: a run may set groups aside for ever and make no step.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import isfinite
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from busrl.config import Topology
from busrl.engines.base import LENGTH
from busrl.errors import MachineError
from busrl.files import LineFile, json_lines, tail
from busrl.ledger.trainlog import last_step
from busrl.ledger.wal import Record, SampleRecord
from busrl.paths import RunPaths
from busrl.scheduling.groups import GroupView
from busrl.states import ACCIDENTS, Fate, fate_name

if TYPE_CHECKING:
    from busrl.training.custom import Metrics
    from busrl.training.trainer import StepStats



# -- Whether the answers that are trained are as long as those that were drawn: lengths side by side, and an alarm ----


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
        self._consumed.append(_joined(lengths for lengths, fate in self._now if fate == Fate.TRAINED.letter))
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
        row["untrained_share"] = float((fates != Fate.TRAINED).mean()) if len(fates) else 0.0
        row["old_by_length"] = [int((part == Fate.OLD).sum()) for part in np.array_split(fates, QUARTILES)]
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


# -- Alarms over the numbers of the newest steps: a policy that left the one that sampled, or that learns ... ---------


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


# -- A run that ends groups and trains none: counts them, names the commonest cause, and says when to warn and ... ----


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
    Fate.REWARD_RAISED.letter: "mend the reward function",
    Fate.REWARD_HUNG.letter: "mend the reward function, or raise reward.timeout_s",
    Fate.UNRENDERED.letter: "look at data.template and data.prompt_key",
    Fate.POISON.letter: "look at the engine's log",
    Fate.MALFORMED.letter: "look at the process that wrote it",
    Fate.INCOMPLETE.letter: "look at errors.jsonl",
}


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
                if usable := row["fates"].count(Fate.TRAINED.letter):
                    self._usable, self._ended = self._usable + usable, self._ended + ended - usable
                    self.saw([*seen])
                    ended, seen = 0, set()

    # -- what happens ---------------------------------------------------------------------------------------------

    def look(self, view: GroupView, asides: Collection[int]) -> None:
        """Groups that ended since the last view, and such as can be trained now (`asides` are just being dropped)."""
        if self._looked:
            for fates in view.ended_fates:
                if not (fates == Fate.TRAINED).any():
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
        if fate == Fate.FLAT.letter and len(lines):
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
        return level and self.causes[Fate.FLAT.letter] >= MOSTLY * self.streak

    def _flat(self) -> list[str]:
        """What the flat groups had in common, and what to do about it."""
        flat = self.flat
        always = flat.answers > 0 and self._worst == self._best > 0
        return [flat.text() if flat.answers else "", ALWAYS if always else REMEDY[Fate.FLAT.letter]]

    def text(self, step: int) -> str:
        """What ended the groups, in words: the commonest cause with its count, the last error or answer behind it."""
        cause, count = self.causes.most_common(1)[0] if self.causes else (Fate.INCOMPLETE.letter, 0)
        share = f"all {self.streak}" if count == self.streak else f"{count} of {self.streak}"
        since = f"since step {step}" if step else "since the start"
        head = f"{share} groups that ended {since} had the fate {cause} ({fate_name(cause)})"
        if self.solved:
            head = f"{share} groups that ended {since} were flat with a reward of {self.flat.low:g}"
            parts = [f"{head}, {SOLVED}", self._answer()]
        elif cause == Fate.FLAT.letter:
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
    rule = next((fate for fate in BY_RULE if counts[fate]), "")
    return rule or (accidents.most_common(1)[0][0] if accidents else Fate.INCOMPLETE.letter)


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


# -- What the learner writes down per step: one line of metrics.jsonl, one of samples.jsonl, and ... ------------------


IDLE = "idle"  # `kind` of a line about groups without a step; a step's line has none


TAIL_BYTES = 1 << 20  # of groups.jsonl, in which a step's line is looked for at a start
HALF_DROPPED = 4096  # newest groups set aside by predecessors that are known again; each death leaves one at most


class GroupsLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line of groups.jsonl: groups that ended. `step` is the one whose headline reward counts them; its own line is
    the one with fates T, and comes after those of the groups set aside before it."""

    step: int
    draws: list[int]
    fates: str  # one letter per group
    born: list[int]  # step of the oldest weights that the group was admitted with
    lengths: list[list[int]]  # of each member, tokens
    rewards: list[list[float]]
    parts: dict[str, list[float]] = {}  # of the rewards of a group set aside, where the function gives any


@dataclass
class _Mean:
    total: float = 0.0
    count: int = 0

    def add(self, values: Iterable[float]) -> None:
        for value in values:
            self.total, self.count = self.total + value, self.count + 1

    def join(self, other: _Mean) -> None:
        self.total, self.count = self.total + other.total, self.count + other.count

    @property
    def value(self) -> float:
        return self.total / self.count


@dataclass
class _Aside:
    """Sums over groups that were set aside since a step."""

    fates: Counter[str] = field(default_factory=Counter)
    rewards: _Mean = field(default_factory=_Mean)
    lengths: _Mean = field(default_factory=_Mean)
    parts: dict[str, _Mean] = field(default_factory=dict)

    def add(self, line: GroupsLine) -> None:
        self.fates.update(line.fates)
        for rewards, lengths in zip(line.rewards, line.lengths):
            self.rewards.add(rewards)
            self.lengths.add(lengths)
        for name, values in line.parts.items():
            self.parts.setdefault(name, _Mean()).add(values)

    def join(self, other: _Aside) -> None:
        self.fates.update(other.fates)
        self.rewards.join(other.rewards)
        self.lengths.join(other.lengths)
        for name, mean in other.parts.items():
            self.parts.setdefault(name, _Mean()).join(mean)

    @property
    def groups(self) -> int:
        return sum(self.fates.values())

    def with_trained(self, record: Record) -> dict[str, Any]:
        """What a step's line says of all groups that ended since the one before: these, and the step's own."""
        groups, rewards, lengths = self.groups + len(record.groups), _Mean(), _Mean()
        rewards.add(sample.reward for sample in record.samples)
        lengths.add(_lengths(record.samples).tolist())
        rewards.join(self.rewards)
        lengths.join(self.lengths)
        return {
            "groups_ended": groups, "samples_ended": rewards.count, "reward": rewards.value,
            "flat_share": self.fates[Fate.FLAT.letter] / groups, "set_aside": dict(self.fates),
            "length_ended": lengths.value,
        }


class StepMetrics:
    """Counts since the last step, and the files they are written to.

    `begun` says of a group that a predecessor set aside with this fate, whether any of its samples has it: its line is
    written first, and it may have died in between.
    """

    def __init__(
        self, paths: RunPaths, begun: Callable[[int, str], bool] = lambda draw, fate: True, own: Metrics | None = None
    ) -> None:
        self.own = own  # the user's metrics
        self._told = last_step(paths.metrics)
        self._metrics = LineFile(paths.metrics)
        self._samples = LineFile(paths.samples)
        self._groups = LineFile(paths.groups)
        self._started: float | None = None
        self._last = time.monotonic()
        self._row: dict[str, Any] = {}
        self.checkpoint_s = 0.0
        self._clear()
        self._recall(paths.groups, begun)

    def _clear(self) -> None:
        self._aside = _Aside()
        self._parts: dict[str, _Mean] = {}  # of the rewards of the samples that were trained
        self._waited: Counter[str] = Counter()
        self._waiting_for = "start"
        self._blocker: int | None = None

    # -- start --------------------------------------------------------------------------------------------------

    def _recall(self, path: Path, begun: Callable[[int, str], bool]) -> None:
        """The groups that predecessors set aside since the last step's line, by the step that is to count them."""
        for size in (TAIL_BYTES, 0):
            self._told_groups, self._earlier, self._known = 0, dict[int, _Aside](), dict[int, None]()
            for row in json_lines(path, size):
                with contextlib.suppress(msgspec.ValidationError):
                    self._met(msgspec.convert(row, GroupsLine), begun)
            if self._told_groups or not path.is_file() or path.stat().st_size <= size:
                return

    def _met(self, line: GroupsLine, begun: Callable[[int, str], bool]) -> None:
        if Fate.TRAINED.letter in line.fates:
            lost = {step: aside for step, aside in self._earlier.items() if step > self._told}  # no line of the metrics
            self._told_groups, self._earlier, self._known = line.step, lost, {}
        elif len(line.draws) == len(line.fates) == 1 and begun(line.draws[0], line.fates):
            self._earlier.setdefault(line.step, _Aside()).add(line)
            self._known[line.draws[0]] = None
            if len(self._known) > HALF_DROPPED:
                del self._known[next(iter(self._known))]

    def resume(self, step: int) -> None:
        """The start is over, with `step` steps made: what was set aside since then counts for the next one."""
        for counted, aside in self._earlier.items():
            if counted > step:
                self._aside.join(aside)
        self._earlier.clear()

    # -- events -------------------------------------------------------------------------------------------------

    def first_claim(self) -> None:
        """The clock of the run starts with the first group that is claimed."""
        if self._started is None:
            self._started = self._last = time.monotonic()

    def set_aside(
        self, lines: npt.NDArray[Any], fate: str, step: int, parts: Iterable[Mapping[str, float]] = ()
    ) -> None:
        """A group's survivors are about to be dropped by a rule; `step` is the coming one, which counts them."""
        draw = int(lines["group"][0])
        if draw in self._known:  # a predecessor died while it dropped them: all of them are counted
            del self._known[draw]
            return
        line = GroupsLine(
            step=step, draws=[draw], fates=fate, born=[int(lines["step"].min())],
            lengths=[lines["response_tokens"].tolist()], rewards=[lines["reward"].tolist()],
        )
        for found in parts:
            for name, value in found.items():
                line.parts.setdefault(name, []).append(value)
        self._write_groups(line)
        self._aside.add(line)

    def reward_parts(self, found: Iterable[Mapping[str, float]]) -> None:
        """Parts of the rewards of samples that are trained."""
        for parts in found:
            for name, value in parts.items():
                self._parts.setdefault(name, _Mean()).add([value])

    def _part_means(self) -> dict[str, dict[str, float]]:
        """Of all samples that ended."""
        means = {name: _Mean(mean.total, mean.count) for name, mean in self._parts.items()}
        for name, mean in self._aside.parts.items():
            means.setdefault(name, _Mean()).join(mean)
        return {"reward_parts": {name: mean.value for name, mean in means.items()}} if means else {}

    @property
    def groups_aside(self) -> int:
        """Groups set aside since the last step."""
        return self._aside.groups

    def waiting(self, reason: str, group: int | None) -> None:
        self._waiting_for, self._blocker = reason, group

    def waited(self, seconds: float) -> None:
        self._waited[self._waiting_for] += seconds  # type: ignore[assignment]

    # -- a step -------------------------------------------------------------------------------------------------

    def step(
        self,
        record: Record,
        stats: StepStats,
        samples: Iterable[Mapping[str, object]],
        version: int,
        published_s: float,
        more: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Write the lines of a finished step, with what others counted (`more`). Returns the row."""
        now = time.monotonic()
        row: dict[str, Any] = {
            "step": record.step,
            "version": version,
            "cause": record.cause,
            "time_s": round(now - (self._started or now), 4),
            "seconds": round(now - self._last, 4),
            "tokens": stats.tokens,
            **self._aside.with_trained(record),
            **self._part_means(),
            "skipped": stats.skipped,
            "culprits": list(stats.culprits),
            **_trained(record),
            **_training(stats),
            "wait_s": {reason: round(seconds, 4) for reason, seconds in self._waited.items()},
            "blocked_by": self._blocker,
            "publish_s": round(published_s, 5),
            "checkpoint_s": round(self.checkpoint_s, 4),
            **more,
        }
        if self.own is not None and (found := self.own.measure(record.samples, row)):
            row["metrics"] = found
        self._write(row, [{"step": record.step, **sample} for sample in samples])
        self._write_groups(_line_of(record))
        self._row, self._last, self.checkpoint_s = row, now, 0.0
        self._clear()
        return row

    def idle(self, step: int, version: int, idling: Idling) -> None:
        """Write the line of groups that ended and gave no step, cumulated since the last step: `kind` is "idle"; and an
        answer of them for samples.jsonl. The counts go on: the next step's line has these groups too."""
        now = time.monotonic()
        row: dict[str, Any] = {
            "kind": IDLE, "step": step, "version": version, "time_s": round(now - (self._started or now), 4),
            "seconds": round(now - self._last, 4), "groups": 0, "groups_ended": self.groups_aside, "samples": 0,
            "samples_ended": self._aside.rewards.count, "tokens": 0, "set_aside": dict(self._aside.fates),
            "idle_groups": idling.streak, "idle_limit": idling.patience, "idle_causes": dict(idling.causes),
            "wait_s": {reason: round(seconds, 4) for reason, seconds in self._waited.items()},
        }
        if self._aside.rewards.count:
            row |= {
                "reward": self._aside.rewards.value, "length_ended": self._aside.lengths.value,
                "flat_share": self._aside.fates[Fate.FLAT.letter] / self.groups_aside, **self._part_means(),
            }
        with contextlib.suppress(MachineError, OSError):
            self._metrics.append(msgspec.json.encode(row))
            if idling.flat.last is not None:
                self._samples.append(msgspec.json.encode({"kind": IDLE, "step": step, **idling.flat.last}))

    def replayed(self, record: Record, stats: StepStats) -> None:
        """The lines of a step that a predecessor logged, but died before it wrote them; without what only it knew."""
        aside = self._earlier.pop(record.step, _Aside())
        if record.step > self._told_groups:
            self._write_groups(_line_of(record))
        if record.step <= self._told:
            return
        row = {
            "step": record.step, "version": record.version, "cause": record.cause, "replayed": True,
            "time_s": 0.0, "seconds": 0.0, "tokens": stats.tokens, **aside.with_trained(record), **_trained(record),
            **_training(stats),
        }
        with contextlib.suppress(MachineError, OSError):
            self._metrics.append(msgspec.json.encode(row))

    def _write(self, row: dict[str, Any], samples: Sequence[dict[str, object]]) -> None:
        # A full disk must not stop training here: these lines are for people, the log is for the ledger.
        with contextlib.suppress(MachineError, OSError):
            self._metrics.append(msgspec.json.encode(row))
            if samples:
                self._samples.append(b"\n".join(map(msgspec.json.encode, samples)))

    def _write_groups(self, line: GroupsLine) -> None:
        """Lengths and rewards of groups that ended: what a successor counts, and a simulation draws from."""
        with contextlib.suppress(MachineError, OSError):
            self._groups.append(msgspec.json.encode(line))

    def update(self, more: Mapping[str, float]) -> dict[str, Any]:
        """Fields of LEARNER_STATE_UPDATE for the step just written, and numbers that hold from now on."""
        row = self._row
        numbers = {name: float(value) for name, value in row.items() if isinstance(value, (int, float))}
        numbers.update({f"reward_parts/{name}": value for name, value in row.get("reward_parts", {}).items()})
        numbers.update({f"metrics/{name}": value for name, value in row.get("metrics", {}).items()})
        numbers.update(more)
        return {
            "entropy": row["entropy"],
            "version": row["version"],
            "step": row["step"],
            "groups": row["groups"],
            "reward": row["reward"],
            "tokens": row["tokens"],
            "samples": row["samples"],
            "age_mean": row["age_mean"],
            "metrics": numbers,
        }

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()
        self._groups.close()


def _members(record: Record) -> list[list[SampleRecord]]:
    return [list(own) for _, own in groupby(record.samples, key=lambda sample: sample.group)]


def _line_of(record: Record) -> GroupsLine:
    """A step's own line."""
    members = _members(record)
    return GroupsLine(
        step=record.step, draws=[own[0].group for own in members], fates=Fate.TRAINED.letter * len(members),
        born=[min(sample.step for sample in own) for own in members],
        lengths=[_lengths(own).tolist() for own in members],
        rewards=[[sample.reward for sample in own] for own in members],
    )


def _segments(sample: SampleRecord) -> int:
    return len(sample.segments) or 1


def _training(stats: StepStats) -> dict[str, Any]:
    told = stats.diagnostics
    earlier = stats.context_tokens - stats.old_tokens
    masked = stats.context_tokens + stats.mastered_tokens
    return {
        "masked": {"earlier_segments": earlier, "too_old": stats.old_tokens, "mastered": stats.mastered_tokens},
        "never_trained": masked / max(1, stats.tokens + stats.context_tokens),  # of the tokens of the step's samples
        "lr": stats.lr,
        "loss": stats.loss,
        "grad_norm": stats.grad_norm,
        "entropy": told.entropy,
        "log_ratio_mean": told.log_ratio_mean,
        "k3": told.k3,
        "ess": told.ess,
        "clip_low": told.clip_low,
        "clip_high": told.clip_high,
        "dual_clip": told.dual_clip,
        "mismatch": told.mismatch,
        "mismatch_begun": told.mismatch_begun,
        "micro_batches": stats.micro_batches,
        "padding": stats.padding,
        "forward_s": round(stats.forward_s, 5),
        "backward_s": round(stats.backward_s, 5),
        "update_s": round(stats.step_s, 5),
    }


def _trained(record: Record) -> dict[str, Any]:
    """What the record alone says of the groups of its step: the same live and replayed."""
    lengths = _lengths(record.samples)
    members = _members(record)
    # A group is as old as its oldest member.
    ages = np.array([record.step - 1 - min(sample.step for sample in own) for own in members])
    return {
        "groups": len(record.groups),
        "samples": len(record.samples),
        "reward_trained": float(np.mean([sample.reward for sample in record.samples])),
        "length_mean": float(lengths.mean()),
        "length_p95": float(np.percentile(lengths, 95)),
        "segments_mean": float(np.mean([_segments(sample) for sample in record.samples])),
        "segments_max": max(map(_segments, record.samples)),
        "cut_share": float(np.mean([sample.finish == LENGTH for sample in record.samples])),
        "age_mean": float(ages.mean()),
        "age_p95": float(np.percentile(ages, 95)),
        "age_max": int(ages.max()),
        "age_by_length": _by_quartile(members, ages),
    }


def _lengths(samples: Sequence[SampleRecord]) -> npt.NDArray[np.int64]:
    return np.array([len(sample.token_ids) // 4 for sample in samples])


def _by_quartile(groups: Sequence[Sequence[SampleRecord]], ages: npt.NDArray[np.int64]) -> list[float]:
    """Mean age of the groups in each quartile of mean length, shortest first."""
    lengths = np.array([_lengths(group).mean() for group in groups])
    order = np.argsort(lengths, kind="stable")
    return [float(ages[part].mean()) if len(part) else 0.0 for part in np.array_split(order, QUARTILES)]
