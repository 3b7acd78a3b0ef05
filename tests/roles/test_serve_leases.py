"""Leases of the episodes that clients hold: open calls keep them, silence loses them, and `/end` says so."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from busrl.agents.http import ClaimBody, EndBody
from busrl.agents.roles.serve import Leases, WaitingClients
from busrl.agents.samples import ClaimedSample
from busrl.errors import CallRefused

LEASE_S = 20.0
LINE = {"uid": 7, "group": 0, "cls": 0}


class Samples:
    """Slots are not the subject: `free` samples wait, and what comes back is `returned`."""

    def __init__(self, free: int) -> None:
        self.free, self.returned = [ClaimedSample(slot, 1, LINE) for slot in range(free)], list[ClaimedSample]()
        self.give_back = self.returned.append

    def settle(self, *_: object) -> str:
        return ""

    def take(self, most: int) -> list[ClaimedSample]:
        taken, self.free = self.free[:most], self.free[most:]
        return taken

    def task_of(self, sample: ClaimedSample) -> bytes:
        return b"{}"


class Held:
    """What a server asks of an episode."""

    def __init__(self, sample: ClaimedSample) -> None:
        self.busy, self.openai, self.keys = False, {"api_key": "key"}, dict[str, str]()
        self.tree = SimpleNamespace(turns=[], sequences=list)
        self.seats = {"policy": self}

    def on_unanswered(self, listener: Any) -> None:
        pass

    def close(self) -> None:
        pass


class Desk:
    """A desk whose clients claimed `held` episodes."""

    def __init__(self, held: int = 1, judges_itself: bool = False) -> None:
        self.samples, self.clients = Samples(held), WaitingClients(lambda: None)
        parts: Any = (self.samples, Held)
        self.leases = Leases(*parts, LEASE_S, self.clients, self.next_pass, lambda: judges_itself,
                             lambda text, *_, **__: None)
        self.names = [row["episode"] for row in asyncio.run(self.leases.claim(ClaimBody(n=held)))] if held else []

    async def next_pass(self, timeout_s: float) -> bool:
        await asyncio.sleep(timeout_s)
        return True

    def only(self) -> Any:
        return self.leases.open[self.names[0]]


def test_a_call_longer_than_the_lease_leaves_its_client_a_whole_one() -> None:
    desk, now = Desk(), time.monotonic()
    desk.only().until, desk.only().episode.busy = now - 100, True
    desk.leases.expire(now, 0.0)
    desk.only().episode.busy = False
    desk.leases.expire(now, 0.0)
    assert not desk.samples.returned and desk.only().until > now + 15


def test_a_silent_client_has_lost_its_episode_and_its_end_is_refused() -> None:
    desk = Desk()
    lease = desk.only()
    desk.leases.expire(lease.until + 1, 0.0)
    assert desk.samples.returned == [lease.sample] and not desk.leases.open
    with pytest.raises(CallRefused, match=rf"{lease.name} is not open: its client was silent for 20 s") as refused:
        desk.leases.end(lease.name, EndBody(reward=1.0))
    assert refused.value.code == "ended" and desk.leases.look(lease.name)["outcome"] == "lost"


def test_time_in_which_nobody_was_heard_costs_no_episode() -> None:
    desk = Desk()
    lease, until = desk.only(), desk.only().until
    desk.leases.expire(until + 95, deaf_s=100)
    assert not desk.samples.returned and lease.until == until + 100, "it has what was left of it, and no more"
    desk.leases.expire(until + 101, 0.0)
    assert desk.samples.returned == [lease.sample]


def test_samples_of_two_ledgers_with_one_number_are_two_episodes() -> None:
    desk = Desk(held=0)
    desk.samples.free = [ClaimedSample(0, 1, LINE, seat=seat) for seat in ("solver", "judge")]
    rows = asyncio.run(desk.leases.claim(ClaimBody(n=2)))
    assert len({row["episode"] for row in rows}) == len(desk.leases.open) == 2
    for row in rows:
        assert desk.leases.end(row["episode"], EndBody(reward=1.0))["outcome"] == "committed"
        assert row["episode"] not in desk.leases.open
    assert Desk().names == ["7-1"], "where episodes have one seat names are as ever"


def test_an_episode_that_judges_itself_needs_a_reward() -> None:
    judging, judged = Desk(judges_itself=True), Desk()
    with pytest.raises(CallRefused, match="a number is needed"):
        judging.leases.end(judging.names[0], EndBody())
    assert judging.leases.end(judging.names[0], EndBody(reward=0.5))["outcome"] == "committed"
    assert judged.leases.end(judged.names[0], EndBody())["outcome"] == "committed"


def test_a_claim_that_waits_holds_no_other_up() -> None:
    desk = Desk(held=0)

    async def run() -> None:
        waiting = asyncio.ensure_future(desk.leases.claim(ClaimBody(wait_s=30)))
        await asyncio.sleep(0)
        assert await asyncio.wait_for(desk.leases.claim(ClaimBody()), 5) == []
        assert not waiting.done() and desk.clients.count() == 1
        waiting.cancel()

    asyncio.run(run())
