"""The control server of a broadcast: only this user reaches it, and nothing that arrives there harms it."""

from __future__ import annotations

import contextlib
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from busrl.weights.broadcast import group
from busrl.weights.broadcast.group import ControlConnection, ControlServer

PATIENCE_S = 60.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ControlServer]:
    server = ControlServer(tmp_path / "cast.sock")
    yield server
    server.close()


def received(server: ControlServer) -> list[object]:
    end = time.monotonic() + PATIENCE_S
    while not (came := server.poll(0.01)):
        assert time.monotonic() < end, f"nothing arrived within {PATIENCE_S:g} s"
    return [message for _, message in came]


def test_the_socket_is_private_and_closes_only_with_its_own_server(tmp_path: Path) -> None:
    file = tmp_path / "cast.sock"
    first = ControlServer(file)
    assert stat.S_ISSOCK(file.stat().st_mode) and stat.S_IMODE(file.stat().st_mode) == 0o600
    successor = ControlServer(file)
    first.close()
    ControlConnection.to(file).close()
    successor.close()
    with pytest.raises(FileNotFoundError):
        ControlConnection.to(file)


@pytest.mark.parametrize("line", [b"[" * 60_000, b"7", b"\xff\xfe"], ids=["deep", "number", "bytes"])
def test_a_malformed_line_ends_only_its_own_connection(server: ControlServer, line: bytes) -> None:
    engine, stranger = ControlConnection.to(server.file), ControlConnection.to(server.file)
    stranger.socket.setblocking(True)
    stranger.socket.sendall(line + b"\n")
    assert received(server) == [None]
    engine.send({"still": "here"})
    assert received(server) == [{"still": "here"}]


def test_a_peer_that_sends_lines_without_end_is_read_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "LONGEST_LINE", 1000)
    ours, others = socket.socketpair()
    with ours, others:
        ours.setblocking(False)
        sent = 0
        connection = ControlConnection(others)
        with contextlib.suppress(BlockingIOError):
            while True:
                sent += ours.send(b"{}\n" * 20_000)
        assert 0 < len(connection.read()) * 3 <= (1 << 16) + 1000 < sent


def test_a_line_that_is_too_long_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "LONGEST_LINE", 1000)
    ours, others = socket.socketpair()
    with ours, others:
        ours.sendall(b"x" * 1001)
        with pytest.raises(ConnectionError, match="a line of more than 1000 bytes"):
            ControlConnection(others).read()
