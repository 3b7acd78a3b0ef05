"""Names come from outside: an endpoint that answers ever new ones remembers few of them, and still says who it is."""

from __future__ import annotations

from busrl.bus.endpoint import MAX_ADDRESSED
from busrl.protocol import codec
from busrl.protocol import messages as m
from busrl.protocol.codec import topic
from busrl.protocol.messages import MAX_ACTIVITY

MANY = 3 * MAX_ADDRESSED


def test_an_endpoint_remembers_a_bounded_number_of_names(endpoint):
    said: list[str] = []
    listener = endpoint("monitor", topic(m.Heartbeat), report=said.append)
    keeper = endpoint("keeper")
    for number in range(MANY):
        keeper.send(m.Pong(token="x"), to=f"worker-{number:06d}-of-a-pool-of-machines-somewhere")
    keeper.heartbeat("keeper", "x" * MAX_ACTIVITY)
    beat = listener.recv(30)
    assert isinstance(beat, m.Heartbeat) and said == []
    assert len(beat.last_seqs) <= MAX_ADDRESSED + len(m.Message.__subclasses__())
    assert f"PONG/worker-{MANY - 1:06d}-of-a-pool-of-machines-somewhere/" in beat.last_seqs
    assert len(codec.encode(beat)) < 1 << 17


def test_a_forgotten_topic_begins_anew_without_counting_as_loss(endpoint):
    worker, keeper = endpoint("worker", topic(m.Goodbye, "worker")), endpoint("keeper")
    for _ in range(3):
        keeper.send(m.Goodbye(), to="worker")
    for number in range(MAX_ADDRESSED):
        keeper.send(m.Pong(token="x"), to=f"worker-{number}")
    keeper.send(m.Goodbye(), to="worker")
    got = [worker.recv(30) for _ in range(4)]
    assert [message.msg_seq for message in got if message] == [1, 2, 3, 1]
    assert worker.gaps.missed == worker.gaps.repeated == 0

