"""Decisions of `launch` about its processes: a state machine for each child, the order of a stop, foreign processes.

Takes entries of the process table, deaths and times; `processes.py` carries out what it decides. It starts no process
and sends no signal, so that every rule is tested without either. Reads /proc only for the titles of foreign processes.

- A child that died after it was ready is started again at once, as often as it does some of its own work in between. A
  process that serves by being there (bus, keeper) has done some after `SERVED_S`. Deaths before ready, in a row, count
  towards giving up, and so do deaths after it without work in between; a growing pause follows each.
- A death before ready by SIGKILL that launch did not send shows less than an exit code: a person may kill at random, or
  the machine be short of memory for a moment. `KILLS_FOR_ONE` of them count as one death.
- The ranks of a learner live and die together: when one dies the others are ended, which counts as no death, and all
  start again as soon as the last of them is gone.
- Silence on the bus kills no process. What counts is the progress counter in the ring, timed on the caller's clock from
  its last change that the caller saw, without the time for which the caller itself was late.
- The limit is that of the declared activity if there is one, else the usual one. An activity declared to be endless
  (waiting for another's lock, or for disk space) has none. A child that does not map the ring only has to become ready
  in time.
- Before a child is ready, time in which it uses the processor does not count, up to five times the limit: a machine
  under load is no reason to begin again.
- A child that is halted (SIGSTOP, a debugger, a frozen group) does not go on by itself, whatever it declares: a line
  names it at once, and it is killed early enough to be back within `limits.progress_s`.
- At a stop producers end before consumers, so that nothing new arrives at a process that is ending; the bus is last. A
  process gets SIGTERM once (beside STOP on the bus) and is killed by name after its time.
- A foreign process (started by hand, or left by an earlier launch) may hold the place and the lock of a child that
  exists once. It may well do the work, and launch's own child waits for the lock. It is killed only for lack of
  progress, as a child would be, and only if its title agrees with the table: a pid alone may be another program's.
"""

from __future__ import annotations

import enum
import math
import signal
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from busrl.capabilities import ROLES
from busrl.errors import RETRY
from busrl.ring import Process
from busrl.topology.schema import Limits

# -- the order of a stop -----------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Ending:
    """A process to end now: by SIGTERM, or by SIGKILL if `overdue`, a line for the person, is set."""

    name: str
    overdue: str = ""


@dataclass
class Shutdown:
    """An orderly stop. Each stage has `stop_s` to end."""

    stop_s: float
    _stage: int = -1
    _since: float = 0.0
    _signalled: set[str] = field(default_factory=set)
    _forced: set[str] = field(default_factory=set)

    def step(self, alive: Collection[str], now: float) -> list[Ending]:
        """The processes to end now. `alive` has the names of those that still run."""
        stage = min(map(stage_of, alive), default=len(ROLES))
        if stage != self._stage:
            self._stage, self._since = stage, now
        here, waited = [name for name in alive if stage_of(name) == stage], now - self._since
        actions = [Ending(name) for name in here if name not in self._signalled]
        self._signalled.update(here)
        if waited > self.stop_s:
            why = f"did not end within {waited:.1f} s of SIGTERM: killed"
            actions += [Ending(name, f"{name} {why}") for name in here if name not in self._forced]
            self._forced.update(here)
        return actions


def stage_of(name: str) -> int:
    """Place of a process in the order of a stop; names of no role stop with the rollouts."""
    return ROLES.get(name.partition("/")[0], ROLES["rollout"]).stop


# -- one child ---------------------------------------------------------------------------------------------------------

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 10.0
SPACE_PAUSE_S = 2.0
SERVED_S = 3.0
ENDLESS_S = 1e8  # the ring cuts infinity to 1e9 s
KILLS_FOR_ONE = 3
KILLED_BY_OTHERS = (
    f" ({KILLS_FOR_ONE} times SIGKILL from outside counting as one): the kernel may have killed it for want of memory "
    "(see `dmesg`), or somebody did; free memory, then start the run again"
)
DEATHS_WITHOUT_PAUSE = 5  # after ready, without work; then pauses
WORKING_SHARE = 0.02  # of a core: a child that uses so much of it while it starts is not stalled at all
HELD_NAMED_S = 1.0  # after which a line names a halted child
HELD_SHARE = 1 / 3  # of `limits.progress_s`: when it is killed


