"""A run with hostile company: an unlisted key, a member that talks nonsense, broken descriptors. It finishes."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import msgspec
import pytest
import zmq
from harness import Run, read_lines, running

from busrl import curve
from busrl.bus import Endpoint, tcp_pair
from busrl.bus.endpoint import encrypt
from busrl.curve import ClientKeys, Pair
from busrl.errors import BusNotReady
from busrl.protocol import messages as m
from busrl.protocol.codec import topic
from busrl.ring import Ring, State
from busrl.status.view import status

pytestmark = [pytest.mark.usefixtures("quickstart"), pytest.mark.slow]
BROKEN = 3


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return min(port, 65534)


def break_descriptors(run: Run) -> list[int]:
    """Make the task of samples that are being generated unreadable, past the library; their uids."""
    ring = Ring.attach(run.paths.ring_name, read_only=True)
    layout = header(run.paths.ring_file)
    descriptor = os.open(run.paths.ring_file, os.O_RDWR)
    counts: dict[int, int] = {}

    def some() -> bool:
        lines = ring.lines()
        for slot in (lines["state"] == State.GENERATING).nonzero()[0].tolist()[: BROKEN - len(counts)]:
            at = layout["table_off"] + slot * (128 + 48 * 128) + 128 + 0x28
            os.pwrite(descriptor, (8).to_bytes(8, "little"), at)
            counts[int(lines["uid"][slot])] = slot
        return len(counts) >= BROKEN

    try:
        run.until("samples were in generation", some)
    finally:
        os.close(descriptor)
        ring.close()
    return list(counts)


def header(path: Path) -> dict[str, int]:
    with open(path, "rb") as file:
        head = file.read(0x78)
    return {"table_off": int.from_bytes(head[0x58:0x60], "little")}


def test_a_run_finishes_in_hostile_company_and_names_who_it_was(tmp_path: Path) -> None:
    directory = tmp_path / "keys"
    curve.init(directory)
    file = curve.add(directory, "laptop")
    assert file is not None
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    run = Run(tmp_path / "run", f'bus.endpoint="{endpoint}"', f'bus.keys="{directory}"', steps=30)
    public, secret = zmq.curve_keypair()
    stranger = ClientKeys(Pair(public.decode(), secret.decode()), curve.server_pair(directory).public)
    with running(run):
        run.until_step(2)
        doors, mine = tcp_pair(endpoint), curve.load_client(file)
        with Endpoint("laptop", *doors, subscribe=[topic(m.Heartbeat)], keys=mine) as far:
            far.ready(30.0)
            assert isinstance(far.recv(30.0), m.Heartbeat)
            run.kill("bus")
            far.ready(60.0)  # the next broker has the same keys, and the client comes back by itself
        with zmq.Context() as context, context.socket(zmq.PUB) as member:
            encrypt(member, mine)
            member.connect(doors[0])
            run.until("nonsense from a member was recorded", lambda: nonsense(member, run))
        with Endpoint("stranger", *doors, keys=stranger) as outside, contextlib.suppress(BusNotReady):
            outside.ready(0.5)
            raise AssertionError("an unlisted key was let in")
        broken = break_descriptors(run)
        run.until("the refusal was recorded", lambda: said(run, public.decode()))
        run.until("a broken sample was recorded", lambda: said(run, "payload that cannot be read"))
        page = status(run.directory)
        assert public.decode() in page and "127.0.0.1" in page and "cannot be read" in page
        assert "dropped a message: malformed from loud" in page
        assert run.wait() == 0, run.tail()
    report = run.audit()
    assert report.counts.lost == report.counts.trained_twice == 0 and not report.errors, report
    assert report.counts.step == run.steps and report.accidents == {"malformed": len(broken)}, report
    assert {chr(run.paths.fates.read_bytes()[uid]) for uid in broken} == {"M"}
    assert all(run.restarts(name) == 0 for name in ("learner", "reward/0", "rollout/0", "keeper", "scheduler"))


def nonsense(member: zmq.Socket[bytes], run: Run) -> bool:
    """A STOP whose reason is a number: everybody listens to STOP, nobody may stop for this."""
    body = {"type": "STOP", "sender": "loud", "reason": 7}
    member.send_multipart([topic(m.Stop).encode(), msgspec.msgpack.encode(body)])
    return said(run, "dropped a message: malformed from loud")


def said(run: Run, text: str) -> bool:
    return any(text in row["text"] for row in read_lines(run.paths.errors))
