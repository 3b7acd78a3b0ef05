"""Garbage at all doors of a broker: it lives, its memory is bounded, and those who speak well go on talking."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from busrl import curve
from busrl.bus import Endpoint
from busrl.protocol import codec
from busrl.protocol import messages as m
from busrl.protocol.codec import Fault, topic

sys.path.insert(0, str(Path(__file__).parents[1] / "security"))

from fixtures import Broker, free_port, short_dir  # noqa: F401

from tests.fuzz.garbage import Garbage, dial, frame, greeting, shake_hands, speak

PATIENCE_S = 30.0
GROWTH_BYTES = 64 << 20
FRAMES = 2_000


@pytest.fixture
def broker(short_dir: Path, tmp_path: Path) -> Iterator[Broker]:  # noqa: F811
    curve.init(tmp_path / "keys")
    broker = Broker(short_dir, tmp_path / "keys", f"tcp://127.0.0.1:{free_port()}").start()
    yield broker
    broker.kill()


class Talk:
    """Two well-behaved processes; `goes_on` sends a message from one to the other."""

    def __init__(self, broker: Broker) -> None:
        heard = topic(m.Goodbye)
        self.speaker = Endpoint("speaker", *broker.ipc)
        self.listener = Endpoint("listener", *broker.ipc, subscribe=[heard])
        self.count = 0

    def __enter__(self) -> Talk:
        self.goes_on()
        return self

    def __exit__(self, *_: object) -> None:
        self.speaker.close()
        self.listener.close()

    def goes_on(self) -> None:
        for endpoint in (self.listener, self.speaker):  # the listener first: the sender then knows of its subscription
            endpoint.ready(PATIENCE_S)
        self.count += 1
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            # Again and again: the sender's socket may learn of the subscription after its first message.
            self.speaker.send(m.Goodbye(reason=f"number {self.count}"))
            while (got := self.listener.recv(0.5)) is not None:
                if isinstance(got, m.Goodbye) and got.reason == f"number {self.count}":
                    return
        raise AssertionError(f"message {self.count} did not come through in {PATIENCE_S:g} s")


def resident_bytes(broker: Broker) -> int:
    assert broker.process is not None
    return int(Path(f"/proc/{broker.process.pid}/statm").read_text().split()[1]) * 4096


def flood(broker: Broker, connections: int, batches: int, seed: int) -> None:
    """Bad connections at each of the four doors, and batches of frames of peers whose handshake went well."""
    garbage = Garbage(seed)
    doors = [*broker.ipc, *broker.tcp]
    for number in range(connections):
        speak(doors[number % 4], garbage.connection())
    for number in range(batches):
        kind, door = ((b"PUB", broker.ipc[0]), (b"SUB", broker.ipc[1]))[number % 2]
        with contextlib.suppress(OSError), dial(door) as peer:
            shake_hands(peer, kind)
            peer.sendall(garbage.frames(FRAMES))


@pytest.mark.parametrize(
    ("connections", "batches", "rounds"),
    [(100, 3, 2), pytest.param(1_000, 25, 20, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
)
def test_a_broker_outlives_garbage_at_all_its_doors(
    broker: Broker, connections: int, batches: int, rounds: int
) -> None:
    with Talk(broker) as talk:
        flood(broker, connections, batches, seed=0)
        talk.goes_on()
        size = resident_bytes(broker)
        for seed in range(1, rounds + 1):
            flood(broker, connections, batches, seed)
            talk.goes_on()
        broker.beat()
        assert resident_bytes(broker) - size < GROWTH_BYTES
        # One frame in twenty is for a topic with a listener: most were passed on, and refused there.
        assert talk.listener.faults[Fault.MALFORMED] > rounds * batches * FRAMES * 0.05 / 2 * 0.5


def test_the_speaker_of_garbage_is_understood_when_it_speaks_well(broker: Broker) -> None:
    """Else the tests here would only show that a broker ignores a bad handshake."""
    good = codec.encode(m.Goodbye(sender="bare", reason="well said"))
    with Talk(broker) as talk, dial(broker.ipc[0]) as peer:
        shake_hands(peer, b"PUB")
        heard: m.Message | None = None
        while not isinstance(heard, m.Goodbye):
            peer.sendall(frame(topic(m.Goodbye).encode(), 1) + frame(good))
            heard = talk.listener.recv(0.1)
        assert (heard.sender, heard.reason) == ("bare", "well said")


@pytest.mark.parametrize("held", [200, pytest.param(3_000, marks=pytest.mark.slow)])
def test_thousands_of_half_handshakes_that_stay_open_stop_nobody(broker: Broker, held: int) -> None:
    doors, open_ones = [*broker.ipc, *broker.tcp], []
    with Talk(broker) as talk:
        for number in range(held):
            with contextlib.suppress(OSError):
                peer = dial(doors[number % 4])
                open_ones.append(peer)
                peer.sendall(greeting()[: number % 64])
        talk.goes_on()
        with Talk(broker) as late:
            late.goes_on()
        for peer in open_ones:
            peer.close()
        talk.goes_on()
    broker.beat()
    assert len(open_ones) > held * 0.9


@pytest.mark.slow
def test_half_a_handshake_is_cut_off_after_a_while(broker: Broker) -> None:
    with dial(broker.ipc[0]) as peer:
        peer.sendall(greeting()[:20])
        peer.settimeout(PATIENCE_S)
        while data := peer.recv(4096):
            assert data
    broker.beat()


def test_a_stranger_flood_taking_every_descriptor_disturbs_no_connected_process(
    short_dir: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    curve.init(tmp_path / "keys")
    broker = Broker(short_dir, tmp_path / "keys", f"tcp://127.0.0.1:{free_port()}")
    broker.start("prlimit", "--nofile=64:64")
    open_ones: list[socket.socket] = []
    try:
        with Talk(broker) as talk:
            for number in range(160):
                with contextlib.suppress(OSError):
                    open_ones.append(dial(broker.tcp[number % 2]))
            talk.goes_on()
            for peer in open_ones:
                peer.close()
            talk.goes_on()
        broker.beat()
    finally:
        broker.kill()


def test_own_processes_exhausting_descriptors_end_the_broker_and_its_successor_serves(
    short_dir: Path,  # noqa: F811
) -> None:
    broker = Broker(short_dir)
    broker.start("prlimit", "--nofile=64:64")
    open_ones: list[socket.socket] = []
    with Talk(broker) as talk:
        assert broker.process is not None and broker.process.stderr is not None
        for _ in range(160):
            with contextlib.suppress(OSError):
                open_ones.append(dial(broker.ipc[0]))
        assert broker.process.wait(PATIENCE_S) == -signal.SIGABRT
        assert "Too many open files" in broker.process.stderr.read()
        for peer in open_ones:
            peer.close()
        broker.start()
        talk.goes_on()
    broker.kill()


def test_an_endless_multipart_message_is_forgotten_with_its_sender(broker: Broker) -> None:
    part = frame(topic(m.Goodbye).encode(), 1) + frame(bytes(1000), 1) * 1000
    with Talk(broker) as talk:
        size = resident_bytes(broker)
        for _ in range(8):
            with contextlib.suppress(OSError), dial(broker.ipc[0]) as peer:
                shake_hands(peer, b"PUB")
                peer.sendall(part)
            talk.goes_on()
        assert resident_bytes(broker) - size < GROWTH_BYTES
        assert talk.listener.drain() == []