NOT_STARTED = 127  # the exit code of a program that could not be started, as shells have it


@dataclass(frozen=True)
class Exit:
    """The end of a process; its text is for a person. `code` is as in Popen.returncode: -n after signal n. `verdict` is
    what busrl's own code in the process gave as its exit code (`errors.process_code`), RETRY if it gave none, and `why`
    the cause that it gave."""

    code: int
    text: str = ""
    verdict: int = RETRY
    why: str = ""

    def __str__(self) -> str:
        if self.text or self.code >= 0:
            return self.text or f"exit code {self.code}"
        try:
            return f"signal {signal.Signals(-self.code).name}"
        except ValueError:
            return f"signal {-self.code}"

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL


class Phase(enum.Enum):
    """BACKOFF -> STARTING -> READY -> STOPPING -> GONE

    STARTING -> BACKOFF (died before ready)   READY -> BACKOFF with no pause (died after it)
    BACKOFF -> GONE (stopped, or given up)    STARTING -> STOPPING
    """

    BACKOFF = "waiting to start"
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    GONE = "gone"


@dataclass(frozen=True)
class Death:
    """Judgement on a death: the line for the person, and why the run gives up because of it, if it does."""

    text: str
    why: str = ""

    @property
    def gives_up(self) -> bool:
        return bool(self.why)


