"""What every process of a run needs before it is a role: its title, its log, and its turn where only one may run.

Talks to the role's lock and to the process's own entry in the ring. Imports next to nothing, so that the broker, for
which everybody waits, is back in a fraction of a second. Knows nothing of the bus or of topologies.

What all roles share: attaching to a run, the loop, doorbells, presence and an orderly end.

Talks to the ring (registration, progress, activity) and to the bus (presence, STOP). Knows nothing of prompts, tokens
or rewards. A role subclasses `Actor` and gives `setup`, `step` and, where it listens, `handle`.

Invariants:
- The loop looks at the ring at least once per `tick_s` even when no message arrives: messages only shorten the wait.
- Every pass of the loop moves the progress counter; a longer piece of work is declared with `activity`.
- A STOP counts only once the ring says that the run is over: whoever can write to the bus can not end it.
- `stopping` is only ever set, never cleared; a role ends at the next pass after it.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import random
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy.typing as npt
import setproctitle

from busrl.bus import Endpoint
from busrl.config import Topology
from busrl.errors import BusNotReady, DiskFull, NoSuchRun, RunInUse, SharedMemoryFull, cause
from busrl.faults import Trouble, trouble_for
from busrl.ledger.errors import Throttle, record_error
from busrl.paths import RunPaths
from busrl.protocol import messages as m
from busrl.protocol.codec import topic
from busrl.ring import Fates, LockTimeout, OfdLock, Ring, RingError
from busrl.scheduling.groups import GroupScanner, GroupView
from busrl.states import HeaderWord, RunPhase

# -- What every process of a run needs before it is a role: its title, its log, and its turn where only one may run ---


TURN_S = 0.5
PREDECESSOR_S = 10.0  # a dead holder is gone by then
log = logging.getLogger("busrl")


def configure_process(name: str) -> None:
    """Title for `ps`, and a log format whose lines can be read side by side with those of other processes."""
    setproctitle.setproctitle(title_of(name))
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format=f"%(asctime)s {name} %(levelname).1s %(message)s", force=True
    )


def title_of(name: str) -> str:
    """What `ps` shows for a process of a run."""
    return f"busrl:{name}"


def reacquire_lock(lock: OfdLock, name: str) -> bool:
    """Whether the lock had to be taken again, since somebody removed its file; RunInUse if another process has it."""
    if lock.stands:
        return False
    with contextlib.suppress(RingError):  # what stands in its place keeps others out as well
        if not lock.try_acquire():
            raise RunInUse(
                f"another {name} (pid {OfdLock(lock.path).holder() or 'unknown'}) has served this run since somebody "
                f"removed {lock.path}; this one ends"
            )
        return True
    return False


def acquire_lock(lock: OfdLock, ring: Ring, stopping: Callable[[], object], paths: RunPaths, name: str) -> bool:
    """Hold the lock of a role of which there is one; False if asked to stop meanwhile.

    A predecessor may take a moment to be buried, or live: waiting for it is declared, so nobody is killed for it. One
    that lives on is named in errors.jsonl.
    """
    if lock.try_acquire():
        return True
    holder, begun, told = lock.holder() or "unknown", time.monotonic(), False
    log.info("waits for pid %s, which holds %s", holder, lock.path)
    ring.activity(f"waits for pid {holder}", math.inf)
    while not stopping():
        with contextlib.suppress(LockTimeout):
            lock.acquire(TURN_S)
            ring.activity("")
            return True
        ring.progress()
        if not told and time.monotonic() - begun > PREDECESSOR_S:
            told = True
            text = f"another {name} serves this run (pid {holder} holds {lock.path}); this one waits until it has ended"
            log.error(text)
            record_error(paths, name, "error", name, text)
    return False


# -- What all roles share: attaching to a run, the loop, doorbells, presence and an orderly end -----------------------


HEARTBEAT_S = 1.0
SPACE_LOOK_S = 0.5
BUS_WAIT_S = 3.0


def open_run(run_dir: str | Path) -> tuple[RunPaths, Topology]:
    """The paths and the resolved topology of a run. NoSuchRun where no run was started."""
    paths = RunPaths.of(run_dir)
    if not paths.topology.is_file():
        raise NoSuchRun(f"{paths.root}: no topology.json there; name the directory that `busrl launch` printed")
    return paths, Topology.from_json(paths.topology.read_text())


class Doorbell:
    """Coalesces announcements of one topic: remembers the first slot, counts the rest, rings when flushed."""

    def __init__(self) -> None:
        self.first: m.Message | None = None
        self.count = 0

    def add(self, make: Callable[[], m.Message], count: int = 1) -> None:
        """`count` slots more; their message is made only if they are the first, since the others are merely counted."""
        if self.first is None:
            self.first = make()
        self.count += count

    def take(self) -> m.Message | None:
        """Return the message to send, its `count` filled in, and start afresh."""
        if self.first is None:
            return None
        message = msgspec.structs.replace(self.first, count=self.count)
        self.first, self.count = None, 0
        return message


class WorkDeadline:
    """How long one piece of long work that comes again and again may take: `work_s` for the first of this life, then
    FACTOR times the longest that was seen, at least `progress_s` and LEAST_S, and never more than `work_s`.

    So who stands still is found soon, and who has more to do than before is not killed for it again and again.
    """

    FACTOR, LEAST_S = 50.0, 30.0

    def __init__(self, progress_s: float, work_s: float) -> None:
        self._progress_s, self._work_s = progress_s, work_s
        self._longest_s: float | None = None
        self._begun = 0.0

    def begin(self) -> float:
        """A piece begins now; seconds that it may take."""
        self._begun = time.monotonic()
        if self._longest_s is None:
            return self._work_s
        return min(self._work_s, max(self._progress_s, self.LEAST_S, self.FACTOR * self._longest_s))

    def ended(self) -> None:
        """The piece is done, and the next one begins."""
        now = time.monotonic()
        self._longest_s, self._begun = max(self._longest_s or 0.0, now - self._begun), now


class Actor:
    """One process of a run. States: starting -> running -> stopping -> gone; killed is possible from each."""

    role: ClassVar[str] = ""
    subscribe: ClassVar[tuple[type[m.Message], ...]] = ()
    singleton: ClassVar[bool] = False
    tick_s: ClassVar[float] = 0.05
    _activities: tuple[tuple[str, float], ...] = ()  # declared and not over, outer ones first

    def __init__(self, run_dir: str, name: str) -> None:
        self.name = name
        self.worker_id = name.replace("/", "-")
        self.paths, self.topology = open_run(run_dir)
        self.stopping = ""
        self._next_heartbeat = 0.0
        self._throttle = Throttle()
        self._random = random.Random(f"{name}:{os.getpid()}")
        self._lock: OfdLock | None = None
        self.trouble: Trouble | None = None

    # -- life ---------------------------------------------------------------------------------------------------

    def main(self) -> int:
        """Attach, run until stopped, leave. Returns the exit code."""
        configure_process(self.name)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda got, _frame: self.stop(signal.Signals(got).name))
        self._attach()
        try:
            if not self._acquire_lock():
                return 0
            self._connect()
            return self._live()
        except Exception as problem:
            self._report(problem)
            raise
        finally:
            self._leave()

    def stop(self, reason: str) -> None:
        self.stopping = self.stopping or reason

    def setup(self) -> None:
        """Load what the role needs; the process counts as ready after it."""

    def step(self) -> bool:
        """One pass over the work at hand; True when something was done."""
        raise NotImplementedError(f"{type(self).__name__} has no step")

    def handle(self, message: m.Message) -> None:
        """A message that the role subscribed to. It may be late, doubled or missing: look at the ring."""

    def teardown(self) -> None:
        """Flush what the role still holds; the bus and the ring are open."""

    def idle(self, timeout_s: float) -> None:
        """Wait for a reason to look again: a message, or the time."""
        message = self.bus.recv(timeout_s)
        if message is not None:
            self._dispatch(message)

    # -- helpers ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def activity(self, name: str, deadline_s: float) -> Iterator[None]:
        """Declare a long piece of work, so that the supervisor knows how long silence is all right (seconds).

        One inside another takes its place while it lasts; then the outer one's time begins anew.
        """
        self._activities = (*self._activities, (name, deadline_s))
        self.ring.activity(name, deadline_s)
        try:
            yield
        finally:
            self._activities = self._activities[:-1]
            self.ring.activity(*(self._activities[-1] if self._activities else ("",)))
            self.ring.progress()

    def ring_bell(self, bell: Doorbell, to: str = "") -> None:
        message = bell.take()
        if message is not None:
            self.bus.send(message, to)

    def warn(
        self,
        where: str,
        text: str,
        severity: str = "warning",
        kind: str = "",
        uids: Sequence[int] = (),
        trace: str = "",
    ) -> None:
        """Log, publish and file an event that a person should see; many of one kind become one line with a count.

        `uids` are the samples that it is about: the line is part of their history. `trace`: the traceback behind it.
        """
        kind = kind or re.sub(r"[0-9]+", "#", text)
        if self._throttle.admit(f"{where}/{kind}", (where, text, severity, trace), time.monotonic(), uids):
            self._publish_warning(where, text, severity, trace, uids)

    def write_or_wait(self, what: str, write: Callable[[], None]) -> bool:
        """Do `write`; a full disk pauses this process, says so, and is waited for. False: it was stopped meanwhile."""
        told = False
        while True:
            try:
                write()
            except (DiskFull, SharedMemoryFull) as problem:
                if not told:
                    self.warn(self.role, f"{what} pauses: {problem}", "error", kind=f"full disk: {what}")
                told = True
            else:
                if told:
                    self.warn(self.role, f"{what} goes on: there is space again", kind=f"space: {what}")
                return True
            if self.stopping:
                return False
            with self.activity("waiting for disk space", math.inf):
                Actor.idle(self, SPACE_LOOK_S)
                self._heartbeat()

    def _publish_warning(self, where: str, text: str, severity: str, trace: str, uids: Sequence[int]) -> None:
        log.warning("%s: %s%s", where, text, f"\n{trace}" if trace else "")
        self.bus.send(m.Error(severity=severity, where=where, text=text, traceback=trace))
        record_error(self.paths, self.name, severity, where, text, trace, uids)

    def scan(self, scanner: GroupScanner, lines: npt.NDArray[Any] | None = None) -> GroupView:
        """The open groups now, in `lines` or in a fresh copy of the slots' lines. The lines are copied before the fates
        are read, and the fate table may have grown."""
        lines = self.ring.lines() if lines is None else lines
        if len(self.fates) != len(scanner.fates):
            scanner.fates = self.fates.view()
        self.lines = lines
        return scanner.scan(lines)

    # -- internals ----------------------------------------------------------------------------------------------

    def _acquire_lock(self) -> bool:
        if not self.singleton:
            return True
        self._lock = OfdLock(str(self.paths.lock(self.name.replace("/", "-"))))
        return acquire_lock(self._lock, self.ring, lambda: self.stopping, self.paths, self.name)

    def keep_lock(self) -> None:
        """The lock of the role counts while its file has the name: make it again if somebody removed it. RunInUse if
        another process holds the one that has the name now."""
        if self._lock is not None and reacquire_lock(self._lock, self.name):
            self.warn(self.role, f"{self._lock.path} was removed by somebody else; it is made and held again")

    def _attach(self) -> None:
        self.ring = Ring.attach(self.paths.ring_name)
        self.ring.register(self.role, self.name)

    def _connect(self) -> None:
        self.ring.activity("starting", self.topology.limits.ready_s)
        self.fates = Fates(str(self.paths.fates))
        self.validate_fates = Fates(str(self.paths.validate_fates))
        self.ring.bind_fates(self.fates, self.validate_fates)
        self.trouble = trouble_for(self.topology.faults, self.role, self.worker_id)
        self.bus = Endpoint(
            self.worker_id,
            self.paths.frontend,
            self.paths.backend,
            subscribe=self.subscriptions(),
            hwm=self.topology.bus.hwm,
            max_bytes=self.topology.bus.max_message_bytes,
            trouble=self.trouble,
            report=lambda text: self.warn("bus", text),
        )

    def subscriptions(self) -> list[str]:
        """Topic prefixes; a role that has topics of its own extends it."""
        kinds: tuple[type[m.Message], ...] = (*self.subscribe, m.Stop)
        return [topic(kind) for kind in kinds]

    def _live(self) -> int:
        self.setup()
        # What is loaded by now stays: to look through all of torch's objects stops a learner for a tenth of a second.
        gc.freeze()
        if not self.stopping:
            self._announce_ready()
        while not self.stopping:
            self._pass()
        log.info("stopping: %s", self.stopping)
        self.teardown()
        return 0

    def _announce_ready(self) -> None:
        self._find_bus()
        self.bus.send(m.Hello(role=self.role, pid=os.getpid(), host=os.uname().nodename, index=self.ring.index))
        self.ring.activity("")
        self.ring.set_ready()
        log.info("ready")

    def _find_bus(self) -> None:
        """The bus is only the doorbell: a process that hears nothing says so, and works by the ring alone."""
        try:
            self.bus.ready(BUS_WAIT_S)
        except BusNotReady as problem:
            self.warn(self.role, f"goes on without the bus: {problem}", kind="no bus")

    def _pass(self) -> None:
        for message in self.bus.drain():
            self._dispatch(message)
        self.ring.progress()
        self._heartbeat()
        if not self.step() and not self.stopping:
            # Jitter keeps the timers of many processes from falling into step.
            self.idle(self.tick_s * self._random.uniform(0.75, 1.25))

    def _dispatch(self, message: m.Message) -> None:
        if m.is_from_another(message):
            kind = m.name_of(type(message))
            self.warn("bus", f"{kind} of {message.sender!r} is not heard: it is not the one who sends it", kind=kind)
        elif not isinstance(message, m.Stop):
            self.handle(message)
        elif self.ring.header(HeaderWord.RUN_STATE) != RunPhase.RUNNING:
            self.stop(f"STOP: {message.reason}")
        else:
            self.warn("bus", f"a STOP of {message.sender!r} is not followed: the run goes on", kind="STOP")

    def _heartbeat(self) -> None:
        now = time.monotonic()
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + HEARTBEAT_S
            self.keep_lock()
            self.bus.heartbeat(self.role, "")
            self._publish_repeats(now)

    def _publish_repeats(self, now: float, everything: bool = False) -> None:
        for count, (where, text, severity, trace), uids in self._throttle.due(now, everything):
            self._publish_warning(where, f"{count} more like this, the latest: {text}", severity, trace, uids)

    def _report(self, problem: Exception) -> None:
        text, said = "".join(traceback.format_exception(problem)), cause(problem)
        record_error(self.paths, self.name, "critical", self.role, said, text)
        with contextlib.suppress(Exception):
            self.bus.send(m.Error(severity="critical", where=self.role, text=said, traceback=text[-4000:]))

    def _leave(self) -> None:
        if self.trouble is not None:
            log.info("faults on its messages: %s", self.trouble)
        with contextlib.suppress(Exception):
            self._publish_repeats(time.monotonic(), everything=True)
            self.bus.send(m.Goodbye(reason=self.stopping or "error"))
            self.bus.close()
        self.ring.close()
