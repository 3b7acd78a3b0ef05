"""Text that others wrote, made safe to print: no character in it can move a cursor or change a terminal.

Pure. Used wherever a person reads what came from the bus, the ring or a file of a run: display, log of `launch`,
`busrl status`, `ring inspect`, `audit` and the monitor. Knows nothing of who wrote it.

The story of a run as its files tell it: reward, speed, waste, validation, one sample, and what became of every one.

Reads metrics.jsonl, validation.jsonl, samples.jsonl and the table of fates; changes nothing. Knows nothing of rings,
the bus or terminals. From the first step ever, whoever started the run how often, so a resumed run has one story.

- Bounded: the first line and the end of each file are read, the table of fates in blocks.
- Torn, damaged and foreign lines are left out; a number that is none is not known.

What a person wants to know of a run, folded from bus messages and from the ring.

Pure: messages and numbers in, a `Progress` out. Knows nothing of terminals. The ring is the better witness: step and
version come from its header, so the picture stays right when messages are lost.

What went wrong in a run lately, from the tail of errors.jsonl, for `busrl status`.

Reads one file; knows nothing of who wrote the lines. Lines of one process that differ only in numbers count as one.

What a run is doing now, or how it ended, as plain data: `busrl status` shows it, `--json` prints it.

Talks to the run directory and to the ring, read-only; knows nothing of the bus, so it works with the broker down.
A ring that can not be used is a state like others. The keys stand in docs/operating.md: they are only ever added to.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from busrl.errors import NoSuchRun, RingNotFound, first_line
from busrl.files import TAIL_BYTES, tail
from busrl.gateway.desk import BAD
from busrl.ledger.trainlog import of_step
from busrl.paths import RunPaths
from busrl.protocol import messages as m
from busrl.protocol.messages import SEVERITIES
from busrl.ring import OfdLock, Process, Ring, RingError
from busrl.states import Fate, HeaderWord, RunPhase, fate_name

# -- Text that others wrote, made safe to print: no character in it can move a cursor or change a terminal ------------


LIMIT = 400


def printable(text: str) -> str:
    """The text with a space for every control character, escape, line end and mark that turns the reading order."""
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def safe(text: str, limit: int = LIMIT) -> str:
    """One line of bounded length of it, without spaces around."""
    return printable(text[:limit]).strip()


# -- The story of a run as its files tell it: reward, speed, waste, validation, one sample, and what became of ... ----


STORY_TAIL_BYTES = 1 << 20
HEAD_BYTES = 1 << 16
RECENT = 10  # steps that a present value is the mean of
PACE_S = 20.0  # a speed is that of the newest steps which together took so long
BLOCK = 1 << 20
PROMPT, ANSWER = 90, 120
WORDS = {
    Fate.DISPATCHED: "open",
    Fate.FLAT: "flat (all rewards of the group equal)",
    Fate.OLD: "too old",
    Fate.INCOMPLETE: "of groups that lost members",
    Fate.LONG: "with a prompt that is too long",
    Fate.POISON: "given up after killing their process twice",
    Fate.REWARD_RAISED: "whose reward raised",
    Fate.REWARD_HUNG: "whose reward hung",
}


def is_step(value: object) -> bool:
    """Whether a line's number can be a step's: what others wrote into a file may be anything."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


