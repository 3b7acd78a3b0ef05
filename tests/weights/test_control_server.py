"""The control server of a broadcast: any user of the machine can connect to its port, and few of them cost anything."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from busrl.weights.broadcast.group import MAX_UNIDENTIFIED, ControlConnection, ControlServer, ready

MANY = 4 * MAX_UNIDENTIFIED
PATIENCE_S = 60.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ControlServer]:
    made = ControlServer(tmp_path / "weights.store")
    yield made
    made.close()


def silent(server: ControlServer, count: int) -> list[socket.socket]:
    """Connections that say nothing; the server polls in between, as it does all the time."""
    made = []
    port = int(server.address.partition("/")[0].rpartition(":")[2])
    for _ in range(count):
        one = socket.socket()
        one.setblocking(False)
        one.connect_ex(("127.0.0.1", port))
        end = time.monotonic() + PATIENCE_S
        while not ready([one], 0.0, select.POLLOUT):  # others may fill the queue
            assert time.monotonic() < end, f"no connection within {PATIENCE_S:g} s"
            server.poll(0.01)
        one.setblocking(True)
        made.append(one)
        server.poll(0.01)
    return made


def test_connections_that_say_nothing_take_a_bounded_number_of_descriptors_and_their_owner_is_named(server, caplog):
    before = len(os.listdir("/proc/self/fd"))
    strangers = silent(server, MANY)
    assert len(os.listdir("/proc/self/fd")) - before <= MANY + MAX_UNIDENTIFIED
    assert f"user {os.getuid()}" in caplog.text and caplog.text.count("did not send the secret") <= 2
    for one in strangers:
        one.close()


def test_an_engine_comes_in_and_stays_while_strangers_flood_the_port(server):
    stop = threading.Event()
    address, _, secret = server.address.partition("/")
    port = int(address.rpartition(":")[2])

    def flood() -> None:
        held: list[socket.socket] = []
        while not stop.is_set():
            try:
                held.append(socket.create_connection(("127.0.0.1", port), 1))
            except OSError:
                stop.wait(0.01)
            if len(held) > MANY:
                held.pop(0).close()
        for one in held:
            one.close()

    connections: list[ControlConnection] = []

    def engine() -> None:
        while not connections and not stop.is_set():
            try:
                connection = ControlConnection.to(server.address, 1)
                connection.send({"secret": secret, "name": "rollout-0"})
                connections.append(connection)
            except OSError:
                stop.wait(0.01)

    others = [threading.Thread(target=one) for one in (flood, flood, engine)]
    for one in others:
        one.start()
    try:
        assert heard(server)["name"] == "rollout-0"
        silent(server, MANY)
        connections[0].send({"still": "here"})
        assert heard(server) == {"still": "here"}
    finally:
        stop.set()
        for one in others:
            one.join()


@pytest.mark.parametrize(
    "line", [b"[" * 60_000, b'{"secret": "\\ud800"}', b"7", b"\xff\xfe"], ids=["deep", "surrogate", "number", "bytes"]
)
def test_a_stranger_s_line_ends_its_own_connection_and_nothing_else(server, line):
    (stranger,) = silent(server, 1)
    stranger.sendall(line + b"\n")
    end = time.monotonic() + PATIENCE_S
    while not (said := server.poll(0.01)):
        assert time.monotonic() < end, f"nothing was heard within {PATIENCE_S:g} s"
    assert [message for _, message in said] == [None]
    stranger.close()


def test_a_stranger_that_sends_lines_without_end_is_turned_away_and_not_read_on(server):
    mine, others = socket.socketpair()
    with mine, others:
        mine.setblocking(False)
        sent = 0
        connection = ControlConnection(TcpLike(others), longest=1000)
        with contextlib.suppress(BlockingIOError):
            while True:
                sent += mine.send(b"{}\n" * 20_000)
        assert 0 < len(connection.read()) * 3 <= (1 << 16) + 1000 < sent


class TcpLike:
    """A connected socket that takes options of TCP."""

    def __init__(self, connected: socket.socket) -> None:
        self._connected = connected

    def setsockopt(self, *_: object) -> None: ...

    def __getattr__(self, name: str) -> object:
        return getattr(self._connected, name)


def heard(server: ControlServer) -> dict[str, object]:
    """The first message that comes in."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        for _, message in server.poll(0.01):
            if message is not None:
                return message
    raise AssertionError(f"no engine was heard within {PATIENCE_S:g} s")
