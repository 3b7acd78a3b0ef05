"""The base of every role: attaching to a run, the loop, doorbells, presence on the bus and an orderly end.

Talks to the ring (registration, progress, activity) and to the bus (presence, STOP). A role subclasses `Actor` and
gives `setup`, `work` and, where it subscribes to messages, `handle`. Knows nothing of prompts, tokens or rewards.

- The loop looks at the ring at least once per `tick_s` even when no message arrives: messages only shorten the wait.
- Every pass of the loop moves the progress counter; a longer piece of work is declared with `activity`.
- What is changed in flight (docs/operating.md) is taken up between two passes, by the size of control.jsonl.
- A STOP counts only once the rings of all models say that the run is over: a process that can write to the bus cannot
  end the run, nor a model that has made its steps the processes that others need.
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
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import format_exception
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy.typing as npt

from busrl.bus import Endpoint
from busrl.errors import BusNotReady, DiskFull, RingError, SharedMemoryFull, Stopped, cause
from busrl.faults import MessageFaults, message_faults
from busrl.ledger.errors import Throttle, record_error
from busrl.paths import RunPaths
from busrl.protocol import messages as m
from busrl.protocol.codec import Rejected, topic
from busrl.ring import Fates, Ring
from busrl.roles.process import RoleLock, configure_process
from busrl.scheduling.groups import GroupScanner, GroupView
from busrl.states import PAUSED, HeaderWord, RunPhase
from busrl.system.files import size_of
from busrl.topology import Topology

log = logging.getLogger("busrl")
HEARTBEAT_S = 1.0
SPACE_LOOK_S = 0.5
NO_SPACE = "waiting for disk space"
BUS_WAIT_S = 3.0
ACTIVITY_BYTES = 31  # that an entry of the process table has room for
FOLLOW_EVERY_S = 0.25
WAVE_TICK_S = 0.01  # of roles in rounds of segments: a wave begins without a message that could wake them


class Doorbell:
    """Coalesces announcements of one topic: a message that names the first slot and counts the others."""

    def __init__(self) -> None:
        self._message: m.Message | None = None
        self._count = 0

    def add(self, make: Callable[[], m.Message], count: int = 1) -> None:
        """Announce `count` slots more. Only the first of them needs its message, `make`; the others are counted."""
        if self._message is None:
            self._message = make()
        self._count += count

    def take(self) -> m.Message | None:
        """The message that announces all slots since the last call; None if there were none."""
        if self._message is None:
            return None
        message = msgspec.structs.replace(self._message, count=self._count)
        self._message, self._count = None, 0
        return message


def ring_bells(bus: Endpoint, *bells: Doorbell) -> None:
    """Send what the doorbells have coalesced."""
    for bell in bells:
        if (message := bell.take()) is not None:
            bus.send(message)


class WorkDeadline:
    """The time that a piece of recurring long work may take: `work_s` for the first of this process, then FACTOR times
    the longest that was seen, at least `progress_s` and LEAST_S, and never more than `work_s`.

    So a process that hangs is found soon, and one with more work than before is not killed for it again and again.
    """

    FACTOR, LEAST_S = 50.0, 30.0

    def __init__(self, progress_s: float, work_s: float) -> None:
        self._progress_s, self._work_s = progress_s, work_s
        self._longest_s: float | None = None
        self._begun: float | None = None

    def begin(self) -> float:
        """A piece begins now; seconds that it may take."""
        self._begun = time.monotonic()
        if self._longest_s is None:
            return self._work_s
        return min(self._work_s, max(self._progress_s, self.LEAST_S, self.FACTOR * self._longest_s))

    def ended(self) -> None:
        """The piece is done, and the next one begins; before the first, in a start, nothing is measured."""
        if self._begun is None:
            return
        now = time.monotonic()
        self._longest_s, self._begun = max(self._longest_s or 0.0, now - self._begun), now


class Shown:
    """The text of a process in the ring's process table: the innermost declared piece of work, else the usual text."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._activities: tuple[tuple[str, float], ...] = ()  # declared and not over, outer ones first
        self._usual = ""

    @contextlib.contextmanager
    def activity(self, name: str, deadline_s: float) -> Iterator[None]:
        """Declare a piece of work that may take `deadline_s` seconds, inside or outside of another."""
        self._activities = (*self._activities, (name, deadline_s))
        self._ring.activity(name, deadline_s)
        try:
            yield
        finally:
            self._activities = self._activities[:-1]
            self._ring.activity(*(self._activities[-1] if self._activities else (self._usual,)))
            self._ring.progress()

    def progress(self) -> None:
        """Show that the process is at work."""
        self._ring.progress()

    def usually(self, text: str, again: bool = False) -> None:
        """Show `text` while no work is declared. `again`: its time begins now, also for the same text."""
        text = text.encode()[:ACTIVITY_BYTES].decode(errors="ignore")
        if text != self._usual or again:
            self._usual = text
            if not self._activities:
                self._ring.activity(self._usual)

    def waits(self, reason: str, draw: int | None = None) -> None:
        """Show what this process waits for, and for which group; "" = for nothing. The monitor reads it."""
        self.usually(f"waits: {reason}{f', group {draw}' if draw is not None else ''}" if reason else "")


