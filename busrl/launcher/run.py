"""The loop of `launch`: one run from its first child to its last, and the files that are written at its end.

Talks to the bus (progress, STOP, CONTROL), to the display and to the signals that end a run. `processes.py` starts and
ends the children, `supervisor.py` decides the order of a stop, `control.py` carries out requests. Knows nothing of
samples, groups or weights.

- The run has reached its goal only when the learner has set `run_state` to finishing and ended with 0, and the
  validator, if there is one, has ended with 0 after that.
- One thread does everything, with one wait: for a death, a signal, or the next look.
- The run does not depend on the bus here: with every message lost only the picture is poorer.
- At the end, slots of dead processes are taken back, open.bin and the fates are written and synced, then the ring is
  unlinked. After a kill in between, the next start adopts the ring and removes open.bin.
"""

from __future__ import annotations

import selectors
import shutil
import signal
import time
from collections.abc import Callable, Collection
from typing import Protocol

import numpy as np

from busrl import capabilities
from busrl.bus import Endpoint
from busrl.capabilities import RANK
from busrl.errors import TEAM_ENDED
from busrl.faults import describe, message_faults
from busrl.launcher.children import Signals
from busrl.launcher.control import NO_PROOF, ControlDesk
from busrl.launcher.display import Display
from busrl.launcher.fates import FateWatch, FateWatches
from busrl.launcher.processes import Processes, failed
from busrl.launcher.rundir import OpenRun, remove_runtime_dir, unlink_segments
from busrl.launcher.summary import EventLog, Journal, Progress, ResidenceTimes, RunOutcome, Usage
from busrl.launcher.supervisor import Child, Exit, Shutdown
from busrl.ledger.openbin import OpenSlot, write_open
from busrl.paths import RunPaths
from busrl.protocol import messages as m
from busrl.protocol.codec import is_address, topic
from busrl.ring import UID_NONE, Fates, State
from busrl.states import HeaderWord, RunPhase
from busrl.status.reader import RingLook, ring_record
from busrl.status.runfiles import RunFiles, run_of_files
from busrl.status.waits import Link, StallAlarm, chain, limit_s, sentence_of
from busrl.system.clocks import FairClock
from busrl.system.files import bound
from busrl.topology import Topology

# -- closing -----------------------------------------------------------------------------------------------------------

def close_run(run: OpenRun) -> int:
    """Write open.bin, unlink the shared memory and release the directory. Returns the number of open samples."""
    if run.displaced:
        run.release()
        return 0
    if run.moved() or run.read_only():
        return _abandon(run)
    still_open = sum(map(_closed, run.every))
    remove_runtime_dir(run.paths)
    run.release()
    return still_open


def _closed(run: OpenRun) -> int:
    """Write what is open in the ring of one model, and unlink its shared memory; the number of open samples."""
    still_open = _written_down(run) if not run.topology.frozen else 0
    unlink_segments(run.paths.ring_name)
    shutil.rmtree(run.paths.published, ignore_errors=True)
    return still_open


def _written_down(run: OpenRun) -> int:
    # Mapped again: a table may have been cut short since, and reading beyond its end kills.
    run.fates = Fates(str(run.paths.fates), create=True)
    run.validate_fates = Fates(str(run.paths.validate_fates), create=True)
    run.ring.bind_fates(run.fates, run.validate_fates)
    run.ring.reap()
    run.ring.finish_drops()
    lines = run.ring.lines()
    occupied = np.flatnonzero((lines["state"] != State.FREE) & (lines["uid"] != UID_NONE))
    still_open = [OpenSlot(int(lines["uid"][slot]), int(lines["state"][slot]), int(slot)) for slot in occupied]
    run.fates.sync()
    run.validate_fates.sync()
    write_open(run.paths.open_bin, still_open)
    return len(still_open)


def _abandon(run: OpenRun) -> int:
    """Close a run whose directory was moved or cannot be written: nothing is written there. Without a ring and an
    open.bin the next start, wherever that is, generates again what was open."""
    for each in run.every:
        unlink_segments(each.paths.ring_name)
    remove_runtime_dir(run.paths)
    occupied = sum(count for each in run.every for state, count in each.ring.stats().occupancy.items()
                   if state != "FREE")
    run.release()
    return occupied


