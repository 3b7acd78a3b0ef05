"""Waiting for the bus and for something else at once, and a round trip that does not wait for its first ping."""

from __future__ import annotations

import os
import threading
import time

import pytest

from busrl.bus.endpoint import PING_EVERY_S, PING_FIRST_S
from busrl.errors import BusNotReady
from busrl.protocol import messages as m

LONG_S = 30.0


def test_a_wait_ends_by_message_descriptor_or_time(endpoint):
    sender, listener = endpoint("sender"), endpoint("listener", "SCHEDULER_STATE/")
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


def test_pauses_between_pings_grow_and_begin_again_with_the_next_round_trip(endpoint):
    one = endpoint("one")
    one._receive = lambda flags: []  # nothing comes back
    for _ in range(2):
        pauses: list[float] = []
        one.wait = lambda pause_s, pauses=pauses: (pauses.append(pause_s), time.sleep(pause_s))
        with pytest.raises(BusNotReady):
            one.ready(8 * PING_EVERY_S)
        assert pauses[0] <= PING_FIRST_S and PING_EVERY_S / 2 < max(pauses) <= PING_EVERY_S
