"""Players of several models: each asks the engines of its own model, at its own ring, as its seat's sample says."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import agent_worlds as worlds
import msgspec
import numpy as np
import pytest

from busrl.agents.child import Begin
from busrl.agents.episode import Call
from busrl.agents.players import Players
from busrl.agents.roles.holder import EpisodeHolder
from busrl.agents.seats import Seat
from busrl.agents.sides import ClaimedSample
from busrl.protocol import messages as m
from busrl.ring import Ring, State
from busrl.ring.calls import write_answer
from busrl.states import Finish, SampleClass
from busrl.topology.schema import Agents, Generation, Limits

LINE = {"uid": 7, "cls": SampleClass.TRAIN, "max_new_tokens": 5, "temperature": 0.5, "top_p": 1.0, "priority": -3,
        "admission": 3}
TAGS = {"solver": 100, "judge": 200, "old": 300}  # the id that the engine of each draws


class Calls:
    """A ring of calls, and an engine in a thread that answers each with an id of its own, and notes its line."""

    def __init__(self, tag: str) -> None:
        self.name, self.token = f"busrl.test.{os.getpid()}.{tag}", TAGS[tag]
        self.made = Ring.create(self.name, slots=8, slot_bytes=4096, processes=8, uuid=b"c" * 16, calls=True)
        self.engine = Ring.attach(self.name, calls=True)
        self.engine.register("rollout", f"rollout/{tag}")
        self.lines, self.over, self.open = list[Any](), False, True
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self) -> None:
        while not self.over:
            taken = self.engine.take(State.QUEUED, State.GENERATING, cls=None, limit=8, timeout_s=0.02)
            for slot, word in taken if self.open else ():
                self.lines.append(self.engine.line(slot))
                ids = np.array([self.token], np.int32)
                write_answer(self.engine, slot, word, ids, np.array([-0.5], np.float32), np.array([2], np.uint32),
                             int(Finish.EOS), 0, 9)

    def attach(self) -> Ring:
        ring = Ring.attach(self.name, calls=True)
        ring.register("agent", "agent/0")
        return ring

    def close(self) -> None:
        self.over = True
        self.thread.join()
        self.engine.close()
        self.made.close()
        Ring.unlink(self.name)


class Whole:
    """The part that players read of the topology of a run of a solver, a judge and an older model."""

    def __init__(self, folder: Path) -> None:
        self.tags, self.lead = tuple(TAGS), "solver"
        own = {"judge": Generation(max_new_tokens=9, temperature=0.25), "old": Generation(max_new_tokens=3, top_p=0.5)}
        self.models = {tag: SimpleNamespace(
            tag=tag, beside="" if tag == self.lead else tag, frozen=tag == "old", seats=(tag,), base_dir=".",
            model=SimpleNamespace(path=str(folder)), agents=Agents(), limits=Limits(), keeps_prefixes=False,
            episode_limits=(512, 512, 512), follows=(), generation=own.get(tag, Generation()), of=self.of,
            tags=self.tags, lead=self.lead, derived=SimpleNamespace(routing=None),
        ) for tag in TAGS}

    def of(self, tag: str) -> Any:
        return self.models[tag]


@pytest.fixture
def rings() -> Iterator[dict[str, Calls]]:
    made = {tag: Calls(tag) for tag in TAGS}
    yield made
    for calls in made.values():
        calls.close()


@pytest.fixture
def players(tmp_path: Path, rings: dict[str, Calls]) -> Iterator[Players]:
    whole: Any = Whole(worlds.folder(tmp_path / "model", "qwen2_5"))
    made = Players(whole.of("solver"), lambda topology: rings[topology.tag].attach(), lambda text: None)
    yield made
    made.close()


def call(number: int = 0) -> Call:
    return Call(7, number, np.array([1, 2, 3 + number], np.int32), 4, -1)


def test_each_player_asks_the_engines_of_its_own_model(players: Players, rings: dict[str, Calls]) -> None:
    counted = ClaimedSample(0, 0, LINE)

    async def ask() -> dict[str, int]:
        async with players.calling(lambda message, address: None):
            answers = {seat.name: await player.ask(LINE, call(), counted if seat.name == "judge" else None)
                       for seat, player in players.seats.items()}
        return {name: int(answer.ids[0]) for name, answer in answers.items()}

    assert asyncio.run(ask()) == TAGS and (counted.read, counted.computed) == (3, 0)
    assert [len(calls.lines) for calls in rings.values()] == [1, 1, 1]
    assert [*players.seats] == [Seat("solver", "solver"), Seat("judge", "judge"), Seat("old", "old", trained=False)]


def test_the_only_seat_of_a_run_has_its_name(players: Players) -> None:
    seat, line = Seat("solver", "solver"), {"uid": 7, "max_new_tokens": 4, "temperature": 1.0, "top_p": 1.0}
    holder: Any = SimpleNamespace(seats={seat: players.lead}, player=players.lead, _ask=print)
    episode = EpisodeHolder.begin(holder, ClaimedSample(0, 1, line))
    assert episode.places == [seat]
    begin = Begin(1, msgspec.Raw(b"{}"), 7, {"api_key": "key"}, episode.places)
    asked: Any = print
    llm = begin.llm(asked)
    assert llm["solver"] is llm and llm.seats == ("solver",) and llm.openai == {"api_key": "key"}


def test_an_unrecorded_seat_draws_as_its_own_model_says(players: Players) -> None:
    by_name = {seat.name: (seat, player) for seat, player in players.seats.items()}
    sample, asked = ClaimedSample(0, 0, LINE), ClaimedSample(0, 0, {**LINE, "cls": SampleClass.VALIDATE})

    def drawn(name: str, of: ClaimedSample) -> tuple[int, float, float]:
        seat, player = by_name[name]
        settings = player.settings(player.line_of(of, seat))
        return settings.max_new_tokens, settings.temperature, settings.top_p

    assert drawn("judge", sample) == (9, 0.25, 1.0) and drawn("old", sample) == (3, 1.0, 0.5)
    assert drawn("judge", asked) == (5, 0.5, 1.0), "a round asks all trained models alike"
    assert drawn("old", asked) == (3, 1.0, 0.5)
    assert by_name["judge"][1].line_of(sample, by_name["judge"][0])["priority"] == -3


def test_messages_about_calls_name_the_model_whose_ring_they_are_in(
    players: Players, rings: dict[str, Calls]
) -> None:
    sent: list[m.Message] = []
    for calls in rings.values():
        calls.open = False

    async def give_up() -> None:
        async with players.calling(lambda message, address: sent.append(message)):
            for player in players:
                asking = asyncio.ensure_future(player.ask(LINE, call(), None))
                end = asyncio.get_running_loop().time() + 30
                while not player.calls.stats().occupancy["GENERATING"]:
                    assert asyncio.get_running_loop().time() < end, "no engine took the call"
                    await asyncio.sleep(0.005)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(give_up())
    assert [m.model_of(message) for message in sent if isinstance(message, m.CallCancel)] == ["", "judge", "old"]
