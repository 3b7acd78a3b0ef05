"""The learner's door for engines: any user of the machine can connect to its port, and few of them cost anything."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from busrl.weights.door import MOST_UNKNOWN, Door, Wire

MANY = 4 * MOST_UNKNOWN
PATIENCE_S = 60.0


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    made = Door(tmp_path / "weights.store")
    yield made
    made.close()


def silent(door: Door, count: int) -> list[socket.socket]:
    """Connections that say nothing; the door looks in between, as it does all the time."""
    made = []
    for _ in range(count):
        one = socket.create_connection(("127.0.0.1", int(door.address.partition("/")[0].rpartition(":")[2])), 10)
        made.append(one)
        door.poll(0.01)
    return made


def test_connections_that_say_nothing_take_a_bounded_number_of_descriptors_and_their_owner_is_named(door, caplog):
    before = len(os.listdir("/proc/self/fd"))
    strangers = silent(door, MANY)
    assert len(os.listdir("/proc/self/fd")) - before <= MANY + MOST_UNKNOWN
    assert f"user {os.getuid()}" in caplog.text and caplog.text.count("said nothing") <= 2
    for one in strangers:
        one.close()


def test_an_engine_comes_in_and_stays_while_strangers_flood_the_port(door):
    stop = threading.Event()
    address, _, secret = door.address.partition("/")
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

    wires: list[Wire] = []

    def engine() -> None:
        while not wires and not stop.is_set():
            try:
                wire = Wire.to(door.address, 1)
                wire.send({"secret": secret, "name": "rollout-0"})
                wires.append(wire)
            except OSError:
                stop.wait(0.01)

    others = [threading.Thread(target=one) for one in (flood, flood, engine)]
    for one in others:
        one.start()
    try:
        assert heard(door)["name"] == "rollout-0"
        silent(door, MANY)
        wires[0].send({"still": "here"})
        assert heard(door) == {"still": "here"}
    finally:
        stop.set()
        for one in others:
            one.join()


def heard(door: Door) -> dict[str, object]:
    """The first message that comes in."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        for _, message in door.poll(0.01):
            if message is not None:
                return message
    raise AssertionError(f"no engine was heard within {PATIENCE_S:g} s")