# -- the loop ----------------------------------------------------------------------------------------------------------

TICK_S = 0.2
STOP_EVERY_S = 0.5
BOUND_EVERY_S = 5.0  # logs grow on until the next look
STOP_LOOK_S, STOP_LATE_S = 0.05, 0.5  # lateness of a busy machine counts, time for which it was suspended does not
STOOD_STILL_S = 10.0  # the least time without a step that is reported when a run ends otherwise than at its goal
ALONE = 3  # exit code of a host that has lost its run
GOAL = ("learner", "validator", "satellite")
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
    """Make the part that starts the other hosts of the run, where the topology says how (`hosts.start`)."""
    if topology.here or not (topology.hosts.start and topology.host_names):
        return None
    placement: Placement = capabilities.plug("hosts", "placement")(topology, paths, say, warn)
    return placement


def _solved(run: OpenRun) -> str:
    """Words for a model that ended below its goal because nothing is left to learn; empty for another. With its last
    step done, the newest line of its metrics.jsonl is that step's."""
    topology, step = run.topology, run.ring.header(HeaderWord.STEP)
    if step >= topology.run.max_steps or not run_of_files(RunFiles(run.paths)).idle:
        return ""
    whose = f"{topology.tag}: " if topology.models or topology.beside else ""
    return (
        f"{whose}after {step} of {topology.run.max_steps} steps all answers get the best reward seen: nothing is left "
        "to learn, or the policy has collapsed (limits.idle_groups; see errors.jsonl)"
    )


class StandStill:
    """Watch for times in which a run makes no step: how long they are, and which process waits for which."""

    def __init__(self, paths: RunPaths, topology: Topology, progress: Progress, events: EventLog) -> None:
        self._progress, self._events, self._topology = progress, events, topology
        self._alarm, self._picture = StallAlarm(), RingLook(paths, group_size=topology.groups.size)

    def look(self, passed_s: float) -> str:
        """Look, `passed_s` after the last time; a line to show, once for each time that the run stands still."""
        if self._alarm.look(self._progress.run, passed_s) and (waits := self._waits()):
            return f"no step for {self._alarm.quiet_s:.0f} s, the run stands still: {sentence_of(waits)}"
        return ""

    def at_end(self) -> None:
        """Record for the summary that the run stood still when it ended."""
        if self._alarm.quiet_s > limit_s(self._progress.run, STOOD_STILL_S):
            self._progress.ended_still(self._alarm.quiet_s, self._waits())

    def _waits(self) -> list[Link]:
        run, now = self._progress.run, time.monotonic()
        own = (child for child in self._progress.children if not child.name.startswith("rollout/")
               or self._topology.tag_of(child.name) == self._topology.tag)
        run.restarts = {child.name: child.restarts for child in own}
        run.deaths = dict(self._events.deaths)
        run.look(self._picture.look(), now)
        return chain(run, now)

    def close(self) -> None:
        self._picture.close()


