"""A real run, tapped: every message on its bus is one of docs/messages.md, sent by whom and where it says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from busrl.protocol import codec
from busrl.protocol import messages as m
from busrl.protocol.codec import kind_of
from busrl.protocol.messages import name_of
from tools.reference.catalog import ROUTES, Reach

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "run"))
from harness import Run, running

EXPECTED = {
    m.TaskRequest, m.NewTask, m.DataGenerated, m.RewardComputed, m.LearnerStateUpdate, m.WeightsPublished,
    m.ValidationStarted, m.ValidationDone, m.SchedulerState, m.Hello, m.Heartbeat, m.Goodbye, m.Ping, m.Stop,
}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with running(Run(tmp_path / "run", "validation.every=2", steps=4)) as started:
        yield started


def everything(run: Run) -> list[list[bytes]]:
    """All messages of the bus until the run has ended."""
    context = zmq.Context()
    tap = context.socket(zmq.SUB)
    tap.setsockopt(zmq.RCVHWM, 0)
    tap.setsockopt(zmq.RECONNECT_IVL, 10)
    tap.subscribe(b"")
    tap.connect(run.paths.backend)
    heard: list[list[bytes]] = []
    try:
        assert run.child is not None
        while run.child.poll() is None:
            if tap.poll(100):
                heard.append(tap.recv_multipart())
        while tap.poll(0):
            heard.append(tap.recv_multipart())
    finally:
        context.destroy(linger=0)
    return heard


@pytest.mark.slow
def test_every_run_message_has_the_sender_and_receiver_that_the_page_states(run):
    heard = everything(run)
    assert run.wait() == 0, run.tail()
    seen = set()
    for target, raw in heard:
        kind = kind_of(target.decode())
        message = codec.decode(kind, raw, 1 << 20)
        seen.add(kind)
        route, role = ROUTES[kind], message.sender.partition("-")[0]
        assert route.sent_by == "everybody" or role in route.sent_by.split(), (name_of(kind), message.sender)
        assert (target.count(b"/") == 2) == (route.reach is Reach.ONE), target
    assert EXPECTED - seen == set()
