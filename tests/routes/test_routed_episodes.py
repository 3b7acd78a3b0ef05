"""Routes of episodes: each call brings those that its parent did not have, and every sequence has all of its rows."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import agent_worlds as worlds
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routed_ring import SHAPE, LetterText, Routes, topology

from busrl.agents.episode import Call, EngineAnswer, until
from busrl.agents.players import Players
from busrl.agents.tree import Tree, Turn
from busrl.data.routing import Routed
from busrl.engines.base import Finished, Request
from busrl.errors import CallUnanswered
from busrl.ring import Fates, Ring, State
from busrl.ring.calls import Caller, ModelCall
from busrl.roles.episodes import commit_episode, write_episode
from busrl.roles.intake import CallIntake
from busrl.roles.learner.groups import Claimed, Malformed, claim_groups
from busrl.roles.learner.samples import to_sample
from busrl.states import Fate, Finish, SampleClass

ROUTED = Routed(SHAPE, prompts=True)


def of_path(ids: Any, begin: int, end: int) -> Routes:
    """The routes of positions of a path: they hang on all ids up to each."""
    sums = np.cumsum(np.asarray(ids, np.int64) * np.arange(1, len(ids) + 1))[begin:end]
    first = sums[:, None, None] + np.arange(2)[None, :, None] * 3
    return ((first + np.arange(3)) % 8).astype(np.uint8)


# -- a tree, its slot, the learner -----

calls = st.tuples(
    st.integers(0, 9), st.lists(st.integers(0, 99), min_size=1, max_size=4),
    st.lists(st.integers(0, 99), min_size=1, max_size=4), st.booleans(),
)


def grown(plan: list[Any]) -> Tree:
    """A tree of the calls of a plan: number of the parent, ids read, ids sampled, whether it was delivered."""
    tree, turns = Tree(), list[Turn]()
    for parent, read, drawn, delivered in plan:
        before = turns[parent % (len(turns) + 1) - 1] if turns and parent % (len(turns) + 1) else None
        asked = tree.ask(before, read, 8)
        path, begin = [*asked.prompt.tolist(), *drawn], before.end - 1 if before else 0
        count = len(drawn)
        turns.append(tree.answer(
            asked, drawn, [-0.5] * count, [4] * count, Finish.EOS, {}, routes=of_path(path, begin, len(path) - 1)))
        turns[-1].delivered = delivered
    turns[0].delivered = True
    return tree


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    name = f"busrl.test.{os.getpid()}.routed-episodes"
    ring = Ring.create(name, slots=4, slot_bytes=8192, processes=8, uuid=b"e" * 16)
    ring.register("learner", "test")
    ring.bind_fates(Fates(str(tmp_path_factory.mktemp("fates") / "fates.bin"), create=True), None)
    yield ring
    ring.close()
    Ring.unlink(name)


UIDS = iter(range(0, 10**6, 2))


def learnt(ring: Ring, episode: Any) -> Any:
    """What the learner gets of an episode."""
    uid = next(UIDS)
    ring.dispatch(uid=uid, group=uid, admission=uid, member=0, group_size=1, cls=0, task=b"{}", prompt_crc=1,
                  max_new_tokens=64, temperature=0.5, version=4, step=14)
    ((slot, word),) = ring.take(State.QUEUED, State.GENERATING, cls=None, limit=1)
    write_episode(ring, slot, word, episode, episode.text, 0.5)
    assert commit_episode(ring, slot, word, episode, episode.step) is not None
    ((slot, word),) = ring.take(State.GENERATED, State.REWARDING, cls=None, limit=1)
    ring.commit_rewards([(slot, word)], [1.5])
    groups = claim_groups(ring, ring.lines(), [[slot]], lambda records: None, ROUTED)
    assert groups is not None
    if isinstance(groups, Malformed):
        return groups
    ring.finish(slot, int(ring.words()[slot]), Fate.TRAINED)
    return groups[0]


@settings(max_examples=40)
@given(plan=st.lists(calls, min_size=1, max_size=6))
def test_every_sequence_has_the_routes_of_all_its_ids_but_the_last(ring: Ring, plan: list[Any]) -> None:
    episode = grown(plan).trajectory()
    assert episode is not None
    claimed = learnt(ring, episode)
    assert isinstance(claimed, Claimed)
    sample = to_sample(claimed.records[0])
    expected = [of_path(piece.ids, 0, len(piece.ids) - 1) for piece in sample.pieces]
    assert sample.routes is not None and np.array_equal(sample.routes, np.concatenate(expected))
    assert sample.prompt_routes is None


def test_an_episode_without_routes_or_with_bad_ones_is_refused(ring: Ring) -> None:
    plan = [(0, [1, 2], [3, 4], True), (1, [5], [6, 7], True)]
    sound = grown(plan).trajectory()
    assert sound is not None and sound.routes is not None and len(sound.routes) == 6
    assert "routes: slot" in str(learnt(ring, replace(sound, routes=None)))
    assert "routes [5, 2, 3]: must be [6, 2, 3]" in str(learnt(ring, replace(sound, routes=sound.routes[1:])))
    rotten = sound.routes.copy()
    rotten[4, 0] = 1
    assert "row 4, layer 0: expert 1 twice" in str(learnt(ring, replace(sound, routes=rotten)))


def test_a_turn_without_routes_takes_those_of_its_episode() -> None:
    tree = grown([(0, [1, 2], [3, 4], True)])
    asked = tree.ask(tree.turns[0], [5], 8)
    tree.answer(asked, [6], [-0.5], [4], Finish.EOS, {}).delivered = True
    trajectory = tree.trajectory()
    assert trajectory is not None and trajectory.routes is None


# -- calls, at a real ring with a rollout's intake -----


class Engines:
    """A ring of calls, and an intake in a thread whose engine draws two ids with the routes that `given` makes."""

    def __init__(self) -> None:
        self.name = f"busrl.test.{os.getpid()}.routed-calls"
        self.made = Ring.create(self.name, slots=8, slot_bytes=8192, processes=8, uuid=b"c" * 16, calls=True)
        self.ring = Ring.attach(self.name, calls=True)
        self.ring.register("rollout", "rollout/0")
        self.requests = list[Request]()
        self.given: Callable[[Request, list[int]], dict[str, Any]] = sound
        text: Any = LetterText()
        self.intake = CallIntake(self.ring, topology(), "rollout/0", text, lambda where, text, **_: None)
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        while not self.over.is_set():
            seen = self.ring.transitions(State.QUEUED)
            for request in self.intake.take(8, lambda: False):
                self.requests.append(request)
                path = [*request.prompt_ids.tolist(), 97, 98]
                self.intake.commit(Finished(
                    request.key, np.array(path[-2:], np.int32), np.full(2, -0.5, np.float32), np.full(2, 2, np.uint32),
                    Finish.EOS, **self.given(request, path)))
            self.ring.wait(State.QUEUED, seen, 0.05)

    def attach(self, _: Any = None) -> Ring:
        ring = Ring.attach(self.name, calls=True)
        ring.register("agent", "agent/0")
        return ring

    def close(self) -> None:
        self.over.set()
        self.thread.join()
        self.intake.give_back()
        self.made.close()
        Ring.unlink(self.name)


def sound(request: Request, path: list[int]) -> dict[str, Any]:
    begin = len(request.prompt_ids) - 1
    return {"routes": of_path(path, begin, begin + 2), "prompt_routes": of_path(path, request.routes_from, begin)}


@pytest.fixture
def engines() -> Iterator[Engines]:
    engines = Engines()
    yield engines
    engines.close()


def players(engines: Engines, folder: Path) -> Players:
    base = topology()
    model = replace(base.model, path=str(worlds.folder(folder / "model", "qwen2_5")))
    return Players(replace(base, model=model), engines.attach, lambda text: None)


def asked(players: Players, cls: int, *calls: Call) -> list[Any]:
    line = {"uid": 7, "cls": cls, "max_new_tokens": 5, "temperature": 0.5, "top_p": 1.0, "priority": 0, "admission": 3}

    async def ask() -> list[Any]:
        async with players.calling(lambda message, to: None):
            return [await players.lead.ask(line, call, None) for call in calls]

    return asyncio.run(ask())


def test_a_call_brings_the_routes_that_its_parent_did_not(engines: Engines, tmp_path: Path) -> None:
    team = players(engines, tmp_path)
    first, second = np.array([70, 71, 72], np.int32), np.array([70, 71, 72, 97, 98, 73], np.int32)
    answers = asked(team, SampleClass.TRAIN, Call(1, 1, first, 5, -1), Call(1, 2, second, 5, -1, None, 4))
    team.close()
    assert [request.routes_from for request in engines.requests] == [0, 4]
    whole = [*second.tolist(), 97, 98]
    assert np.array_equal(np.concatenate([answer.routes for answer in answers]), of_path(whole, 0, 7))


def test_calls_of_validation_ask_for_no_routes(engines: Engines, tmp_path: Path) -> None:
    team = players(engines, tmp_path)
    (answer,) = asked(team, SampleClass.VALIDATE, Call(1, 1, np.array([70], np.int32), 5, -1))
    team.close()
    assert answer.routes is None and engines.requests[0].extra == {}


@pytest.mark.parametrize(("given", "said"), [
    ({"routes": None}, "cannot be read"),
    ({"routes": np.ones((1, 2, 3), np.uint8)}, "routes of the answer: routes [1, 2, 3]: must be [2, 2, 3]"),
    ({"prompt_routes": np.ones((2, 2, 3), np.uint8)}, "row 0, layer 0: expert 1 twice"),
])
def test_an_engine_with_bad_routes_leaves_its_call_unanswered(
    engines: Engines, tmp_path: Path, given: Any, said: str
) -> None:
    engines.given, team = lambda request, path: {**sound(request, path), **given}, players(engines, tmp_path)
    with pytest.raises(CallUnanswered) as refused:
        asked(team, SampleClass.TRAIN, Call(1, 1, np.array([70, 71, 72], np.int32), 5, -1))
    team.close()
    assert refused.value.code == "malformed" and said in str(refused.value)


@pytest.mark.parametrize("extra", [
    {"routes_from": 3}, {"routes_from": -1}, {"routes_from": "all"}, {"routes_from": None},
])
def test_a_call_that_asks_for_rows_beyond_its_ids_is_refused(engines: Engines, extra: dict[str, Any]) -> None:
    ring = engines.attach()
    caller = Caller(ring, lambda message, to: None)
    pending = caller.put(ModelCall(np.array([70, 71, 72], np.int32), 5, extra={"gives": 3, **extra}))
    assert pending is not None and caller.wait(20.0) == [pending]
    assert pending.error is not None and "routes_from" in str(pending.error)
    ring.close()


def test_ids_behind_a_stop_text_take_their_routes_with_them(tmp_path: Path) -> None:
    chat = worlds.renderer(tmp_path, "qwen3")
    ids = np.array(chat.encode("a stop b c"), np.int32)
    routes = of_path(range(5 + len(ids)), 0, 4 + len(ids))  # of five ids that it read, and of what it drew
    zeros = np.zeros(len(ids), np.uint32)
    cut, text, _ = until(chat, EngineAnswer(ids, zeros.astype(np.float32), zeros, 1, routes=routes), ["stop"])
    assert text == "a " and 0 < len(cut.ids) < len(ids)
    assert cut.routes is not None and np.array_equal(cut.routes, routes[: 4 + len(cut.ids)])
