"""Waiting for the bus and for something else at once, and a round trip that does not wait for its first ping."""

from __future__ import annotations

import os
import threading
import time

from busrl.bus.endpoint import PING_EVERY_S
from busrl.protocol import messages as m

LONG_S = 30.0


def test_a_wait_ends_with_a_message_with_the_other_descriptor_or_with_the_time(endpoint):
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


def test_pauses_between_pings_of_a_round_trip_grow_and_begin_anew_with_the_next(endpoint):
    one = endpoint("one")
    one.forget_echo()
    one._receive = lambda flags: []  # nothing comes back
    pauses, now = [], 0.0
    for _ in range(8):
        one.round_trip(now)
        pauses.append(round(one._ping_due - now, 6))
        now = one._ping_due
    assert pauses == sorted(pauses) and pauses[0] < PING_EVERY_S / 10 and pauses[-1] == PING_EVERY_S
    one.forget_echo()
    one.round_trip(now)
    assert one._ping_due - now < PING_EVERY_S / 10