@dataclass(frozen=True)
class Story:
    """Lines as they stand in the files: the first step ever, the newest ones, rounds of validation, the last sample."""

    first: dict[str, Any] = field(default_factory=dict)
    rows: tuple[dict[str, Any], ...] = ()
    rounds: tuple[dict[str, Any], ...] = ()
    sample: dict[str, Any] = field(default_factory=dict)
    idle: dict[str, Any] = field(default_factory=dict)  # of groups that ended since the newest step, which gave none

    @classmethod
    def of(cls, paths: RunPaths) -> Story:
        """Empty where there is nothing (yet)."""
        found = [row for row in tail_rows(paths.metrics) if is_step(row.get("step"))]
        rows = [row for row in found if of_step(row)]
        # A line about groups without a step is the newest there is to tell; the next step's has its groups as well.
        idle = found[-1] if found and not of_step(found[-1]) else {}
        rounds = [row for row in tail_rows(paths.validation) if is_step(row.get("round"))]
        samples = tail_rows(paths.samples)
        first = next((row for row in _head(paths.metrics) if "reward" in row and of_step(row)), {})
        return cls(first, tuple(rows), tuple(rounds), samples[-1] if samples else {}, idle)

    @property
    def step(self) -> int:
        """The newest step that has a line."""
        return max((row["step"] for row in (*self.rows, self.idle) if row), default=0)

    @property
    def first_reward(self) -> float | None:
        """Mean reward of the first step ever."""
        return number(self.first.get("reward"))

    def rewards(self) -> list[float]:
        """Mean reward of each of the newest steps, oldest first."""
        return [value for row in self.rows if (value := number(row.get("reward"))) is not None]

    def means(self) -> list[tuple[int, float, int]]:
        """Round, mean reward and samples of each round of validation that judged any."""
        known = [(row["round"], number(row.get("val/reward")), row.get("samples")) for row in self.rounds]
        return [(at, mean, count) for at, mean, count in known if mean is not None and isinstance(count, int) and count]

    def recent(self, name: str) -> float | None:
        """Mean of a number over the newest steps that tell it."""
        told = [value for row in self.rows[-RECENT:] if (value := number(row.get(name))) is not None]
        return sum(told) / len(told) if told else None

    def flat_share(self) -> float | None:
        """Share of flat groups among all that ended in the newest steps."""
        told = (*self.rows[-RECENT:], self.idle)
        rows = [(row, ended) for row in told if (ended := number(row.get("groups_ended")))]
        flat = sum((number(row.get("flat_share")) or 0.0) * ended for row, ended in rows)
        return flat / sum(ended for _, ended in rows) if rows else None

    def pace(self, quiet_s: float = 0.0) -> tuple[float, float] | None:
        """Steps and trained tokens per second lately, the last step having ended `quiet_s` ago; None: not known."""
        steps, tokens, span = 0, 0.0, 0.0
        for row in reversed(self.rows):
            seconds = number(row.get("seconds")) or 0.0
            if seconds > 0:
                steps, tokens, span = steps + 1, tokens + (number(row.get("tokens")) or 0.0), span + seconds
            if span >= PACE_S:
                break
        if not steps:
            return None
        over = span + max(0.0, quiet_s - span / steps)  # a step that takes longer than the others counts against it
        return steps / over, tokens / over


def fates(path: Path) -> dict[str, int]:
    """How many samples have each fate, most interesting first; empty where the table can not be read."""
    counts = np.zeros(256, np.int64)
    with suppress(OSError), open(path, "rb") as file:
        while block := file.read(BLOCK):
            counts += np.bincount(np.frombuffer(block, np.uint8), minlength=256)
    order = sorted(range(1, 256), key=lambda code: (code != Fate.TRAINED, code == Fate.DISPATCHED, -counts[code]))
    return {WORDS.get(code, fate_name(code)): int(counts[code]) for code in order if counts[code]}  # type: ignore[call-overload]


def in_words(fate: str) -> str:
    """A fate as the audit names it, for somebody who does not know the word."""
    return next((text for code, text in WORDS.items() if fate_name(code) == fate), fate)


def sample_line(sample: dict[str, Any]) -> str:
    """What the model wrote lately, in one line; "" if nothing is known."""
    if "completion" not in sample:
        return ""
    prompt, answer, reward = _prompt(sample.get("prompt")), str(sample["completion"]), number(sample.get("reward"))
    shown = safe(prompt, len(prompt))[-PROMPT:]
    told = safe(answer, len(answer))
    cut = f"{told[: ANSWER // 2]} … {told[-ANSWER // 2 :]}" if len(told) > ANSWER else told
    return f"{shown!r} → {cut!r}" + (f", reward {reward:g}" if reward is not None else "")