class Reports:
    """Events that a person should see: each is logged, published and filed; repeats of a kind become a line with a
    count. `send` publishes a message."""

    def __init__(self, paths: RunPaths, name: str, role: str, send: Callable[[m.Message], None]) -> None:
        self._paths, self._name, self._role, self._send = paths, name, role, send
        self._throttle = Throttle()

    def warn(
        self, where: str, text: str, severity: str = "warning", kind: str = "", uids: Sequence[int] = (),
        traceback: str = "",
    ) -> None:
        """`uids`: the samples concerned, whose history the line becomes part of. `traceback`: what follows the text."""
        kind = kind or re.sub(r"[0-9]+", "#", text)
        if self._throttle.admit(f"{where}/{kind}", (where, text, severity, traceback), time.monotonic(), uids):
            self._publish(where, text, severity, traceback, uids)

    def publish_repeats(self, now: float, everything: bool = False) -> None:
        """Publish what was held back as a repeat, if it is due."""
        for count, (where, text, severity, traceback), uids in self._throttle.due(now, everything):
            self._publish(where, f"{count} more like this, the latest: {text}", severity, traceback, uids)

    def failed(self, problem: Exception) -> None:
        """File and publish what ends this process."""
        traceback, text = "".join(format_exception(problem)), cause(problem)
        record_error(self._paths, self._name, "critical", self._role, text, traceback)
        with contextlib.suppress(Exception):
            self._send(m.Error(severity="critical", where=self._role, text=text, traceback=traceback[-4000:]))

    def _publish(self, where: str, text: str, severity: str, traceback: str, uids: Sequence[int]) -> None:
        log.warning("%s: %s%s", where, text, f"\n{traceback}" if traceback else "")
        self._send(m.Error(severity=severity, where=where, text=text, traceback=traceback))
        record_error(self._paths, self._name, severity, where, text, traceback, uids)


@dataclass
class Parts:
    """The things that a process of a run works with. A process attaches to those of its run directory; a test hands in
    its own."""

    topology: Topology
    ring: Ring
    bus: Endpoint
    fates: Fates | None  # of a model that only serves, none
    validate_fates: Fates | None
    beside: str = ""  # the model beside the lead that the process, or this part of it, works for


class InForce(NamedTuple):
    """The topology of a run as it is now, and the requests that are in it: how long control.jsonl was just before."""

    whole: Topology
    followed: int

    @classmethod
    def read(cls, run: RunPaths) -> InForce:
        followed = size_of(run.control)  # first: what is asked meanwhile is taken up later, never lost
        return cls(Topology.from_json(run.topology.read_text()), followed)


def is_running(ring: Ring) -> bool:
    """Tell whether the model of this ring is trained or served, and neither ended nor asked to stop."""
    return ring.header(HeaderWord.RUN_STATE) == RunPhase.RUNNING


def rings_beside(topology: Topology, tag: str, run: RunPaths) -> Iterator[Ring]:
    """The rings of the run's other models than `tag`, each open while it is looked at; one that is gone is left out."""
    for other in topology.tags:
        if other != tag:
            with contextlib.suppress(RingError), contextlib.closing(
                    Ring.attach(topology.paths_of(other, run).ring_name, read_only=True)) as ring:
                yield ring


def import_nothing(topology: Topology, name: str) -> None:
    """Import all that `setup` of the process `name` imports, and start nothing: processes are forked after it. For most
    roles that is done when their module is there."""


