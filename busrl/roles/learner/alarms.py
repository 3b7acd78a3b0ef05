"""Warnings from the numbers of training, and the end of a run that makes no step.

`LengthSkew` compares the answers that are trained with those that were drawn. `Alarms` watches the newest steps.
`Idling` counts groups that end one after another without being trained; it reads the tails of errors.jsonl and
groups.jsonl. Knows nothing of the ring and of the bus: the results are texts for warnings, and errors.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from busrl.capabilities import CALLER_ROLES
from busrl.paths import RunPaths
from busrl.scheduling.groups import GroupView
from busrl.states import ACCIDENTS, Fate, Finish, fate_name
from busrl.system.files import TAIL_BYTES, json_lines
from busrl.topology import Topology

Ints = npt.NDArray[np.int64]
Shares = npt.NDArray[np.float64]

# -- lengths of drawn, ended and trained answers ------------------------------

QUARTILES = 4
MOST_GROUPS = 10_000


class LengthSkew:
    """Lengths of the answers that are trained beside those that were drawn, and an alarm where they differ.

    *Dispatched* are the samples of every group that ended, *consumed* the trained ones. *Drawn* are the dispatched ones
    in the order of the loader, up to the oldest draw that is still open: a slow group is missing together with all that
    was drawn after it. `alarm` 0 = never. The window of steps is lost with the process. If more than `MOST_GROUPS` end
    without a step, the newest stand for all.
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
        tokens = np.fromiter(lengths, np.int64)
        self._behind[draw] = tokens
        if len(self._behind) > MOST_GROUPS:
            del self._behind[next(iter(self._behind))]
        self._now.append((tokens, fate))

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
    left, right = (np.pad(shares, (0, size - len(shares)), constant_values=1.0) for shares in (a, b))
    return float(np.abs(left - right).max())


def _joined(parts: Iterable[Ints]) -> Ints:
    arrays = list(parts)
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)


# -- the newest steps ----------------------------------------------------------

K3_HIGH, MOVED_STEPS = 0.3, 3
FLAT, SEAT, REWARD = "flat", "seat/", "/reward"
FLAT_HIGH, FLAT_OVER, FLAT_GROUPS = 0.9, 0.8, 64  # it begins above the first, is over below the second
CUT_HIGH, CUT_ANSWERS = 0.99, 64  # of at least so many answers
STEPS = 10


