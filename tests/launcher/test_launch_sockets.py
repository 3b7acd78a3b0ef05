"""Listening sockets that launch holds for a process over all its lives."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

from busrl.launcher.processes import Sockets
from busrl.paths import RunPaths
from busrl.topology import ProcessName
from busrl.topology.schema import Process, Tinker


class Topology:
    def __init__(self, port: int) -> None:
        self.tinker = Tinker(port=port)


def sockets(root: Path, port: int = 0) -> Sockets:
    return Sockets(RunPaths.of(root), Topology(port))  # type: ignore[arg-type]


def named(role: str, **more: Any) -> ProcessName:
    return ProcessName(role, role, 0, Process(role, **more))


def port_of(descriptors: tuple[int, ...]) -> int:
    with socket.socket(fileno=os.dup(descriptors[0])) as bound:
        return int(bound.getsockname()[1])


def test_each_life_of_a_process_gets_the_same_socket(tmp_path: Path) -> None:
    held = sockets(tmp_path)
    first = held.of(named("tinker"))
    assert first == held.of(named("tinker"))
    with socket.create_connection(("127.0.0.1", port_of(first))):  # nobody accepts it yet
        pass
    held.close()


def test_another_launch_listens_where_clients_know_it(tmp_path: Path) -> None:
    before = sockets(tmp_path)
    port = port_of(before.of(named("tinker")))
    before.close()
    (tmp_path / "tinker.json").write_text(json.dumps({"port": port}))
    after = sockets(tmp_path)
    assert port_of(after.of(named("tinker"))) == port
    other = sockets(tmp_path)  # the port is taken meanwhile, and any would do
    assert port_of(other.of(named("tinker"))) != port
    after.close()
    other.close()


def test_a_process_finds_out_itself_why_it_cannot_listen(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        held = sockets(tmp_path, taken.getsockname()[1])
        assert held.of(named("tinker")) == ()


def test_a_process_that_listens_nowhere_gets_none(tmp_path: Path) -> None:
    held = sockets(tmp_path)
    assert held.of(named("rollout")) == held.of(named("tinker", command=("door",))) == ()
