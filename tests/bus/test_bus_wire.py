"""The two ways to pyzmq's sockets: they behave alike, and the compiled one holds no handle longer than it may."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import time

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from busrl import _ring, _wire
from busrl.bus import endpoint as module
from busrl.bus.endpoint import KIND, NOBLOCK, WAIT, PlainWire, open_wire
from busrl.errors import BusClosed
from busrl.protocol import codec
from busrl.protocol import messages as m

MOST, MOST_BYTES = 64, 1 << 18  # of one call, as csrc/python/wire.cpp has it
LONG_S = 30.0
_names = itertools.count()
context = zmq.Context()


class Pair:
    """A PUB and a SUB socket that are connected, and a wire over both."""

    def __init__(self, make) -> None:
        address = f"inproc://wire-{next(_names)}"
        self.pub, self.sub = context.socket(zmq.PUB), context.socket(zmq.SUB)
        for socket in (self.pub, self.sub):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
        self.sub.setsockopt(zmq.SUBSCRIBE, b"")
        self.pub.bind(address)
        self.sub.connect(address)
        self.wire = make(self.pub, self.sub)
        self.sub.setsockopt(zmq.RCVTIMEO, 1000)
        self.pub.setsockopt(zmq.SNDTIMEO, 1000)
        deadline = time.monotonic() + LONG_S
        while not self.wire.receive(NOBLOCK):  # until the subscription has reached the publisher
            assert time.monotonic() < deadline
            self.pub.send_multipart([b"first", b""])
        self.all()

    def all(self) -> list[tuple[bytes, ...]]:
        got: list[tuple[bytes, ...]] = []
        while came := self.wire.receive(NOBLOCK):
            got += came
        return got

    def close(self) -> None:
        self.wire.close()
        self.pub.close()
        self.sub.close()


@pytest.fixture(params=[open_wire, PlainWire], ids=["reached", "plain"])
def pair(request):
    wires = Pair(request.param)
    yield wires
    wires.close()


def told_apart(multipart: list[bytes]) -> list[tuple[bytes, ...]]:
    """What a wire makes of one multipart: its first two frames, each further one, or the only one."""
    return [tuple(multipart[:2]), *((frame,) for frame in multipart[2:])]


@pytest.mark.parametrize("make", [open_wire, PlainWire], ids=["reached", "plain"])
@given(st.lists(st.lists(st.binary(max_size=40), min_size=1, max_size=5), max_size=150))
def test_any_multiparts_come_out_in_order_and_none_shifts_the_next(make, multiparts):
    pair = Pair(make)
    try:
        for multipart in multiparts:
            pair.pub.send_multipart(multipart)
        assert pair.all() == [frames for multipart in multiparts for frames in told_apart(multipart)]
    finally:
        pair.close()


def test_what_is_sent_comes_out_whatever_its_size(pair):
    sent = [(b"TOPIC/", bytes([size & 255]) * size) for size in (0, 1, 29, 30, 33, 34, 1000, 1 << 20)]
    for topic, payload in sent:
        pair.wire.send(topic, payload)
    assert pair.all() == sent


def test_an_empty_socket_gives_nothing_at_once_or_in_time(pair):
    assert pair.wire.receive(NOBLOCK) == []
    pair.sub.setsockopt(zmq.RCVTIMEO, 60)
    begun = time.monotonic()
    assert pair.wire.receive(WAIT) == []
    assert 0.05 < time.monotonic() - begun < LONG_S
    pair.wire.send(b"A/", b"1")
    assert pair.wire.receive(WAIT) == [(b"A/", b"1")]


@pytest.mark.parametrize(("count", "size"), [(1000, 10), (40, 100_000)])
def test_one_call_takes_a_bounded_number_of_messages_and_bytes(pair, count, size):
    for _ in range(count):
        pair.wire.send(b"A/", b"x" * size)
    lists = list(iter(lambda: pair.wire.receive(NOBLOCK), []))
    assert sum(map(len, lists)) == count
    assert max(map(len, lists)) <= min(MOST, MOST_BYTES // size + 1)
    assert isinstance(pair.wire, PlainWire) or max(map(len, lists)) > 1


def test_a_closed_wire_touches_no_socket(pair):
    pair.close()
    wire = pair.wire
    for use in (lambda: wire.send(b"A/", b""), lambda: wire.receive(NOBLOCK), lambda: wire.receive(WAIT)):
        with pytest.raises(zmq.ZMQError) as caught:
            use()
        assert caught.value.errno == zmq.ENOTSOCK
    pair.wire.close()


def test_a_signal_whose_handler_closes_the_sockets_ends_the_wait(pair):
    pair.sub.setsockopt(zmq.RCVTIMEO, int(LONG_S * 1000))
    before = signal.signal(signal.SIGALRM, lambda *_: pair.close())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        begun = time.monotonic()
        with pytest.raises(zmq.ZMQError):
            pair.wire.receive(WAIT)
        assert time.monotonic() - begun < LONG_S
    finally:
        signal.signal(signal.SIGALRM, before)


def test_only_a_signal_whose_handler_raises_ends_the_wait(pair):
    def handler(*_):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    calls: list[int] = []
    pair.sub.setsockopt(zmq.RCVTIMEO, int(LONG_S * 1000))
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.03, 0.03)
        with pytest.raises(KeyboardInterrupt):
            pair.wire.receive(WAIT)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(calls) == 2


def test_the_compiled_wire_refuses_closed_sockets_and_wrong_arguments():
    pair = Pair(open_wire)
    for bad in ((b"A/", "text"), (b"A/",), (b"A/", bytearray(b"x"))):
        with pytest.raises(TypeError):
            pair.wire.send(*bad)
    for bad in ((), ("x",), (7,), (-1,)):
        with pytest.raises(TypeError):
            pair.wire.receive(*bad)
    pair.close()
    with pytest.raises(ValueError, match="no handle"):
        open_wire(pair.pub, pair.sub)
    with pytest.raises(AttributeError):
        open_wire(object(), pair.sub)


def test_the_library_is_the_libzmq_of_pyzmq(tmp_path):
    assert f"libzmq {zmq.zmq_version()}" == KIND
    for path in ("", _ring.__file__, str(tmp_path / "none.so"), module.__file__):
        with pytest.raises(LookupError):
            _wire.use(path)
    assert Pair(open_wire).wire  # a refusal takes nothing away


PLAIN = """
from busrl import _wire
def use(path): raise LookupError(path)
_wire.use = use
from busrl.bus import Endpoint, endpoint
from busrl.protocol.messages import Goodbye
import sys
with Endpoint("one", *sys.argv[1:], subscribe=["GOODBYE/"]) as one:
    one.ready(30)
    for number in range(200):
        one.send(Goodbye(reason=str(number)))
    assert [one.recv(30).reason for _ in range(200)] == [str(number) for number in range(200)]
    print(endpoint.KIND, one.gaps.missed)
