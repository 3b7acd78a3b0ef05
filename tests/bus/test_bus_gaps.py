"""What a listener missed is counted per sender and topic, also at the end of a topic and over restarts."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from busrl.bus.endpoint import Gaps
from busrl.protocol import messages as m
from busrl.protocol.codec import topic

PATIENCE_S = 30.0
TOPIC = b"DATA_GENERATED/"


def at(seq: int, time_ns: int, sender: str = "a") -> m.Goodbye:
    return m.Goodbye(sender=sender, msg_seq=seq, time_ns=time_ns)


def test_a_gap_is_counted_for_its_sender_and_topic():
    gaps = Gaps()
    for seq in (1, 2, 5):
        gaps.seen(TOPIC, at(seq, seq))
    gaps.seen(TOPIC, at(9, 9, sender="late listener"))
    assert gaps.missed == 2 and gaps.missed_by == {("a", "DATA_GENERATED/"): 2}


def test_a_sender_that_was_started_again_is_no_gap_and_no_repetition():
    gaps = Gaps()
    for seq, time_ns in ((7, 70), (1, 80), (2, 90)):
        gaps.seen(TOPIC, at(seq, time_ns))
    assert (gaps.missed, gaps.repeated) == (0, 0)


def test_a_late_copy_is_a_repetition_and_moves_nothing():
    gaps = Gaps()
    for seq, time_ns in ((7, 70), (5, 50), (8, 80)):
        gaps.seen(TOPIC, at(seq, time_ns))
    assert (gaps.missed, gaps.repeated) == (0, 1)


def test_beyond_its_capacity_new_senders_are_not_followed():
    gaps = Gaps(capacity=2)
    for sender in ("a", "b", "c"):
        gaps.seen(TOPIC, at(1, 1, sender))
        gaps.seen(TOPIC, at(3, 3, sender))
    assert {sender for sender, _ in gaps.missed_by} == {"a", "b"}


@given(st.sets(st.integers(1, 200), min_size=1))
def test_whatever_is_lost_the_count_is_what_lies_between_first_and_last(seen):
    gaps = Gaps()
    for seq in sorted(seen):
        gaps.seen(TOPIC, at(seq, seq))
    assert gaps.missed == max(seen) - min(seen) + 1 - len(seen)


class AfterTheFirst:
    """Message faults of a sender that lose every message of a topic but the first."""

    def __init__(self, topic: str) -> None:
        self.topic, self.sent = topic, 0

    def lets_out(self, topic: str) -> bool:
        self.sent += topic == self.topic
        return topic != self.topic or self.sent == 1

    def around(self, receive):
        return receive

    def due_s(self) -> float:
        return math.inf


def test_a_heartbeat_shows_the_loss_of_the_newest_messages(endpoint):
    listener = endpoint("learner", topic(m.Goodbye), topic(m.Heartbeat))
    sender = endpoint("a", message_faults=AfterTheFirst(topic(m.Goodbye)))
    sender.send(m.Goodbye())
    assert isinstance(listener.recv(PATIENCE_S), m.Goodbye)
    for _ in range(3):
        sender.send(m.Goodbye())
    sender.heartbeat("rollout", "generating")
    beat = listener.recv(PATIENCE_S)
    assert isinstance(beat, m.Heartbeat) and beat.activity == "generating" and beat.last_seqs["GOODBYE/"] == 4
    assert listener.gaps.missed_by == {("a", "GOODBYE/"): 3}


def test_messages_dropped_at_a_full_queue_are_counted_by_the_listener(endpoint):
    listener, sender = endpoint("slow", topic(m.Goodbye), hwm=10), endpoint("fast")
    for _ in range(20_000):
        sender.send(m.Goodbye())
    got = [listener.recv(PATIENCE_S)]
    while got[-1].reason != "end":
        sender.send(m.Goodbye(reason="end"))
        got += listener.drain() or [listener.recv(PATIENCE_S)]
    missed = listener.gaps.missed
    assert missed > 0
    assert missed + len(got) == got[-1].msg_seq - got[0].msg_seq + 1
