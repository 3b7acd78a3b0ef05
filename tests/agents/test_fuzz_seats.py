"""Spoilt bodies for an episode of several seats over HTTP: each is answered or refused by name, and harms no other.

Sockets, the door, the desk of leases and the rings of two ledgers are real; the engines disobey a tokenizer.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import agent_worlds as worlds
import aiohttp
import pytest
from agent_worlds import Table
from seat_holder import PLACES, Holder
from side_scene import SEATS

from busrl.agents.episode import Episode
from busrl.agents.http import Card, EpisodeServer
from busrl.agents.renderer import Renderer
from busrl.agents.roles.serve import Leases, WaitingClients
from busrl.agents.sides import ClaimedSample
from busrl.ring import State
from busrl.roles.episodes import reward_of

FEW, MANY = 400, 10_000
KEY, CONTEXT = "the key of the run", 4096
NAMES = [*SEATS, "old"]
CALLS = ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate", "/generate", "/tokenize", "/detokenize")
REFUSALS = {400, 401, 404, 409, 413}
ODD_NAMES = [
    "", "..", "../first", "first ", "FIRST", "policy", "0", "-1", "1e3", "first\0", "\u202efirst", "é" * 40, "x" * 5000,
]
ODD = [
    None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**400, 0.5, 5e-324, 1e308, -1e308, "", "NaN", "\ud800", [], {}, [[]],
    [{}], {"": {}}, {"": 1.0}, {"0": 1.0}, {"0": {"0": 1.0}}, [1.0] * 300, ["first"], {"first": [1.0]},
    {"first": {"0": 1e308}}, *ODD_NAMES,
]
MANY_SEATS = [{f"{name}{n}": 1.0 for n in range(count)} for name, count in (("seat ", 30_000), ("seat ", 100_000),
                                                                          ("", 50_000))]


# -- bodies -----


def call_body(dice: random.Random) -> dict[str, Any]:
    """A body that each route of calls can read."""
    message = {"role": "user", "content": "Hello?"}
    return {"model": dice.choice([*NAMES, ""]), "messages": [message], "prompt": "Q?", "token_ids": [65, 66],
            "tokens": [65], "max_tokens": 4, "sampling_params": {"max_tokens": 4, "model": dice.choice(NAMES)}}


def end_body(dice: random.Random) -> dict[str, Any]:
    each = {seat: round(dice.uniform(-2, 2), 3) for seat in NAMES}
    parts = {seat: {"right": reward, "short": -0.25} for seat, reward in each.items()}
    by_seat = {seat: {"0": 0.5} for seat in dice.sample(NAMES, dice.randint(0, 4))}
    body = dice.choice([
        {"rewards": each}, {"rewards": parts}, {"rewards": {**each, "first": {"right": 1.0}}}, {"failed": True},
        {"reward": 0.5, "parts": {"right": 0.5}}, {"failed": True, "rewards": each}, {"again": True, "why": "no tool"},
    ])
    return body | {"turn_rewards": dice.choice([by_seat, {}, {"0": 0.25}, [0.25]])} if dice.random() < 0.7 else body


def places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Each holder with each of its keys."""
    entries = content.items() if isinstance(content, dict) else enumerate(content if isinstance(content, list) else ())
    for key, value in [*entries]:
        yield content, key
        yield from places(value)


def spoilt(dice: random.Random, body: dict[str, Any]) -> bytes:
    """The body with odd values and names at some of its places, now and then cut or no JSON at all."""
    body = copy.deepcopy(body)
    for _ in range(dice.choice([0, 1, 1, 1, 2, 3])):
        holder, key = dice.choice([*places(body)] or [(body, "model")])
        if isinstance(holder, dict) and dice.random() < 0.4:
            value = holder.pop(key, None)
            if dice.random() < 0.7:
                holder[dice.choice([*ODD_NAMES, *NAMES, *"012"])] = value
        else:
            holder[key] = copy.deepcopy(dice.choice(ODD))
    if dice.random() < 0.01:
        body[dice.choice(["rewards", "turn_rewards", "parts", "model"])] = dice.choice(MANY_SEATS)
    raw = json.dumps(body).encode()
    if dice.random() < 0.05:
        raw = raw[: dice.randrange(len(raw))] + dice.choice([b"", b"\xff", b"[" * 50_000])
    return raw


# -- who gets them -----


