"""Files that the learner writes at each step: lines of metrics.jsonl, samples.jsonl and groups.jsonl, and
LEARNER_STATE_UPDATE; a line of metrics.jsonl too for groups that end without a step.

Counts, and appends to files. Knows nothing of the ring or of torch. `reward` is the mean over all samples of all groups
that ended since the last step, flat ones included; `reward_trained` over the trained ones.

- The line of a group that is set aside is in groups.jsonl before its first sample is dropped; the groups of a step get
  their line with the step. A learner that starts again reads the lines that no step has counted yet, so the headline
  reward counts each ended group once.
- Groups that are set aside are held as sums alone: a run may set groups aside for ever and make no step.
- Figures of a source or tag are over the groups whose lines have it. A replayed step has none: its prompts are not
  read.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from busrl.data.figures import MOST_TAGS
from busrl.errors import MachineError
from busrl.ledger.skips import newest_skips
from busrl.ledger.trained import last_step
from busrl.ledger.wal import Record, SampleRecord
from busrl.paths import RunPaths
from busrl.states import Fate, Finish
from busrl.system.files import LineFile, json_lines

if TYPE_CHECKING:
    from busrl.roles.learner.alarms import Idling
    from busrl.training.custom import Metrics
    from busrl.training.step_stats import StepStats

IDLE = "idle"  # `kind` of a line about groups without a step; a step's line has none
TAIL_BYTES = 1 << 20  # of groups.jsonl, in which a step's line is looked for at a start
PART = "parts/"  # before the name of a part of the reward
QUARTILES = 4  # of length
WAITS, JOINED_S = 64, 0.05  # of a line at most; waits that are closer to each other are one
HALF_DROPPED = 4096  # newest groups set aside by predecessors that are recognised; each death leaves one at most


class GroupsLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line of groups.jsonl: groups that ended. `step`: the step whose headline reward counts them. The line of its
    trained groups (fates T) comes after those of the groups set aside before it."""

    step: int
    draws: list[int]
    fates: str  # one letter per group
    born: list[int]  # step of the oldest weights that the group was admitted with
    lengths: list[list[int]]  # of each member, tokens
    rewards: list[list[float]]
    parts: dict[str, list[float]] = {}  # of the rewards of a group set aside, where the function gives any
    tags: list[str] = []  # of the line of each group, "" without one


Sums = defaultdict[str, float]


def _add(sums: Sums, more: Mapping[str, float]) -> None:
    for name, value in more.items():
        sums[name] += value


def _row_of_tag(sums: Sums) -> dict[str, float]:
    per = 1 / max(1, sums["samples"])
    return {
        "groups": sums["groups"], "samples": sums["samples"], "reward": sums["reward"] * per,
        "pass_rate": sums["solved"] * per, "length": sums["tokens"] * per,
        "flat_share": sums["flat"] / max(1, sums["groups"]),
    }


