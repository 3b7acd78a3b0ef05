"""The bytes of every message, as a stranger's msgpack decoder sees them, and the topics that they travel on."""

from __future__ import annotations

import msgpack
import pytest

from busrl.hosts import messages as g
from busrl.protocol import codec
from busrl.protocol import messages as m
from busrl.protocol.codec import ALL, BY_NAME, address, kind_of, topic
from busrl.protocol.messages import name_of

ENVELOPE = {"v": 1, "sender": "s", "msg_seq": 2, "time_ns": 3}
IDS, LOGS = g.Tensor("int32", [1], b"\x05\0\0\0"), g.Tensor("float32", [1], b"\0\0\x80\xbf")
IDS_MAP = {"dtype": "int32", "shape": [1], "data": b"\x05\0\0\0"}
LOGS_MAP = {"dtype": "float32", "shape": [1], "data": b"\0\0\x80\xbf"}
TASK_MAP = {
    "task": "1.2.3", "slot_id": 1, "seq": 2, "uid": 3, "record": "{}", "segment": 0, "attempt": 0,
    "max_new_tokens": 0, "temperature": 1.0, "top_p": 1.0, "version": 0, "completion": "x",
    "tensors": {"tokens": IDS_MAP}, "segment_tokens": 0, "kind": "", "stream": 0, "stop": [],
    "cls": 0, "priority": 0, "admission": 0,
}
GOLDEN: list[tuple[m.Message, dict]] = [
    (
        m.TaskRequest(worker_id="w-0", capacity=8, rows=64),
        {"type": "TASK_REQUEST", "worker_id": "w-0", "capacity": 8, "rows": 64},
    ),
    (
        m.NewTask(worker_id="rollout-0", slot_id=1, seq=2**36 - 1, uid=1 << 62, count=4),
        {"type": "NEW_TASK", "worker_id": "rollout-0", "slot_id": 1, "seq": 2**36 - 1, "uid": 1 << 62, "count": 4},
    ),
    (
        m.DataGenerated(slot_id=1, seq=2, uid=3, version=4),
        {"type": "DATA_GENERATED", "slot_id": 1, "seq": 2, "uid": 3, "version": 4, "status": "generated", "count": 1},
    ),
    (
        m.RewardComputed(slot_id=1, seq=2, uid=3, reward=0.5),
        {"type": "REWARD_COMPUTED", "slot_id": 1, "seq": 2, "uid": 3, "reward": 0.5, "count": 1},
    ),
    (
        m.LearnerStateUpdate(entropy=1.5, version=2, step=3, groups=4, metrics={"kl": 0.1}),
        {"type": "LEARNER_STATE_UPDATE", "entropy": 1.5, "version": 2, "step": 3, "groups": 4, "reward": 0.0}
        | {"tokens": 0, "samples": 0, "age_mean": 0.0, "metrics": {"kl": 0.1}},
    ),
    (
        g.RemoteGenerated(life=7, req=8, task="1.2.3", text="|1", tokens=IDS, logprobs=LOGS, versions=IDS),
        {"type": "REMOTE_GENERATED", "life": 7, "req": 8, "task": "1.2.3", "text": "|1", "prompt_ids": None}
        | {"tokens": IDS_MAP, "logprobs": LOGS_MAP, "versions": IDS_MAP, "finish": 1, "done": True},
    ),
    (
        g.GatewayTasks(life=7, req=8, tasks=[g.Task("1.2.3", 1, 2, 3, "{}", completion="x", tensors={"tokens": IDS})]),
        {"type": "GATEWAY_TASKS", "life": 7, "req": 8, "tasks": [TASK_MAP], "differs": False},
    ),
    (
        g.GatewayAnswer(code="late", life=7, task="1.2.3", lost=["4.5.6"]),
        {"type": "GATEWAY_ANSWER", "code": "late", "life": 7, "req": 0, "about": "", "task": "1.2.3", "text": ""}
        | {"lost": ["4.5.6"]},
    ),
    (m.Stop(reason="done", drain_s=1.0), {"type": "STOP", "reason": "done", "drain_s": 1.0}),
    (m.Ping(token="x"), {"type": "PING", "token": "x"}),
]
GOODBYE_BYTES = bytes.fromhex(
    "86a474797065a7474f4f44425945a6726561736f6ea3656e64a17601a673656e646572a173a76d73675f73657102a774696d655f6e7303"
)


def sent(message: m.Message) -> m.Message:
    message.sender, message.msg_seq, message.time_ns = "s", 2, 3
    return message


@pytest.mark.parametrize(("message", "fields"), GOLDEN, ids=[name_of(type(message)) for message, _ in GOLDEN])
def test_an_independent_decoder_reads_the_fields_of_a_message(message, fields):
    assert msgpack.unpackb(codec.encode(sent(message))) == ENVELOPE | fields


@pytest.mark.parametrize(("message", "fields"), GOLDEN, ids=[name_of(type(message)) for message, _ in GOLDEN])
def test_bytes_of_an_independent_encoder_are_read_with_unknown_fields_ignored(message, fields):
    raw = msgpack.packb(ENVELOPE | fields | {"from_tomorrow": [1, {"x": 2}]})
    assert codec.decode(type(message), raw, 1 << 20) == sent(message)


def test_the_bytes_of_goodbye_are_these():
    assert codec.encode(sent(m.Goodbye(reason="end"))) == GOODBYE_BYTES


def test_optional_fields_may_be_absent():
    got = codec.decode(m.TaskRequest, msgpack.packb({"type": "TASK_REQUEST", "v": 1, "worker_id": "w"}), 1000)
    assert got == m.TaskRequest(worker_id="w")


def test_every_message_has_its_own_name_and_is_listed():
    assert len(BY_NAME) == len(ALL)
    kinds = (kind for kind in {**vars(m), **vars(g)}.values() if isinstance(kind, type))
    defined = {kind for kind in kinds if issubclass(kind, m.Message)}
    of_parts = {kind for kind in ALL if kind.__module__ not in (m.__name__, g.__name__)}
    assert defined - {m.Message, g.Remote} == set(ALL) - of_parts


def test_a_long_traceback_keeps_its_tail():
    long = m.Error(severity="critical", text="t" * 100_000, traceback="x" * 100_000 + "the end")
    got = codec.decode(m.Error, codec.encode(sent(long)), 1 << 20)
    assert isinstance(got, m.Error) and got.traceback.endswith("the end")


def test_topics_end_with_a_slash_so_that_prefixes_are_exact():
    assert topic(m.NewTask) == "NEW_TASK/" and topic("NEW_TASK", to="rollout/0") == "NEW_TASK/rollout-0/"
    assert not topic(m.NewTask, "rollout/10").startswith(topic(m.NewTask, "rollout/1"))


@pytest.mark.parametrize("bad", ["NEW_TASK", "NOPE/", "NEW_TASK/x", "", "/"])
def test_a_subscription_that_is_no_topic_is_refused(bad):
    with pytest.raises(ValueError, match="final slash"):
        kind_of(bad)


@pytest.mark.parametrize("bad", ["", "a b", "x" * 65, "rollout/\u00e9", "a\n"])
def test_a_process_name_that_can_not_stand_in_a_topic_is_refused(bad):
    with pytest.raises(ValueError, match="rename the process"):
        address(bad)
