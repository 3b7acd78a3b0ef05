"""The state of a run as a monitor sees it: `RunState`, its parts, and the records that are folded into them.

Pure: takes records, messages and clock values. Knows nothing of files, terminals or JSON. Times are seconds; an age is
that at the moment of the look.

- Ring and files have precedence; a message only adds what they do not hold. So a state that missed messages is poorer,
  never wrong.
- The learner's file and its bus message report the same step, in either order, twice or not at all. A step is
  identified by its number, and its first report counts.
- Memory is bounded, whatever is received.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, islice
from operator import attrgetter
from typing import Annotated, Any, Final

import msgspec
from msgspec.structs import asdict

from busrl.protocol import messages as m
from busrl.states import HeaderWord, RunPhase

VERSIONS: Final = 8
KNOWN: Final = msgspec.Meta(ge=0, le=(1 << 63) - 1)  # bounds of a step or a round from a file

# -- records ----------------------------------------------------------------------------------------------------------

class Facts(msgspec.Struct, frozen=True):
    """Facts that do not change during a run. Zeros and empty texts stand for unknown facts."""

    name: str = ""
    run_id: str = ""
    uuid: str = ""
    run_dir: str = ""
    launch_pid: int = 0
    started: float = 0.0  # wall clock
    max_steps: int = 0
    group_size: int = 0
    n_min: int = 0
    t_max_s: float = math.inf
    mode: str = ""
    max_staleness: int = 0
    progress_s: float = 30.0
    transport: str = ""  # of weights
    reward_function: str = ""
    reward_kind: str = ""
    agent_function: str = ""
    stall_steps: float = 0.0
    stall_s: float = 0.0
    learns: bool = True  # it has a learner, and so steps, versions and groups
    beside: str = ""  # the model whose state it is, in a run of several; empty for the lead


class ProcessRecord(msgspec.Struct, frozen=True):
    name: str
    role: str = ""
    pid: int = 0
    state: str = ""  # "starting", "ready" or "dead"
    activity: str = ""
    deadline_s: float = 0.0
    progress_age_s: float = 0.0
    busy_ns: int = 0
    tokens: int = 0
    samples: int = 0
    version: int = 0
    remote: bool = False  # works through the gateway, and stays listed when all processes here were killed
    activity_age_s: float = 0.0
    stopped: bool = False  # by a signal or a debugger


class ProcessRow(ProcessRecord, frozen=True, kw_only=True):
    """A process for a view. `late`: without progress for longer than it declared."""

    late: bool = False
    busy: float | None = None  # None: not known
    behind: int = 0  # versions behind the newest, 0 where it holds none
    restarts: int = 0  # by launch, as far as that is known


class Held(msgspec.Struct, frozen=True):
    """A class of like slots: in one state, with one owner ("" where a state has none)."""

    state: str
    owner: str = ""
    slots: int = 0
    oldest_s: float = 0.0  # since the first slot entered the state, or its call entered its state
    validates: bool = False
    draw: int = -1  # of a group that a process waits for
    call: str = ""  # of an episode: "queued" or "queued TAG", the engine that has its call, or "" for none under way


class RingRecord(msgspec.Struct, frozen=True):
    """The content of the ring at a look; group counts are -1 where the fate table could not be read."""

    slots: int
    occupancy: dict[str, int]
    words: dict[str, int]
    reaps: int
    tokens: int
    groups_open: int
    groups_ready: int
    processes: tuple[ProcessRecord, ...]
    calls: dict[str, int] = {}  # slots of the ring of model calls by state; {} where the run has none
    episodes: dict[str, tuple[int, float]] = {}  # open ones: number and age of the oldest in seconds, by state
    held: tuple[Held, ...] = ()  # all slots but the free ones, where they were counted
    moved: dict[str, int] = {}  # transitions into each state, in all
    ages: dict[str, tuple[float, ...]] = {}  # seconds of slots in a state: least, median, most
    versions: dict[str, int] = {}  # slots by the version that began their answer: the newest `VERSIONS` versions
    # Learners and engines of the other models of a run of several, by tag.
    beside: dict[str, tuple[ProcessRecord, ...]] | msgspec.UnsetType = msgspec.UNSET

    @property
    def living(self) -> int:
        return sum(process.state != "dead" and not process.remote for process in self.processes)


class StepRecord(msgspec.Struct, frozen=True):
    """An optimiser step: a line of metrics.jsonl, or the numbers of a LEARNER_STATE_UPDATE."""

    step: Annotated[int, KNOWN]
    version: int = 0
    time: float | None = None  # when its line was written, seconds since 1970
    reward: float = 0.0
    reward_trained: float | None = None
    reward_parts: dict[str, float] = {}  # mean of each part, over all samples that ended
    length_ended: float = 0.0
    length_mean: float = 0.0
    age_mean: float = 0.0
    age_p95: float = 0.0
    age_max: float = 0.0
    entropy: float = 0.0
    flat_share: float | None = None  # of the groups that ended
    cut_share: float | None = None  # of the trained answers
    lr: float | None = None
    grad_norm: float | None = None
    kl: float | None = None  # to the reference model
    k3: float | None = None
    ess: float | None = None
    mismatch: float | None = None  # of the log-probabilities of engine and trainer, per token
    seconds: float = 0.0
    groups_ended: float | None = None
    samples: int = 0
    tokens: int = 0
    n_min: float = 0.0  # in force, 0: not known
    control_n_min: float = 0.0  # the controller's value, in force or advised; 0: there is no controller
    control_moves: float = 0.0
    entropy_ratio: float = 0.0  # H / H_ref on the probe set, 0: not known yet
    by: dict[str, dict[str, float]] = {}  # figures of the groups that ended, by source or tag of their lines

    @property
    def length(self) -> float:
        """Mean tokens of an answer: of all that ended, where the step has that."""
        return self.length_ended or self.length_mean

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of the step's samples in a second of the time since the step before."""
        return self.tokens / self.seconds if self.seconds > 0 else None