class Ended:
    """Sums over ended groups: their fates; total and count of `reward`, `length` and each part of the reward; sums by
    source or tag. `solved`: the least reward of a right answer."""

    def __init__(self, solved: float = 1.0) -> None:
        self.solved = solved
        self.fates: Counter[str] = Counter()
        self.tags: dict[str, Sums] = {}
        self._totals = Sums(int)
        self._counts: Counter[str] = Counter()

    def add(self, name: str, values: Iterable[float]) -> None:
        for value in values:
            self._totals[name] += value
            self._counts[name] += 1

    def add_line(self, line: GroupsLine) -> None:
        self.fates.update(line.fates)
        self.add("reward", chain.from_iterable(line.rewards))
        self.add("length", chain.from_iterable(line.lengths))
        for name, values in line.parts.items():
            self.add(PART + name, values)
        for tag, fate, rewards, lengths in zip(line.tags, line.fates, line.rewards, line.lengths):
            self._add_to_tag(tag, {
                "groups": 1, "flat": fate == Fate.FLAT.letter, "samples": len(rewards), "reward": sum(rewards),
                "solved": sum(reward >= self.solved for reward in rewards), "tokens": sum(lengths),
            })

    def _add_to_tag(self, tag: str, more: Mapping[str, float]) -> None:
        if tag in self.tags or (tag and len(self.tags) < MOST_TAGS):
            _add(self.tags.setdefault(tag, Sums(int)), more)

    def join(self, other: Ended) -> None:
        self.fates.update(other.fates)
        self._counts.update(other._counts)
        _add(self._totals, other._totals)
        for tag, more in other.tags.items():
            self._add_to_tag(tag, more)

    @property
    def groups(self) -> int:
        return sum(self.fates.values())

    def row(self) -> dict[str, Any]:
        """The numbers of a line of metrics.jsonl over these groups."""
        means = {name: total / self._counts[name] for name, total in self._totals.items()}
        aside = {fate: count for fate, count in self.fates.items() if fate != Fate.TRAINED.letter}
        row: dict[str, Any] = {
            "groups_ended": self.groups, "samples_ended": self._counts["reward"], "set_aside": aside,
        }
        if "reward" in means:
            flat_share = self.fates[Fate.FLAT.letter] / self.groups
            row |= {"reward": means["reward"], "length_ended": means["length"], "flat_share": flat_share}
        if parts := {name.removeprefix(PART): mean for name, mean in means.items() if name.startswith(PART)}:
            row["reward_parts"] = parts
        if self.tags:
            row["by"] = {tag: _row_of_tag(sums) for tag, sums in self.tags.items()}
        return row


