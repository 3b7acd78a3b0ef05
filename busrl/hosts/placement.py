"""Starts the other hosts of a run from launch: one command per host (ssh, srun, kubectl exec) runs `busrl host -`
there.

Talks to the kernel, to the standard input of the commands and to their logs; `run.py` calls it with every look of its
own. Knows nothing of the processes on a host: the exit code says what to do (docs/hosts.md).

- The keys of a host travel over the standard input of its command alone: not in arguments, not in an environment.
- A command is ended for silence only where its host has asked home before, and then asked nothing for `UNHEARD_S`. A
  host ends by itself when home does not answer, but a command may outlive its node (srun does). The first start of a
  host may take any time.
- A command that ends is started again, with a growing pause. Not so after exit code 2 (mend something), if busrl wrote
  a line into the log: a shell or ssh may end with 2 for reasons of their own. Nor after 0, if the run is over: a
  command may end with 0 where its node was lost (srun does).
- At the end of a run hosts learn of it from the relay: a command has time to end by itself before it is ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from busrl.errors import NEEDS_FIX, BadKeys
from busrl.hosts.membership import Invitation
from busrl.launcher.children import RunningChild, Signals, last_words, lines_of_life, spawn
from busrl.launcher.supervisor import Exit
from busrl.paths import RunPaths
from busrl.topology import Topology

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
UNHEARD_S = 60.0
ENDING_S = 5.0  # after SIGTERM


@dataclass
class Placed:
    """A host and its command. States: waiting (until `due`) -> running -> waiting, or over."""

    name: str
    due: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    begun: float = 0.0
    seen: float = 0.0  # when home last listed it, since this start
    ended_at: float = 0.0  # when its command got SIGTERM, for silence
    running: RunningChild | None = None
    over: bool = False

    def ended(self) -> Exit | None:
        """The exit of its command; None while it runs, and after the first call that returned it."""
        how = self.running.ended() if self.running is not None else None
        if how is not None and self.running is not None:
            self.running.close()
            self.running = None
        return how


class Placement:
    """The hosts of a run that launch starts. `say` shows a line; `warn` files it in errors.jsonl too. `hosts` None: all
    of the topology."""

    def __init__(
        self, topology: Topology, paths: RunPaths, say: Callable[[str], None], warn: Callable[[str, str], None],
        hosts: Sequence[Placed] | None = None,
    ) -> None:
        self._topology, self._paths, self._say, self._warn = topology, paths, say, warn
        self._hosts = [Placed(name) for name in topology.host_names] if hosts is None else list(hosts)

    def look(self, now: float, seen: Collection[str], run_is_over: bool) -> None:
        """Start hosts that are due; handle those that have ended, or are silent: not in `seen`, the hosts at home."""
        for host in self._hosts:
            if host.running is not None:
                host.seen = now if host.name in seen else host.seen
                self._see(host, host.running, now, run_is_over)
            elif not host.over and now >= host.due:
                self._start(host, now)

    def _start(self, host: Placed, now: float) -> None:
        command = [part.replace("{host}", host.name) for part in self._topology.hosts.start]
        try:
            line = Invitation.by_home(self._topology, host.name).line
            host.running = spawn(f"host-{host.name}", command, self._log(host), os.environ, stdin=_pipe_of(line))
        except (OSError, BadKeys) as problem:
            self._again(host, now, f"cannot be started: {problem}")
            return
        host.begun, host.seen, host.ended_at = now, 0.0, 0.0
        self._say(f"host {host.name}: started (pid {host.running.pid}): {' '.join(command)}")

    def _see(self, host: Placed, command: RunningChild, now: float, run_is_over: bool) -> None:
        how = host.ended()
        if how is None:
            self._end_silent(host, command, now)
            return
        if now - host.begun > LONGEST_PAUSE_S:
            host.pause_s = FIRST_PAUSE_S
        words = last_words(self._log(host))
        by_busrl = any(line.startswith("busrl") for line in lines_of_life(self._log(host)))
        if how.code == NEEDS_FIX and by_busrl:
            host.over = True
            self._warn(f"host {host.name} is not started again: {words or how}", "error")
        elif how.code == 0 and run_is_over:
            host.over = True
        else:
            self._again(host, now, f"ended ({how}){f': {words}' if words else ''}")

    def _end_silent(self, host: Placed, command: RunningChild, now: float) -> None:
        if not host.seen or now - host.seen < UNHEARD_S:
            host.ended_at = 0.0
        elif not host.ended_at:
            host.ended_at = now
            self._warn(f"host {host.name}: nothing is heard of it for {UNHEARD_S:g} s: its command is ended", "warning")
            command.signal(signal.SIGTERM)
        elif now - host.ended_at > ENDING_S:
            command.kill()

    def _again(self, host: Placed, now: float, why: str) -> None:
        self._warn(f"host {host.name} {why}; again in {host.pause_s:g} s", "warning")
        host.due, host.pause_s = now + host.pause_s, min(2 * host.pause_s, LONGEST_PAUSE_S)

    def _log(self, host: Placed) -> Path:
        return self._paths.log(f"host-{host.name}")

    def end(self, patience_s: float, signals: Signals) -> None:
        """Wait for `patience_s` until all commands have ended, then end the rest. A second signal ends the waiting."""
        for number, wait_s in ((0, patience_s), (signal.SIGTERM, ENDING_S)):
            if signals.count < 2:
                self._wait(number, wait_s, signals)
        self._wait(signal.SIGKILL, ENDING_S)
        for name, command in self._commands().items():
            self._say(f"host {name}: its command (pid {command.pid}) does not end")

    def _commands(self) -> dict[str, RunningChild]:
        """The commands that run, by host."""
        return {host.name: host.running for host in self._hosts if host.running is not None}

    def _wait(self, number: int, wait_s: float, signals: Signals | None = None) -> None:
        """Send this signal (0: none) and wait until all have ended, or launch has got a second one of `signals`."""
        for name, command in self._commands().items() if number else ():
            self._say(f"host {name}: its command is ended by {signal.Signals(number).name}")
            command.signal(number)
        end = time.monotonic() + wait_s
        while True:
            for host in self._hosts:
                if (how := host.ended()) is not None:
                    self._say(f"host {host.name}: ended ({how})")
            left, seconds = self._commands().values(), max(0.0, end - time.monotonic())
            if not left or not seconds or (signals and signals.count > 1):
                return
            fds = [command.pidfd for command in left] + ([signals.fileno()] if signals else [])
            select.select(fds, [], [], seconds)
            if signals is not None:
                signals.clear()

    def kill(self) -> None:
        """Kill all commands, after an error of launch itself: none outlives it. Hosts find out by its silence."""
        for command in self._commands().values():
            command.kill()
        self._wait(0, ENDING_S)


def _pipe_of(data: bytes) -> int:
    """The reading end of a pipe that holds all of `data`, which is less than a pipe holds."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    with contextlib.closing(os.fdopen(writer, "wb", buffering=0)) as file:
        file.write(data)
    return reader
