"""The learner's door for engines: any user of the machine can connect to its port, and few of them cost anything."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from busrl.weights.door import MOST_UNKNOWN, Door, Wire, secret_of

MANY = 4 * MOST_UNKNOWN


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

    floods = [threading.Thread(target=flood) for _ in range(2)]
    for one in floods:
        one.start()
    try:
        wire, heard = None, []
        for _ in range(2000):
            if wire is None:
                wire = Wire.to(door.address, 10)
                wire.send({"secret": secret_of(door.address), "name": "rollout-0"})
            heard += [message for _, message in door.poll(0.01) if message is not None]
            if heard:
                break
        assert heard and heard[0]["name"] == "rollout-0" and secret
        silent(door, MANY)
        wire.send({"still": "here"})
        heard = []
        for _ in range(2000):
            heard += [message for _, message in door.poll(0.01) if message is not None]
            if heard:
                break
        assert heard == [{"still": "here"}]
    finally:
        stop.set()
        for one in floods:
            one.join()