class MetricsLine(StepRecord, frozen=True):
    """A line of metrics.jsonl: a step, or with `kind` "idle" groups that ended without one."""

    kind: str = ""
    idle_groups: int = 0
    idle_limit: int | None = None
    idle_causes: dict[str, int] = {}


class RoundRecord(msgspec.Struct, frozen=True, rename={"mean": "val/reward"}):
    """A round of validation of one set: a line of validation.jsonl, a VALIDATION_DONE or a VALIDATION_SET_DONE."""

    round: Annotated[int, KNOWN]
    version: int = 0
    mean: float | None = None  # none of its samples was judged
    samples: int = 0
    set: str = ""  # its name; "" is [validation] itself
    time: float | None = None  # when its line was written, seconds since 1970
    dropped: int = 0  # samples that ended without a reward

    @property
    def measured(self) -> bool:
        """True if any sample was judged: without one the mean is meaningless, whatever its line holds."""
        return self.mean is not None and (self.samples > 0 or not self.dropped)

    def plain(self) -> dict[str, Any]:
        """The round for JSON; with `set` for a named set, and with `dropped` if samples ended without a reward."""
        extra = {"set": self.set, "dropped": self.dropped}
        mean = self.mean if self.measured else None
        return {"round": self.round, "mean": mean, "samples": self.samples, **{k: v for k, v in extra.items() if v}}


class ErrorRecord(msgspec.Struct, frozen=True):
    time: float
    process: str
    severity: str
    where: str = ""
    text: str = ""


# -- steps ------------------------------------------------------------------------------------------------------------

RATE_S: Final = 20.0
STEPS_KEPT: Final = 4096
RECENT: Final = 10
PACE_S: Final = 20.0  # the speed is measured over the newest steps that took so long together


@dataclass
class Rate:
    """The growth of a counter over the last `over_s`."""

    over_s: float = RATE_S
    points: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=256))

    def add(self, value: float, now: float) -> None:
        if self.points and value < self.points[-1][1]:
            self.points.clear()  # its owner restarted, and counts from 0
        if self.points and self.points[-1][0] == now:
            self.points.pop()  # of one instant the newest value counts: growth in no time would have no rate
        self.points.append((now, value))
        while len(self.points) > 2 and now - self.points[0][0] > self.over_s:
            self.points.popleft()

    @property
    def known(self) -> bool:
        return len(self.points) > 1

    def per_s(self) -> float:
        if len(self.points) < 2:
            return 0.0
        (t0, v0), (t1, v1) = self.points[0], self.points[-1]
        return (v1 - v0) / (t1 - t0) if t1 > t0 else 0.0