class Launch:
    """A run from its first child to its last. `run` gives the outcome; no child is left then."""

    def __init__(self, opened: OpenRun, display: Display, signals: Signals) -> None:
        topology, paths = opened.topology, opened.paths
        self._run, self._paths, self._display, self._signals = opened, paths, display, signals
        names = {process.name: process for process in topology.processes()}
        children = [Child(name, topology.limits) for name in names]
        programs = [name for name, process in names.items() if not process.spec.command]
        self._journal = Journal(paths, display.say, EventLog(paths, children, programs))
        self._fates = FateWatches([
            FateWatch(each.paths.fates, each.paths.validate_fates, each.ring, topology.groups.size)
            for each in opened.trained()
        ])
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals, selectors.EVENT_READ)
        self._processes = Processes(opened, names, children, self._journal, self._fates, self._selector)
        self._names = names
        # Processes that have to end with 0 after the last step for the goal to be reached.
        self._goal = {name for name, process in names.items() if process.role in GOAL}
        self._done: set[str] = set()
        self.usage, self.residence, self.crashes = Usage(), ResidenceTimes(), self._processes.crashes
        state, faults = run_of_files(RunFiles(paths)), describe(topology.faults)
        self.progress = Progress(state, children, time.monotonic(), faults)
        self._stand = StandStill(paths, topology, self.progress, self._journal.events)
        self._bus = Endpoint(
            "launch", paths.frontend, paths.backend, subscribe=[topic(kind) for kind in SUBSCRIBED],
            hwm=topology.bus.hwm, max_bytes=topology.bus.max_message_bytes, report=self._journal.say,
            message_faults=message_faults(topology.faults, "launch", "launch"),
        )
        self._fair = FairClock(TICK_S, time.monotonic())
        self._placement = placement_of(topology, paths, self._journal.say, self._journal.warn)
        self._bound_at = 0.0
        self._desk = ControlDesk(opened, names, self._processes, self._journal.say)

    def run(self) -> RunOutcome:
        """Run until the goal is reached, the run has failed, or a signal or a request ends it."""
        for line in self.progress.faults:
            self._journal.say(f"FAULTS ARE ON: {line}")
        try:
            outcome = self._until_decided()
            self._journal.say(f"ending: {outcome.why}")
            if outcome.kind != "finished":
                self._stand.at_end()
            if not self._run.displaced:  # else the processes of the other launch would obey too
                self._stop_all(outcome)
                if self._placement:
                    self._placement.end(self._run.topology.limits.stop_s, self._signals)
            self.progress.run.look(ring_record(self._run.ring), time.monotonic())
            self._display.show(self.progress)
            return outcome
        finally:
            self._close()

    def _close(self) -> None:
        """Kill what still runs, and close everything."""
        self._processes.kill_all()
        self._bound_logs()
        if self._placement:
            self._placement.kill()
        for line in self._journal.events.tick(time.monotonic(), everything=True):
            self._journal.say(line)
        for part in (self._fates, self._stand, self._bus, self._selector, self._journal):
            part.close()

    # -- while it runs ----------------------------------------------------------------------------------------------

    def _until_decided(self) -> RunOutcome:
        while True:
            outcome = self._desk.outcome or self._signalled() or self._ledger_damaged() or self._processes.start_due()
            outcome = outcome or self._handle_deaths() or self._left_alone()
            if outcome is not None:
                return outcome
            self._receive()
            self._look()
            if self._placement:
                self._placement.look(time.monotonic(), self._processes.table.remote, self._finishing)
            self._display.show(self.progress)
            self._selector.select(max(0.0, min(TICK_S, self._processes.next_start_s())))
            self._signals.clear()

    def _handle_deaths(self) -> RunOutcome | None:
        """Settle each child that has ended; the outcome of the run if the run ends with one of them."""
        for child, how in self._processes.ended():
            if child.leaves_by is not None:
                self._processes.left(child, how)
            elif self._is_done(child, how):
                child.finished()
            elif outcome := self._judged(child, how):
                return outcome
        if self._done and self._done == self._goal:
            return RunOutcome("finished", self._why_finished(), 0)
        return None

    def _is_done(self, child: Child, how: Exit) -> bool:
        """Check whether a child ended because its work is done: one of the goal, or a rank once the learner is done."""
        if not self._run.has_made_steps(child.name):
            return False
        if child.name in self._goal and how.verdict == 0:
            self._done.add(child.name)
            return True
        return self._names[child.name].role == RANK

    def _judged(self, child: Child, how: Exit) -> RunOutcome | None:
        """Judge a death before the work was done. The others of a team end with the child, unless it ended with them.
        """
        if how.verdict == TEAM_ENDED and self._run.topology.here:  # the launch at home counts that death
            child.goes_with("its team")
        went_along = child.went_along
        outcome = self._processes.deaths.judge(child, how)
        if outcome is None and not went_along:
            self._processes.end_team(child)
        return outcome

    def _why_finished(self) -> str:
        """The reason why the run is finished."""
        if self._run.topology.here:
            return "the run is over"
        return "; ".join(filter(None, map(_solved, self._run.trained()))) or "the learner has reached the goal"

    def _signalled(self) -> RunOutcome | None:
        if not self._signals.count:
            return None
        number = self._signals.first
        name = signal.Signals(number).name
        self._desk.signalled(name)
        return RunOutcome("stopped", f"asked to by {name}", 128 + number)

    def _left_alone(self) -> RunOutcome | None:
        """The outcome on another host whose relay has found that the run at home does not count on it any more."""
        if not self._run.topology.here or self._run.ring.header(HeaderWord.RUN_STATE) != RunPhase.STOPPING:
            return None
        return RunOutcome("stopped", "this host has no part in the run any more: see errors.jsonl", ALONE)

    def _ledger_damaged(self) -> RunOutcome | None:
        """The outcome if the ledger is damaged. Looked for before a child is started again: a scheduler that finds no
        fates would dispatch samples a second time."""
        if line := self._run.keep_lock():
            self._journal.warn(line, "error")
            if self._run.displaced:
                return RunOutcome("failed", line, 1)
        fault = self._run.moved() or self._fates.look(time.monotonic())
        return failed(self._paths, fault) if fault else None

    def _receive(self) -> None:
        for message in self._bus.drain():
            if m.is_from_another(message):
                continue
            if isinstance(message, m.Heartbeat):
                self._desk.note_heartbeat(message)
            if isinstance(message, m.Control) and is_address(message.sender):
                self._control(message)
            if isinstance(message, m.Hello):
                self._processes.greeted(message)
            now = time.monotonic()
            lines = self._journal.events.received(message, now) if isinstance(message, m.Error) else []
            for line in (*lines, *self.progress.handle(message, now)):
                self._journal.say(line)

    def _control(self, request: m.Control) -> None:
        """Answer a request. One without proof is recorded like other errors from outside."""
        answer = self._desk.handle(request)
        if answer.text == NO_PROOF:
            text = f"CONTROL {request.verb} of {request.sender} {answer.text}"
            refused = m.Error(severity="warning", where="control", text=text)
            refused.sender = request.sender
            for line in self._journal.events.received(refused, time.monotonic()):
                self._journal.say(line)
        if self._desk.at_once:
            self._signals.count += 2
        self._bus.send(answer, request.sender)

    def _look(self) -> None:
        now = time.monotonic()
        self._desk.look()
        passed_s = 0.0 if self._desk.paused else self._fair.passed(now)  # no process is too slow during a pause
        self._processes.look(now, passed_s)
        if now >= self._bound_at:
            self._bound_at = now + BOUND_EVERY_S
            self._bound_logs()
        step, stats = self._run.ring.header(HeaderWord.STEP), self._run.ring.stats()
        self.usage.look(self._processes.pids(), self._processes.table.entries, step, now)
        self.residence.look(stats.occupancy, stats.transitions, step, now)
        self.progress.run.look(ring_record(self._run.ring), now)
        if line := self._stand.look(passed_s):
            self._journal.warn(line)

    def _bound_logs(self) -> None:
        for path in (self._paths.errors, *self._paths.logs.glob("*.log")):
            bound(path, self._run.topology.log.keep)

    @property
    def _finishing(self) -> bool:
        """True once every learner has reached its goal."""
        return all(each.ring.header(HeaderWord.RUN_STATE) == RunPhase.FINISHING for each in self._run.trained())

    # -- the end ----------------------------------------------------------------------------------------------------

    def _stop_all(self, outcome: RunOutcome) -> None:
        """Publish STOP, then send SIGTERM stage by stage; after a second signal kill what still runs."""
        for each in self._run.every:
            if outcome.kind != "finished" or each.topology.frozen:
                each.ring.set_header(HeaderWord.RUN_STATE, RunPhase.STOPPING)
        self._processes.stop()
        stop_s, running = self._run.topology.limits.stop_s, self._processes.running
        shutdown, fair, now, next_stop = Shutdown(stop_s), FairClock(STOP_LATE_S, time.monotonic()), 0.0, 0.0
        while running and self._signals.count < 2:
            now += fair.passed(time.monotonic())
            if now >= next_stop:
                next_stop = now + STOP_EVERY_S
                self._bus.send(m.Stop(reason=outcome.why, drain_s=stop_s))
            for ending in shutdown.step(running, now):
                self._processes.end(ending)
            self._selector.select(STOP_LOOK_S)
            self._signals.clear()
            self._processes.note_ended()
            self._receive()
        if running:
            why = "as asked" if self._desk.at_once else "a second signal"
            self._journal.say(f"{why}: killing {', '.join(running)}")
