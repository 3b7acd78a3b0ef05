"""Processes of a run on this host over all their lives: started, watched, killed for silence, started again, ended.

Talks to the children (pids, exit codes), to the ring's process table and to the journal of launch. `supervisor.py`
decides about each child, `run.py` what an end means for the run as a whole. Knows nothing of the bus or of samples.

- The slots of a dead process are taken back before anything else is done about its death.
- A new rank never meets an old one: when one of a team ends, all are ended, and none starts before the last is gone.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import selectors
import signal
import socket
import time
from collections.abc import Iterator, Mapping

from busrl.capabilities import FOREIGN_ROLES, IMPLIED_ROLES, RANK, ROLES, SINGLE_ROLES
from busrl.errors import NEEDS_FIX, NO_SPACE, NOT_IMPORTED, RUN_FAILED, SOCKET, FateRefused
from busrl.faults import CrashWatch, crash_environment
from busrl.launcher.children import RunningChild, common_environment, last_lines, last_words, start
from busrl.launcher.fates import FateWatches
from busrl.launcher.forks import Forks, Way
from busrl.launcher.rundir import OpenRun
from busrl.launcher.summary import Journal, RunOutcome, cpu_of
from busrl.launcher.supervisor import NOT_STARTED, Child, Death, Ending, Exit, ForeignProcesses, Phase
from busrl.ledger.errors import record_error
from busrl.paths import RunPaths
from busrl.preflight import machine
from busrl.protocol import messages as m
from busrl.protocol.codec import address
from busrl.ring import Process
from busrl.ring.locks import taken_back
from busrl.states import HeaderWord
from busrl.system import device
from busrl.system.files import read_map
from busrl.system.guardian import Guardian, halted, mark
from busrl.topology import ProcessName, Topology
from busrl.topology.schema import AGENT

DYING_S = 10.0  # after SIGKILL
WAITING_CLIENTS = 1024  # that a socket keeps while its process starts again


def failed(paths: RunPaths, fault: str, before: str = "") -> RunOutcome:
    """Record a fault of the ledger for which the run cannot go on; the run's outcome."""
    record_error(paths, "launch", "critical", "ledger", fault)
    return RunOutcome("failed", before + fault, 1)


def is_hopeless(how: Exit, was_ready: bool) -> bool:
    """Check by the verdict of a process whether its next life would end the same. A missing fix (NEEDS_FIX) counts only
    before it was ready: later a moment's fault may look like one."""
    return how.verdict in (RUN_FAILED, NOT_IMPORTED) or (how.verdict == NEEDS_FIX and not was_ready)


class ProcessTable:
    """The rings' process tables as last read: `entries` of this host by pid, and the labels of `remote` processes. Of a
    process with an entry in several rings the one in that of its own model counts: there it shows its progress."""

    def __init__(self, run: OpenRun) -> None:
        self._run = run
        self.entries: dict[int, Process] = {}
        self.remote: set[str] = set()

    def read(self) -> None:
        table = [entry for each in self._run.every for entry in each.ring.processes()
                 if not self._run.beside or self._run.of_process(entry.label) is each]
        self.entries = {entry.pid: entry for entry in table if not entry.remote}
        self.remote = {entry.label for entry in table if entry.remote}

    def makes_ready(self, child: Child) -> bool:
        """Check whether the ring shows for the first time that a child is ready. A child that does not map the ring has
        no entry."""
        entry = self.entries.get(child.pid)
        return entry is not None and entry.state == "ready" and child.became_ready()