@dataclass
class Child:
    """A child over all of its lives. The methods record what happened to it; those that return a text or a `Death` also
    judge it."""

    name: str
    limits: Limits
    phase: Phase = Phase.BACKOFF
    pid: int = 0
    restarts: int = 0
    kills: int = 0
    early_deaths: float = 0.0  # before ready, in a row
    idle_deaths: int = 0  # after it, in a row, with no work done since the last one
    was_ready: bool = False  # in any of its lives
    unlogged: str = ""  # why it has no log in this life
    leaves_by: float | None = None  # of a child that the run does not need any more: when it is killed
    waits_for_space: bool = False
    due: float = 0.0
    entry: Process | None = None  # of the process table, as it was last seen
    _since: float = 0.0
    _silent_s: float = 0.0
    _ready_s: float = 0.0  # of this life
    _starting_s: float = 0.0
    _cpu_s: float = 0.0
    _held_s: float = 0.0
    _held_by: str = ""
    _killed_for: str = field(default="", repr=False)
    _goes_with: str = field(default="", repr=False)
    _did: int = -1  # its work by the last death after ready

    def account(self) -> dict[str, int]:
        """Counts of its restarts and of its deaths by launch, as the files of a run hold them."""
        return {"restarts": self.restarts, "killed_for_silence": self.kills}

    def goes_with(self, name: str) -> None:
        """Record that launch has killed it because another of its team has ended, which is no death of its own."""
        self._goes_with = name

    @property
    def went_along(self) -> bool:
        """True if it was ended, or is being ended, because another of its team has ended."""
        return bool(self._goes_with)

    @property
    def condemned(self) -> bool:
        return bool(self._killed_for or self._goes_with)

    def is_due(self, now: float) -> bool:
        return self.phase is Phase.BACKOFF and now >= self.due

    @property
    def alive(self) -> bool:
        return self.phase in (Phase.STARTING, Phase.READY, Phase.STOPPING)

    def started(self, pid: int, now: float) -> None:
        self.phase, self.pid, self._since = Phase.STARTING, pid, now
        self.entry, self._silent_s, self._ready_s, self._killed_for = None, 0.0, 0.0, ""
        self._goes_with, self._starting_s, self._cpu_s, self._held_s, self._held_by = "", 0.0, 0.0, 0.0, ""

    def became_ready(self) -> bool:
        """Record that it is ready, by the ring or (if it does not map it) by its HELLO; True the first time."""
        if self.phase is not Phase.STARTING:
            return False
        self.phase, self.early_deaths, self._silent_s, self.was_ready = Phase.READY, 0.0, 0.0, True
        self.waits_for_space = False
        return True

    @property
    def watched(self) -> bool:
        return self.phase in (Phase.STARTING, Phase.READY) and not self._killed_for

    def held(self, how: str, passed_s: float) -> str:
        """Record that it is halted; a line to show, once. `how` says by what, as the kernel shows it; "" if it is not.
        """
        was_named = self._held_s > HELD_NAMED_S
        self._held_s, self._held_by = self._held_s + passed_s if how else 0.0, how
        if was_named or self._held_s <= HELD_NAMED_S or not self.watched:
            return ""
        limit = self.limits.progress_s * HELD_SHARE
        return f"{self.name} (pid {self.pid}) is {how}; after {limit:g} s it is killed and started again"

    def looked(self, entry: Process | None, passed_s: float, cpu_s: float = 0.0) -> str:
        """Judge its progress; a line if it has to be killed, else "". `entry` is its entry in the ring, read `passed_s`
        after the last time (without the reader's own lateness), `cpu_s` the processor's time that it has used."""
        if not self.watched:
            return ""
        ready, before = self.phase is Phase.READY, self.entry
        self._ready_s += passed_s if ready else 0.0
        self._starting_s += 0.0 if ready else passed_s
        worked_s = 0.0 if ready else max(0.0, cpu_s - self._cpu_s) / WORKING_SHARE
        self._cpu_s = cpu_s
        changed = entry is not None and (before is None or entry.progress != before.progress)
        renewed = entry is not None and before is not None and entry.activity != before.activity
        deadline_s = entry.deadline_s if entry is not None else 0.0
        # A start has one limit in all; but a long piece of it that is declared (steps that are trained again) has a
        # limit of its own, from each sign of progress on.
        if deadline_s >= ENDLESS_S or (changed and deadline_s > 0) or (ready and (changed or renewed)):
            self._silent_s = self._starting_s = 0.0
        else:
            self._silent_s += max(0.0, passed_s - worked_s)
        self._held_s = 0.0 if changed and ready else self._held_s
        self.entry = entry or before
        if self._held_s > (held_most := self.limits.progress_s * HELD_SHARE):
            return self._condemn(f"{self._held_by} for {self._held_s:.1f} s", held_most)
        limit = max(self.limits.ready_s, deadline_s)
        if ready:
            limit = (deadline_s or self.limits.progress_s) if entry else math.inf
        most = max(self.limits.start_most_s, 5 * deadline_s)
        if not ready and self._starting_s > most:
            return self._condemn(f"not ready after {self._starting_s:.1f} s of work", most)
        what = "no progress" if ready else "not ready"
        return self._condemn(f"{what} for {self._silent_s:.1f} s", limit) if self._silent_s > limit else ""

    def _condemn(self, what: str, limit: float) -> str:
        doing = f", doing {self.entry.activity!r}" if self.entry and self.entry.activity else ""
        self._killed_for = f"{what} (limit {limit:g} s{doing})"
        self.kills += 1
        return f"killing {self.name} (pid {self.pid}), state {self.phase.value}: {self._killed_for}"

    def ended(self, how: Exit, now: float, hopeless: bool = False, did: int | None = 0) -> Death:
        """Record and judge its death. `hopeless`: its next life would end the same. `did` is a number that grows with
        its own work; None if its work is to be there."""
        text = f"{self.name} (pid {self.pid}) ended while {self.phase.value}, after {now - self._since:.1f} s: {how}"
        if self._killed_for:
            text += f", killed for {self._killed_for}"
        before, self.pid = self.phase, 0
        if before is Phase.STOPPING:
            self.phase = Phase.GONE
            return Death(text)
        if hopeless:
            return self._given_up(text, "to start it again would change nothing")
        self.phase = Phase.BACKOFF
        if self._goes_with:
            self.restarts, self.due = self.restarts + 1, now
            return Death(f"{self.name} was ended with {self._goes_with}; starting it again")
        if before is Phase.READY:
            return self._died_ready(text, now, did)
        return self._died_early(text, now, how.killed and not self._killed_for)

    def _died_ready(self, text: str, now: float, did: int | None) -> Death:
        worked = self._ready_s >= SERVED_S if did is None else did != self._did
        worked = worked or (self.entry is not None and self.entry.samples > 0)
        self._did, self.idle_deaths = did or 0, 1 if worked else self.idle_deaths + 1
        allowed = self.limits.crash_attempts
        if allowed and self.idle_deaths >= allowed:
            why = f"it died {self.idle_deaths} times in a row and did none of its work in between"
            return self._given_up(text, why)
        pause = self._pause_s(self.idle_deaths - DEATHS_WITHOUT_PAUSE) if allowed else 0.0
        self.restarts, self.due = self.restarts + 1, now + pause
        return Death(f"{text}; starting it again{f' in {pause:g} s' if pause else ''}")

    def _died_early(self, text: str, now: float, by_others: bool) -> Death:
        self.early_deaths += 1 / KILLS_FOR_ONE if by_others else 1
        allowed, counted = max(1, self.limits.restart_attempts), round(self.early_deaths, 2)
        if counted >= allowed:
            why = f"it died {counted:g} times in a row before it was ready{KILLED_BY_OTHERS if by_others else ''}"
            return self._given_up(text, why)
        self.restarts, pause = self.restarts + 1, self._pause_s(math.ceil(counted))
        self.due, attempt = now + pause, math.floor(counted) + 1
        return Death(f"{text}; starting it again in {pause:g} s (attempt {attempt} of {allowed})")

    def _given_up(self, text: str, why: str) -> Death:
        self.phase = Phase.GONE
        return Death(f"{text}; giving up: {why}", why)

    @staticmethod
    def _pause_s(deaths: int) -> float:
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (deaths - 1)) if deaths > 0 else 0.0

    def no_space(self, how: Exit, now: float) -> str:
        """Record an end for want of space, after which it is started again, uncounted, until there is some. A line to
        show, the first time."""
        self.phase, self.pid, self.due = Phase.BACKOFF, 0, now + SPACE_PAUSE_S
        before, self.waits_for_space = self.waits_for_space, True
        return "" if before else f"{self.name} cannot go on without space ({how}); it is started again until there is"

    def stop(self) -> None:
        """Record that it is to end, and not to start again."""
        if self.phase is Phase.BACKOFF:
            self.phase = Phase.GONE
        elif self.alive:
            self.phase = Phase.STOPPING

    def finished(self) -> None:
        """Record an end because its work is done (the learner)."""
        self.phase, self.pid = Phase.GONE, 0