def _prompt(found: Any) -> str:
    """The prompt as text, also where the whole line of the data file stands for it."""
    if isinstance(found, str) and found.startswith("{"):
        with suppress(ValueError, RecursionError):
            line = json.loads(found)
            found = line.get("prompt", found) if isinstance(line, dict) else found
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)


def number(value: Any) -> float | None:
    """The finite number that a value of a JSON file is; None for everything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    with suppress(OverflowError):  # a whole number of hundreds of digits
        found = float(value)
        return found if math.isfinite(found) else None
    return None


def _head(path: Path) -> list[dict[str, Any]]:
    try:
        with open(path, "rb") as file:
            return _rows(file.read(HEAD_BYTES).split(b"\n")[:-1])
    except OSError:
        return []


def tail_rows(path: Path) -> list[dict[str, Any]]:
    """The maps in the newest lines of a file, oldest first; none if it is not there."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - STORY_TAIL_BYTES))
            lines = file.read(STORY_TAIL_BYTES).split(b"\n")
    except OSError:
        return []
    return _rows(lines[1 if size > STORY_TAIL_BYTES else 0 : -1])  # the first may be cut, the last is not ended


def _rows(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    found = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
            found += [row] if isinstance(row, dict) else []
    return found


# -- What a person wants to know of a run, folded from bus messages and from the ring ---------------------------------


WINDOW_S = 20.0
HISTORY = 400


@dataclass(frozen=True)
class Row:
    """One process of the run as it is now."""

    name: str
    phase: str
    activity: str = ""
    busy: float = 0.0
    restarts: int = 0


@dataclass
class Rate:
    """How fast a counter grows, over the last `WINDOW_S`."""

    points: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=256))

    def add(self, value: float, now: float) -> None:
        if self.points and value < self.points[-1][1]:
            self.points.clear()  # its owner was started again and counts from 0
        if self.points and self.points[-1][0] == now:
            self.points.pop()  # the newest of one instant counts, or what came before would have taken no time
        self.points.append((now, value))
        while len(self.points) > 2 and now - self.points[0][0] > WINDOW_S:
            self.points.popleft()

    def per_s(self) -> float:
        if len(self.points) < 2:
            return 0.0
        (t0, v0), (t1, v1) = self.points[0], self.points[-1]
        return (v1 - v0) / (t1 - t0) if t1 > t0 else 0.0


