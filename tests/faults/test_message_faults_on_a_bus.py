"""Faults at the ends of a real bus: what is lost is lost for that end alone, and late messages wake who waits."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from busrl.bus import Endpoint
from busrl.errors import BusNotReady
from busrl.faults import message_faults
from busrl.protocol import messages as m
from busrl.topology.schema import BusFault, Faults


def _bus_fixtures() -> Any:
    path = Path(__file__).parents[1] / "bus" / "conftest.py"
    spec = importlib.util.spec_from_file_location("bus_fixtures", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bus_fixtures"] = module
    spec.loader.exec_module(module)
    return module


_fixtures = _bus_fixtures()
short_dir, broker = _fixtures.short_dir, _fixtures.broker
MANY = 400


@pytest.fixture
def counts() -> dict[str, Counter[str]]:
    """Counts of the messages of each end that has faults, by what became of them."""
    return {}


@pytest.fixture
def ends(broker: Any, counts: dict[str, Counter[str]]) -> Iterator[Any]:
    opened: list[Endpoint] = []

    def open_one(name: str, *entries: BusFault, ready: bool = True) -> Endpoint:
        faults = message_faults(Faults(bus=entries), "reward", name)
        counts[name] = faults.counts if faults else Counter()
        subscribe = ["HEARTBEAT/", "SCHEDULER_STATE/"]
        opened.append(Endpoint(name, broker.frontend, broker.backend, subscribe=subscribe, message_faults=faults))
        if ready:
            opened[-1].ready(30)
        return opened[-1]

    yield open_one
    for end in opened:
        end.close()


def heard(endpoint: Endpoint, last: str = "last") -> list[m.SchedulerState]:
    """Everything until the message that says it is the last."""
    states: list[m.SchedulerState] = []
    while True:
        message = endpoint.recv(30)
        assert message is not None
        if isinstance(message, m.Heartbeat) and message.activity == last:
            return states
        if isinstance(message, m.SchedulerState):
            states.append(message)


def publish(endpoint: Endpoint) -> None:
    for number in range(MANY):
        endpoint.send(m.SchedulerState(values={"number": float(number)}))
    endpoint.send(m.Heartbeat(activity="last"))


def numbers(messages: list[m.SchedulerState]) -> list[int]:
    return [int(message.values["number"]) for message in messages]


def test_a_receiver_loses_its_own_share_counts_it_and_others_lose_nothing(
    ends: Any, counts: dict[str, Counter[str]]
) -> None:
    sender, well = ends("sender"), ends("well")
    lossy = ends("lossy", BusFault(types=("SCHEDULER_STATE",), drop=0.5))
    publish(sender)
    assert numbers(heard(well)) == list(range(MANY))
    left = numbers(heard(lossy))
    assert MANY * 0.3 < len(left) < MANY * 0.7 and left == sorted(left)
    assert lossy.gaps.missed > 0 and well.gaps.missed == 0
    assert len(left) + counts["lossy"]["lost"] == MANY


def test_what_a_sender_loses_nobody_hears_and_everybody_can_count(ends: Any) -> None:
    well = ends("well")
    sender = ends("sender", BusFault(types=("SCHEDULER_STATE",), at="sender", drop=0.5))
    publish(sender)
    left = numbers(heard(well))
    assert MANY * 0.3 < len(left) < MANY * 0.7 and well.gaps.missed >= MANY - len(left) - 2


def test_doubled_and_overtaken_messages_are_counted_as_repetitions_by_the_listener(ends: Any) -> None:
    sender = ends("sender")
    odd = ends("odd", BusFault(types=("SCHEDULER_STATE",), duplicate=0.2, reorder=0.2))
    publish(sender)
    got = numbers(heard(odd))
    assert set(got) | {MANY - 1} == set(range(MANY)) and len(got) > MANY and got != sorted(got)


def test_a_wait_ends_when_a_late_message_is_due(ends: Any, counts: dict[str, Counter[str]]) -> None:
    sender = ends("sender")
    late = ends("late", BusFault(types=("SCHEDULER_STATE",), delay_s=0.5))
    sender.send(m.SchedulerState(values={"number": 1.0}))
    begun = time.monotonic()
    message = late.recv(60)
    assert isinstance(message, m.SchedulerState) and time.monotonic() - begun < 30
    assert counts["late"]["late"] == 1


def test_with_every_message_lost_an_end_hears_nothing_not_even_itself(
    ends: Any, counts: dict[str, Counter[str]]
) -> None:
    deaf = ends("deaf", BusFault(drop=1.0), ready=False)
    with pytest.raises(BusNotReady):
        deaf.ready(0.5)
    assert deaf.recv(0.1) is None and counts["deaf"]["lost"] > 0
