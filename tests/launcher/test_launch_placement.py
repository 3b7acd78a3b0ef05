"""The commands of other hosts at the end of a run: patience, and a second signal that ends it."""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import Any

import pytest

from busrl.hosts.placement import ENDING_S, UNHEARD_S, Placed, Placement
from busrl.launcher.children import RunningChild, spawn
from busrl.paths import RunPaths


class Pressed:
    """Signals of which the second comes as soon as somebody waits for it."""

    def __init__(self) -> None:
        self.count, (self._reader, self._writer) = 1, os.pipe2(os.O_NONBLOCK)

    def fileno(self) -> int:
        self.count = 2
        os.write(self._writer, b"x")
        return self._reader

    def clear(self) -> None:
        os.read(self._reader, 64)


def deaf(folder: Path) -> RunningChild:
    """A command that does not end by SIGTERM any more."""
    ready = folder / "ready"
    os.mkfifo(ready)
    command = ["sh", "-c", f"trap '' TERM; echo > {ready}; while :; do sleep 1; done"]
    child = spawn("host-a", command, folder / "a.log", os.environ)
    ready.read_bytes()
    return child


def wait_for(child: RunningChild | None) -> None:
    assert child is not None and select.select([child.pidfd], [], [], 30.0)[0]


def placement(folder: Path, said: list[str], host: Placed) -> Placement:
    """Placement of one host that was started already; what it says and warns of goes to `said`."""
    topology: Any = None
    return Placement(topology, RunPaths.of(folder), said.append, lambda text, level: said.append(text), [host])


def test_a_second_signal_kills_the_commands_of_hosts_at_once(tmp_path: Path) -> None:
    child, said = deaf(tmp_path), list[str]()
    placement(tmp_path, said, Placed("a", running=child)).end(3600.0, Pressed())
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)
    assert said == ["host a: its command is ended by SIGKILL", "host a: ended (signal SIGKILL)"]


def test_a_command_whose_host_falls_silent_is_started_again(tmp_path: Path) -> None:
    host, said, now = Placed("a", running=deaf(tmp_path)), list[str](), 1000.0
    placed = placement(tmp_path, said, host)
    for second in range(1000):
        placed.look(now + second, (), False)
    assert not said, "it may take as long as it needs to start"
    placed.look(now := now + 1000, {"a"}, False)
    placed.look(now := now + UNHEARD_S - 1, (), False)
    placed.look(now := now + 1, {"a"}, False)
    placed.look(now + UNHEARD_S / 2, (), False)
    assert not said, "it is back"
    for second in range(int(UNHEARD_S + ENDING_S) + 2):
        placed.look(now + second, (), False)
    wait_for(host.running)
    placed.look(now + 2 * UNHEARD_S, (), False)
    silent, killed = said
    assert silent.startswith("host a: nothing is heard of it"), said
    assert killed == "host a ended (signal SIGKILL); again in 1 s"
    assert host.due == now + 2 * UNHEARD_S + 1.0


def test_a_command_that_ends_well_is_started_again_during_the_run(tmp_path: Path) -> None:
    said = list[str]()
    for over in (False, True):
        host = Placed("a", running=spawn("host-a", ["true"], tmp_path / "a.log", os.environ))
        wait_for(host.running)
        placement(tmp_path, said, host).look(5.0, (), over)
        assert (host.over, len(said)) == (over, 1) and "host a ended (exit code 0); again in 1 s" in said
