"""Leases of the episodes that clients hold: open calls keep them, silence loses them, and `/end` says so."""

from __future__ import annotations

import asyncio
import math
import time
from types import SimpleNamespace
from typing import Any

import pytest

from busrl.agents.http import ClaimBody, EndBody
from busrl.agents.roles.holder import EpisodeHolder
from busrl.agents.roles.serve import Lease, Serve
from busrl.errors import CallRefused
from busrl.topology.schema import Reward, RewardPart


class Held:
    """What a server asks of an episode."""

    def __init__(self) -> None:
        self.busy, self.openai = False, {"api_key": "key"}

    def close(self) -> None:
        pass


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Lease, Any]:
    """A server with one lease, and the episode of it; slots are not the subject."""
    serve: Any = object.__new__(Serve)
    episode: Any = Held()
    lease = Lease("7-1", SimpleNamespace(uid=7), episode, time.monotonic() + 60)  # type: ignore[arg-type]
    serve.__dict__.update(
        lease_s=20.0, leases={"7-1": lease}, by_episode={episode: lease}, answers={}, given_back=[],
        _passed=asyncio.Event(), news=asyncio.Event(), wanted=0, stopping="", warn=lambda *_, **__: None,
        take=lambda most: [], looked=math.inf, tick_s=0.2,
    )
    serve.give_back = serve.given_back.append
    monkeypatch.setattr(EpisodeHolder, "work", lambda self: False)
    return serve, lease, episode


def test_a_call_that_waited_longer_than_the_lease_leaves_its_client_a_whole_one(served: tuple[Any, Lease, Any]) -> None:
    serve, lease, episode = served
    lease.until, episode.busy = time.monotonic() - 100, True
    serve.work()
    episode.busy = False
    serve.work()
    assert not serve.given_back and lease.until > time.monotonic() + 15


def test_a_silent_client_has_lost_its_episode_and_its_end_is_refused(served: tuple[Any, Lease, Any]) -> None:
    serve, lease, _ = served
    lease.until = time.monotonic() - 1
    serve.work()
    assert serve.given_back == [lease.claim] and not serve.leases
    with pytest.raises(CallRefused, match=r"7-1 is not open: its client was silent for 20 s") as refused:
        serve.end("7-1", EndBody(reward=1.0))
    assert refused.value.code == "ended" and serve.look("7-1")["outcome"] == "lost"


def test_time_in_which_the_server_heard_nobody_costs_no_client_its_episode(served: tuple[Any, Lease, Any]) -> None:
    serve, lease, _ = served
    lease.until = time.monotonic() + 5
    serve.work()
    serve.looked -= 100  # so long it did not look
    lease.until -= 100
    serve.work()
    assert not serve.given_back and lease.until < time.monotonic() + 20, "it has what was left of it, and no more"
    lease.until = time.monotonic() - 1
    serve.work()
    assert serve.given_back == [lease.claim]


@pytest.mark.parametrize("kind", ["agent", "regex"])
def test_an_end_without_a_reward_is_refused_where_a_part_of_the_rewards_is_what_the_episode_returned(
    served: tuple[Any, Lease, Any], kind: str
) -> None:
    serve, _, _ = served
    serve.topology = SimpleNamespace(reward=Reward(part=(RewardPart(kind="regex", pattern="x"), RewardPart(kind=kind))))
    if kind == "regex":
        assert serve._verdict(EndBody()).reward == 0.0
        return
    with pytest.raises(CallRefused, match="a number is needed"):
        serve._verdict(EndBody())
    assert serve._verdict(EndBody(reward=0.5)).reward == 0.5


def test_a_claim_that_waits_holds_no_other_up(served: tuple[Any, Lease, Any]) -> None:
    serve, _, _ = served

    async def run() -> None:
        waiting = asyncio.ensure_future(serve.claim(ClaimBody(wait_s=30)))
        await asyncio.sleep(0)
        assert await asyncio.wait_for(serve.claim(ClaimBody()), 5) == []
        assert not waiting.done()
        waiting.cancel()

    asyncio.run(run())