@dataclass(frozen=True)
class Speed:
    """The speed of a run; None: not known."""

    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    steps_per_min: float | None = None


class Steps:
    """The newest `STEPS_KEPT` steps in order.

    Each step records the seconds since the step before it, so the speed is known before a second step is seen, and a
    replay has the run's speed. Figures by tag, which take most of a record's memory, are kept of the newest alone.
    """

    def __init__(self) -> None:
        self._steps: list[StepRecord] = []

    def add(self, seen: StepRecord) -> bool:
        """Add a step; False if it is a repeat, or older than the steps that are kept."""
        at = bisect_left(self._steps, seen.step, key=lambda record: record.step)
        repeated = at < len(self._steps) and self._steps[at].step == seen.step
        if repeated or (at == 0 and len(self._steps) >= STEPS_KEPT):
            return False
        if at < len(self._steps):
            seen = msgspec.structs.replace(seen, by={})
        elif at > 0:
            self._steps[-1] = msgspec.structs.replace(self._steps[-1], by={})
        self._steps.insert(at, seen)
        del self._steps[:-STEPS_KEPT]
        return True

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def newest(self) -> StepRecord | None:
        return self._steps[-1] if self._steps else None

    def after(self, step: int) -> list[StepRecord]:
        """The kept steps after this one."""
        return self._steps[bisect_left(self._steps, step + 1, key=lambda record: record.step) :]

    def pace(self, quiet_s: float) -> Speed:
        """The speed of the newest steps that record their seconds; the last step ended `quiet_s` ago."""
        measured: list[StepRecord] = []
        span = 0.0
        for record in reversed(self._steps):
            if 0 < record.seconds < math.inf:
                measured.append(record)
                span += record.seconds
            if span >= PACE_S:
                break
        if not measured:
            return Speed()
        # A step under way counts against the speed once it takes longer than those before it: a run may stand still.
        over = span + max(0.0, quiet_s - span / len(measured))
        samples, tokens = sum(record.samples for record in measured), sum(record.tokens for record in measured)
        return Speed(samples / over, tokens / over, 60 * len(measured) / over)

    def recent(self, of: Callable[[StepRecord], float | None]) -> float | None:
        """Mean of a figure over the newest steps that have it."""
        values = [value for value in map(of, self._steps[-RECENT:]) if value is not None and math.isfinite(value)]
        return sum(values) / len(values) if values else None

    def flat_share(self, idle: StepRecord | None = None) -> float | None:
        """Share of flat groups among all that ended in the newest steps; `idle`: groups that ended after the last."""
        newest = [*self._steps[-RECENT:], *([idle] if idle else [])]
        measured = [record for record in newest if record.flat_share is not None]
        ended = sum(record.groups_ended or 0.0 for record in measured)
        if ended <= 0:
            return self.recent(lambda record: record.flat_share)
        return sum((record.flat_share or 0.0) * (record.groups_ended or 0.0) for record in measured) / ended

    def policy(self, idle: StepRecord | None = None) -> dict[str, float | None]:
        """Figures of the newest steps on the policy and on samples without use; None where no step has them."""
        figures = {name: self.recent(attrgetter(name)) for name in ("cut_share", "entropy", "ess", "k3")}
        return {"flat_share": self.flat_share(idle), **figures}

    def course(self, of: Callable[[StepRecord], float]) -> list[float]:
        return [of(record) for record in self._steps]


# -- messages ---------------------------------------------------------------------------------------------------------

MAX_NAMES: Final = 64  # the protocol has some twenty; names beyond are counted together
MAX_SENDERS: Final = 256
OTHERS: Final = "(others)"


@dataclass
class Flow:
    """The messages of one name or sender: their number, bytes and rates."""

    count: int = 0
    bytes: int = 0
    rate: Rate = field(default_factory=Rate)
    byte_rate: Rate = field(default_factory=Rate)

    def tick(self, now: float) -> None:
        self.rate.add(self.count, now)
        self.byte_rate.add(self.bytes, now)