# -- foreign processes -------------------------------------------------------------------------------------------------

class ForeignProcesses:
    """Processes that launch did not start and that have the place of a child. `names`: roles with one process each."""

    def __init__(self, names: Collection[str], limits: Limits) -> None:
        self._names, self._limits = names, limits
        self._children: dict[tuple[int, int], Child] = {}

    def look(self, entries: Iterable[Process], ours: Collection[int], passed_s: float) -> list[tuple[int, str]]:
        """Judge their progress, `passed_s` after the last time; pid and reason of each that has to be killed."""
        theirs = [entry for entry in entries if not entry.remote and entry.label in self._names]
        here = {(entry.pid, entry.index): entry for entry in theirs if entry.pid not in ours}
        for key in here.keys() - self._children.keys():
            self._children[key] = child = Child(here[key].label, self._limits)
            child.started(here[key].pid, 0.0)
            child.became_ready()
        self._children = {key: self._children[key] for key in here}
        condemned = []
        for key, child in self._children.items():
            entry = here[key]
            if (why := child.looked(entry, passed_s)) and is_titled(entry.pid, entry.label):
                condemned.append((entry.pid, f"{why}; this launch did not start it, and it holds a lock of the run"))
        return condemned


def is_titled(pid: int, name: str) -> bool:
    """Check whether a process has the title of this process of a run."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0 ") == f"busrl:{name}".encode()
    except OSError:
        return False