class Deaths:
    """Judge of deaths: a child gets another life, the run goes on without it, or the run ends."""

    def __init__(self, run: OpenRun, names: Mapping[str, ProcessName], journal: Journal) -> None:
        self._run, self._paths, self._names, self._journal = run, run.paths, names, journal

    def judge(self, child: Child, how: Exit) -> RunOutcome | None:
        """Record a death; the outcome of the run if the run ends for it."""
        if child.was_ready and how.verdict == NO_SPACE:
            self.lacks_space(child, how)
            return None
        if read_only := self._run.read_only():
            child.ended(how, time.monotonic())
            return RunOutcome("failed", f"{child.name} ended ({how}): {read_only}", 1)
        hopeless = is_hopeless(how, child.was_ready)
        death = child.ended(how, time.monotonic(), hopeless, self._work_of(child))
        self._journal.say(death.text)
        awaited = ROLES[self._names[child.name].role].awaited
        self._journal.events.died(child, death.text, gives_up=death.gives_up and awaited)
        words = how.why or ("" if child.unlogged else last_words(self._paths.log(child.name)))
        if death.gives_up and awaited:
            return self._given_up(child, how, death, words, hopeless)
        if death.gives_up:
            text = f"{child.name} is not started again, and the run goes on without it: {words or how}"
            self._journal.warn(text, "error")
        elif words:
            self._journal.say(f"  {words} ({self._paths.log(child.name)})")
        return None

    def lacks_space(self, child: Child, how: Exit) -> None:
        """Have a child started again until there is space on the disk."""
        if line := child.no_space(how, time.monotonic()):
            self._journal.warn(line, "error")

    def _given_up(self, child: Child, how: Exit, death: Death, words: str, hopeless: bool) -> RunOutcome:
        """Fail the run with this child; print the last lines of its log if its verdict has no reason."""
        if how.why and hopeless:  # the journal has the death and its exit code
            return RunOutcome("failed", f"{child.name}: {how.why}", 1)
        log = self._paths.log(child.name)
        if words and not how.why:
            self._journal.say(f"last lines of {log}:")
            for line in last_lines(log):
                self._journal.say(f"  | {line}")
        elif child.unlogged:
            words = f"it had no log: {child.unlogged}"
        what = "cannot do what was asked" if hopeless else death.why.removeprefix("it ")
        return RunOutcome("failed", f"{child.name} {what}: {how}{f': {words}' if words else ''}", 1)

    def _work_of(self, child: Child) -> int | None:
        """A number that grows with a child's own work: steps, dispatches, rounds; 0 for a role whose samples the ring
        counts, None for one whose work is to be there."""
        process, ring = self._names[child.name], self._run.of_process(child.name).ring
        match process.role:
            case "learner" | "rank":
                return sum(each.ring.header(HeaderWord.STEP) for each in self._run.of_models(child.name))
            case "scheduler":
                return sum(each.ring.stats().dispatched for each in self._run.trained())
            case "validator":
                return self._paths.validation.stat().st_size if self._paths.validation.exists() else 0
            case role if role in (*FOREIGN_ROLES, AGENT):
                # The work of a program that does not map the ring shows only in what the run does.
                return sum(ring.stats().transitions.values()) if process.spec.command else 0
        return None


class Sockets:
    """Listening sockets that outlive the processes they are for: a client that comes while one starts again waits."""

    def __init__(self, paths: RunPaths, topology: Topology) -> None:
        self._paths, self._topology = paths, topology
        self._bound: dict[str, socket.socket] = {}

    def of(self, process: ProcessName) -> tuple[int, ...]:
        """The descriptor of the process's socket; none where it has none, or it could not be bound: the process tries
        itself then, and says what is wrong."""
        table = ROLES[process.role].listens
        if not table or process.spec.command:
            return ()
        if process.name not in self._bound:
            settings = getattr(self._topology, table)
            told = read_map(self._paths.root / f"{table}.json").get("port", 0)
            for port in (settings.port,) if settings.port else (told, 0):  # a port that clients know comes first
                with contextlib.suppress(OSError):
                    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
                    bound = socket.create_server((settings.host, port), family=family, backlog=WAITING_CLIENTS)
                    self._bound[process.name] = bound
                    break
        bound_socket = self._bound.get(process.name)
        return () if bound_socket is None else (bound_socket.fileno(),)

    def close(self) -> None:
        """Let go of all: a client that comes when the process has ended is refused."""
        while self._bound:
            self._bound.popitem()[1].close()