@dataclass
class Traffic:
    """The bus as its tap shows it. `missed` and `malformed`: the counts of the tap.

    The lag is the smallest of the last batch, since a listener that is behind is behind with all messages. A message is
    late by its age less the least age of its sender's messages, so that a wrong clock does not look like a lag.
    """

    by_name: dict[str, Flow] = field(default_factory=dict)
    by_sender: dict[str, Flow] = field(default_factory=dict)
    missed: int = 0
    malformed: int = 0
    resyncs: int = 0
    lag_s: float = 0.0
    last_at: float | None = None
    total: Flow = field(default_factory=Flow)
    _ticked: float | None = None
    _least_age: dict[str, float] = field(default_factory=dict)

    def received(self, name: str, size: int, sender: str = "") -> None:
        of_name = self.by_name.get(name) or self._new(self.by_name, name, MAX_NAMES)
        sent = self.by_sender.get(sender) or self._new(self.by_sender, sender, MAX_SENDERS)
        for flow in (of_name, sent, self.total):
            flow.count += 1
            flow.bytes += size

    def _new(self, flows: dict[str, Flow], key: str, most: int) -> Flow:
        key = key if len(flows) < most else OTHERS
        if key not in flows:
            flows[key] = Flow()
            if self._ticked is not None:
                flows[key].tick(self._ticked)  # its rate begins with 0 messages at that time
        return flows[key]

    def late(self, sender: str, age_s: float) -> float:
        """The seconds by which a message of this age is later than the promptest of its sender."""
        least = min(age_s, self._least_age.get(sender, age_s))
        if sender in self._least_age or len(self._least_age) < MAX_SENDERS:
            self._least_age[sender] = least
        return age_s - least

    def batch(self, messages: int, least_late_s: float | None, now: float) -> None:
        """End a batch; `least_late_s`: of its messages, None where none has a time."""
        if messages:
            self.last_at = now
        self.lag_s = least_late_s if least_late_s is not None else 0.0

    def tick(self, now: float) -> None:
        """Take the counts for the rates, some times a second."""
        self._ticked = now
        for flow in (*self.by_name.values(), *self.by_sender.values(), self.total):
            flow.tick(now)


# -- errors -----------------------------------------------------------------------------------------------------------

ERRORS_KEPT: Final = 200
SAME_S: Final = 5.0  # the two reports of one event are closer together than this


class RecentErrors:
    """Counts all errors, and keeps the newest `ERRORS_KEPT`; each once, though file and bus both report it.

    Most processes write a line to errors.jsonl and publish ERROR; a foreign actor publishes only.
    """

    def __init__(self) -> None:
        self.count = 0
        self._newest: deque[tuple[ErrorRecord, str]] = deque(maxlen=ERRORS_KEPT)

    def add(self, seen: ErrorRecord, source: str) -> None:
        """Add a report by `source` ("file" or "bus"), unless the other source has reported the same error."""
        for at, (earlier, reported_by) in enumerate(self._newest):
            if reported_by and reported_by != source and _same(earlier, seen):
                self._newest[at] = (earlier, "")  # both have reported it: the next is another event
                return
        self.count += 1
        self._newest.appendleft((seen, source))

    def skipped(self, count: int) -> None:
        """Count lines of the file that were not read."""
        self.count += count

    def newest(self, limit: int = ERRORS_KEPT) -> list[ErrorRecord]:
        return [seen for seen, _ in islice(self._newest, limit)]


def _same(first: ErrorRecord, second: ErrorRecord) -> bool:
    alike = (first.where, first.text) == (second.where, second.text)
    return alike and address_of(first.process) == address_of(second.process) and abs(first.time - second.time) < SAME_S


@lru_cache(maxsize=1024)
def address_of(process: str) -> str:
    """The name of a process as it stands in a topic: `rollout-0` for `rollout/0` of the process table."""
    return process.replace("/", "-")


# -- the state of a run -----------------------------------------------------------------------------------------------

OVER: Final = ("ended", "left", "damaged")  # states in which nothing moves
MAX_PRESENT: Final = 256
MAX_ROUNDS: Final = 4096
IN_UPDATE: Final = ("step", "version", "reward", "age_mean", "entropy", "samples", "tokens")  # not among its metrics
BUSY_S: Final = 1.0  # the time over which a busy share is taken
SILENT_S: Final = 5.0  # of a process without an entry in the ring, whose heartbeats come every second