class Actor(ABC):
    """A process of a run. States: starting -> running -> stopping -> gone; killed is possible from each."""

    warm: ClassVar[staticmethod[[Topology, str], None]] = staticmethod(import_nothing)
    role: ClassVar[str] = ""
    subscribe: ClassVar[tuple[type[m.Message], ...]] = ()
    singleton: ClassVar[bool] = False
    tick_s: float = 0.05
    # Called with bytes that came as the message of this name and are none; the bus counts and reports them itself.
    unreadable: Callable[[Rejected, str], None] | None = None

    def __init__(
        self, run_dir: str | Path, name: str, parts: Parts | None = None, in_force: InForce | None = None
    ) -> None:
        """With `parts` the role is attached already, and its methods drive it; without, `main` attaches it. `in_force`:
        what was read of the run just now."""
        self.name, self.worker_id = name, name.replace("/", "-")
        self._run, self._next_follow = RunPaths.of(run_dir), 0.0
        if parts:
            in_force = InForce(parts.topology, size_of(self._run.control))
        self.whole, self.followed = in_force or InForce.read(self._run)
        self.topology = self.whole if parts else self.whole.of(self.whole.tag_of(name))
        self.beside = parts.beside if parts else self.topology.beside
        self.paths = self._run.of_tag(self.beside)
        self.stopping = ""
        self.other_rings: list[Ring] = []  # those of other models, where this process has an entry too
        self._next_heartbeat = 0.0
        self._random = random.Random(f"{name}:{os.getpid()}")
        self._lock: RoleLock | None = None
        self.message_faults: MessageFaults | None = None
        self.reports = Reports(self.paths, name, self.role, lambda message: self.bus.send(message))
        if parts:
            self.bus, self.ring, self.shown = parts.bus, parts.ring, Shown(parts.ring)
            if parts.fates is not None:
                self.fates = parts.fates
            if parts.validate_fates is not None:
                self.validate_fates = parts.validate_fates

    # -- life ---------------------------------------------------------------------------------------------------

    def main(self) -> int:
        """Attach, run until stopped, leave. Returns the exit code."""
        configure_process(self.name)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda got, _frame: self.stop(signal.Signals(got).name))
        self.ring = Ring.attach(self.paths.ring_name)
        self.shown = Shown(self.ring)
        self.ring.register(self.role, self.name)
        try:
            if self.singleton:
                self._lock = RoleLock(self.paths, self.worker_id)
                if not self._lock.acquire(self.ring, lambda: self.stopping):
                    return 0
            self._connect()
            return self._live()
        except Stopped as stopped:
            log.info("stopping: %s", stopped)
            return 0
        except Exception as problem:
            self.reports.failed(problem)
            raise
        finally:
            self._leave()

    def stop(self, reason: str) -> None:
        self.stopping = self.stopping or reason

    def setup(self) -> None:
        """Load what the role needs; the process counts as ready after it."""

    @abstractmethod
    def work(self) -> bool:
        """Make one pass over the work at hand; True when something was done."""

    def handle(self, message: m.Message) -> None:
        """A message that the role subscribed to. It may be late, doubled or missing: look at the ring."""

    def follow(self) -> None:
        """The run got a request: control.jsonl has a new line, and `topology` is read again."""

    def teardown(self) -> None:
        """Flush what the role still holds; the bus and the ring are open."""

    def idle(self, timeout_s: float) -> None:
        """Wait for a reason to look again: a message, or the time."""
        if (message := self.bus.recv(timeout_s)) is not None:
            self.receive(message)

    # -- helpers ------------------------------------------------------------------------------------------------

    def activity(self, name: str, deadline_s: float) -> contextlib.AbstractContextManager[None]:
        """Declare a long piece of work: the supervisor accepts silence for `deadline_s` seconds. An activity inside
        another replaces it while it lasts; then the time of the outer one starts again."""
        return self.shown.activity(name, deadline_s)

    def awaited(self) -> str:
        """Show progress while waiting for other processes, which may take as long as a host is away. Returns the reason
        to stop waiting, "" for none."""
        self.shown.progress()
        return self.stopping

    def warn(
        self, where: str, text: str, severity: str = "warning", kind: str = "", uids: Sequence[int] = (),
        traceback: str = "",
    ) -> None:
        """Report an event that a person should see (`Reports.warn`)."""
        self.reports.warn(where, text, severity, kind, uids, traceback)

    def write_or_wait(self, what: str, write: Callable[[], None]) -> bool:
        """Call `write`; while the disk is full, warn, wait and try again. False if stopped meanwhile."""
        paused = False
        while True:
            try:
                write()
            except (DiskFull, SharedMemoryFull) as problem:
                if not paused:
                    self.warn(self.role, f"{what} pauses: {problem}", "error", kind=f"full disk: {what}")
                paused = True
            else:
                if paused:
                    self.warn(self.role, f"{what} continues: there is space again", kind=f"space: {what}")
                return True
            if self.stopping:
                return False
            with self.activity(NO_SPACE, math.inf):
                Actor.idle(self, SPACE_LOOK_S)
                self._heartbeat()

    def scan(self, scanner: GroupScanner, lines: npt.NDArray[Any] | None = None) -> GroupView:
        """The open groups, in `lines`: a copy made before the fates are read, whose table may have grown."""
        self.lines = self.ring.lines() if lines is None else lines
        if len(self.fates) != len(scanner.fates):
            scanner.fates = self.fates.view()
        return scanner.scan(self.lines)

    # -- internals ----------------------------------------------------------------------------------------------

    def keep_lock(self) -> None:
        """Hold the lock of the role, again if its file was removed. RunInUse if another process holds the new one."""
        if self._lock is not None and (path := self._lock.keep()):
            self.warn(self.role, f"{path} was removed by another program; it is made and held again")

    def _connect(self) -> None:
        self.ring.activity("starting", self.topology.limits.ready_s)
        if not self.topology.frozen:
            self.fates = Fates(str(self.paths.fates))
            self.validate_fates = Fates(str(self.paths.validate_fates))
            self.ring.bind_fates(self.fates, self.validate_fates)
        self.message_faults = message_faults(self.topology.faults, self.role, self.worker_id)
        settings = self.topology.bus
        self.bus = Endpoint(
            self.worker_id, self.paths.frontend, self.paths.backend, subscribe=self.subscriptions(), hwm=settings.hwm,
            max_bytes=settings.max_message_bytes, message_faults=self.message_faults,
            report=lambda text: self.warn("bus", text), on_reject=self.unreadable,
        )

    def subscriptions(self) -> list[str]:
        """Topic prefixes; a role that has topics of its own extends it."""
        routed = m.ProbeDrawn in self.subscribe and self.topology.derived.routing is not None
        return [*map(topic, self.subscribe), topic(m.Stop), *([topic(m.ProbeRouted)] if routed else [])]

    def _live(self) -> int:
        self.setup()
        # What is loaded by now stays: collecting among all of torch's objects stops a learner for a tenth of a second.
        gc.freeze()
        if not self.stopping:
            try:
                self.bus.ready(BUS_WAIT_S)
            except BusNotReady as problem:  # it is only the doorbell: the ring is enough to work
                self.warn(self.role, f"continues without the bus: {problem}", kind="no bus")
            self.bus.send(m.Hello(role=self.role, pid=os.getpid(), host=os.uname().nodename, index=self.ring.index))
            self.ring.activity("")
            self.ring.set_ready()
            log.info("ready")
        self.run_passes()
        log.info("stopping: %s", self.stopping)
        self.teardown()
        return 0

    def run_passes(self) -> None:
        while not self.stopping:
            self.look_around()
            if not self.work() and not self.stopping:
                # Jitter keeps the timers of many processes from falling into step.
                self.idle(self.tick_s * self._random.uniform(0.75, 1.25))

    def look_around(self) -> None:
        """Begin a pass: messages, progress, presence."""
        for message in self.bus.drain():
            self.receive(message)
        for ring in (self.ring, *self.other_rings):
            ring.progress()
        self._follow()
        self._heartbeat()

    @property
    def paused(self) -> bool:
        return bool(self.ring.header(HeaderWord.GENERATION_PAUSE) & PAUSED)

    def _follow(self) -> None:
        """Between two passes: read what was changed in flight, and report it with a heartbeat at once."""
        if (now := time.monotonic()) < self._next_follow:
            return
        self._next_follow = now + FOLLOW_EVERY_S
        if size_of(self._run.control) != self.followed:
            self.whole, followed = InForce.read(self._run)
            self.topology = self.whole.of(self.topology.tag)
            self.follow()
            self.followed, self._next_heartbeat = followed, 0.0

    def receive(self, message: m.Message) -> None:
        """Handle a message, unless another process sent it than the one that may: a STOP that counts, or one of the
        role's own."""
        if m.is_from_another(message):
            kind = m.name_of(type(message))
            text = f"{kind} of {message.sender!r} is ignored: only {m.ONLY_FROM[type(message)]} sends it"
            self.warn("bus", text, kind=kind)
        elif not isinstance(message, m.Stop):
            if not m.is_of_another_model(message, self.beside):
                self.handle(message)
        elif is_running(self.ring) or any(map(is_running, rings_beside(self.whole, self.topology.tag, self._run))):
            self.warn("bus", f"a STOP of {message.sender!r} is ignored: the run continues", kind="STOP")
        else:
            self.stop(f"STOP: {message.reason}")

    def _heartbeat(self) -> None:
        now = time.monotonic()
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + HEARTBEAT_S
            self.keep_lock()
            self.bus.heartbeat(self.role, "", self.followed)
            self.reports.publish_repeats(now)

    def _leave(self) -> None:
        if self.message_faults is not None:
            log.info("faults on its messages: %s", self.message_faults)
        with contextlib.suppress(Exception):
            self.reports.publish_repeats(time.monotonic(), everything=True)
            self.bus.send(m.Goodbye(reason=self.stopping or "error"))
            self.bus.close()
        self.ring.close()
