"""What happens to messages is decided by seed and rates alone, and by nothing that the messages hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from busrl.faults import MAX_HELD, OVERTAKEN_S, MessageFaults, describe, message_faults
from busrl.topology.schema import BusFault, CrashFault, Faults


@dataclass
class Line:
    """A socket that gives what was put in, and a clock that stands still."""

    waiting: list[tuple[bytes, bytes]] = field(default_factory=list)
    now: float = 0.0

    def receive(self, flags: int) -> list[tuple[bytes, bytes]]:
        return [self.waiting.pop(0)] if self.waiting else []

    def clock(self) -> float:
        return self.now


def numbers(count: int, topic: bytes = b"NEW_TASK/a/") -> list[tuple[bytes, bytes]]:
    return [(topic, str(number).encode()) for number in range(count)]


def through(
    fault: BusFault, messages: list[tuple[bytes, bytes]], seed: int = 0, wait_s: float = 0.0
) -> tuple[list[int], MessageFaults]:
    """The numbers that come out at once, and, after `wait_s`, those that come out later."""
    line = Line(list(messages))
    trouble = MessageFaults([fault], seed, "reward-0", line.clock)
    take = trouble.around(line.receive)
    out: list[int] = []
    for moment in (0.0, wait_s):
        line.now = moment
        while came := take(0):
            out.append(int(came[0][1]))
    return out, trouble


def test_seed_and_name_decide_which_messages_are_lost() -> None:
    fault = BusFault(drop=0.3)
    first, trouble = through(fault, numbers(2000))
    assert through(fault, numbers(2000))[0] == first != through(fault, numbers(2000), seed=1)[0]
    assert 1300 < len(first) < 1500 and first == sorted(first)
    assert trouble.counts == {"lost": 2000 - len(first), "passed": len(first)}


@pytest.mark.parametrize(("drop", "left"), [(0.0, 500), (1.0, 0)])
def test_none_and_all(drop: float, left: int) -> None:
    assert len(through(BusFault(drop=drop, duplicate=0.0), numbers(500))[0]) == left


def test_doubled_messages_come_out_twice() -> None:
    out, trouble = through(BusFault(duplicate=0.25), numbers(2000))
    times = Counter(out)
    assert set(times) == set(range(2000)) and set(times.values()) == {1, 2}
    doubled = trouble.counts["doubled"]
    assert doubled == sum(count == 2 for count in times.values()) and 400 < doubled < 600


def test_late_messages_come_out_in_their_time_and_in_another_order() -> None:
    line = Line(numbers(200))
    trouble = MessageFaults([BusFault(delay_s=2.0)], 0, "reward-0", line.clock)
    take = trouble.around(line.receive)
    out: list[int] = []
    while len(out) < 200:
        if came := take(0):
            out.append(int(came[0][1]))
        else:
            line.now += trouble.due_s()
    assert sorted(out) == list(range(200)) and out != sorted(out)
    assert 1.8 < line.now <= 2.0 and trouble.due_s() == float("inf")


def test_an_overtaken_message_arrives_after_the_next_or_alone_without_one() -> None:
    out, trouble = through(BusFault(reorder=0.2), numbers(1000), wait_s=OVERTAKEN_S)
    assert sorted(out) == list(range(1000))
    assert all(abs(number - place) <= 1 for place, number in enumerate(out))
    swapped = sum(number != place for place, number in enumerate(out))
    assert trouble.counts["overtaken"] in (swapped // 2, swapped // 2 + 1) and 100 < trouble.counts["overtaken"] < 250
    alone, _ = through(BusFault(reorder=1.0), numbers(1))
    assert alone == [] and through(BusFault(reorder=1.0), numbers(1), wait_s=OVERTAKEN_S)[0] == [0]


def test_only_the_named_messages_are_touched_and_the_first_fitting_entry_decides() -> None:
    line = Line([*numbers(50), *numbers(50, b"STOP/"), *numbers(50, b"PING/x/")])
    rules = [BusFault(types=("STOP",), drop=0.0, duplicate=1.0), BusFault(types=("STOP", "NEW_TASK"), drop=1.0)]
    take = MessageFaults(rules, 0, "x", line.clock).around(line.receive)
    topics: Counter[bytes] = Counter()
    while came := take(0):
        topics[came[0][0]] += 1
    assert topics == {b"STOP/": 100, b"PING/x/": 50}


def test_a_sender_loses_what_it_should_and_receives_everything() -> None:
    faults = Faults(bus=(BusFault(at="sender", types=("HEARTBEAT",), drop=0.5),))
    trouble = message_faults(faults, "reward", "reward-0")
    assert trouble is not None
    assert 400 < sum(trouble.lets_out("HEARTBEAT/") for _ in range(1000)) < 600
    assert all(trouble.lets_out("STOP/") for _ in range(100))
    line = Line(numbers(100, b"HEARTBEAT/"))
    take = trouble.around(line.receive)
    assert [take(0)[0] for _ in range(100)] == numbers(100, b"HEARTBEAT/") and not take(0)


def test_an_endpoint_that_no_entry_is_about_has_no_trouble_at_all() -> None:
    faults = Faults(bus=(BusFault(roles=("reward",), drop=1.0),))
    assert message_faults(faults, "rollout", "rollout-0") is None
    assert message_faults(Faults(), "reward", "reward-0") is None
    assert message_faults(faults, "reward", "reward-0") is not None


def test_what_is_held_back_is_bounded() -> None:
    out, trouble = through(BusFault(delay_s=60.0), numbers(MAX_HELD + 10), wait_s=60.0)
    assert len(out) == MAX_HELD and trouble.counts["lost"] == 10


rates = st.floats(0, 1)


@given(st.builds(BusFault, drop=rates, duplicate=rates, reorder=rates, delay_s=st.floats(0, 5)), st.integers(0, 99))
def test_every_message_arrives_once_or_twice_unless_counted_as_lost(fault: BusFault, seed: int) -> None:
    out, trouble = through(fault, numbers(100), seed, wait_s=6.0)
    times = Counter(out)
    assert max(times.values(), default=0) <= 2
    assert 100 - len(times) <= trouble.counts["lost"] and len(out) == trouble.counts["passed"]
    assert len(out) == 100 - trouble.counts["lost"] + trouble.counts["doubled"]


def test_faults_are_told_in_words() -> None:
    bus = BusFault(types=("NEW_TASK",), roles=("rollout",), drop=0.3, duplicate=0.1, delay_s=0.5, reorder=0.2)
    crash = CrashFault(process="learner", point="finish.fate", count=7, lives=2)
    assert describe(Faults(bus=(bus, BusFault(at="sender", drop=1.0)), crash=(crash, replace(crash, lives=0)))) == [
        "NEW_TASK to rollout: 30% lost, 10% doubled, up to 0.5 s late, 20% overtaken",
        "every message from everybody but the broker: 100% lost",
        "learner is killed when it passes finish.fate for the 7. time, in 2 lives",
        "learner is killed when it passes finish.fate for the 7. time, in every life",
    ]