@dataclass
class Present:
    role: str = ""
    pid: int = 0
    index: int = 0
    activity: str = ""
    heard: float = 0.0


@dataclass
class RunState:
    """Fed by `look`, `step`, `validated` and `handle`; read by the views.

    A process that does not map the ring is known by its presence on the bus alone.
    """

    facts: Facts = field(default_factory=Facts)
    ring: RingRecord | None = None
    steps: Steps = field(default_factory=Steps)
    traffic: Traffic = field(default_factory=Traffic)
    errors: RecentErrors = field(default_factory=RecentErrors)
    ended: str = ""  # how the run ended, in words, once it has; then also its last step and version
    ended_step: int = 0
    ended_version: int = 0
    damage: str = ""  # why its ring cannot be read, with the remedy
    replay: str = ""  # what is replayed and how fast, if it is a replay
    replay_over: bool = False
    pace: float = 1.0  # seconds of the run in one of the listener's; 0: a replay as fast as it goes
    changed: str = ""  # what people have changed in flight, in one line
    sample: str = ""  # what the model wrote lately, in one line
    first_reward: float | None = None  # mean reward of the first step ever
    idle: MetricsLine | None = None  # groups that ended since the newest step and gave none
    launched: bool = False  # its launch draws this: it runs, even with nobody registered in the ring
    faults: bool = False  # on purpose
    validating: bool = False
    waiting: str = ""  # for what the scheduler waits
    left_out: dict[str, int] = field(default_factory=dict)  # with data.skip: draws left out, and prompts that rest
    hosts: dict[str, dict[str, Any]] = field(default_factory=dict)  # as hosts.json has them
    restarts: dict[str, int] = field(default_factory=dict)  # by launch, of each of its children
    deaths: dict[str, str] = field(default_factory=dict)  # the latest of each of them, in words
    validations: dict[tuple[str, int], RoundRecord] = field(default_factory=dict)  # by set and round, the newest last
    _present: dict[str, Present] = field(default_factory=dict)
    _busy: dict[tuple[str, int], Rate] = field(default_factory=dict)  # by name and pid
    _stepped_at: float | None = None
    _generated: Rate = field(default_factory=Rate)  # tokens, as the ring counts them
    _steps_done: Rate = field(default_factory=Rate)  # as the ring tells them

    # -- what comes in ------------------------------------------------------------------------------------------

    def look(self, seen: RingRecord | None, now: float, damage: str = "") -> None:
        """Take a look at the ring; None if there is none, or if it cannot be read: `damage` is the reason."""
        self.ring, self.damage = seen, damage
        if seen is None:
            self._generated, self._steps_done = Rate(), Rate()  # a later ring is another counter
            return
        if self.pace > 0:
            self._generated.add(seen.tokens, now * self.pace)
            self._steps_done.add(seen.words.get(HeaderWord.STEP, 0), now * self.pace)
        self._busy = {key: self._busy.get(key) or Rate(BUSY_S) for key in map(_life, seen.processes)}
        for process in seen.processes:
            self._busy[_life(process)].add(process.busy_ns, now)

    def step(self, seen: StepRecord, ended: float | None) -> None:
        """Take a finished step, and when it ended; None: at an unknown time before the first look."""
        if self.steps.add(seen) and ended is not None:
            self._stepped_at = ended

    def validated(self, seen: RoundRecord) -> None:
        """Take a round of validation, from the file or the bus; of a round the last report that measured anything
        counts."""
        before = self.validations.get((seen.set, seen.round))
        if before is not None and before.measured and not seen.measured:
            return
        self.validations.pop((seen.set, seen.round), None)
        self.validations[seen.set, seen.round] = seen
        if len(self.validations) > MAX_ROUNDS:
            firsts = {record.set: (record.set, record.round) for record in reversed(self.rounds())}.values()
            del self.validations[next((key for key in self.validations if key not in firsts), (seen.set, seen.round))]

    def handle(self, message: m.Message, now: float) -> None:
        """Take a message of the bus, in any order, repeated or not; `HEARD` are the kinds that matter here."""
        if m.is_of_another_model(message, self.facts.beside):
            return
        match message:
            case m.LearnerStateUpdate():
                self.step(step_of(message), now)
            case m.SchedulerState():
                self.waiting = message.waiting
                counts = {name: message.values.get(name, math.nan) for name in ("left_out", "resting")}
                self.left_out = {name: int(value) for name, value in counts.items() if math.isfinite(value)}
            case m.ValidationStarted():
                self.validating = True
            case m.ValidationDone() | m.ValidationSetDone():
                self.validating = False
                mean = message.mean if message.samples and math.isfinite(message.mean) else None
                name = message.set if isinstance(message, m.ValidationSetDone) else ""
                self.validated(RoundRecord(message.round, message.version, mean, message.samples, name,
                                           dropped=message.dropped))
            case m.Error():
                seen = message.time_ns / 1e9, message.sender, message.severity, message.where, message.text
                self.errors.add(ErrorRecord(*seen), "bus")
            case m.Hello() | m.Heartbeat() | m.Goodbye():
                self._presence(message, now)

    def begin_rewards(self, reward: float) -> None:
        """Set the mean reward of the first step ever, unless it is set."""
        if self.first_reward is None:
            self.first_reward = reward

    def replayed(self, facts: Facts, pace: float, over: bool) -> None:
        """Mark the state as a replay of the run of these facts, at `pace` times its speed; 0: as fast as possible."""
        speed = f"at {pace:g}x" if pace else "as fast as it goes"
        self.facts, self.replay, self.replay_over = facts, f"{facts.run_id or 'a recording'} {speed}", over
        if pace != self.pace:
            self.pace, self._generated = pace, Rate()

    # -- what is shown ------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """running, finishing, stopping, left (a ring that nobody uses), damaged, ended, replay or unknown."""
        if self.replay:
            return "replay"
        if self.damage:
            return "damaged"
        if self.ring is None:
            return "ended" if self.ended else "unknown"
        if not self.ring.living and not self.launched:
            return "left"
        return RunPhase(self.ring.words.get(HeaderWord.RUN_STATE, 0)).name.lower()

    @property
    def at_step(self) -> int:
        """The newest step of all sources."""
        return max(self._newest(HeaderWord.STEP), self.ended_step)

    @property
    def version(self) -> int:
        return max(self._newest(HeaderWord.VERSION), self.ended_version)

    @property
    def n_min(self) -> int:
        """The number of groups that a step takes: of the newest step, or of the topology."""
        newest = self.steps.newest
        return int(newest.n_min) if newest is not None and newest.n_min else self.facts.n_min

    def _newest(self, word: HeaderWord) -> int:
        newest: int = getattr(self.steps.newest, word.value, 0)
        return max(newest, self.ring.words.get(word, 0)) if self.ring else newest

    def since_step_s(self, now: float) -> float | None:
        """Seconds since a step ended; None if that time is unknown."""
        return None if self._stepped_at is None else max(0.0, now - self._stepped_at)

    def speed(self, now: float) -> Speed:
        """The speed of the run: steps and samples by the records of steps, tokens by the counter of the ring if there
        is one."""
        if self.state in OVER:
            return Speed()
        pace = self._pace(now)
        if self._generated.known:
            return replace(pace, tokens_per_s=self._generated.per_s())
        # Trained tokens, until generated ones were counted.
        return pace if not self.replay else replace(pace, tokens_per_s=None)

    def left_s(self, now: float) -> float | None:
        """Estimated seconds to the goal; None while there is nothing to estimate from."""
        if self.state in OVER or not self.facts.max_steps:
            return None
        steps_per_min = self._pace(now).steps_per_min
        per_s = self._steps_done.per_s() if steps_per_min is None else steps_per_min / 60
        return max(0.0, self.facts.max_steps - self.at_step) / per_s if per_s > 0 else None

    def rounds(self) -> list[RoundRecord]:
        """The rounds of validation that measured anything, in order. All views show the first round of a set as its
        beginning, and the last as its present."""
        return sorted((entry for entry in self.validations.values() if entry.measured), key=attrgetter("round"))

    def unmeasured(self) -> list[RoundRecord]:
        """Rounds of which no sample was judged."""
        return sorted((entry for entry in self.validations.values() if not entry.measured), key=attrgetter("round"))

    def judged(self) -> dict[str, list[dict[str, Any]]]:
        """Both kinds of rounds, under their keys in JSON."""
        return {
            "validation": [record.plain() for record in self.rounds()],
            "validation_unmeasured": [record.plain() for record in self.unmeasured()],
        }

    def rows(self, now: float) -> list[ProcessRow]:
        """The processes: those of the ring in the order of their entries, then those known by the bus alone."""
        entries = self.ring.processes if self.ring else ()
        rows = [self._row(process) for process in entries]
        if not (entries and self.facts.beside):  # the bus is the run's: a model beside the lead has those of its ring
            rows += self._rows_of_bus(now)
        return rows

    def rows_beside(self) -> dict[str, list[ProcessRow]]:
        """Learners and engines of the other models, by tag, as they are in the rings of these."""
        beside = (self.ring and self.ring.beside) or {}
        return {tag: [ProcessRow(**asdict(process), late=self._late(process)) for process in processes]
                for tag, processes in beside.items()}

    # -- inside -------------------------------------------------------------------------------------------------

    def _rows_of_bus(self, now: float) -> Iterator[ProcessRow]:
        """Find the processes that are in no ring, neither this one nor that of another model."""
        entries = self.ring.processes if self.ring else ()
        beside = (self.ring and self.ring.beside) or {}
        mapped = {address_of(process.name) for process in chain(entries, *beside.values())}
        for sender, present in sorted(self._present.items()):
            if sender not in mapped and not (entries and present.index):
                age = max(0.0, now - present.heard)
                yield ProcessRow(
                    sender, present.role, present.pid, "on the bus", present.activity, progress_age_s=age,
                    late=age > SILENT_S,
                )

    def _pace(self, now: float) -> Speed:
        quiet = 0.0 if self.replay_over else (self.since_step_s(now) or 0.0) * self.pace
        return self.steps.pace(quiet)

    def _row(self, process: ProcessRecord) -> ProcessRow:
        spent = self._busy[_life(process)]
        # Most roles do not count their busy time: it is unknown, not 0.
        busy = min(1.0, max(0.0, spent.per_s() / 1e9)) if spent.known and process.busy_ns else None
        behind = max(0, self.version - process.version) if process.version else 0
        restarts = self.restarts.get(process.name, 0)
        return ProcessRow(
            **asdict(process), late=self._late(process), busy=busy, behind=behind, restarts=restarts
        )

    def _late(self, process: ProcessRecord) -> bool:
        return process.state == "ready" and process.progress_age_s > (process.deadline_s or self.facts.progress_s)

    def _presence(self, message: m.Hello | m.Heartbeat | m.Goodbye, now: float) -> None:
        sender = address_of(message.sender)
        if isinstance(message, m.Goodbye):
            self._present.pop(sender, None)
        elif sender in self._present or len(self._present) < MAX_PRESENT:
            present = self._present.setdefault(sender, Present())
            present.heard, present.role = now, message.role
            if isinstance(message, m.Hello):
                present.pid, present.index = message.pid, message.index
            else:
                present.activity = message.activity