class Processes:
    """All children of one launch. `names` has each process of the topology in force by its name, `children` their
    lives. Both change in place when the number of processes changes."""

    def __init__(
        self, run: OpenRun, names: dict[str, ProcessName], children: list[Child], journal: Journal, fates: FateWatches,
        selector: selectors.BaseSelector,
    ) -> None:
        self._run, self._paths, self._journal, self._fates, self._selector = run, run.paths, journal, fates, selector
        self._names, self.children = names, children
        self.table, self.deaths = ProcessTable(run), Deaths(run, names, journal)
        self.crashes = CrashWatch(run.topology.faults)
        self.running: dict[str, RunningChild] = {}
        ranks = {name for name, process in names.items() if process.role == RANK}
        self._team = ranks | {"learner"} if ranks else ranks  # when one of them ends, all start again
        singles = {*IMPLIED_ROLES, *SINGLE_ROLES} & names.keys()
        self._foreign = ForeignProcesses(singles, run.topology.limits)
        environment = common_environment(1, run.paths, (run.topology.serve.host,))
        self._forks = Forks(run.paths, run.topology, environment, selector, journal)
        self._sockets = Sockets(run.paths, run.topology)
        self._mark = mark(run.paths.key, os.getpid())
        self._guardian = Guardian(self._mark)

    # -- starting ---------------------------------------------------------------------------------------------------

    def start_due(self) -> RunOutcome | None:
        """Start each child whose pause is over; the outcome of the run if one can never be started."""
        now = time.monotonic()
        self._forks.look([self._names[child.name] for child in self.children if child.is_due(now)])
        due = (child for child in self.children if child.is_due(now) and not self._awaits_another(child))
        return next(filter(None, map(self._start, due)), None)

    def next_start_s(self) -> float:
        """Seconds until the next child is to be started; inf if none is before another process has changed."""
        waiting = (child for child in self.children if child.phase is Phase.BACKOFF and not self._awaits_another(child))
        return min((child.due - time.monotonic() for child in waiting), default=math.inf)

    def _awaits_another(self, child: Child) -> bool:
        """Check whether the template is not yet ready for the child, or another process of its team is still to end."""
        if self._forks.way_of(self._names[child.name]) is Way.WAITS:
            return True
        return child.name in self._team and any(
            other.went_along and other.name in self.running for other in self.children
        )

    def _start(self, child: Child) -> RunOutcome | None:
        """Start a child; the outcome of the run if it can never be started."""
        for line in self._run.restore():
            self._journal.say(line)
        if gone := self._run.ring_gone():
            return failed(self._paths, gone, f"{child.name} cannot be started: ")
        try:
            running = self._spawned(child)
        except OSError as error:
            child.started(0, time.monotonic())
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self.deaths.lacks_space(child, Exit(NO_SPACE, str(error)))
                return None
            return self.deaths.judge(child, Exit(NOT_STARTED, f"it could not be started: {error}"))
        child.unlogged = running.unlogged
        if child.unlogged:
            self._journal.say(f"{child.name} (pid {running.pid}) has no log: {child.unlogged}")
        self.running[child.name] = running
        self._selector.register(running, selectors.EVENT_READ)
        child.started(running.pid, time.monotonic())
        self._journal.note(f"{child.name} started, pid {child.pid}")
        return None

    def _spawned(self, child: Child) -> RunningChild:
        """Start the child's process on its devices and cores, under the guardian."""
        process, topology = self._names[child.name], self._run.topology
        crash = crash_environment(topology.faults, child.name, child.restarts + 1)
        variables = {**os.environ, **process.spec.env}
        devices = device.environment(topology.device_of(child.name), process.devices, variables)
        cores = machine.cores_of(topology, process.spec, machine.cores())
        sign = f"{self._mark}{child.name}/{child.restarts}/"
        sockets = self._sockets.of(process)
        own = {**devices, **crash, **({SOCKET: str(sockets[0])} if sockets else {})}
        running = start(
            process, self._paths, (self._run.lock.fileno(), *sockets), own, cores, sign, (topology.serve.host,),
            self._forks,
        )
        running.on_end = self._guardian.let_go
        self._guardian.hold(running.pid)
        return running

    # -- a number of processes that changes -------------------------------------------------------------------------

    def adopt(self, topology: Topology) -> None:
        """Add the processes that only this topology has; end those that it lacks, in order and the last ones first."""
        wanted = {process.name: process for process in topology.processes()}
        for name, process in wanted.items():
            if name not in self._names:
                self._names[name] = process
                self.children.append(Child(name, topology.limits))
                if not process.spec.command:
                    self._journal.events.has(name)
        for child in reversed(self.children):
            if child.name not in wanted and child.leaves_by is None:
                child.leaves_by = time.monotonic() + topology.limits.stop_s
                child.stop()
                if child.name in self.running:
                    self.running[child.name].signal(signal.SIGTERM)
                else:
                    self._forget(child)

    def unsettled(self) -> list[str]:
        """Children that are still to become ready, or to end."""
        return [child.name for child in self.children if child.phase not in (Phase.READY, Phase.GONE)]

    def left(self, child: Child, how: Exit) -> None:
        """Record the end of a child that was to end; the topology in force may have it again by now."""
        self._journal.say(f"{child.name} is not needed any more and has ended: {how}")
        child.ended(how, time.monotonic())
        self._forget(child)
        self.adopt(self._run.topology)

    def _forget(self, child: Child) -> None:
        self.children.remove(child)
        del self._names[child.name]

    # -- deaths -----------------------------------------------------------------------------------------------------

    def ended(self) -> Iterator[tuple[Child, Exit]]:
        """Yield each child that has ended, and how."""
        for name, running in list(self.running.items()):
            how = running.ended()
            if how is None:
                continue
            self._selector.unregister(running)
            running.close()
            del self.running[name]
            child = next(child for child in self.children if child.name == name)
            # It may have become ready since the last look: its entry shows that until it is reaped.
            self.table.read()
            self.table.makes_ready(child)
            if how.killed and not child.condemned:
                self.crashes.killed(child.name, child.restarts + 1)
            self._reap()
            yield child, how

    def _reap(self) -> None:
        """Take back the slots of dead processes. The keeper does so on its next tick, but launch sees a death at once,
        and the dead process may be the keeper.

        Nothing is done while a fate table is cut short: a look beyond its end kills, and the run ends for it anyway.
        """
        if self._fates.fault():
            return
        for each in reversed(self._run.every):  # the lead's last: who claims a lead side takes those that wait then
            for text, uids in taken_back(each.ring, each.ring.reap()):
                self._journal.note(text)
                self._journal.events.warn(text, uids=uids)
            if not each.topology.frozen:
                with contextlib.suppress(FateRefused):  # the keeper meets it too, and reports it
                    each.ring.finish_drops()

    def end_team(self, dead: Child) -> None:
        """Kill the others of a dead child's team: they would wait for it in vain."""
        if dead.name not in self._team:
            return
        for other in self.children:
            if other.name in self._team and other.name in self.running and not other.condemned:
                other.goes_with(dead.name)
                self.running[other.name].kill()

    # -- looking ----------------------------------------------------------------------------------------------------

    def look(self, now: float, passed_s: float) -> None:
        """Read the ring's table, `passed_s` after the last time; kill a process that is silent, or does not leave."""
        self.table.read()
        self._journal.events.note_entries(self.table.entries.values())
        for line in self._journal.events.tick(now):
            self._journal.say(line)
        for child in self.children:
            self._look_at(child, passed_s)
        for child in self.children:
            if child.leaves_by is not None and now > child.leaves_by and child.name in self.running:
                stop_s = self._run.topology.limits.stop_s
                self._journal.say(f"{child.name} did not end within {stop_s:g} s of SIGTERM: killed")
                child.leaves_by = math.inf
                self.running[child.name].kill()
        ours = {running.pid for running in self.running.values()}
        for pid, why in self._foreign.look(self.table.entries.values(), ours, passed_s):
            self._journal.warn(why)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if self._guardian.renew():
            self._journal.note("somebody ended the guardian, which ends what outlives launch; there is another one now")

    def _look_at(self, child: Child, passed_s: float) -> None:
        if self.table.makes_ready(child):
            self._journal.note(f"{child.name} (pid {child.pid}) is ready")
        if child.watched and (line := child.held(halted(child.pid), passed_s)):
            self._journal.warn(line)
        used_s = cpu_of(child.pid) if child.phase is Phase.STARTING else 0.0
        if why := child.looked(self.table.entries.get(child.pid), passed_s, used_s):
            self._journal.say(why)
            self.running[child.name].kill()

    def greeted(self, hello: m.Hello) -> None:
        """Take a HELLO as the sign that a process is ready, if it does not map the ring."""
        sender = hello.sender.replace("/", "-")
        for child in self.children:
            foreign = address(child.name) == sender and self._names[child.name].spec.command
            if foreign and child.became_ready():
                self._journal.note(f"{child.name} (pid {child.pid}) is ready: it sent HELLO")

    def pids(self) -> list[tuple[str, int]]:
        """Name and pid of launch, of its template, and of each living child."""
        template = [("template", self._forks.pid)] if self._forks.pid else []
        children = [(name, running.pid) for name, running in self.running.items()]
        return [("launch", os.getpid()), *template, *children]

    # -- the end ----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Start no child again from here on."""
        self._forks.close()
        self._sockets.close()
        for child in self.children:
            child.stop()

    def end(self, ending: Ending) -> None:
        """Send SIGTERM to a child, or kill it if that was long ago."""
        if ending.overdue:
            self._journal.say(ending.overdue)
            self.running[ending.name].kill()
        else:
            self.running[ending.name].signal(signal.SIGTERM)

    def note_ended(self) -> None:
        """Record deaths while the run ends: only those with another exit code than 0 are reported."""
        for child, how in self.ended():
            death = child.ended(how, time.monotonic())
            if how.code:
                self._journal.say(death.text)
                self._journal.events.died(child, death.text)

    def kill_all(self) -> None:
        """Kill every child and wait for its end; also the way out of an error of launch itself."""
        for running in self.running.values():
            running.kill()
        for running in self.running.values():
            running.wait(DYING_S)
            running.ended()
            running.close()
        self.running.clear()
        self._forks.close()
        self._sockets.close()
        self._guardian.close()
