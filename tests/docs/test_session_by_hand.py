"""The session of docs/messages.md, played from the page's own bytes on plain Unix sockets against a real broker.

On the worker's side nothing of busrl and no ZeroMQ: what the page says is all that is used.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from busrl.protocol import codec
from busrl.protocol.codec import kind_of

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "messages.md").read_text()
SERVE = """
import signal, sys
from busrl.bus.broker import run_broker, StopRequest
from busrl.ring import OfdLock
stop = StopRequest()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
folder = sys.argv[1]
run_broker(f"ipc://{folder}/pub.sock", f"ipc://{folder}/sub.sock", OfdLock(f"{folder}/bus.lock"), stop,
           on_ready=lambda: print("ready", flush=True))
"""
PATIENCE_S = 30.0
COMMAND, LONG = 4, 2


def lines() -> list[tuple[str, str, bytes]]:
    """(socket, direction, bytes) of every line of the page's session."""
    block = PAGE.split("<!-- generated: session -->")[1].split("```")[1]
    fields = [line.split(";")[0].split() for line in block.splitlines()]
    return [(words[0], words[1], bytes.fromhex("".join(words[2:]))) for words in fields if words]


def steps() -> list[tuple[str, str, bytes]]:
    """Lines that go one way on one socket, joined."""
    joined: list[tuple[str, str, bytes]] = []
    for name, arrow, raw in lines():
        if joined and joined[-1][:2] == (name, arrow):
            joined[-1] = (name, arrow, joined[-1][2] + raw)
        else:
            joined.append((name, arrow, raw))
    return joined


class Peer:
    """One plain socket; answers ZMTP PINGs and leaves out what the page says is no part of the session."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(str(path))
        self.greeted = False

    def exactly(self, size: int) -> bytes:
        got = b""
        while len(got) < size:
            piece = self.socket.recv(size - len(got))
            assert piece, f"the broker closed the connection after {got.hex(' ')}"
            got += piece
        return got

    def frame(self) -> bytes:
        head = self.exactly(2)
        if head[0] & LONG:
            head += self.exactly(7)
        return head + self.exactly(int.from_bytes(head[1:], "big"))

    def next(self) -> bytes:
        """The next frame, PINGs of the transport answered."""
        while (frame := self.frame())[0] == COMMAND and frame[2:7] == b"\x04PING":
            self.socket.sendall(bytes([COMMAND, len(frame) - 4]) + b"\x04PONG" + frame[9:])
        return frame

    def take(self, size: int) -> bytes:
        """The next `size` bytes that belong to the session."""
        got = b""
        if not self.greeted:
            self.greeted, got = True, self.exactly(64)
        while len(got) < size:
            frame = self.next()
            got += b"" if is_wish(frame) else frame
        return got

    def until_wanted(self, prefixes: set[bytes]) -> None:
        """Wait until the broker has said that somebody wants all of these."""
        while prefixes:
            frame = self.next()
            prefixes = prefixes - ({frame[3:]} if is_wish(frame) else set())


def is_wish(frame: bytes) -> bool:
    return frame[0] == 0 and frame[2:3] == b"\x01"


@pytest.fixture
def folder() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="busrl-session-"))
    broker = subprocess.Popen([sys.executable, "-c", SERVE, str(place)], stdout=subprocess.PIPE, text=True)
    try:
        assert broker.stdout is not None and broker.stdout.readline() == "ready\n"
        yield place
    finally:
        broker.terminate()
        broker.wait(PATIENCE_S)
        shutil.rmtree(place)


def frames(raw: bytes) -> list[bytes]:
    """The bodies of message frames."""
    bodies, at = [], 0
    while at < len(raw):
        head = 9 if raw[at] & LONG else 2
        size = int.from_bytes(raw[at + 1 : at + head], "big")
        bodies.append(raw[at + head : at + head + size])
        at += head + size
    return bodies


class Others:
    """Everybody else on the bus: hears all, and publishes what the page says that the worker receives."""

    def __init__(self, folder: Path) -> None:
        self.context = zmq.Context()
        self.says, self.hears = self.context.socket(zmq.XPUB), self.context.socket(zmq.SUB)
        self.says.connect(f"ipc://{folder}/pub.sock")
        self.hears.connect(f"ipc://{folder}/sub.sock")
        self.hears.subscribe(b"")
        self.wishes: set[bytes] = set()

    def say(self, target: bytes, body: bytes) -> None:
        """Publish once the broker has told that somebody wants the topic: earlier it would be dropped."""
        while target not in self.wishes:
            assert self.says.poll(PATIENCE_S * 1000), f"nobody wants {target!r}"
            self.wishes.add(self.says.recv()[1:])
        self.says.send_multipart([target, body])

    def heard_until(self, last: bytes) -> list[bytes]:
        """All frames up to this one, without those of the broker's own PING."""
        heard: list[bytes] = []
        while not heard or heard[-1] != last:
            assert self.hears.poll(PATIENCE_S * 1000), f"heard {heard}"
            parts = self.hears.recv_multipart()
            heard += [] if parts[0] == b"PING/bus/" else parts
        return heard


def test_the_session_of_the_page_can_be_followed_byte_by_byte(folder):
    peers = {"SUB": Peer(folder / "sub.sock"), "PUB": Peer(folder / "pub.sock")}
    others = Others(folder)
    sent: list[bytes] = []
    try:
        for name, arrow, raw in steps():
            if arrow == ">" and name == "PUB" and raw[0] == 1:
                if not sent:  # instead of a PING that is repeated: one, once the broker is known to pass it on
                    peers[name].until_wanted({b"", b"PING/reward-9/"})
                sent += frames(raw)
            if arrow == ">":
                peers[name].socket.sendall(raw)
                continue
            if raw[0] == 1 and frames(raw) != sent:  # not our own PING
                parts = frames(raw)
                for target, body in zip(parts[::2], parts[1::2]):
                    others.say(target, body)
            assert peers[name].take(len(raw)).hex(" ") == raw.hex(" ")
        heard = others.heard_until(sent[-1])
    finally:
        others.context.destroy(linger=0)
        for peer in peers.values():
            peer.socket.close()
    assert [part for part in heard if part in sent] == sent and len(sent) > 10


def test_what_travels_in_the_session_are_messages():
    for _, _, raw in steps():
        parts = frames(raw) if raw[0] == 1 else []
        for target, body in zip(parts[::2], parts[1::2]):
            message = codec.decode(kind_of(target.decode()), body, 1 << 20)
            assert codec.encode(message) == body


def test_the_page_has_a_session_that_goes_both_ways_on_both_sockets():
    assert {(name, arrow) for name, arrow, _ in lines()} == {(n, a) for n in ("SUB", "PUB") for a in "<>"}
    assert len(re.findall(r"^; ", PAGE, re.MULTILINE)) > 6
