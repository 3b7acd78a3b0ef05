"""The broker as a process: passing on, being killed, being refused, ending."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from busrl.bus import Endpoint
from busrl.errors import BusClosed, BusNotReady, MessageTooLarge
from busrl.hosts import messages as g
from busrl.protocol import messages as m
from busrl.protocol.codec import topic

PATIENCE_S = 30.0


def test_a_message_reaches_the_subscribers_of_its_name_and_nobody_else(endpoint):
    wants, does_not = endpoint("reward/0", topic(m.DataGenerated)), endpoint("learner", topic(m.RewardComputed))
    sender = endpoint("rollout/0")
    sender.send(m.DataGenerated(slot_id=3, seq=5, uid=7, version=2, count=4))
    got = wants.recv(PATIENCE_S)
    assert isinstance(got, m.DataGenerated)
    assert (got.slot_id, got.seq, got.uid, got.version, got.count) == (3, 5, 7, 2, 4)
    assert (got.sender, got.msg_seq, got.v) == ("rollout/0", 1, 1)
    does_not.ready(PATIENCE_S)
    assert does_not.drain() == []


def test_an_addressed_message_reaches_its_addressee_alone(endpoint):
    addressee, ten = (endpoint(name, topic(m.NewTask, name)) for name in ("rollout/1", "rollout/10"))
    everything = endpoint("monitor", topic(m.NewTask))
    sender = endpoint("scheduler")
    sender.send(m.NewTask(worker_id="rollout-1", slot_id=0, seq=0, uid=0), to="rollout/1")
    assert isinstance(addressee.recv(PATIENCE_S), m.NewTask)
    assert isinstance(everything.recv(PATIENCE_S), m.NewTask)
    ten.ready(PATIENCE_S)
    assert ten.drain() == []


def test_messages_that_come_while_readiness_is_awaited_are_kept(endpoint):
    listener, sender = endpoint("a", topic(m.SchedulerState)), endpoint("b")
    for value in range(5):
        sender.send(m.SchedulerState(values={"x": value}))
    sender.send(m.Ping(token="t"), to="a")
    while listener.pending < 5:
        listener.ready(PATIENCE_S)
        sender.ready(PATIENCE_S)
    got = [listener.recv(PATIENCE_S) for _ in range(5)]
    assert [message.values["x"] for message in got] == [0, 1, 2, 3, 4]


def test_an_endpoint_answers_the_ping_of_another(endpoint):
    asker = endpoint("launch", topic(m.Pong, "launch"))
    served = endpoint("rollout/0")
    answer = None
    while answer is None:  # again and again: the asker may not know yet that the other listens
        asker.send(m.Ping(token="abc"), to="rollout/0")
        assert served.recv(0.05) is None
        answer = asker.take()
    assert isinstance(answer, m.Pong) and (answer.token, answer.sender) == ("abc", "rollout/0")


def test_subscriptions_come_back_after_the_broker_was_killed_and_started_again(broker, endpoint):
    listener, sender = endpoint("learner", topic(m.RewardComputed)), endpoint("reward/0")
    broker.kill()
    sender.send(m.RewardComputed(slot_id=0, seq=0, uid=1))  # nobody is there: it may be lost
    broker.start()
    listener.ready(PATIENCE_S)
    sender.ready(PATIENCE_S)
    sender.send(m.RewardComputed(slot_id=0, seq=0, uid=2))
    got = listener.recv(PATIENCE_S)
    if got.uid == 1:  # libzmq had not noticed the death when it was sent, and kept it for the next connection
        got = listener.recv(PATIENCE_S)
    assert isinstance(got, m.RewardComputed) and got.uid == 2


def test_a_broker_without_sockets_ends_and_its_successor_serves_all_endpoints(
    broker, endpoint, short_dir
):
    before = endpoint("learner", topic(m.RewardComputed))
    for name in ("pub.sock", "sub.sock"):
        (short_dir / name).unlink()
    _, said = broker.process.communicate(timeout=PATIENCE_S)
    assert broker.process.returncode and "was removed or replaced by another program" in said
    broker.start()
    sender = endpoint("reward/0")
    before.ready(PATIENCE_S)
    got = None
    deadline = time.monotonic() + PATIENCE_S
    while got is None and time.monotonic() < deadline:  # what is sent before the subscription is back is lost, as ever
        sender.send(m.RewardComputed(slot_id=0, seq=0, uid=2))
        got = before.recv(0.2)
    assert isinstance(got, m.RewardComputed)


def test_sends_return_at_once_and_are_numbered_while_there_is_no_broker(short_dir):
    with Endpoint("alone", f"ipc://{short_dir}/a", f"ipc://{short_dir}/b", hwm=10) as alone:
        for _ in range(1000):
            alone.send(m.Hello(role="rollout"))
        assert alone.last_seqs() == {"HELLO/": 1000}


def test_waiting_for_a_missing_broker_ends_and_names_the_endpoint(short_dir):
    address = f"ipc://{short_dir}/pub.sock"
    with Endpoint("rollout/3", address, f"ipc://{short_dir}/sub.sock") as alone:
        with pytest.raises(BusNotReady) as caught:
            alone.ready(0.2)
        assert "rollout/3" in str(caught.value) and address in str(caught.value)


def test_a_second_broker_is_refused_with_the_pid_of_the_first(broker):
    second = broker.spawn()
    text = second.communicate(timeout=PATIENCE_S)[1]
    assert second.returncode != 0
    assert "RunInUse" in text and f"pid {broker.process.pid}" in text


def test_the_refused_second_broker_leaves_the_first_one_serving(broker, endpoint):
    listener, sender = endpoint("a", topic(m.Goodbye)), endpoint("b")
    broker.spawn().communicate(timeout=PATIENCE_S)
    sender.send(m.Goodbye(reason="still here"))
    assert listener.recv(PATIENCE_S).reason == "still here"


def test_the_broker_reports_progress_only_from_round_trips_and_ends_on_request(broker):
    assert broker.next_line() == "progress"
    broker.process.send_signal(signal.SIGTERM)
    out, _ = broker.process.communicate(timeout=PATIENCE_S)
    assert out.splitlines()[-1] == "ended"
    assert broker.process.returncode == 0


def test_sockets_and_their_directory_are_for_their_owner_alone(broker, short_dir: Path):
    assert short_dir.stat().st_mode & 0o777 == 0o700
    for name in ("pub.sock", "sub.sock"):
        assert (short_dir / name).stat().st_mode & 0o777 == 0o600


def test_a_closed_endpoint_and_one_inherited_over_fork_refuse_to_work(endpoint):
    inherited = endpoint("a")
    pid = os.fork()
    if pid == 0:
        try:
            inherited.send(m.Goodbye())
        except BusClosed:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    inherited.send(m.Goodbye())
    inherited.close()
    inherited.close()
    with pytest.raises(BusClosed, match="closed"):
        inherited.send(m.Goodbye())


def test_a_message_over_the_limit_is_refused_at_its_sender(endpoint):
    sender = endpoint("scheduler", max_bytes=1000)
    with pytest.raises(MessageTooLarge, match=r"GATEWAY_ANSWER/rollout-0/.*limit is 1000"):
        sender.send(g.GatewayAnswer(code="refused", text="x" * 2000), to="rollout/0")
    sender.ready(PATIENCE_S)
