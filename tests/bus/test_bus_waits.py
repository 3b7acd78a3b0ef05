"""Waiting for the bus and for something else at once, and a round trip that does not wait for its first ping."""

from __future__ import annotations

import math
import os
import threading
import time

import pytest

from busrl.bus.endpoint import PING_EVERY_S, PING_FIRST_S, Endpoint
from busrl.errors import BusNotReady
from busrl.protocol import messages as m

LONG_S = 30.0


def test_a_wait_ends_by_message_descriptor_or_time(endpoint):
    listener, sender = endpoint("listener", "SCHEDULER_STATE/"), endpoint("sender")
    reader, writer = os.pipe()
    try:
        begun = time.monotonic()
        listener.wait(0.05, reader)
        assert 0.04 < time.monotonic() - begun < LONG_S and listener.take() is None
        other = threading.Timer(0.05, os.write, (writer, b"x"))
        other.start()
        listener.wait(LONG_S, reader)
        assert time.monotonic() - begun < LONG_S and listener.take() is None
        other.join()
        os.read(reader, 1)
        sender.send(m.SchedulerState(values={"a": 1.0}))
        end = time.monotonic() + LONG_S
        while (message := listener.take()) is None:
            assert time.monotonic() < end
            listener.wait(LONG_S, reader)  # may wake up for what is no message
        assert isinstance(message, m.SchedulerState)
    finally:
        os.close(reader)
        os.close(writer)


class NothingComesBack:
    """Message faults of an endpoint that receives nothing."""

    def lets_out(self, topic):
        return True

    def around(self, receive):
        return lambda flags: []

    def due_s(self):
        return math.inf


def test_pauses_between_pings_grow_and_begin_again_with_the_next_round_trip(short_dir):
    addresses = f"ipc://{short_dir}/pub.sock", f"ipc://{short_dir}/sub.sock"
    lonely = Endpoint("lonely", *addresses, message_faults=NothingComesBack())
    for _ in range(2):
        pauses: list[float] = []
        lonely.wait = lambda pause_s, pauses=pauses: (pauses.append(pause_s), time.sleep(pause_s))
        with pytest.raises(BusNotReady):
            lonely.ready(8 * PING_EVERY_S)
        assert pauses[0] <= PING_FIRST_S and PING_EVERY_S / 2 < max(pauses) <= PING_EVERY_S
    lonely.close()
