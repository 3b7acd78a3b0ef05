"""Bytes that are no message: counted, reported once per sender and kind, dropped; the next good one still arrives."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from busrl.protocol import codec
from busrl.protocol import messages as m
from busrl.protocol.codec import ALL, Fault, Rejected, topic

PATIENCE_S = 30.0
HEARD = topic(m.Goodbye)
pack = msgspec.msgpack.encode
ENVELOPE = {"type": "GOODBYE", "v": 1, "sender": "stranger", "msg_seq": 1, "time_ns": 1, "reason": ""}
DEEP = b"\x82\xa4type\xa7GOODBYE\xa1x" + b"\x91" * 100_000 + b"\xc0"
BAD = [
    (b"", "MALFORMED"),
    (b"\xc1", "MALFORMED"),
    (b"\xdf\xff\xff\xff\xff", "MALFORMED"),
    (pack([1, 2, 3]), "MALFORMED"),
    (pack(ENVELOPE)[:-3], "MALFORMED"),
    (pack({**ENVELOPE, "reason": 5}), "MALFORMED"),
    (b"\x82\xa4type\xa7GOODBYE\xa6reason\xa1\xff", "MALFORMED"),
    (DEEP, "MALFORMED"),
    (pack({**ENVELOPE, "type": "FROM_TOMORROW"}), "UNKNOWN_TYPE"),
    (pack({**ENVELOPE, "v": 99}), "WRONG_VERSION"),
    (pack({**ENVELOPE, "reason": "y" * (1 << 20)}), "OVERSIZE"),
]


@pytest.fixture
def stranger(broker):
    """A bare PUB socket: a program that does not use our endpoint."""
    context = zmq.Context()
    socket = context.socket(zmq.PUB)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(broker.frontend)
    yield socket
    context.destroy(linger=0)


def hear_good(listener, stranger) -> m.Goodbye:
    """Send good messages until one comes through (the stranger's connection may be young)."""
    while True:
        stranger.send_multipart([HEARD.encode(), pack({**ENVELOPE, "reason": "good"})])
        if (got := listener.recv(0.05)) is not None:
            return got


@pytest.mark.parametrize(("raw", "counter"), BAD, ids=[f"{name}-{len(raw)}" for raw, name in BAD])
def test_bytes_that_are_no_message_are_counted_and_dropped(endpoint, stranger, raw, counter):
    said: list[str] = []
    listener = endpoint("learner", HEARD, report=said.append)
    hear_good(listener, stranger)
    for _ in range(3):
        stranger.send_multipart([HEARD.encode(), raw])
    assert hear_good(listener, stranger).reason == "good"
    assert listener.faults == {Fault[counter]: 3}
    assert len(said) == 1 and "learner" in said[0]


@pytest.mark.usefixtures("each_wire")
def test_a_multipart_of_another_length_is_counted_as_malformed(endpoint, stranger):
    listener = endpoint("learner", HEARD, report=lambda _: None)
    hear_good(listener, stranger)
    stranger.send_multipart([HEARD.encode()])
    stranger.send_multipart([HEARD.encode(), b"no map", b"more"])
    hear_good(listener, stranger)
    assert listener.faults[Fault.MALFORMED] == 3  # a topic alone, a payload that is none, a frame too many


@pytest.mark.usefixtures("each_wire")
def test_a_frame_too_many_shifts_nothing(endpoint, stranger):
    listener = endpoint("learner", HEARD, report=lambda _: None)
    hear_good(listener, stranger)
    for extra in (HEARD.encode(), b"NEW_TASK/x/", b"", b"\x80"):
        stranger.send_multipart([HEARD.encode(), pack({**ENVELOPE, "reason": "first"}), extra])
        while listener.recv(5).reason != "first":
            pass
        assert hear_good(listener, stranger).reason == "good"


def test_each_sender_is_reported_once_and_named(endpoint, stranger):
    said: list[str] = []
    listener = endpoint("learner", HEARD, report=said.append)
    hear_good(listener, stranger)
    for sender in ("one", "two", "one", "two"):
        stranger.send_multipart([HEARD.encode(), pack({**ENVELOPE, "sender": sender, "reason": 1})])
    hear_good(listener, stranger)
    assert len(said) == 2 and "from one" in said[0] and "from two" in said[1] and "$.reason" in said[0]


@pytest.mark.usefixtures("each_wire")
def test_a_sender_far_over_the_limit_is_cut_off(endpoint, stranger):
    listener = endpoint("learner", HEARD, report=lambda _: None)
    hear_good(listener, stranger)
    stranger.send_multipart([HEARD.encode(), b"x" * (8 << 20)])
    assert hear_good(listener, stranger).reason == "good"


FLOOD = """
import sys, zmq
socket = zmq.Context().socket(zmq.PUB)
socket.connect(sys.argv[1])
for number in range(50_000_000):
    socket.send_multipart([b"GOODBYE/", b"\\xc1" * 20])
    if number == 1000:
        print("flooding", flush=True)
"""


@pytest.mark.usefixtures("each_wire")
def test_a_flood_of_refused_messages_holds_no_caller(broker, endpoint):
    listener = endpoint("learner", HEARD, report=lambda _: None)
    flood = subprocess.Popen([sys.executable, "-c", FLOOD, broker.frontend], stdout=subprocess.PIPE)
    try:
        assert flood.stdout is not None and flood.stdout.readline()
        while not listener.faults[Fault.MALFORMED]:
            listener.recv(0.05)
        for wait in (lambda: listener.recv(0.2), listener.take, listener.drain):
            assert not wait()
        assert flood.poll() is None  # it went on all the while
    finally:
        flood.kill()
        flood.wait(PATIENCE_S)


@given(st.binary(max_size=200))
def test_decoding_any_bytes_gives_a_message_or_a_rejection(raw):
    for kind in ALL:
        try:
            assert isinstance(codec.decode(kind, raw, 1 << 20), kind)
        except Rejected as rejected:
            assert isinstance(rejected.fault, Fault)


@given(st.recursive(st.none() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.floats(), st.lists, max_leaves=8))
def test_any_map_decodes_to_a_message_or_a_rejection(value):
    for field in ("v", "sender", "msg_seq", "time_ns", "reason", "not_a_field"):
        try:
            codec.decode(m.Goodbye, pack({**ENVELOPE, field: value}), 1 << 20)
        except Rejected as rejected:
            assert rejected.fault in (Fault.MALFORMED, Fault.WRONG_VERSION)