class StepMetrics:
    """Counts since the last step, and the files that they are written to.

    `begun(draw, fate)`: any sample of a group that a predecessor set aside has this fate. The predecessor writes the
    line first, and may have died before the first drop.
    """

    def __init__(
        self, paths: RunPaths, begun: Callable[[int, str], bool] = lambda draw, fate: True,
        user_metrics: Metrics | None = None, solved: float = 1.0, keep: int = 0,
    ) -> None:
        self.user_metrics = user_metrics
        self._solved = solved
        self._written, self._skips = last_step(paths.metrics), paths.skips
        self._metrics, self._samples, self._groups = (
            LineFile(path, keep=keep) for path in (paths.metrics, paths.samples, paths.groups)
        )
        self._started: float | None = None
        self._last = time.monotonic()
        self._row: dict[str, Any] = {}
        self.checkpoint_s = 0.0
        self.begin_step()
        self._recall(paths.groups, begun)

    def begin_step(self) -> None:
        """Begin the counts of the next step."""
        self.ended = Ended(self._solved)  # groups that were set aside since the last step
        self._tags: dict[int, str] = {}  # of the groups that are trained
        self._context = Counter[str]()  # of their episodes
        self._waited: Counter[str] = Counter()
        self._waits: list[list[float]] = []  # begin and end of each, since the last step
        self._waiting_for = "start"
        self._blocker: int | None = None

    # -- start --------------------------------------------------------------------------------------------------

    def _recall(self, path: Path, begun: Callable[[int, str], bool]) -> None:
        """Read the groups that predecessors set aside since the last step's line, by the step that is to count them."""
        for size in (TAIL_BYTES, 0):
            self._groups_written, self._earlier, self._known = 0, dict[int, Ended](), dict[int, None]()
            for row in json_lines(path, size):
                with contextlib.suppress(msgspec.ValidationError):
                    self._met(msgspec.convert(row, GroupsLine), begun)
            if self._groups_written or self._groups.size() <= size:
                return

    def _met(self, line: GroupsLine, begun: Callable[[int, str], bool]) -> None:
        if Fate.TRAINED.letter in line.fates:
            # Groups of steps that have no line of metrics.jsonl.
            lost = {step: ended for step, ended in self._earlier.items() if step > self._written}
            self._groups_written, self._earlier, self._known = line.step, lost, {}
        elif len(line.draws) == len(line.fates) == 1 and begun(line.draws[0], line.fates):
            self._earlier.setdefault(line.step, Ended(self._solved)).add_line(line)
            self._known[line.draws[0]] = None
            if len(self._known) > HALF_DROPPED:
                del self._known[next(iter(self._known))]

    def resume(self, step: int) -> None:
        """End the start, after `step` steps: groups that were set aside since then count for the next step."""
        for counted, ended in self._earlier.items():
            if counted > step:
                self.ended.join(ended)
        self._earlier.clear()

    # -- events -------------------------------------------------------------------------------------------------

    def first_claim(self) -> None:
        """The clock of the run starts with the first group that is claimed."""
        if self._started is None:
            self._started = self._last = time.monotonic()
            self._waits.clear()

    def set_aside(
        self, lines: npt.NDArray[Any], fate: str, step: int, parts: Iterable[Mapping[str, float]] = (), tag: str = ""
    ) -> None:
        """A rule is about to drop a group's survivors; `step`: the coming step, which counts them."""
        draw = int(lines["group"][0])
        if draw in self._known:  # a predecessor died while it dropped them, and has counted them
            del self._known[draw]
            return
        line = GroupsLine(
            step=step, draws=[draw], fates=fate, born=[int(lines["step"].min())],
            lengths=[lines["response_tokens"].tolist()], rewards=[lines["reward"].tolist()], tags=[tag] if tag else [],
        )
        for sample_parts in parts:
            for name, value in sample_parts.items():
                line.parts.setdefault(name, []).append(value)
        self._write_groups(line)
        self.ended.add_line(line)

    def trained(self, draw: int, found: Iterable[Mapping[str, float]], tag: str = "") -> None:
        """Parts of the rewards of a group that is trained, and the tag of its line."""
        self._tags |= {draw: tag} if tag else {}
        for parts in found:
            for name, value in parts.items():
                self.ended.add(PART + name, [value])

    def context(self, counted: Counter[str]) -> None:
        """Add the counts of a group's episodes (`busrl.data.episodes.CONTEXT`)."""
        self._context += counted

    def waiting(self, reason: str, group: int | None) -> None:
        self._waiting_for, self._blocker = reason, group

    def waited(self, seconds: float) -> None:
        self._waited[self._waiting_for] += seconds  # type: ignore[assignment]
        end = time.monotonic() - self._last
        self._waits = joined([*self._waits, [max(0.0, end - seconds), end]])

    # -- a step -------------------------------------------------------------------------------------------------

    def step(
        self, record: Record, stats: StepStats, samples: Iterable[Mapping[str, object]], version: int,
        published_s: float, more: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Write the lines of a finished step, with the numbers of others (`more`). Returns the row."""
        now, line = time.monotonic(), _line_of(record, self._tags)
        self.ended.add_line(line)
        row: dict[str, Any] = {
            "step": record.step,
            "version": version,
            "cause": record.cause,
            **self._times(now),
            **self.ended.row(),
            "skipped": stats.skipped,
            "culprits": list(stats.culprits),
            **_trained(record),
            **_training(stats, record.samples),
            "blocked_by": self._blocker,
            "publish_s": round(published_s, 5),
            "checkpoint_s": round(self.checkpoint_s, 4),
            **more,
        }
        if read := self._context["read"]:
            computed = self._context["computed"]
            per_trained = computed / max(1, row["tokens"])
            row["episodes"] |= {"prefix_hit_share": 1 - computed / read, "computed_per_trained": per_trained}
            row["episodes"] |= {name: self._context[name] for name in ("unparsed", "overridden", "refused")}
        if drawn := self._context["partner_tokens"]:
            row["episodes"] |= {"partner_age": self._context["partner_age"] / drawn, "alone": self._context["alone"]}
        if switched := self._context["opponent_switched"]:
            row["episodes"]["opponent_switched"] = switched
        if skips := newest_skips(self._skips):
            row["left_out"], row["resting"] = skips.left_out, skips.resting
        if self.user_metrics is not None and (figures := self.user_metrics.measure(record.samples, row)):
            row["metrics"] = figures
        self._write(row, [{"step": record.step, **sample} for sample in samples])
        self._write_groups(line)
        self._row, self._last, self.checkpoint_s = row, now, 0.0
        self.begin_step()
        return row

    def _times(self, now: float) -> dict[str, Any]:
        return {
            "time": round(time.time(), 3),
            "time_s": round(now - (self._started or now), 4), "seconds": round(now - self._last, 4),
            "wait_s": {reason: round(seconds, 4) for reason, seconds in self._waited.items()},
            "waits": [[round(begin, 3), round(end, 3)] for begin, end in self._waits],
        }

    def idle(self, step: int, version: int, idling: Idling) -> None:
        """Write a line (`kind` "idle") of the groups that ended since the last step without one, and an answer of them
        to samples.jsonl. The next step's line counts these groups too."""
        row = {
            "kind": IDLE, "step": step, "version": version, **self._times(time.monotonic()), **self.ended.row(),
            "groups": 0, "samples": 0, "tokens": 0, "idle_groups": idling.streak,
            "idle_limit": idling.patience, "idle_causes": dict(idling.causes),
        }
        last = idling.flat.last
        self._write(row, [] if last is None else [{"kind": IDLE, "step": step, **last}])

    def checkpoint_took(self, seconds: float) -> None:
        """Keep the time of a checkpoint for the next step's line."""
        self.checkpoint_s = seconds

    def replayed(self, record: Record, stats: StepStats) -> None:
        """Write the lines of a step that a predecessor logged before it died; without numbers that died with it."""
        ended, line = self._earlier.pop(record.step, Ended(self._solved)), _line_of(record)
        if record.step > self._groups_written:
            self._write_groups(line)
        if record.step <= self._written:
            return
        ended.add_line(line)
        self._write({
            "step": record.step, "version": record.version, "cause": record.cause, "replayed": True,
            "time": round(time.time(), 3), "time_s": 0.0, "seconds": 0.0, **ended.row(),
            **_trained(record), **_training(stats, record.samples),
        })

    def _write(self, row: Mapping[str, Any], samples: Sequence[Mapping[str, object]] = ()) -> None:
        # A full disk does not stop training here: these lines are for people, the log is for the ledger.
        with contextlib.suppress(MachineError, OSError):
            self._metrics.append(msgspec.json.encode(row))
            self._samples.extend([msgspec.json.encode(sample) for sample in samples])

    def _write_groups(self, line: GroupsLine) -> None:
        """Append lengths and rewards of ended groups: a successor counts them, a simulation draws from them."""
        with contextlib.suppress(MachineError, OSError):
            self._groups.append(msgspec.json.encode(line))

    def update(self, more: Mapping[str, float]) -> dict[str, Any]:
        """Fields of LEARNER_STATE_UPDATE for the step just written, and numbers that hold from now on."""
        row = self._row
        numbers = {name: float(value) for name, value in row.items() if isinstance(value, (int, float))}
        for key in ("reward_parts", "metrics", "routes"):
            numbers |= {f"{key}/{name}": value for name, value in row.get(key, {}).items()}
        numbers |= {f"by/{tag}/{name}": value for tag, of in row.get("by", {}).items() for name, value in of.items()}
        numbers.update(more)
        fields = ("entropy", "version", "step", "groups", "reward", "tokens", "samples", "age_mean")
        return {**{name: row[name] for name in fields}, "metrics": numbers}

    def close(self) -> None:
        for file in (self._metrics, self._samples, self._groups):
            file.close()


def joined(spans: list[list[float]], most: int = WAITS) -> list[list[float]]:
    """Spans of time in order: the newest joins the one before if it is close, and the closest two if there are too
    many."""
    if len(spans) > 1 and spans[-1][0] - spans[-2][1] < JOINED_S:
        spans = [*spans[:-2], [spans[-2][0], spans[-1][1]]]
    if len(spans) > most:
        at = min(range(len(spans) - 1), key=lambda n: spans[n + 1][0] - spans[n][1])
        spans = [*spans[:at], [spans[at][0], spans[at + 1][1]], *spans[at + 2 :]]
    return spans


def _members(record: Record) -> list[list[SampleRecord]]:
    return [list(group) for _, group in groupby(record.samples, key=lambda sample: sample.group)]


def _line_of(record: Record, tags: Mapping[int, str] | None = None) -> GroupsLine:
    members = _members(record)
    return GroupsLine(
        step=record.step, draws=[group[0].group for group in members], fates=Fate.TRAINED.letter * len(members),
        born=[min(sample.step for sample in group) for group in members],
        lengths=[_lengths(group).tolist() for group in members],
        rewards=[[sample.reward for sample in group] for group in members],
        tags=[tags.get(group[0].group, "") for group in members] if tags else [],
    )


def _training(stats: StepStats, samples: Sequence[SampleRecord] = ()) -> dict[str, Any]:
    # All tokens of a cut episode that is masked count as cut, also those of untrained turns.
    masks_cut = stats.cut_tokens > 0
    counted = (sample for sample in samples if sample.turns and not (masks_cut and sample.finish == Finish.LENGTH))
    untrained = sum(_untrained(sample) for sample in counted)
    earlier = stats.context_tokens - stats.old_tokens - untrained
    left_out = stats.context_tokens + stats.cut_tokens
    masked = {"earlier_segments": max(0, earlier), "too_old": stats.old_tokens}
    more = {"cut": stats.cut_tokens, "untrained": untrained}  # named where there are any
    return {
        "tokens": stats.tokens,
        "masked": {**masked, **{name: count for name, count in more.items() if count}},
        # The share of all tokens of the step's samples.
        "never_trained": left_out / max(1, stats.tokens + left_out),
        "lr": stats.lr,
        "loss": stats.loss,
        "grad_norm": stats.grad_norm,
        **{name: value for name, value in vars(stats.diagnostics).items() if name != "loss"},
        **({"routes": routes} if (routes := stats.route_figures()) else {}),
        "micro_batches": stats.micro_batches,
        "padding": stats.padding,
        "forward_s": round(stats.forward_s, 5),
        "backward_s": round(stats.backward_s, 5),
        "update_s": round(stats.step_s, 5),
    }


def _trained(record: Record) -> dict[str, Any]:
    """The numbers that follow from the record alone: equal live and replayed."""
    lengths = _lengths(record.samples)
    segments = [len(sample.segments) or 1 for sample in record.samples]
    members = _members(record)
    # A group is as old as its oldest member.
    ages = np.array([record.step - 1 - min(sample.step for sample in group) for group in members])
    return {
        "groups": len(record.groups),
        "samples": len(record.samples),
        "reward_trained": float(np.mean([sample.reward for sample in record.samples])),
        "length_mean": float(lengths.mean()),
        "length_p95": float(np.percentile(lengths, 95)),
        "segments_mean": float(np.mean(segments)),
        "segments_max": max(segments),
        "cut_share": float(np.mean([sample.finish == Finish.LENGTH for sample in record.samples])),
        "age_mean": float(ages.mean()),
        "age_p95": float(np.percentile(ages, 95)),
        "age_max": int(ages.max()),
        "age_by_length": _by_quartile(members, ages),
        **_episodes([sample for sample in record.samples if sample.turns]),
    }


def _untrained(sample: SampleRecord) -> int:
    """Sampled tokens of turns that are not trained."""
    return int(sample.turn_lengths()[~sample.turns_trained()].sum())


def _episodes(samples: Sequence[SampleRecord]) -> dict[str, Any]:
    """Figures of episodes of several turns: turns, sequences, read tokens, and the sum of turn rewards of each."""
    if not samples:
        return {}
    each = {
        "turns": [len(sample.turn_array()) for sample in samples],
        "sequences": [len(sample.seqs) for sample in samples],
        "context_tokens": [len(sample.token_ids) // 4 - sample.tokens for sample in samples],
    }
    figures: dict[str, Any] = {"count": len(samples)}
    for name, values in each.items():
        figures |= {f"{name}_mean": float(np.mean(values)), f"{name}_p95": float(np.percentile(values, 95))}
    if any(sample.turn_rewards for sample in samples):
        figures["turn_rewards"] = float(np.mean([sum(sample.turn_rewards) for sample in samples]))
    return {"episodes": figures}


def _lengths(samples: Sequence[SampleRecord]) -> npt.NDArray[np.int64]:
    return np.array([sample.tokens for sample in samples])


def _by_quartile(groups: Sequence[Sequence[SampleRecord]], ages: npt.NDArray[np.int64]) -> list[float]:
    """Mean age of the groups in each quartile of mean length, shortest first."""
    lengths = np.array([_lengths(group).mean() for group in groups])
    order = np.argsort(lengths, kind="stable")
    return [float(ages[part].mean()) if len(part) else 0.0 for part in np.array_split(order, QUARTILES)]