@dataclass
class Progress:
    """The state of a run for the display and the summary."""

    name: str
    goal: int
    started: float
    step: int = 0
    version: int = 0
    groups: int = 0
    samples: int = 0
    tokens: int = 0
    generated: int = 0
    entropy: float = 0.0
    age: float = 0.0
    told: int = 0  # the newest step whose numbers are known
    before: int = 0  # steps that were done before this start
    waste: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=RECENT))
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    first_reward: float | None = None
    validations: list[tuple[int, float, int]] = field(default_factory=list)
    validating: int = -1
    waiting: str = ""
    faults: list[str] = field(default_factory=list)  # faults on purpose, in words
    rows: tuple[Row, ...] = ()
    slots: dict[str, int] = field(default_factory=dict)
    token_rate: Rate = field(default_factory=Rate)
    step_rate: Rate = field(default_factory=Rate)

    def recall(self, story: Story) -> None:
        """What earlier starts in the run directory came to: this one goes on with their story."""
        self.step = self.told = self.before = story.step
        self.rewards.extend(story.rewards()[-HISTORY:])
        self.first_reward, self.validations = story.first_reward, story.means()

    def hear(self, message: m.Message) -> list[str]:
        """Fold one message in; returns lines that a person should read."""
        if isinstance(message, m.LearnerStateUpdate):
            self._stepped(message)
        elif isinstance(message, m.SchedulerState):
            self.waiting = message.waiting
        elif isinstance(message, m.ValidationStarted):
            self.validating = message.round
        elif isinstance(message, m.ValidationDone):
            return [self._validated(message)]
        return []

    def _stepped(self, update: m.LearnerStateUpdate) -> None:
        if not self.told < update.step <= self.goal:
            return  # doubled, late, or of no step that there is
        if not all(map(math.isfinite, (update.reward, update.entropy, update.age_mean, *update.metrics.values()))):
            return  # no mean of anything
        self.told = update.step
        told = update.metrics
        self.waste.append((told.get("flat_share", 0.0), told.get("groups_ended", 0.0), told.get("cut_share", 0.0)))
        self.step, self.version = max(self.step, update.step), max(self.version, update.version)
        self.groups += update.groups
        self.samples += update.samples
        self.tokens += update.tokens
        self.entropy, self.age = update.entropy, update.age_mean
        self.rewards.append(update.reward)
        if self.first_reward is None:
            self.first_reward = update.reward

    def _validated(self, done: m.ValidationDone) -> str:
        self.validating = -1
        self.validations.append((done.round, done.mean, done.samples))
        mixed = ", versions mixed" if done.mixed else ""
        return f"validation {done.round} of version {done.version}: {done.mean:.3f} over {done.samples} samples{mixed}"

    def ring(self, *, step: int, version: int, tokens: int, slots: dict[str, int], now: float) -> None:
        """What the ring says: header words, tokens generated so far, slots by state."""
        self.step, self.version, self.slots = max(self.step, step), max(self.version, version), slots
        self.generated = tokens
        self.token_rate.add(tokens, now)
        self.step_rate.add(self.step, now)

    def recent_reward(self, count: int = 10) -> float | None:
        """Mean reward of the newest steps."""
        newest = list(self.rewards)[-count:]
        return sum(newest) / len(newest) if newest else None

    def recent_waste(self) -> tuple[float, float] | None:
        """Share of flat groups among those that ended, and of cut answers among the trained, of the newest steps."""
        ended = sum(groups for _, groups, _ in self.waste)
        if not ended > 0:
            return None
        flat = sum(share * groups for share, groups, _ in self.waste) / ended
        return flat, sum(cut for _, _, cut in self.waste) / len(self.waste)

    def left_s(self) -> float | None:
        """Estimated seconds to the goal; None while there is nothing to estimate from."""
        rate = self.step_rate.per_s()
        return (self.goal - self.step) / rate if rate > 0 else None


