"""The loop of `launch`: starts the children of a run, watches them, starts them again, stops them in order.

Talks to the children (pids, exit codes), to the ring's process table (reading), to the bus (progress for the display,
STOP, CONTROL), to the display and to the signals that ask for an end. `supervisor.py` decides what to do about a child
and in which order to stop, `control.py` what is asked of the run. Knows nothing of samples, groups or weights.

- The run has reached its goal when the learner has ended with 0 after setting `run_state` to finishing, and the
  validator, if there is one, with 0 after that; and only then.
- Everything is done in one thread, with one wait: for a death, a signal, or the next look.
- Nothing here depends on the bus: with every message lost the picture is poorer and the run the same.
- At the end: reclaim what the dead held, write and sync open.bin and the fates, then unlink the ring. Killed in
  between, the next start adopts the ring and forgets open.bin.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import selectors
import shutil
import signal
import time
from collections.abc import Callable, Collection, Iterator
from typing import Protocol

import numpy as np

from busrl import capabilities
from busrl.bus import Endpoint
from busrl.errors import NEEDS_FIX, NO_SPACE, NOT_IMPORTED, RUN_FAILED, TEAM_ENDED, FateRefused
from busrl.faults import CrashWatch, crash_environment, describe, message_faults
from busrl.launch.children import RunningChild, Signals, last_lines, last_words, start
from busrl.launch.control import NO_PROOF, ControlDesk
from busrl.launch.display import Display
from busrl.launch.fates import FateWatch
from busrl.launch.rundir import OpenRun, remove_runtime_dir, unlink_segments
from busrl.launch.summary import EventLog, Progress, ResidenceTimes, RunOutcome, Usage, cpu_of
from busrl.launch.supervisor import NOT_STARTED, Child, Exit, ForeignProcesses, Phase, Shutdown
from busrl.ledger.errors import record_error
from busrl.ledger.openbin import OpenSlot, write_open
from busrl.paths import RunPaths
from busrl.preflight import machine
from busrl.protocol import messages as m
from busrl.protocol.codec import address, is_address, topic
from busrl.ring import UID_NONE, Fates, Process, State
from busrl.ring.locks import taken_back
from busrl.states import FOREIGN_ROLES, IMPLIED_ROLES, RANK, ROLES, SINGLE_ROLES, HeaderWord, RunPhase
from busrl.status.reader import RingLook, ring_record
from busrl.status.runfiles import RunFiles, run_of_files
from busrl.status.waits import Link, StallAlarm, chain, limit_s, said
from busrl.status.words import printable
from busrl.system import device
from busrl.system.clocks import FairClock
from busrl.system.files import bound
from busrl.system.guardian import Guardian, halted, mark
from busrl.topology import ProcessName, Topology
from busrl.topology.schema import AGENT

# -- closing -----------------------------------------------------------------------------------------------------------

def close_run(run: OpenRun) -> int:
    """Write what is open, unlink everything, let go of the directory. Returns how many samples are open."""
    if run.displaced:
        run.release()
        return 0
    if run.moved() or run.read_only():
        return _abandon(run)
    # Mapped again: a table that somebody cut short must not be read as long as it was.
    run.fates = Fates(str(run.paths.fates), create=True)
    run.validate_fates = Fates(str(run.paths.validate_fates), create=True)
    run.ring.bind_fates(run.fates, run.validate_fates)
    run.ring.reap()
    run.ring.finish_drops()
    lines = run.ring.lines()
    held = np.flatnonzero((lines["state"] != State.FREE) & (lines["uid"] != UID_NONE))
    still_open = [OpenSlot(int(lines["uid"][slot]), int(lines["state"][slot]), int(slot)) for slot in held]
    run.fates.sync()
    run.validate_fates.sync()
    write_open(run.paths.open_bin, still_open)
    unlink_segments(run.paths.ring_name)
    shutil.rmtree(run.paths.published, ignore_errors=True)
    remove_runtime_dir(run.paths)
    run.release()
    return len(still_open)


def _abandon(run: OpenRun) -> int:
    """The run directory is not where it was, or cannot be written: nothing is written in its place. Without a ring and
    an open.bin the next start, wherever it is, generates again what was open."""
    unlink_segments(run.paths.ring_name)
    remove_runtime_dir(run.paths)
    held = sum(count for state, count in run.ring.stats().occupancy.items() if state != "FREE")
    run.release()
    return held


# -- the loop ----------------------------------------------------------------------------------------------------------

TICK_S = 0.2
STOP_EVERY_S = 0.5
BOUND_EVERY_S = 5.0  # logs grow on until the next look
STOP_LOOK_S, STOP_LATE_S = 0.05, 0.5  # a busy machine's lateness counts, a machine that was suspended does not
DYING_S = 10.0  # after SIGKILL
STOOD_STILL_S = 10.0  # the least time without a step that is told when a run ends otherwise than at its goal
ALONE = 3  # exit code of a host that has lost its run
SUBSCRIBED = (
    m.LearnerStateUpdate, m.SchedulerState, m.ValidationStarted, m.ValidationDone, m.ValidationSetDone, m.Error,
    m.Hello, m.Heartbeat, m.Control,
)


class Placement(Protocol):
    """Starts the other hosts of a run and ends them with it."""

    def look(self, now: float, heard: Collection[str], run_is_over: bool) -> None: ...
    def end(self, patience_s: float, signals: Signals) -> None: ...
    def kill(self) -> None: ...


def placement_of(
    topology: Topology, paths: RunPaths, say: Callable[[str], None], warn: Callable[[str, str], None]
) -> Placement | None:
    """Whoever starts the other hosts of the run, where the topology says how (`hosts.start`)."""
    if topology.here or not (topology.hosts.start and topology.host_names):
        return None
    placement: Placement = capabilities.plug("hosts", "placement")(topology, paths, say, warn)
    return placement


class Launch:
    """One run from its first child to its last. `run` gives the outcome; no child is left then."""

    def __init__(self, opened: OpenRun, display: Display, signals: Signals) -> None:
        self._run, self._display, self._signals = opened, display, signals
        self.topology, self._paths, topology = opened.topology, opened.paths, opened.topology
        self._processes: dict[str, ProcessName] = {one.name: one for one in topology.processes()}
        self.children = [Child(name, topology.limits) for name in self._processes]
        self._running: dict[str, RunningChild] = {}
        # The processes that have to end in order, after the last step, for the goal to be reached.
        self._goal = {"learner", "validator", "satellite"} & self._processes.keys()
        ranks = {name for name, one in self._processes.items() if one.role == RANK}
        self._team = ranks | {"learner"} if ranks else ranks  # one of them ends: all start again
        self._done: set[str] = set()
        self._entries: dict[int, Process] = {}  # the process table of the last look, by pid
        self._remote: set[str] = set()  # and the hosts and workers elsewhere that home hears
        self._fates = FateWatch(self._paths.fates, self._paths.validate_fates, opened.ring, topology.groups.size)
        own = [name for name, one in self._processes.items() if not one.spec.command]
        self._events = EventLog(self._paths, self.children, own)
        self._foreign = ForeignProcesses({*IMPLIED_ROLES, *SINGLE_ROLES} & self._processes.keys(), topology.limits)
        self.usage, self.residence, self.crashes = Usage(), ResidenceTimes(), CrashWatch(topology.faults)
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals, selectors.EVENT_READ)
        self._log = open(self._paths.log("launch"), "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        known, faults = run_of_files(RunFiles(self._paths)), describe(topology.faults)
        self.progress = Progress(known, self.children, time.monotonic(), faults)
        self._bus = Endpoint(
            "launch", self._paths.frontend, self._paths.backend,
            subscribe=[topic(kind) for kind in SUBSCRIBED],
            hwm=topology.bus.hwm, max_bytes=topology.bus.max_message_bytes,
            report=self._say, message_faults=message_faults(topology.faults, "launch", "launch"),
        )
        self._fair = FairClock(TICK_S, time.monotonic())
        self._mark = mark(self._paths.key, os.getpid())
        self._guardian = Guardian(self._mark)
        self._placement = placement_of(topology, self._paths, self._say, self._warn)
        self._bound_at = 0.0
        self._stall, self._picture = StallAlarm(), RingLook(self._paths, group_size=topology.groups.size)
        self._desk = ControlDesk(opened, self._processes, self, self._say)

    def run(self) -> RunOutcome:
        """Until the goal is reached, the run has failed, or a signal asks for the end."""
        for line in self.progress.faults:
            self._say(f"FAULTS ARE ON: {line}")
        try:
            outcome = self._until_decided()
            self._say(f"ending: {outcome.why}")
            if outcome.kind != "finished" and self._stall.quiet_s > limit_s(self.progress.run, STOOD_STILL_S):
                self.progress.stood_still = (self._stall.quiet_s, self._waits())
            if not self._run.displaced:  # without a turn it asks nobody to stop: the others would obey too
                self._stop_all(outcome)
                if self._placement:
                    self._placement.end(self.topology.limits.stop_s, self._signals)
            self.progress.run.look(ring_record(self._run.ring), time.monotonic())
            self._display.show(self.progress)
            return outcome
        finally:
            self._kill_all()
            self._bound_logs()
            if self._placement:
                self._placement.kill()
            for line in self._events.tick(time.monotonic(), everything=True):
                self._say(line)
            self._fates.close()
            self._picture.close()
            self._bus.close()
            self._selector.close()
            with contextlib.suppress(OSError):  # its last lines may have no place, as in `_note`
                self._log.close()

    # while it runs

    def _until_decided(self) -> RunOutcome:
        while True:
            outcome = self._desk.outcome or self._signalled() or self._ledger_damaged() or self._start_due()
            outcome = outcome or self._handle_deaths() or self._left_alone()
            if outcome is not None:
                return outcome
            self._receive()
            self._look()
            if self._placement:
                self._placement.look(time.monotonic(), self._remote, self._finishing)
            self._display.show(self.progress)
            waiting = (one for one in self.children if one.phase is Phase.BACKOFF and not self._awaits(one))
            due = [child.due - time.monotonic() for child in waiting]
            self._selector.select(max(0.0, min([TICK_S, *due])))
            self._signals.clear()

    def _start_due(self) -> RunOutcome | None:
        started = (
            self._start(child) for child in self.children if child.is_due(time.monotonic()) and not self._awaits(child)
        )
        return next(filter(None, started), None)

    def _awaits(self, child: Child) -> bool:
        """Whether one of its team is still to end: a new rank must not meet an old one."""
        return child.name in self._team and any(
            other.went_along and other.name in self._running for other in self.children
        )

    def _start(self, child: Child) -> RunOutcome | None:
        for line in self._run.restore():
            self._say(line)
        if gone := self._run.ring_gone():
            return self._lost(gone, f"{child.name} cannot be started: ")
        try:
            process, topology = self._processes[child.name], self._run.topology
            crash = crash_environment(topology.faults, child.name, child.restarts + 1)
            known = {**os.environ, **process.spec.env}
            devices = device.environment(topology.device_of(child.name), process.devices, known)
            bound = machine.cores_of(topology, process.spec, machine.cores())
            sign = f"{self._mark}{child.name}/{child.restarts}/"
            running = start(process, self._paths, (self._run.lock.fileno(),), {**devices, **crash}, bound, sign,
                            (topology.serve.host,))
        except OSError as error:
            child.started(0, time.monotonic())
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._waits_for_space(child, Exit(NO_SPACE, str(error)))
                return None
            return self._died(child, Exit(NOT_STARTED, f"it could not be started: {error}"))
        running.on_end = self._guardian.let_go
        self._guardian.hold(running.pid)
        child.unlogged = running.unlogged
        if child.unlogged:
            self._say(f"{child.name} (pid {running.pid}) has no log: {child.unlogged}")
        self._running[child.name] = running
        self._selector.register(running, selectors.EVENT_READ)
        child.started(running.pid, time.monotonic())
        self._note(f"{child.name} started, pid {child.pid}")
        return None

    def _handle_deaths(self) -> RunOutcome | None:
        """The learner's end may be the run's."""
        for child, how in self._ended():
            finishing = self._finishing
            if child.leaves_by is not None:
                self._left(child, how)
                continue
            if child.name in self._goal and how.verdict == 0 and finishing:
                child.finished()
                self._done.add(child.name)
                continue
            if finishing and self._processes[child.name].role == RANK:
                child.finished()
                continue
            if how.verdict == TEAM_ENDED and self.topology.here:  # home counts the deaths
                child.goes_with("its team")
            along = child.went_along
            outcome = self._died(child, how)
            if outcome is not None:
                return outcome
            if child.name in self._team and not along:
                self._end_team(child)
        if self._done and self._done == self._goal:
            return RunOutcome("finished", self._why_finished(), 0)
        return None

    # a number of processes that changes

    def adopt(self, topology: Topology) -> None:
        """Start what this topology has and the run has not; end what it has no more, in order, the last ones first."""
        self.topology = topology
        wanted = {one.name: one for one in topology.processes()}
        for name, process in wanted.items():
            if name not in self._processes:
                self._processes[name] = process
                self.children.append(Child(name, topology.limits))
                if not process.spec.command:
                    self._events.has(name)
        for child in reversed(self.children):
            if child.name not in wanted and child.leaves_by is None:
                child.leaves_by = time.monotonic() + topology.limits.stop_s
                child.stop()
                if child.name in self._running:
                    self._running[child.name].signal(signal.SIGTERM)
                else:
                    self._forget(child)

    def unsettled(self) -> list[str]:
        """Children that are still to become ready, or to end."""
        return [child.name for child in self.children if child.phase not in (Phase.READY, Phase.GONE)]

    def _left(self, child: Child, how: Exit) -> None:
        """One that was to end has ended; it may be wanted again by now."""
        self._say(f"{child.name} is not needed any more and has ended: {how}")
        child.ended(how, time.monotonic())
        self._forget(child)
        self.adopt(self.topology)

    def _forget(self, child: Child) -> None:
        self.children.remove(child)
        del self._processes[child.name]

    def _end_team(self, dead: Child) -> None:
        """A rank alone can do nothing, and what the others wait for does not come."""
        for other in self.children:
            if other.name in self._team and other.name in self._running and not other.condemned:
                other.goes_with(dead.name)
                self._running[other.name].kill()

    def _why_finished(self) -> str:
        """Of a run that made its last step the newest line of metrics.jsonl is that step's."""
        if self.topology.here:
            return "the run is over"
        step, goal = self._run.ring.header(HeaderWord.STEP), self.topology.run.max_steps
        if step < goal and run_of_files(RunFiles(self._paths)).idle:
            return (
                f"after {step} of {goal} steps all answers get the best reward seen: nothing is left to learn, or the "
                "policy has collapsed (limits.idle_groups; see errors.jsonl)"
            )
        return "the learner has reached the goal"

    def _ended(self) -> Iterator[tuple[Child, Exit]]:
        """Each child that has ended, and how. What it held goes back to rest before anything else is done."""
        for name, running in list(self._running.items()):
            how = running.ended()
            if how is None:
                continue
            self._selector.unregister(running)
            running.close()
            del self._running[name]
            child = next(one for one in self.children if one.name == name)
            # It may have become ready since the last look; the ring says so until the entry is reaped.
            self._read_table()
            self._see(child)
            if how.killed and not child.condemned:
                self.crashes.killed(child.name, child.restarts + 1)
            self._reap()
            yield child, how

    def _reap(self) -> None:
        """As the keeper does on its next tick; but here a death is known at once, and the keeper may be the dead.

        Not with a fate table cut short: to look beyond its end is death, and the run ends for it anyway.
        """
        if self._fates.fault():
            return
        for text, uids in taken_back(self._run.ring, self._run.ring.reap()):
            self._note(text)
            self._events.warn(text, uids=uids)
        with contextlib.suppress(FateRefused):  # the keeper meets it too, and says so
            self._run.ring.finish_drops()

    def _waits_for_space(self, child: Child, how: Exit) -> None:
        if line := child.no_space(how, time.monotonic()):
            self._warn(line, "error")

    def _died(self, child: Child, how: Exit) -> RunOutcome | None:
        if child.was_ready and how.verdict == NO_SPACE:
            self._waits_for_space(child, how)
            return None
        if read_only := self._run.read_only():
            child.ended(how, time.monotonic())
            return RunOutcome("failed", f"{child.name} ended ({how}): {read_only}", 1)
        hopeless = self._is_hopeless(child, how)
        death = child.ended(how, time.monotonic(), hopeless, self._did(child))
        self._say(death.text)
        awaited = ROLES[self._processes[child.name].role].awaited
        self._events.died(child, death.text, gives_up=death.gives_up and awaited)
        log = self._paths.log(child.name)
        words = how.why or ("" if child.unlogged else last_words(log))
        if not death.gives_up:
            if words:
                self._say(f"  {words} ({log})")
            return None
        if not awaited:
            self._warn(f"{child.name} is not started again, and the run goes on without it: {words or how}", "error")
            return None
        if how.why and hopeless:  # the death and its exit code have been told
            return RunOutcome("failed", f"{child.name}: {how.why}", 1)
        if words and not how.why:
            self._say(f"last lines of {log}:")
            for line in last_lines(log):
                self._say(f"  | {line}")
        elif child.unlogged:
            words = f"it had no log: {child.unlogged}"
        what = "cannot do what was asked" if hopeless else death.why.removeprefix("it ")
        return RunOutcome("failed", f"{child.name} {what}: {how}{f': {words}' if words else ''}", 1)

    def _did(self, child: Child) -> int | None:
        """What grows with a child's own work: steps, dispatches, rounds. A process that finishes samples counts
        them itself; None for one whose work is to be there."""
        process, ring = self._processes[child.name], self._run.ring
        match process.role:
            case "learner" | "rank":
                return ring.header(HeaderWord.STEP)
            case "scheduler":
                return ring.stats().dispatched
            case "validator":
                return self._paths.validation.stat().st_size if self._paths.validation.exists() else 0
            case role if role in (*FOREIGN_ROLES, AGENT):
                # A program that does not map the ring shows only in what the run does.
                return sum(ring.stats().transitions.values()) if process.spec.command else 0
        return None

    def _is_hopeless(self, child: Child, how: Exit) -> bool:
        """A process of busrl's own says so; one that was ready may only have met a bad moment."""
        return how.verdict in (RUN_FAILED, NOT_IMPORTED) or (how.verdict == NEEDS_FIX and not child.was_ready)

    def _signalled(self) -> RunOutcome | None:
        if not self._signals.count:
            return None
        number = self._signals.first
        name = signal.Signals(number).name
        self._desk.signalled(name)
        return RunOutcome("stopped", f"asked to by {name}", 128 + number)

    def _left_alone(self) -> RunOutcome | None:
        """On another host: its relay has found that what is claimed here is nobody's any more."""
        if not self.topology.here or self._run.ring.header(HeaderWord.RUN_STATE) != RunPhase.STOPPING:
            return None
        return RunOutcome("stopped", "this host has no part in the run any more: see errors.jsonl", ALONE)

    def _ledger_damaged(self) -> RunOutcome | None:
        """Before anybody is started again: a scheduler that finds no fates would dispatch samples a second time."""
        if line := self._run.keep_lock():
            self._warn(line, "error")
            if self._run.displaced:
                return RunOutcome("failed", line, 1)
        fault = self._run.moved() or self._fates.look(time.monotonic())
        return self._lost(fault) if fault else None

    def _lost(self, fault: str, before: str = "") -> RunOutcome:
        record_error(self._paths, "launch", "critical", "ledger", fault)
        return RunOutcome("failed", before + fault, 1)

    def _receive(self) -> None:
        for message in self._bus.drain():
            if m.is_from_another(message):
                continue
            if isinstance(message, m.Heartbeat):
                self._desk.heard(message)
            if isinstance(message, m.Control) and is_address(message.sender):
                self._control(message)
            if isinstance(message, m.Hello):
                self._greeted(message)
            lines = self._events.received(message, time.monotonic()) if isinstance(message, m.Error) else []
            for line in (*lines, *self.progress.handle(message, time.monotonic())):
                self._say(line)

    def _control(self, asked: m.Control) -> None:
        """What is asked of the run; one who may not ask is filed as other errors from outside are."""
        answer = self._desk.handle(asked)
        if answer.text == NO_PROOF:
            text = f"CONTROL {asked.verb} of {asked.sender} {answer.text}"
            refused = m.Error(severity="warning", where="control", text=text)
            refused.sender = asked.sender
            for line in self._events.received(refused, time.monotonic()):
                self._say(line)
        if self._desk.at_once:
            self._signals.count += 2
        self._bus.send(answer, asked.sender)

    def _greeted(self, hello: m.Hello) -> None:
        """A process that does not map the ring has no other way to show that it is ready."""
        sender = hello.sender.replace("/", "-")
        for child in self.children:
            foreign = address(child.name) == sender and self._processes[child.name].spec.command
            if foreign and child.became_ready():
                self._note(f"{child.name} (pid {child.pid}) is ready: it sent HELLO")

    def _look(self) -> None:
        now = time.monotonic()
        self._desk.look()
        passed = 0.0 if self._desk.paused else self._fair.passed(now)  # nobody is too slow while nothing moves
        self._read_table()
        self._events.note_entries(self._entries.values())
        for line in self._events.tick(now):
            self._say(line)
        for child in self.children:
            if self._see(child):
                self._note(f"{child.name} (pid {child.pid}) is ready")
            if child.watched and (line := child.held(halted(child.pid), passed)):
                self._warn(line)
            used = cpu_of(child.pid) if child.phase is Phase.STARTING else 0.0
            if why := child.looked(self._entries.get(child.pid), passed, used):
                self._say(why)
                self._running[child.name].kill()
        for child in self.children:
            if child.leaves_by is not None and now > child.leaves_by and child.name in self._running:
                self._say(f"{child.name} did not end within {self.topology.limits.stop_s:g} s of SIGTERM: killed")
                child.leaves_by = math.inf
                self._running[child.name].kill()
        for pid, why in self._foreign.look(self._entries.values(), {one.pid for one in self._running.values()}, passed):
            self._warn(why)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if self._guardian.renew():
            self._note("somebody ended the guardian, which ends what outlives launch; there is another one now")
        if now >= self._bound_at:
            self._bound_at = now + BOUND_EVERY_S
            self._bound_logs()
        pids = [("launch", os.getpid()), *((name, running.pid) for name, running in self._running.items())]
        step, stats = self._run.ring.header(HeaderWord.STEP), self._run.ring.stats()
        self.usage.look(pids, self._entries, step, now)
        self.residence.look(stats.occupancy, stats.transitions, step, now)
        self.progress.run.look(ring_record(self._run.ring), now)
        if self._stall.look(self.progress.run, passed) and (waits := self._waits()):
            self._warn(f"no step for {self._stall.quiet_s:.0f} s, the run stands still: {said(waits)}")

    def _bound_logs(self) -> None:
        for path in (self._paths.errors, *self._paths.logs.glob("*.log")):
            bound(path, self.topology.log.keep)

    def _waits(self) -> list[Link]:
        run, now = self.progress.run, time.monotonic()
        run.restarts, run.deaths = {child.name: child.restarts for child in self.children}, dict(self._events.deaths)
        run.look(self._picture.look(), now)
        return chain(run, now)

    @property
    def _finishing(self) -> bool:
        """Whether the learner has reached the goal."""
        return self._run.ring.header(HeaderWord.RUN_STATE) == RunPhase.FINISHING

    def _read_table(self) -> None:
        found = self._run.ring.processes()
        self._entries = {one.pid: one for one in found if not one.remote}
        self._remote = {one.label for one in found if one.remote}

    def _see(self, child: Child) -> bool:
        """Whether the ring says for the first time that a child is ready. One that does not map it has no entry."""
        entry = self._entries.get(child.pid)
        return entry is not None and entry.state == "ready" and child.became_ready()

    # the end

    def _stop_all(self, outcome: RunOutcome) -> None:
        """STOP on the bus, then SIGTERM stage by stage; a second signal ends the patience."""
        if outcome.kind != "finished":
            self._run.ring.set_header(HeaderWord.RUN_STATE, RunPhase.STOPPING)
        for child in self.children:
            child.stop()
        stop_s = self._run.topology.limits.stop_s
        shutdown, fair, now, next_stop = Shutdown(stop_s), FairClock(STOP_LATE_S, time.monotonic()), 0.0, 0.0
        while self._running and self._signals.count < 2:
            now += fair.passed(time.monotonic())
            if now >= next_stop:
                next_stop = now + STOP_EVERY_S
                self._bus.send(m.Stop(reason=outcome.why, drain_s=stop_s))
            for action in shutdown.step(self._running, now):
                if action.overdue:
                    self._say(action.overdue)
                    self._running[action.name].kill()
                else:
                    self._running[action.name].signal(signal.SIGTERM)
            self._selector.select(STOP_LOOK_S)
            self._signals.clear()
            self._note_deaths()
            self._receive()
        if self._running:
            why = "as asked" if self._desk.at_once else "a second signal"
            self._say(f"{why}: killing {', '.join(self._running)}")

    def _note_deaths(self) -> None:
        for child, how in self._ended():
            death = child.ended(how, time.monotonic())
            if how.code:
                self._say(death.text)
                self._events.died(child, death.text)

    def _kill_all(self) -> None:
        """Nobody outlives this; also the way out of an error of our own."""
        for running in self._running.values():
            running.kill()
        for running in self._running.values():
            running.wait(DYING_S)
            running.ended()
            running.close()
        self._running.clear()
        self._guardian.close()

    def _warn(self, line: str, severity: str = "warning") -> None:
        self._say(line)
        self._events.warn(line, severity)

    def _say(self, line: str) -> None:
        """For the person who watches, and for the log."""
        self._note(line)
        self._display.say(line)

    def _note(self, line: str) -> None:
        """For whoever looks at the log afterwards."""
        with contextlib.suppress(OSError):  # a full disk must not end the run from here
            self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {printable(line)}\n")