"""


def test_a_process_that_can_not_reach_libzmq_uses_the_plain_wire(broker):
    argv = [sys.executable, "-c", PLAIN, broker.frontend, broker.backend]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=LONG_S * 2)
    assert ran.stdout.split() == ["pyzmq", "0"], ran.stderr


@pytest.mark.usefixtures("each_wire")
def test_what_was_fetched_and_not_taken_is_gone_with_the_endpoint(endpoint):
    listener, sender = endpoint("listener", "GOODBYE/"), endpoint("sender")  # who comes later knows who listens
    for _ in range(500):
        sender.send(m.Goodbye())
    assert listener.recv(LONG_S) and listener.recv(LONG_S)
    listener.close()
    for use in (listener.take, listener.drain, lambda: listener.recv(0.1), lambda: listener.send(m.Goodbye())):
        with pytest.raises(BusClosed):
            use()


@pytest.mark.usefixtures("each_wire")
def test_who_is_told_of_a_dropped_message_may_close_the_endpoint(endpoint, broker):
    def close(*_: object) -> None:
        listener.close()

    listener = endpoint("listener", "GOODBYE/", report=lambda _: None, on_reject=close)
    with zmq.Context() as strangers, strangers.socket(zmq.PUB) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(broker.frontend)
        with pytest.raises(BusClosed):
            while True:  # again and again: what is sent before the connection stands is lost
                for payload in [codec.encode(m.Goodbye(sender="stranger", msg_seq=1)), b"\xc1"] * 25:
                    stranger.send_multipart([b"GOODBYE/", payload])
                listener.recv(0.05)
