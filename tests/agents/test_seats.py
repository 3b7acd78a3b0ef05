"""Episodes of several seats: who is asked, what each is worth, whose turns are whose, over pipes and over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import agent_worlds as worlds
import aiohttp
import msgspec
import pytest
from agent_worlds import Table
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from busrl.agents import openai as bodies
from busrl.agents.child import EpisodeSetup
from busrl.agents.episode import Episode
from busrl.agents.http import Card, EndBody, EpisodeServer
from busrl.agents.llm import ChatRequest, CompleteRequest
from busrl.agents.pool import Children
from busrl.agents.pool import verdict_of as verdict_of_program
from busrl.agents.renderer import Renderer
from busrl.agents.roles.serve import reward_turns, verdict_of
from busrl.agents.seats import Seat, Worth, seat_asked, seat_of, settled, worth_of
from busrl.errors import CallRefused
from busrl.rewards.base import MalformedReward

SEATS = [Seat("solver", "solver"), Seat("judge", "judge"), Seat("old", "old", trained=False)]
ONE_TRAINED = [SEATS[0], SEATS[2]]
SELF_PLAY = [Seat("first", "main"), Seat("second", "main")]
CODE = '''
async def episode(task, llm):
    """The solver answers, the judge sees the answer; what is returned is what the task says."""
    answer = await llm["solver"].complete("A?")
    verdict = await llm["judge"].chat([{"role": "user", "content": answer.text}])
    assert llm.seats == ("solver", "judge", "old") and llm["judge"].tag == "judge" and not llm["old"].trained
    assert llm["solver"] is llm and llm["judge"].untrained().trained is False
    if task.get("old"):
        await llm["old"].chat([{"role": "user", "content": "Old one?"}])
    if task.get("unknown"):
        llm["nobody"]
    await llm["judge"].reward(0.5)
    return task["worth"]

ODD = {
    "nan": {"solver": float("nan"), "judge": 1.0}, "infinite part": {"solver": {"right": float("-inf")}, "judge": 1.0},
    "many": {f"seat {number}": 1.0 for number in range(100_000)}, "a number": {1: 1.0, "judge": 1.0},
    "one name": {"x" * 100_000: 1.0}, "too large": {"solver": 10**400, "judge": 1.0}, "a list": [1.0, 1.0],
    "parts": {"solver": {f"part {number}": 1e-5 for number in range(100_000)}, "judge": 0.0},
}

async def odd(task, llm):
    await llm["solver"].complete("A?")
    await llm["judge"].complete("B?")
    return ODD[task["odd"]]

def waiting(task, llm):
    return {"solver": float(len(llm["judge"].complete("B?").ids) > 0), "judge": 0.25}
'''


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return worlds.renderer(tmp_path_factory.mktemp("model"), "qwen2_5")


# -- names and rewards -----


def test_a_seat_has_its_name_and_that_of_its_tag() -> None:
    assert seat_of(SEATS, "judge") is SEATS[1]
    assert seat_of([Seat("a", "main"), Seat("b", "other")], "other").name == "b"
    with pytest.raises(KeyError, match="'main' plays several seats: first, second"):
        seat_of(SELF_PLAY, "main")
    with pytest.raises(KeyError, match="is no seat of this run; its seats: solver, judge, old"):
        seat_of(SEATS, "nobody" * 1000)


@pytest.mark.parametrize("result, seats, same, each", [
    (0.5, SEATS, (0.5, {}), {}),
    ({"solver": 1, "judge": {"right": 0.5, "short": -0.25}}, SEATS, (0, {}),
     {"solver": (1, {}), "judge": (0.25, {"right": 0.5, "short": -0.25})}),
    ({"right": 1, "short": 2}, ONE_TRAINED, (3, {"right": 1, "short": 2}), {}),
    ({"old": 0.5}, ONE_TRAINED, (0.5, {"old": 0.5}), {}),
    ({"solver": 1, "old": 0.5}, ONE_TRAINED, (0, {}), {"solver": (1, {}), "old": (0.5, {})}),
    ({"policy": 1, "more": 2}, [Seat("policy")], (3, {"policy": 1, "more": 2}), {}),
])
def test_a_result_is_for_all_or_for_each(result: Any, seats: list[Seat], same: Any, each: Any) -> None:
    reward, parts, of_seats = settled(result, seats)
    assert (reward, parts) == same
    assert {name: (worth.reward, worth.parts) for name, worth in of_seats.items()} == each


@pytest.mark.parametrize("result, text", [
    ({"solver": 1, "nobody": 2}, "of 'nobody', which is no seat; seats: judge, old, solver"),
    ({"solver": float("nan"), "judge": 1}, "seat solver: the reward is nan: must be finite"),
    ({"solver": {}, "judge": 1}, "seat solver: the reward is an empty map"), ({}, "an empty map"),
    ({"solver": "1", "judge": 1}, "seat solver: the reward is '1'"),
    ({f"seat {number}": 1.0 for number in range(100_000)}, "of 'seat 0', which is no seat"),
    ({"x" * 100_000: 1.0}, r"of 'x{63}\.\.\., which"),
])
def test_a_result_that_is_no_reward_says_why(result: Any, text: str) -> None:
    with pytest.raises(MalformedReward, match=text):
        settled(result, SEATS)


some_seats = st.sets(st.sampled_from(["solver", "judge", "old"]))


@given(spoke=some_seats, worth_something=some_seats)
def test_each_trained_seat_that_spoke_needs_a_reward(
    spoke: set[str], worth_something: set[str]
) -> None:
    each = {name: Worth(1.0 + len(name)) for name in worth_something}
    needed = spoke & {"solver", "judge"}
    if each and not needed <= worth_something:
        with pytest.raises(MalformedReward, match="made calls and got no reward"):
            worth_of(SEATS, Worth(9.0), each, spoke)
    else:
        worth = worth_of(SEATS, Worth(9.0), each, spoke)
        assert {name: one.reward for name, one in worth.items()} == {
            name: 1.0 + len(name) if each else 9.0 for name in needed}


def test_a_program_may_give_each_seat_a_reward() -> None:
    line = b'{"reward": {"solver": 1.0, "judge": {"right": 0.5}}}'
    assert verdict_of_program(0, line, seats=SEATS).seats == {"solver": Worth(1.0), "judge": Worth(0.5, {"right": 0.5})}
    assert verdict_of_program(0, b'{"reward": {"nobody": 1.0}}', seats=SEATS).how == "malformed"


# -- calls -----


def test_two_seats_that_read_the_same_ids_draw_different_numbers(chat: Renderer) -> None:
    async def streams(seats: list[Seat]) -> dict[str, int]:
        table = Table(chat, seats)
        for one in table.episode.seats.values():
            await one.answer(CompleteRequest("The same?"))
        return {name: one.tree.turns[0].call.stream for name, one in table.episode.seats.items()}

    of_three, of_two = asyncio.run(streams(SEATS)), asyncio.run(streams(SELF_PLAY))
    assert len(set(of_three.values())) == 3
    episode, _ = worlds.of(chat)
    asyncio.run(episode.answer(CompleteRequest("The same?")))
    assert of_three["solver"] == of_two["first"] == episode.tree.turns[0].call.stream, "the first seat's are as ever"
    assert of_three["judge"] == of_two["second"]


def test_all_seats_share_the_calls_at_once_and_the_episodes_own_time(chat: Renderer) -> None:
    async def run() -> None:
        table = Table(chat, SELF_PLAY, parallel=1)
        episode = table.episode
        for engine in table.engines.values():
            engine.open.clear()
        asked = [asyncio.ensure_future(one.answer(CompleteRequest("Q?"))) for one in episode.seats.values()]
        await asyncio.sleep(0)
        while not any(engine.running for engine in table.engines.values()):
            await asyncio.sleep(0)
        assert sum(engine.running for engine in table.engines.values()) == 1 and episode.busy
        before = episode.own_s()
        assert episode.own_s() == before, "the time of a call is not the episode's own"
        for engine in table.engines.values():
            engine.open.set()
        await asyncio.gather(*asked)
        assert not episode.busy and table.drawn() == {"first": 1, "second": 1}

    asyncio.run(run())


def test_the_end_of_an_episode_cancels_the_calls_of_all_seats(chat: Renderer) -> None:
    async def run() -> None:
        table = Table(chat, SEATS)
        table.engines["judge"].open.clear()
        asked = asyncio.ensure_future(table.episode.seats["judge"].answer_once(b"", False, CompleteRequest("Q?")))
        while not table.engines["judge"].running:
            await asyncio.sleep(0)
        table.episode.close()
        assert (await asyncio.gather(asked, return_exceptions=True))[0].__class__ is asyncio.CancelledError
        assert all(one.closed for one in table.episode.seats.values())

    asyncio.run(run())


def test_what_seats_said_that_are_not_recorded_follows_under_their_names(chat: Renderer) -> None:
    async def run() -> Table:
        table = Table(chat, SEATS)
        for name, text in (("solver", "Mine?"), ("old", "Theirs?")):
            request = ChatRequest([json.dumps({"role": "user", "content": text}).encode()])  # type: ignore[list-item]
            delivery, _ = await table.episode.seats[name].answer(request)
            delivery.delivered()
        return table

    episode = asyncio.run(run()).episode
    others = {"judge": episode.seats["judge"].tree, "old": episode.seats["old"].tree}
    own, theirs = json.loads(episode.tree.transcript(10_000, others))
    assert own == json.loads(episode.tree.transcript(10_000))[0] and "seat" not in own[0]
    assert [message["seat"] for message in theirs] == ["old", "old"] and theirs[0]["content"] == "Theirs?"
    for limit in range(0, 400, 7):
        data = episode.tree.transcript(limit, others)
        assert len(data) <= max(2, limit) and json.loads(data) is not None


# -- children -----


def played(chat: Renderer, folder: Path, function: str = "episode", **task: Any) -> tuple[Any, Table]:
    """The end of an episode in a child, and its seats."""
    (folder / "seats.py").write_text(CODE)
    table = Table(chat, SEATS)

    async def run() -> Any:
        children = Children(EpisodeSetup(f"seats.py:{function}", str(folder)), 1, 60.0)
        await children.start()
        try:
            return (await children.play(lambda: table.episode, json.dumps(task).encode())).ended
        finally:
            await children.close()

    return asyncio.run(run()), table


def test_code_asks_each_seat_by_its_name_and_gives_each_its_reward(chat: Renderer, tmp_path: Path) -> None:
    ended, table = played(chat, tmp_path, worth={"solver": 1.0, "judge": {"right": 0.5, "short": 0.25}}, old=True)
    assert ended.how == "returned" and ended.seats["solver"].reward == 1.0 and ended.seats["judge"].reward == 0.75
    assert table.drawn() == {"solver": 1, "judge": 1, "old": 1}
    judge = table.episode.seats["judge"].tree.turns[0]
    assert judge.reward == 0.5 and table.episode.tree.turns[0].reward is None
    assert table.episode.spoke == {"solver", "judge", "old"}


def test_code_without_async_asks_seats_too(chat: Renderer, tmp_path: Path) -> None:
    ended, table = played(chat, tmp_path, "waiting")
    assert {name: worth.reward for name, worth in ended.seats.items()} == {"solver": 1.0, "judge": 0.25}
    assert table.episode.spoke == {"judge"}


@pytest.mark.parametrize("task, how, text", [
    ({"worth": {"solver": 1.0, "nobody": 1.0}}, "malformed", "'nobody', which is no seat"),
    ({"worth": 1.0, "unknown": True}, "raised", "its seats: solver, judge, old"),
    ({"worth": None}, "malformed", "the reward is None"),
])
def test_a_wrong_seat_in_the_code_of_an_episode_is_named(
    chat: Renderer, tmp_path: Path, task: dict[str, Any], how: str, text: str
) -> None:
    ended, _ = played(chat, tmp_path, **task)
    assert ended.how == how and text in ended.text


@pytest.mark.parametrize("odd, how, text", [
    ("nan", "malformed", "seat solver: the reward is nan: must be finite"),
    ("infinite part", "malformed", "seat solver: "), ("many", "malformed", "'seat 0', which is no seat"),
    ("a number", "malformed", "1, which is no seat"), ("one name", "malformed", "which is no seat"),
    ("too large", "malformed", "seat solver: "), ("a list", "malformed", "the reward is a list"),
    ("parts", "returned", ""),
])
def test_odd_rewards_of_a_child_end_its_episode_by_name(
    chat: Renderer, tmp_path: Path, odd: str, how: str, text: str
) -> None:
    ended, table = played(chat, tmp_path, "odd", odd=odd)
    assert ended.how == how and text in ended.text and len(ended.text) < 3000, ended.text[:3000]
    assert table.episode.spoke == {"solver", "judge"} and (how == "malformed" or ended.seats["judge"] == Worth(0.0))


# -- over HTTP -----


@given(own=st.sampled_from(["", "solver", "judge"]), model=st.text(max_size=8) | st.sampled_from(["judge", "old", ""]))
def test_a_request_is_for_the_seat_of_its_model_or_key(own: str, model: str) -> None:
    names = {seat.name for seat in SEATS}
    try:
        asked = seat_asked(SEATS, own, model)
    except CallRefused as refused:
        assert refused.param == "model" and model and (model not in names or model != own)
        assert refused.code == ("invalid" if model in names else "model_not_found") and (own or model not in names)
    else:
        assert asked == (model if model in names else own or "solver")
    assert seat_asked([Seat("policy")], "", model) == "policy", "with one seat any name is taken"


def over_http(chat: Renderer, work: Callable[[Table, EpisodeServer, aiohttp.ClientSession], Any]) -> None:
    async def run() -> None:
        table, cards = Table(chat, SEATS), [Card(seat, 4096, chat) for seat in SEATS]
        async with EpisodeServer(4096, chat, "override", cards=cards) as door, aiohttp.ClientSession() as session:
            door.open(table.episode)
            await work(table, door, session)

    asyncio.run(run())


def test_clients_choose_the_seat_by_model_or_by_key(chat: Renderer) -> None:
    async def work(table: Table, door: EpisodeServer, session: aiohttp.ClientSession) -> None:
        base, keys = table.episode.openai["base_url"], table.episode.keys
        assert {*keys} == {"solver", "judge", "old"} and len({*keys.values(), table.episode.openai["api_key"]}) == 4
        hello: Any = [{"role": "user", "content": "Hello?"}]
        async with AsyncOpenAI(**table.episode.openai, max_retries=0) as client:
            answer = await client.chat.completions.create(model="judge", messages=hello)
            assert answer.model == "judge" and table.drawn() == {"solver": 0, "judge": 1, "old": 0}
            with pytest.raises(NotFoundError, match="its seats: solver, judge, old") as missing:
                await client.chat.completions.create(model="gpt-x", messages=hello)
            assert missing.value.code == "model_not_found" and missing.value.param == "model"
            assert [card.id for card in (await client.models.list()).data] == ["solver", "judge", "old"]
        async with AsyncOpenAI(base_url=base, api_key=keys["old"], max_retries=0) as client:
            await client.chat.completions.create(model="gpt-x", messages=hello)
            assert table.drawn() == {"solver": 0, "judge": 1, "old": 1}
            with pytest.raises(BadRequestError, match="this key is that of the seat old"):
                await client.chat.completions.create(model="judge", messages=hello)
        head = {"Authorization": f"Bearer {table.episode.openai['api_key']}"}
        root = base.removesuffix("/v1")
        cut = await session.post(f"{root}/tokenize", json={"prompt": "A b", "model": "judge"}, headers=head)
        body = {"token_ids": (await cut.json())["tokens"], "sampling_params": {"max_tokens": 5}, "model": "old"}
        drawn = await session.post(f"{root}/inference/v1/generate", json=body, headers=head)
        assert drawn.status == 200 and table.drawn()["old"] == 2
        nobody = {"tokens": [1], "prompt": "a", "model": "nobody"}
        for path in ("/tokenize", "/detokenize"):
            assert (await session.post(root + path, json=nobody, headers=head)).status == 404
        table.episode.close()
        again = await session.post(f"{base}/chat/completions", json={"messages": hello},
                                   headers={"Authorization": f"Bearer {keys['judge']}"})
        assert again.status == 401, "all keys end with the episode"

    over_http(chat, work)


def judged(chat: Renderer, body: dict[str, Any]) -> Any:
    """Read a body of `/end`, for an episode in which solver and judge made a call."""
    async def run() -> Any:
        table = Table(chat, SEATS)
        for name in ("solver", "judge"):
            delivery, _ = await table.episode.seats[name].answer(CompleteRequest("Q?"))
            delivery.delivered()
        end = msgspec.convert(body, EndBody)
        ended = verdict_of(end, table.episode, judges_itself=True)
        reward_turns(table.episode, end)
        return ended, table

    return asyncio.run(run())


def test_the_end_over_http_gives_each_seat_its_reward(chat: Renderer) -> None:
    body = {"rewards": {"solver": 1.0, "judge": {"right": 0.5}}, "turn_rewards": {"judge": {"0": 0.25}, "solver": [2]}}
    ended, table = judged(chat, body)
    assert ended.seats == {"solver": Worth(1.0), "judge": Worth(0.5, {"right": 0.5})}
    rewards = {name: [turn.reward for turn in one.tree.turns] for name, one in table.episode.seats.items()}
    assert rewards == {"solver": [2.0], "judge": [0.25], "old": []}
    ended, table = judged(chat, {"reward": 0.5, "turn_rewards": {"0": 1}})
    assert (ended.reward, ended.seats, table.episode.tree.turns[0].reward) == (0.5, {}, 1.0)


@pytest.mark.parametrize("body, param, text", [
    ({"rewards": {"solver": 1.0}}, "rewards", "judge made calls and got no reward"),
    ({"rewards": {"solver": 1.0, "judge": 0.0, "nobody": 1.0}}, "rewards", "'nobody', which is no seat"),
    ({"rewards": {"solver": {}, "judge": 0.0}}, "rewards", "empty map"),
    ({"rewards": {"solver": 1.0, "judge": 0.0}, "reward": 1.0}, "rewards", "one reward for all seats"),
    ({"reward": 1.0, "turn_rewards": {"nobody": [1]}}, "turn_rewards", "'nobody' is no seat"),
    ({"reward": 1.0, "turn_rewards": {"judge": [1], "solver": 2.0}}, "turn_rewards", "must be a map or a list"),
    ({"reward": 1.0, "turn_rewards": {"judge": {"7": 1}}}, "turn_rewards", "for 7"),
    ({"reward": 1.0, "turn_rewards": {"judge": {"x": 1}}}, "turn_rewards", "numbers of calls"),
    ({"reward": 1.0, "turn_rewards": {"": {"0": 1}}}, "turn_rewards", "'' is no seat"),
    ({"reward": 1.0, "turn_rewards": {"judge": [1e39]}}, "turn_rewards", "no finite reward of a call, for 0"),
])
def test_a_wrong_end_is_refused_by_its_field_and_rewards_no_turn(
    chat: Renderer, body: dict[str, Any], param: str, text: str
) -> None:
    with pytest.raises(CallRefused, match=text) as refused:
        judged(chat, body)
    assert refused.value.param == param


names = st.sampled_from(["solver", "judge", "old", "0", "1", ""]) | st.text(max_size=6)
scalars = st.none() | st.booleans() | st.integers(-3, 1 << 70) | st.floats(allow_nan=False) | st.text(max_size=6)
anything = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3))
fields = st.sampled_from(["reward", "rewards", "turn_rewards", "parts", "failed", "again", "why"])
ends = st.dictionaries(fields, anything | st.dictionaries(names, anything, max_size=3), max_size=4)


@pytest.fixture(scope="module")
def asked(chat: Renderer) -> Episode:
    """An episode in which solver and judge made a call."""
    async def run() -> Episode:
        table = Table(chat, SEATS)
        for name in ("solver", "judge"):
            delivery, _ = await table.episode.seats[name].answer(CompleteRequest("Q?"))
            delivery.delivered()
        return table.episode

    return asyncio.run(run())


@settings(max_examples=500)
@given(body=ends)
def test_no_body_of_an_end_does_more_than_be_refused(asked: Episode, body: dict[str, Any]) -> None:
    try:
        end = bodies.read(json.dumps(body).encode(), EndBody)
        ended = verdict_of(end, asked, judges_itself=True)
        reward_turns(asked, end)
    except CallRefused as refused:
        assert refused.code == "invalid"
    else:
        assert ended.how in ("returned", "failed", "again", "used_up") and set(ended.seats) <= {*asked.seats}
