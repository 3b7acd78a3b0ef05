"""The picture of a run: what its ring, its files and its bus said, folded into one state that can be shown.

Pure: records, messages and clock values in; nothing is read here. Knows nothing of terminals or of JSON.

- The ring and the files are believed first; a message only fills in what they do not hold. So a picture that missed
  messages is poorer, never wrong.
- A process that does not map the ring is known by its presence on the bus alone.
- Memory is bounded, whatever is heard.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from busrl.launch.progress import Rate
from busrl.monitor.complaints import Complaints, address_of
from busrl.monitor.seen import ErrorSeen, Facts, ProcessSeen, RingSeen, RoundSeen, StepSeen
from busrl.monitor.steps import Pace, Steps
from busrl.monitor.traffic import Traffic
from busrl.protocol import messages as m

RUN_STATES: Final = {0: "running", 1: "finishing", 2: "stopping"}
OVER: Final = ("ended", "left", "damaged")  # nothing is known to move
MAX_PRESENT: Final = 256
MAX_ROUNDS: Final = 64
ONLY_IN_METRICS: Final = (
    "length_ended", "length_mean", "age_p95", "age_max", "seconds", "n_min", "control_n_min", "control_moves",
    "entropy_ratio", "eta", "flat_share", "cut_share", "k3", "ess",
)  # fmt: skip
SILENT_S: Final = 5.0  # a process known by its heartbeats alone, which come every second


@dataclass(frozen=True)
class Row:
    """One process as it is shown; `busy` None: not known. `late`: no progress for longer than it declared."""

    name: str
    role: str
    pid: int
    state: str
    activity: str
    progress_age_s: float
    deadline_s: float
    late: bool
    busy: float | None
    tokens: int
    samples: int
    version: int
    behind: int  # versions behind the newest, 0 where it holds none
    restarts: int = 0  # by launch, as far as that is known


@dataclass
class Present:
    """A sender on the bus."""

    role: str = ""
    pid: int = 0
    index: int = 0
    activity: str = ""
    heard: float = 0.0
    gone: bool = False


@dataclass(frozen=True)
class Speed:
    """How fast the run is, None where that is not known."""

    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    steps_per_min: float | None = None


@dataclass
class Picture:
    """Fed by `facts`, `look`, `step`, `error`, `hear`; `tick` some times a second; read by the views."""

    facts: Facts = field(default_factory=Facts)
    ring: RingSeen | None = None
    steps: Steps = field(default_factory=Steps)
    traffic: Traffic = field(default_factory=Traffic)
    complaints: Complaints = field(default_factory=Complaints)
    ended: str = ""  # how the run ended, in words, once it has
    damage: str = ""  # why its ring can not be read, with the remedy
    replay: str = ""  # what is replayed and how fast, if it is a replay
    replay_over: bool = False
    pace: float = 1.0  # seconds of the run in one of the listener's; 0: a replay as fast as it goes
    sample: str = ""  # what the model wrote lately, in one line
    waiting: str = ""  # for what the scheduler waits
    credit: int = -1
    restarts: dict[str, int] = field(default_factory=dict)  # by launch, of each of its children
    validations: dict[int, RoundSeen] = field(default_factory=dict)  # by round, the newest last
    _present: dict[str, Present] = field(default_factory=dict)
    _busy: dict[str, tuple[int, int, float, float]] = field(default_factory=dict)  # name: pid, busy_ns, at, share
    _stepped_at: float | None = None
    _generated: Rate = field(default_factory=Rate)  # tokens, as the ring counts them

    # -- what comes in ------------------------------------------------------------------------------------------

    def look(self, seen: RingSeen | None, now: float, damage: str = "") -> None:
        """A look at the ring, None if there is none (any more), or none that can be read: `damage` says why."""
        self.ring, self.damage = seen, damage
        if seen is None:
            self._generated = Rate()  # a later ring is another counter
            return
        if self.pace > 0:
            self._generated.add(seen.tokens, now * self.pace)
        for process in seen.processes:
            self._load(process, now)

    def step(self, seen: StepSeen, ended: float | None) -> None:
        """A finished step and when it ended; None: nobody knows, it was before we looked."""
        if self.steps.add(seen) and ended is not None:
            self._stepped_at = ended

    def validated(self, seen: RoundSeen) -> None:
        """A round of validation, which the file and the bus both tell of; the last word on a round counts."""
        self.validations.pop(seen.round, None)
        self.validations[seen.round] = seen
        if len(self.validations) > MAX_ROUNDS:
            del self.validations[next(iter(self.validations))]

    def error(self, seen: ErrorSeen, source: str) -> None:
        """A warning or an error that the file or the bus told of."""
        self.complaints.add(seen, source)

    def hear(self, message: m.Message, now: float) -> None:
        """A message of the bus, in any order, doubled or not."""
        if isinstance(message, m.LearnerStateUpdate):
            self.step(step_of(message), now)
        elif isinstance(message, m.SchedulerState):
            self.waiting, self.credit = message.waiting, message.credit
        elif isinstance(message, m.ValidationDone):
            self.validated(RoundSeen(message.round, message.version, message.mean))
        elif isinstance(message, m.Error):
            at = message.time_ns / 1e9
            self.error(ErrorSeen(at, message.sender, message.severity, message.where, message.text), "bus")
        elif isinstance(message, (m.Hello, m.Heartbeat, m.Goodbye)):
            self._presence(message, now)

    def replayed(self, what: str, pace: float, over: bool) -> None:
        """This is a replay of `what`, at so many times the speed of the run; 0: as fast as it goes."""
        speed = f"at {pace:g}x" if pace else "as fast as it goes"
        self.replay, self.replay_over = f"{what} {speed}", over
        if pace != self.pace:
            self.pace, self._generated = pace, Rate()

    def tick(self, now: float) -> None:
        """Some times a second: what the rates of the bus are worked out from."""
        self.traffic.tick(now)

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
        if not self.ring.living:
            return "left"
        return RUN_STATES.get(self.ring.words.get("run_state", 0), "running")

    @property
    def at_step(self) -> int:
        """The newest step that anybody knows of."""
        newest = self.steps.newest
        known = newest.step if newest else 0
        return max(known, self.ring.words.get("step", 0)) if self.ring else known

    @property
    def version(self) -> int:
        """The newest published version."""
        newest = self.steps.newest
        known = newest.version if newest else 0
        return max(known, self.ring.words.get("version", 0)) if self.ring else known

    def since_step_s(self, now: float) -> float | None:
        """Seconds since a step ended; None if none did while we watched."""
        return None if self._stepped_at is None else max(0.0, now - self._stepped_at)

    def speed(self, now: float) -> Speed:
        """How fast the run is: steps and samples as the steps tell, tokens as the ring counts them if there is one."""
        if self.state in OVER:
            return Speed()
        pace = self._pace(now)
        tokens = self._generated.per_s() if len(self._generated.points) > 1 else None
        if pace is None:
            return Speed(tokens_per_s=tokens)
        trained = pace.tokens if self.ring is None and not self.replay else None
        return Speed(pace.samples, trained if tokens is None else tokens, 60 * pace.steps)

    def left_s(self, now: float) -> float | None:
        """Estimated seconds to the goal; None while there is nothing to estimate from."""
        pace = self._pace(now) if self.state not in OVER else None
        if pace is None or pace.steps <= 0 or not self.facts.max_steps:
            return None
        return max(0.0, self.facts.max_steps - self.at_step) / pace.steps

    def rows(self, now: float) -> list[Row]:
        """The processes, those of the ring first, in the order of their entries."""
        entries = self.ring.processes if self.ring else ()
        rows = [self._row(process) for process in entries]
        mapped = {address_of(process.name) for process in entries}
        for sender, present in sorted(self._present.items()):
            if sender not in mapped and not present.gone and not (entries and present.index):
                rows.append(_remote(sender, present, now))
        return rows

    # -- inside -------------------------------------------------------------------------------------------------

    def _pace(self, now: float) -> Pace | None:
        quiet = 0.0 if self.replay_over else (self.since_step_s(now) or 0.0) * self.pace
        return self.steps.pace(quiet)

    def _load(self, process: ProcessSeen, now: float) -> None:
        before = self._busy.get(process.name)
        if before is None or before[0] != process.pid:
            if before is not None or len(self._busy) < MAX_PRESENT:
                self._busy[process.name] = (process.pid, process.busy_ns, now, -1.0)
        elif now - before[2] >= 1.0:
            share = (process.busy_ns - before[1]) / 1e9 / (now - before[2])
            self._busy[process.name] = (process.pid, process.busy_ns, now, min(1.0, max(0.0, share)))

    def _row(self, process: ProcessSeen) -> Row:
        known = self._busy.get(process.name)
        # Most roles do not say what they spend their time on: that is not known, and not nothing.
        share = known[3] if known and known[3] >= 0 and process.busy_ns else None
        patience = process.deadline_s or self.facts.progress_s
        late = process.state == "ready" and process.progress_age_s > patience
        return Row(
            process.name, process.role, process.pid, process.state, process.activity, process.progress_age_s,
            process.deadline_s, late, share, process.tokens, process.samples, process.version,
            max(0, self.version - process.version) if process.version else 0, self.restarts.get(process.name, 0),
        )  # fmt: skip

    def _presence(self, message: m.Hello | m.Heartbeat | m.Goodbye, now: float) -> None:
        sender = address_of(message.sender)
        present = self._present.get(sender)
        if present is None:
            if len(self._present) >= MAX_PRESENT:
                return
            present = self._present[sender] = Present()
        present.heard, present.gone = now, isinstance(message, m.Goodbye)
        if isinstance(message, m.Hello):
            present.role, present.pid, present.index = message.role, message.pid, message.index
        elif isinstance(message, m.Heartbeat):
            present.role, present.activity = message.role, message.activity


def step_of(update: m.LearnerStateUpdate) -> StepSeen:
    """The numbers of a step as its message tells them; the same names stand in metrics.jsonl."""
    more = {name: update.metrics[name] for name in ONLY_IN_METRICS if name in update.metrics}
    return StepSeen(
        step=update.step, version=update.version, reward=update.reward, age_mean=update.age_mean,
        entropy=update.entropy, groups=update.groups, samples=update.samples, tokens=update.tokens, **more,
    )  # fmt: skip


def _remote(sender: str, present: Present, now: float) -> Row:
    age = max(0.0, now - present.heard)
    return Row(
        sender, present.role, present.pid, "on the bus", present.activity, age, 0.0, age > SILENT_S, None, 0, 0, 0, 0
    )