def duration(seconds: float) -> str:
    """`1h 02m`, `3m 07s` or `12s`."""
    whole = int(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 60}m {whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def short(number: float) -> str:
    """`3.1k`, `12M`: three digits are enough to watch."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            scaled = number / size
            return f"{scaled:.1f}{unit}" if scaled < 100 else f"{scaled:.0f}{unit}"
    return f"{number:.0f}"


# -- What went wrong in a run lately, from the tail of errors.jsonl, for `busrl status` -------------------------------


__all__ = ["SHOWN", "TAIL_BYTES", "kinds", "lines", "tail"]

SHOWN = 5
TEXT = 240


def kinds(path: Path) -> list[dict[str, Any]]:
    """Every kind of problem in the end of the file, the newest first: severity, process, text, time, count."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for line in tail(path):
        try:
            row = json.loads(line)
            process, severity, text = str(row["process"]), str(row["severity"]), first_line(str(row["text"]), TEXT)
            at = float(row["time"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue  # torn, or cut by the tail
        if not math.isfinite(at):
            continue
        told = {"severity": severity, "process": process, "text": text, "time": at, "count": 0}
        kind = found.setdefault((process, re.sub(r"[0-9]+", "#", text)), told)
        kind.update(text=text, time=at, count=kind["count"] + 1)
    return sorted(found.values(), key=lambda kind: -kind["time"])


def lines(found: list[dict[str, Any]], path: Path) -> Iterator[str]:
    """The newest kinds in words; nothing if there were none."""
    if found:
        yield f"  problems (all of them: {path})"
    for kind in found[:SHOWN]:
        times = f"{kind['count']} times, last " if kind["count"] > 1 else ""
        ago = duration(max(0.0, time.time() - kind["time"]))
        yield f"    {times}{ago} ago  {kind['process']} {kind['severity']}: {kind['text']}"
    if len(found) > SHOWN:
        yield f"    and {len(found) - SHOWN} older kinds"


# -- What a run is doing now, or how it ended, as plain data: `busrl status` shows it, `--json` prints it -------------


SCHEMA = 1
LIVING = (*(one.name.lower() for one in RunPhase), "left")  # states with a ring
IDLE = ("groups", "limit", "causes")  # of groups in a row that gave no step, under `idle_` in metrics.jsonl
MODEL = ("entropy", "cut_share", "k3", "ess")  # means over the newest steps, under their names of metrics.jsonl


def state_of(run_dir: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Everything known of a run; without a directory of the newest one under `runs/`. NoSuchRun if there is none."""
    paths = RunPaths.of(run_dir if run_dir is not None else newest_run(Path("runs")))
    info = read_map(paths.run_json)
    if not info:
        raise NoSuchRun(f"{paths.root}: no run.json there; name the directory that `busrl launch` printed")
    story = Story.of(paths)
    told = _from_files(paths, info, story)
    try:
        ring = Ring.attach(paths.ring_name, read_only=True)
    except RingNotFound:
        return {**told, **_without_ring(paths)}
    except RingError as problem:
        return {**told, "state": "damaged", "problem": str(problem), "holder": holder_of(paths)}
    try:
        return {**told, **_from_ring(paths, ring, told, story)}
    finally:
        ring.close()


def newest_run(parent: Path) -> Path:
    """The run directory under `parent` that was started last."""
    found = [one.parent for one in parent.glob("*/run.json")]
    if not found:
        raise NoSuchRun(f"no run under {parent.resolve()}; name a run directory")
    return max(found, key=lambda one: (one / "run.json").stat().st_mtime)


def _from_files(paths: RunPaths, info: dict[str, Any], story: Story) -> dict[str, Any]:
    newest = story.rows[-1] if story.rows else {}
    return {
        "schema": SCHEMA,
        "time": time.time(),
        "run_id": info.get("run_id"),
        "run_dir": str(paths.root),
        "launch_pid": info.get("launch_pid"),
        "started": info.get("started"),
        "step": story.step,
        "version": newest.get("version", 0),
        "max_steps": as_map(read_map(paths.topology).get("run")).get("max_steps"),
        "reward": {"first": story.first_reward, "last_10_steps": story.recent("reward")},
        "validation": [{"round": at, "mean": mean, "samples": count} for at, mean, count in story.means()],
        "flat_share": story.flat_share(),
        **{name: story.recent(name) for name in MODEL},
        "sample": story.sample or None,
        "idle": {name: story.idle.get(f"idle_{name}") for name in IDLE} if story.idle else None,
        "samples": fates(paths.fates),
        "restarts": restarts_of(paths),
        "problems": kinds(paths.errors),
        "errors_from_outside": list(_from_outside(paths)),
        "refusals": list(_refusals(paths)),
        **_pace(story),
    }


def _pace(story: Story, quiet_s: float = 0.0) -> dict[str, Any]:
    pace = story.pace(quiet_s)
    return {
        "steps_per_min": round(60 * pace[0], 3) if pace else None,
        "tokens_per_s": round(pace[1], 3) if pace else None,
    }


def _quiet_s(paths: RunPaths) -> float:
    """Seconds since a step was written; a clock that was set back makes none."""
    try:
        return max(0.0, time.time() - paths.metrics.stat().st_mtime)
    except OSError:
        return 0.0


def _from_ring(paths: RunPaths, ring: Ring, told: dict[str, Any], story: Story) -> dict[str, Any]:
    stats = ring.stats()
    processes = [one for one in ring.processes() if not ring.is_dead(one.index)]
    here = any(not one.remote for one in processes)
    step = ring.header(HeaderWord.STEP)
    pace = _pace(story, _quiet_s(paths) if here else 0.0)
    goal, per_min = number(told["max_steps"]), pace["steps_per_min"]
    left = (goal - step) * 60 / per_min if here and goal is not None and per_min else None
    return {
        "state": RunPhase(ring.header(HeaderWord.RUN_STATE)).name.lower() if here else "left",
        "step": step,
        "version": ring.header(HeaderWord.VERSION),
        **pace,
        "left_s": round(max(0.0, left), 1) if left is not None else None,
        "slots": {name.lower(): count for name, count in stats.occupancy.items() if count},
        "reaps": stats.reaps,
        "processes": [_process(one, told["restarts"].get(one.label, 0)) for one in processes],
    }


def _process(process: Process, restarts: int) -> dict[str, Any]:
    return {
        "name": process.label,
        "role": process.role,
        "pid": process.pid,
        "remote": process.remote,
        "state": process.state,
        "activity": process.activity,
        "progress_age_s": round(max(0.0, (time.monotonic_ns() - process.progress_ns) / 1e9), 3),
        "tokens": process.tokens,
        "samples": process.samples,
        "restarts": restarts,
    }


def _without_ring(paths: RunPaths) -> dict[str, Any]:
    summary, holder = read_map(paths.summary), holder_of(paths)
    if holder is not None:
        return {"state": "starting", "holder": holder}
    if not summary:
        return {"state": "unfinished"}
    kept = ("why", "seconds", "open_samples", "exit_code")
    return {
        "state": summary.get("outcome"), "step": summary.get("steps"), "max_steps": summary.get("max_steps"),
        "version": summary.get("version"), **{name: summary.get(name) for name in kept},
    }


def restarts_of(paths: RunPaths) -> dict[str, int]:
    """How often launch started each of its children again, by name."""
    told = as_map(read_map(paths.supervisor).get("processes"))
    return {name: int(number(as_map(one).get("restarts")) or 0) for name, one in told.items()}


def _from_outside(paths: RunPaths) -> Iterator[str]:
    """ERRORs of senders that do not file their own, counted by launch."""
    for name, found in as_map(read_map(paths.supervisor).get("errors_from_outside")).items():
        counts = as_map(found)
        told = [f"{counts[severity]} {severity}" for severity in reversed(SEVERITIES) if counts.get(severity)]
        yield f"ERROR from {name}: {', '.join(told)}; the latest {counts.get('latest', '')}"


def _refusals(paths: RunPaths) -> Iterator[str]:
    """What the keeper's gateway had to refuse, by worker."""
    for name, found in as_map(read_map(paths.gateway).get("workers")).items():
        counts = as_map(found)
        bad = [f"{counts[code]} {code.replace('_', ' ')}" for code in BAD if counts.get(code)]
        if bad:
            yield f"gateway refused {name}: {', '.join(bad)}; the latest {counts.get('latest', '')}"


def holder_of(paths: RunPaths) -> int | None:
    """The pid of whoever holds the run's directory; looks, and takes nothing."""
    lock = paths.lock("run")
    try:
        return OfdLock(str(lock)).holder() if lock.is_file() else None
    except (OSError, RingError):  # of another user, say
        return None


def read_map(path: Path) -> dict[str, Any]:
    """The map in a JSON file; empty if there is none that can be read."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return as_map(found)


def as_map(value: Any) -> dict[str, Any]:
    """The value if it is a map, else an empty one."""
    return value if isinstance(value, dict) else {}