class Alarms:
    """Finds in the newest lines of metrics.jsonl a policy that has left the one that sampled, or that learns no more.

    One step decides nothing: two of the newest three, or the groups and answers of the newest ten, do. Each alarm is
    reported when it begins, and again only after it was over. Healthy runs are far from the limits (ess above 0.9, k3
    below 0.05). `ess`: the least that is no alarm.
    """

    def __init__(self, ess: float = 0.3) -> None:
        self._ess = ess
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=STEPS)
        self._on: set[str] = set()

    def step(self, row: Mapping[str, Any]) -> dict[str, str]:
        """The texts of the alarms that begin with this step, by name."""
        self._rows.append(row)
        texts = {"moved": self._left(row), FLAT: self._flat(row), "cut": self._cut(row)}
        begun = {name: f"step {row['step']}: {text}" for name, text in texts.items() if text and name not in self._on}
        self._on = {name for name, text in texts.items() if text}
        return begun

    def _left(self, row: Mapping[str, Any]) -> str:
        # A step without trained tokens has 0 in both; a number that is not finite was reported with its step.
        moved = [
            (past["ess"], past["k3"])
            for past in self._rows if past["tokens"] and isfinite(past["ess"]) and isfinite(past["k3"])
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
        if ended < FLAT_GROUPS or flat <= (FLAT_OVER if FLAT in self._on else FLAT_HIGH):
            return ""
        seats = [f"{key.split('/')[1]} {row[key]:.3g}" for key in row if key.startswith(SEAT) and key.endswith(REWARD)]
        why = (
            f"({', '.join(seats)} in the newest step): play has settled, on the best or on a habit that no seat tries "
            "to break (a higher learner.entropy_coef keeps seats trying), or it is too hard for this model"
        ) if seats else "the task is solved, too hard for this model, or its answers have become all the same"
        return (
            f"{flat:.0%} of the last {ended:g} groups were flat (all rewards of a group equal, nothing to learn from), "
            f"at a mean reward of {self._of_all('groups_ended', 'reward')[1]:.3g} and entropy {row['entropy']:.2g}"
            f"{' ' if seats else ': '}{why}; see samples.jsonl"
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


# -- a run without a step --------------------------------------------------------

AUTO, LEAST = 4, 32  # x n_min, and at least so many: a few flat groups in a row are chance
EPISODES = 8  # where only episodes failed since the start: they are slow, and so many are no chance
FAILED = {fate.letter for fate in (Fate.REWARD_RAISED, Fate.REWARD_HUNG, Fate.MALFORMED, Fate.POISON)}
EPISODE = "its episode "  # before the failure, in the error of a dropped sample
RARE = 32  # usable groups that chance would have brought: a streak that is as long as that is none
QUARTERS = 4
SELDOM = 16  # of so many groups that ended because their seat was not used one counts: it is asked seldom, not idle
BY_RULE = (Fate.FLAT.letter, Fate.OLD.letter, Fate.LONG.letter)  # in the order in which they explain a group
WHERE = {  # the role that reports a fate
    Fate.REWARD_RAISED.letter: "reward", Fate.REWARD_HUNG.letter: "reward",
    Fate.UNRENDERED.letter: "rollout", Fate.LONG.letter: "rollout",
}
MOST_TEXT, MOST_ERROR = 200, 1000
MOST_LINES_BYTES = 1 << 20  # of groups.jsonl, at a start
MOSTLY = 0.9  # of a streak: the rest may be accidents
SOLVED = (
    "the best that this run has seen: nothing is left to learn from these prompts. If a better reward exists, the "
    "policy has collapsed to one kind of answer: see samples.jsonl; else the task is solved: train on harder prompts"
)
SETTLED = (
    "every episode now ends alike: where seats compete, play has settled and teaches nothing more. It may be the best "
    "play, or a habit that no seat tries to break: see samples.jsonl, and let it play another model, an older one say "
    "(docs/several-models.md). A higher learner.entropy_coef keeps seats trying"
)
SHARED = (
    "; an episode that returns one number gives it to every seat: where they compete, return a map from each seat to "
    "its reward"
)
NEWEST = 64  # flat groups of a seat, of which MOSTLY with the best reward mean that the task is learnt
ALWAYS = (
    "no answer ever had another reward: either the prompts are too easy for this model, or the reward gives this to "
    "every answer (reward.extract or the function, data.answer_key); see the answers in samples.jsonl"
)
REMEDY = {
    Fate.FLAT.letter: "look at what the reward compares (reward.extract or the function, data.answer_key) and at the "
    "answers in samples.jsonl; a task that is too easy or too hard for this model has no signal either",
    Fate.OLD.letter: "raise weights.max_staleness, or generate less ahead of training",
    Fate.LONG.letter: "give generation.max_prompt_tokens a number that fits them, or shorten the prompts",
    Fate.REWARD_RAISED.letter: "correct the reward function",
    Fate.REWARD_HUNG.letter: "correct the reward function, or raise reward.timeout_s",
    Fate.UNRENDERED.letter: "look at data.template and data.prompt_key",
    Fate.POISON.letter: "look at the engine's log",
    Fate.MALFORMED.letter: "look at the process that wrote it",
    Fate.INCOMPLETE.letter: "look at errors.jsonl",
    Fate.UNUSED.letter: "the episodes hardly ever call this seat: look at the function that plays them",
}


@dataclass
class FlatStreak:
    """The flat groups of a streak: their lowest and highest reward, and how many answers had each. `seats`: lowest and
    highest of each seat, where there are several."""

    low: float = np.inf
    high: float = -np.inf
    answers: int = 0
    counts: Counter[float] = field(default_factory=Counter)  # of answers, at the lowest and at the highest reward
    cut: int = 0  # at the length limit
    last: dict[str, object] | None = None  # an answer, as in samples.jsonl
    seats: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def settled(self) -> bool:
        """True if each of several seats always had the same reward."""
        return len(self.seats) > 1 and all(low == high for low, high in self.seats.values())

    def by_seat(self) -> str:
        """Rewards of each seat, as words."""
        return ", ".join(
            f"{name} always {low:g}" if low == high else f"{name} {low:g} to {high:g}"
            for name, (low, high) in sorted(self.seats.items())
        )

    def text(self) -> str:
        worth = f"every reward was {self.low:g}"
        if self.low < self.high and self.seats:
            worth = f"all rewards of each group were equal: {self.by_seat()}"
        elif self.low < self.high:
            worth = (
                "all rewards of each group were equal: every prompt always gets the same reward, "
                f"{self.counts[self.high] / self.answers:.0%} of the answers the highest ({self.high:g}), "
                f"{self.counts[self.low] / self.answers:.0%} the lowest ({self.low:g})"
            )
        cut = f", {self.cut / self.answers:.0%} of the answers were cut at generation.max_new_tokens"
        return f"{worth}{cut if self.cut else ''}"

    def add(self, rewards: npt.NDArray[np.float64], seat: str = "") -> None:
        """Count the rewards of a group, which are all equal."""
        self.answers += len(rewards)
        if seat:
            low, high = self.seats.get(seat, (np.inf, -np.inf))
            self.seats[seat] = min(low, *rewards), max(high, *rewards)
        self.counts.update(rewards.tolist())
        self.low, self.high = min(self.counts), max(self.counts)
        self.counts = Counter({edge: self.counts[edge] for edge in (self.low, self.high)})


class Idling:
    """Counts the groups of a run that end untrained, names the commonest cause, and decides when to warn and to end.

    - A streak is counted: groups that ended since the last step and since the last group that could be trained. A task
      with mostly flat groups is slow, not idle: where trainable groups were rare before, the limit is the number of
      groups that RARE of them would have taken on average.
    - Groups that are dropped by a look that finds a new one to train came beside it, during a long step, and are no
      part of a streak when they are seen to have ended.
    - Groups that ended before the first look of this process, or are dropped by it, are not counted: a start after a
      correction begins at 0. The share of trainable groups and the rewards are also read from the steps before it.
    - A streak of flat groups at the best reward of the run, where others were lower, ends the run as successful. The
      run cannot know whether a better reward exists, so the text gives the numbers, and says that a collapse to one
      kind of answer looks the same.
    - Of several seats one has the best reward, and each of the others its own: what one wins another may lose.
    """

    def __init__(self, topology: Topology, paths: RunPaths) -> None:
        wanted, n_min = topology.limits.idle_groups, topology.learner.trigger.n_min
        self.limit = max(LEAST, AUTO * n_min) if isinstance(wanted, str) else wanted
        self._auto, self._episodes = isinstance(wanted, str), topology.has_callers
        self.paths, self._n_min, self._seats = paths, n_min, topology.seats
        self._usable = self._ended = 0  # groups in this life; those that ended unused, without the streak
        self._ready: set[int] = set()
        self._looked, self._unused = False, 0
        self._beside: set[int] = set()  # dropped groups that are of no streak, until they are seen to have ended
        self._begins_anew = False  # what was set aside since the last look is of no streak
        self._worst, self._best = np.inf, -np.inf  # rewards of the run
        # Lowest rewards of each seat's flat groups, whatever was trained between.
        self._newest: dict[str, deque[float]] = {name: deque(maxlen=NEWEST) for name in self._seats}
        self._since_look = FlatStreak()  # set aside, and not yet counted
        self._recall()
        self._begin()

    def _begin(self) -> None:
        self.streak, self._reported = 0, 0
        self.causes: Counter[str] = Counter()
        self.flat = self._since_look

    def _recall(self) -> None:
        """Read the groups and rewards of earlier steps; a streak after the last of them belongs to an earlier start."""
        ended, seen = 0, set[float]()
        for row in json_lines(self.paths.groups, MOST_LINES_BYTES):
            with contextlib.suppress(KeyError, TypeError, ValueError):
                values = [float(reward) for rewards in row["rewards"] for reward in rewards]
                seen |= {min(values), max(values)}
                ended += len(row["fates"])
                if usable := row["fates"].count(Fate.TRAINED.letter):
                    self._usable, self._ended = self._usable + usable, self._ended + ended - usable
                    self.add_rewards([*seen])
                    ended, seen = 0, set()

    def look(self, view: GroupView, asides: Collection[int]) -> None:
        """Count the groups that ended since the last view, and those that can be trained now (without `asides`, which
        are just being dropped)."""
        if self._looked:
            for draw, fates in zip(view.ended_draws.tolist(), view.ended_fates):
                if not ((fates == Fate.TRAINED) | (fates == Fate.SKIPPED)).any():
                    self._count(draw, cause_of(fates))
        self._beside -= {*view.ended_draws.tolist()}
        self._since_look = FlatStreak()
        if self._begins_anew:
            self.flat = self._since_look
        ready = {*view.draws[view.usable & ~view.flat].tolist()} - {*asides}
        if new := len(ready - self._ready):
            self._usable += new
            self.end_streak()
        beside = new > 0 or not self._looked
        self._beside = self._beside | {*asides} if beside else self._beside - {*asides}
        self._ready, self._looked, self._begins_anew = ready, True, beside and len(asides) > 0

    def _count(self, draw: int, cause: str) -> None:
        """A group ended untrained."""
        if draw in self._beside:
            self._ended += 1
            return
        self._unused += cause == Fate.UNUSED.letter
        if cause != Fate.UNUSED.letter or not self._unused % SELDOM:
            self.streak += 1
            self.causes[cause] += 1

    def add_rewards(self, rewards: Sequence[float]) -> None:
        if len(rewards):
            self._worst, self._best = min(self._worst, *rewards), max(self._best, *rewards)

    def set_aside(
        self, lines: npt.NDArray[Any], fate: str, sample: Callable[[], dict[str, object]], group: int = 0
    ) -> None:
        """A group is about to be dropped; of a flat one `sample` gives an answer to show. Its number tells its seat."""
        self.add_rewards(lines["reward"].tolist())
        if fate == Fate.FLAT.letter and len(lines):
            seat = self._seats[group % len(self._seats)]
            self._newest[seat].append(float(lines["reward"].min()))
            cut, last = int(np.count_nonzero(lines["finish"] == Finish.LENGTH)), sample()
            for streak in {id(flat): flat for flat in (self.flat, self._since_look)}.values():
                streak.add(lines["reward"], seat if self._several else "")
                streak.cut += cut
                streak.last = last

    def end_streak(self) -> None:
        """A step was made, or there is a group for one."""
        self._ended += self.streak
        self._begin()

    @property
    def patience(self) -> int:
        """Groups in a row without one that can be trained until the run ends; 0 = it never does."""
        if not self.limit:
            return 0
        if self._auto and self._playing_fails and not self._usable and self._best < self._worst:
            return min(self.limit, EPISODES)
        seen = self._usable + self._ended + self._n_min
        return max(self.limit, RARE * seen // self._usable if self._usable else 0)

    @property
    def _playing_fails(self) -> bool:
        """True if all groups of the streak are episodes that came to no reward."""
        return self._episodes and bool(self.causes) and self.causes.keys() <= FAILED

    def quarters(self) -> range:
        """The quarters of the patience that were reached since the last call; the last one ends the run."""
        reached = min(QUARTERS, self.streak * QUARTERS // self.patience) if self.patience else 0
        before, self._reported = self._reported, max(reached, self._reported)
        return range(before + 1, reached + 1)

    @property
    def _several(self) -> bool:
        return len(self._seats) > 1

    @property
    def solved(self) -> bool:
        """True if all answers of the streak had the best reward of the run, which is not the only one there was; of
        several seats, if those of one had it and each other seat always had the same."""
        flat = self.flat
        level = flat.answers > 0 and flat.high == self._best > self._worst and (flat.low == flat.high or flat.settled)
        return level and self.causes[Fate.FLAT.letter] >= MOSTLY * self.streak

    @property
    def learnt(self) -> bool:
        """True if nearly all of the newest flat groups have the best reward of the run: all their answers are right. Of
        several seats that is so of one, and nearly all groups of each other seat have one reward too."""
        usual = [usual_of(newest) for newest in self._newest.values()]
        return None not in usual and self._best in usual and self._best > self._worst

    def learnt_text(self, step: int, last: int) -> str:
        """Advice for a run whose task is learnt; the run is at `step` of `last`."""
        ends = f", or until {self.patience} groups in a row teach nothing (limits.idle_groups)" if self.limit else ""
        if self._several:
            return f"step {step}: nearly {SETTLED}. The run goes on to step {last}{ends}"
        return (
            f"step {step}: the task is learnt: nearly all groups that teach nothing have the best reward that this run "
            f"has seen ({self._best:g}) for every answer. Train on harder prompts (data.train), or end the run (busrl "
            f"stop); it goes on to step {last}{ends}. If a better reward exists, all answers have become of one kind: "
            "see samples.jsonl"
        )

    def text(self, step: int) -> str:
        """Advice about the commonest cause, the number of its groups, and the last error or answer behind it."""
        cause, count = self.causes.most_common(1)[0] if self.causes else (Fate.INCOMPLETE.letter, 0)
        share = f"all {self.streak}" if count == self.streak else f"{count} of {self.streak}"
        since = f"since step {step}" if step else "since the start"
        head = f"{share} groups that ended {since}: {fate_name(cause)}"
        if self.solved and self.flat.low < self.flat.high:
            parts = [f"{share} groups that ended {since} were flat, {self.flat.by_seat()}: {SETTLED}", self._answer()]
        elif self.solved:
            head = f"{share} groups that ended {since} were flat with a reward of {self.flat.low:g}"
            parts = [f"{head}, {SOLVED}", self._answer()]
        elif self._playing_fails:
            error = last_error(self.paths, (*CALLER_ROLES, "reward"))
            last = f"; the last {error.partition(EPISODE)[2] or error}" if error else ""
            parts = [f"no episode came to a reward{last}", "see the log of the process that plays them", head]
        elif cause == Fate.FLAT.letter:
            always = self.flat.answers > 0 and self._worst == self._best > 0
            seen = self.flat.text() if self.flat.answers else ""
            why = f"{ALWAYS}{SHARED if self._several else ''}" if always else REMEDY[cause]
            parts = [why, head, seen, self._answer()]
        else:
            error = last_error(self.paths, (WHERE.get(cause, ""),))
            parts = [error and f"the last error: {error}", REMEDY[cause], head]
        return "; ".join(part for part in parts if part)

    def _answer(self) -> str:
        last = self.flat.last
        if last is None:
            return ""
        return f"the last: {_short(last['prompt'])} was answered {_short(last['completion'])}, worth {last['reward']:g}"


def cause_of(fates: npt.NDArray[np.uint8]) -> str:
    """The fate of a group, from those of its members: the rule that ended it, else its commonest accident, else that
    its seat was not used."""
    counts = Counter(chr(int(fate)) for fate in fates if fate)
    accidents = Counter({fate: count for fate, count in counts.items() if ord(fate) in ACCIDENTS})
    rule = next((fate for fate in BY_RULE if counts[fate]), "")
    other = Fate.UNUSED.letter if counts[Fate.UNUSED.letter] else Fate.INCOMPLETE.letter
    return rule or (accidents.most_common(1)[0][0] if accidents else other)


def usual_of(rewards: Collection[float]) -> float | None:
    """The reward that nearly all are equal to; None where there is none."""
    ((reward, count),) = Counter(rewards).most_common(1) or [(0.0, 0)]
    return reward if count and count >= MOSTLY * len(rewards) else None


def last_error(paths: RunPaths, where: Sequence[str]) -> str:
    """The text of the newest line of errors.jsonl about samples, of these roles ("": any role); "" without one."""
    with contextlib.suppress(OSError):
        for row in reversed(list(json_lines(paths.errors, TAIL_BYTES))):
            if row.get("uids") and "text" in row and ("" in where or row.get("where") in where):
                return str(row["text"])[:MOST_ERROR]
    return ""


def _short(text: object) -> str:
    shown = repr(text)
    return shown if len(shown) <= MOST_TEXT else f"{shown[:MOST_TEXT]} ..."
