"""The commands of other hosts at the end of a run: patience, and a second signal that ends it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from busrl.launch.children import spawn
from busrl.launch.placement import Placed, Placement
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


def test_a_second_signal_kills_the_commands_of_hosts_at_once(tmp_path: Path) -> None:
    placement: Any = object.__new__(Placement)
    placement._paths, said = RunPaths.of(tmp_path), list[str]()
    placement._say = said.append
    deaf = ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done"]
    child = spawn("host-a", deaf, tmp_path / "a.log", os.environ)
    end = time.monotonic() + 30
    while "ready" not in (tmp_path / "a.log").read_text():
        assert time.monotonic() < end
        time.sleep(0.01)
    placement._hosts = [Placed("a", running=child)]
    placement.end(3600.0, Pressed())
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)
    assert said == ["host a: its command is ended by SIGKILL", "host a: ended (signal SIGKILL)"]
