"""The commands of other hosts at the end of a run: patience, and a second signal that ends it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from busrl.launch.children import spawn
from busrl.launch.placement import ENDING_S, UNHEARD_S, Placed, Placement
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


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_second_signal_kills_the_commands_of_hosts_at_once(tmp_path: Path) -> None:
    placement: Any = object.__new__(Placement)
    placement._paths, said = RunPaths.of(tmp_path), list[str]()
    placement._say = said.append
    deaf = ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done"]
    child = spawn("host-a", deaf, tmp_path / "a.log", os.environ)
    until(lambda: "ready" in (tmp_path / "a.log").read_text())
    placement._hosts = [Placed("a", running=child)]
    placement.end(3600.0, Pressed())
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)
    assert said == ["host a: its command is ended by SIGKILL", "host a: ended (signal SIGKILL)"]


def test_a_command_whose_host_was_heard_and_is_not_any_more_is_ended_and_the_host_started_again(tmp_path: Path) -> None:
    placement: Any = object.__new__(Placement)
    placement._paths, said = RunPaths.of(tmp_path), list[str]()
    placement._warn = lambda text, level: said.append(text)
    deaf = ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done"]
    host = Placed("a", running=spawn("host-a", deaf, tmp_path / "a.log", os.environ))
    placement._hosts, now = [host], 1000.0
    until(lambda: "ready" in (tmp_path / "a.log").read_text())
    for second in range(1000):
        placement.look(now + second, ())
    assert not said, "it may take as long as it needs to start"
    placement.look(now := now + 1000, {"a"})
    placement.look(now := now + UNHEARD_S - 1, ())
    placement.look(now := now + 1, {"a"})
    placement.look(now + UNHEARD_S / 2, ())
    assert not said, "it is back"
    for second in range(int(UNHEARD_S + ENDING_S) + 2):
        placement.look(now + second, ())
    until(lambda: placement.look(now + 2 * UNHEARD_S, ()) or host.running is None)
    silent, killed = said
    assert silent.startswith("host a: nothing is heard of it"), said
    assert killed == "host a ended (signal SIGKILL); again in 1 s"
    assert host.due == now + 2 * UNHEARD_S + 1.0


def test_a_command_that_ends_well_while_the_run_goes_on_is_started_again_and_afterwards_not(tmp_path: Path) -> None:
    placement: Any = object.__new__(Placement)
    placement._paths, said = RunPaths.of(tmp_path), list[str]()
    placement._warn = lambda text, level: said.append(text)
    for over in (False, True):
        host = Placed("a", running=spawn("host-a", ["true"], tmp_path / "a.log", os.environ))
        placement._hosts = [host]
        until(lambda over=over, host=host: placement.look(5.0, (), over) or host.running is None)
        assert (host.over, len(said)) == (over, 1) and "host a ended (exit code 0); again in 1 s" in said