HEARD: Final[frozenset[type[m.Message]]] = frozenset({
    m.LearnerStateUpdate, m.SchedulerState, m.ValidationStarted, m.ValidationDone, m.ValidationSetDone, m.Error,
    m.Hello, m.Heartbeat, m.Goodbye,
})


def _life(process: ProcessRecord) -> tuple[str, int]:
    return process.name, process.pid


def step_of(update: m.LearnerStateUpdate) -> StepRecord:
    """The numbers of a step from its message; metrics.jsonl has them under the same names."""
    fields = {name: getattr(update, name) for name in IN_UPDATE}
    more = {name: update.metrics[name] for name in StepRecord.__struct_fields__ if name in update.metrics}
    by: dict[str, dict[str, float]] = {}  # from by/TAG/NAME among the numbers; a tag may have slashes of its own
    parts: dict[str, float] = {}  # from reward_parts/NAME
    for name, value in update.metrics.items():
        if name.startswith("by/") and name.count("/") > 1:
            tag, _, figure = name.removeprefix("by/").rpartition("/")
            by.setdefault(tag, {})[figure] = value
        elif name.startswith("reward_parts/"):
            parts[name.partition("/")[2]] = value
    sent = update.time_ns / 1e9 or None
    values: dict[str, Any] = {"time": sent, **more, **fields, "by": by, "reward_parts": parts}
    return StepRecord(**values)