class Court(Holder):
    """The desk of a server whose episodes have three sides in two ledgers, and one seat that is not trained."""

    def __init__(self, folder: Path, chat: Renderer) -> None:
        super().__init__(folder, "two", chat)
        self.opened, self.tables = 0, dict[int, Table]()
        self.leases = Leases(self.samples, self.begin, 600.0, WaitingClients(lambda: None), self.no_pass, lambda: True,
                             self.warn)
        cards = [Card(seat, CONTEXT, chat) for seat in PLACES]
        self.door = EpisodeServer(CONTEXT, chat, "override", desk=self.leases, key=KEY, cards=cards)

    async def no_pass(self, timeout_s: float) -> bool:
        return False

    def begin(self, sample: ClaimedSample) -> Episode:
        table = self.tables[sample.number] = Table(self.chat, PLACES)
        self.door.open(table.episode)
        return table.episode

    def settle_all(self) -> None:
        """Commit the rewards of what was played, each of them finite, and train it."""
        for book in self.books:
            for slot in (book.ring.lines()["state"] == State.GENERATED).nonzero()[0].tolist():
                reward = reward_of(book.ring, slot)
                assert reward is not None and all(map(math.isfinite, [reward[0], *reward[1]])), reward
        self.samples.commit_rewards()
        for book in self.books:
            lines = book.ring.lines()
            assert all(map(math.isfinite, lines["reward"][lines["state"] == State.REWARDED].tolist()))
            book.work()

    def held(self) -> set[int]:
        """The uids that are held, by ledger and seat made one number."""
        return {int(line["uid"]) + (at << 40) for at, book in enumerate(self.books) for line in book.ring.lines()
                if line["state"] == State.GENERATING}


class Client:
    """A client that claims episodes with the key of the run, and does to one at a time what the dice say."""

    def __init__(self, court: Court, session: aiohttp.ClientSession, seed: int) -> None:
        self.court, self.session, self.dice = court, session, random.Random(seed)
        self.root, self.codes = court.door.base_url.removesuffix("/v1"), Counter[int]()
        self.outcomes = Counter[str]()

    async def post(self, path: str, key: str, body: bytes) -> tuple[int, Any]:
        head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        async with self.session.post(self.root + path, data=body, headers=head) as answer:
            text = await answer.text()
        self.codes[answer.status] += 1
        assert answer.status in {200, *REFUSALS}, (answer.status, path, body[:300], text[:1000])
        told = json.loads(text)
        if answer.status != 200:
            error = told["error"]
            assert error["message"] and error["code"] and len(error["message"]) < 1000, (path, body[:300], text[:2000])
        return answer.status, told

    async def claim(self) -> dict[str, Any]:
        if not any(book.ring.stats().occupancy.get("QUEUED") for book in self.court.books):
            self.court.open(self.court.opened)
            self.court.opened += 1
        _, [episode] = await self.post("/busrl/v1/episodes", KEY, b"{}")
        return episode

    async def call(self, episode: dict[str, Any]) -> None:
        key = self.dice.choice([episode["api_key"], *episode["keys"].values()])
        await self.post(self.dice.choice(CALLS), key, spoilt(self.dice, call_body(self.dice)))

    async def end(self, episode: dict[str, Any]) -> bool:
        """True if the episode has ended by it."""
        key = self.dice.choice([episode["api_key"], KEY])
        before = self.court.held()
        path, body = f"/busrl/v1/episodes/{episode['episode']}/end", spoilt(self.dice, end_body(self.dice))
        status, told = await self.post(path, key, body)
        if status != 200:
            assert self.court.held() == before, "what is refused changes nothing"
            return False
        self.outcomes[told["outcome"]] += 1
        assert len(before - self.court.held()) == 3 and told["outcome"] in ("committed", "dropped", "given back"), told
        return True


def barrage(court: Court, count: int) -> Client:
    """So many bodies, of calls and of ends; another client's episode is as it was."""
    async def run() -> Client:
        async with court.door, aiohttp.ClientSession() as session:
            client = Client(court, session, seed=count)
            other = await client.claim()
            mine = await client.claim()
            for _ in range(count):
                if client.dice.random() < 0.5:
                    await client.call(mine)
                elif await client.end(mine):
                    court.settle_all()
                    mine = await client.claim()
            assert other["episode"] in court.leases.open and not any(court.tables[other["uid"]].drawn().values())
            body = json.dumps({"prompt": "Q?", "model": "second", "max_tokens": 4}).encode()
            assert (await client.post("/v1/completions", other["api_key"], body))[0] == 200
            assert court.tables[other["uid"]].drawn() == {"first": 0, "second": 1, "third": 0, "old": 0}
            return client

    return asyncio.run(run())


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return worlds.renderer(tmp_path_factory.mktemp("model"), "qwen2_5")


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_spoilt_bodies_by_seat_are_answered_or_refused_by_name(tmp_path: Path, chat: Renderer, count: int) -> None:
    court = Court(tmp_path, chat)
    try:
        client = barrage(court, count)
        refused = sum(client.codes[code] for code in REFUSALS)
        assert count / 10 < refused < count * 0.9, client.codes
        assert client.outcomes["committed"] > count / 50, client.outcomes
        states = [int(state) for book in court.books for state in book.ring.lines()["state"]]
        left = Counter(state for state in states if state not in (State.FREE, State.QUEUED))
        assert left == {State.GENERATING: 6}, "two episodes are open"
    finally:
        court.close()
