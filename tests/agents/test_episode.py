"""Episodes as people write them, over an engine that answers in any order: what they get, and what is kept of it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable
from typing import Any

import agent_worlds as worlds
import msgspec
import pytest
from agent_worlds import ADD, Engine, calling, of

from busrl.agents.episode import Call, EngineAnswer, Episode, Retries
from busrl.agents.llm import Again, Blocking, ChatRequest, Ended, Failed, Llm, Refusal, Request, Response, play
from busrl.agents.renderer import Renderer
from busrl.errors import CallRefused
from busrl.states import Finish

TASK = {"prompt": "1 and 2?", "answer": 3}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return worlds.renderer(tmp_path_factory.mktemp("model"), "qwen3")


def model_of(episode: Episode, task: dict[str, Any]) -> Llm:
    """The model of an episode that runs in this process: its answers are delivered when they are there."""
    async def ask(request: Request) -> Response:
        delivery, response = await episode.answer(request)
        delivery.delivered()
        return response

    return Llm(ask, task)


async def adding(task: dict[str, Any], llm: Llm) -> float:
    """The example of the documentation."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": task["prompt"]}]
    for _ in range(8):
        reply = await llm.chat(messages, tools=[ADD])
        messages.append(reply)
        if not reply.get("tool_calls"):
            return float(reply["content"].strip().endswith(str(task["answer"])))
        for call in reply["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            result = str(arguments["a"] + arguments["b"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return 0.0


def test_an_agent_with_a_tool_is_one_sequence_with_its_reward(chat: Renderer) -> None:
    async def run() -> None:
        texts = ["<think>\nadd\n</think>\n\n" + calling("qwen3", (1, 2)), "<think>\nthree\n</think>\n\nIt is 3"]
        episode, engine = of(chat, texts)
        assert await play(adding, TASK, model_of(episode, TASK)) == Ended("returned", 1.0)
        assert engine.world.exact() == (0, 0, 0, 0)
        trajectory = episode.tree.trajectory()
        assert trajectory is not None and len(trajectory.seqs) == 1 and trajectory.text.endswith("It is 3")
        assert trajectory.step == 10, "of the oldest version: that of the first call"
        assert engine.near == [-1, 1], "the second call is offered to the engine that has the first"

    asyncio.run(run())


def test_the_key_of_a_call_is_kept_with_its_turns(chat: Renderer) -> None:
    async def run() -> None:
        episode, _ = of(chat)
        llm, user = model_of(episode, {}), [{"role": "user", "content": "A?"}]
        await llm.chat(user, key="plan")
        await llm.untrained().complete([5, 6], n=2, key="look")
        await llm.complete([5, 6])
        trajectory = episode.tree.trajectory()
        assert trajectory is not None and trajectory.keys == ("plan", "look", "look", "")
        for key in ("k" * 65, "ü" * 33, "two\nlines"):
            with pytest.raises(CallRefused, match=r"at most 64, of printable text") as refused:
                await llm.chat(user, key=key)
            assert (refused.value.code, refused.value.param) == ("invalid", "key")
        assert len(episode.tree.turns) == 4
        for wrong, text in ((7, "key is a int: must be a text"), ("\udc80", "key holds half of a character")):
            with pytest.raises(CallRefused, match=text):
                await llm.complete("A?", key=wrong)  # type: ignore[arg-type]

    asyncio.run(run())


def test_calls_of_an_episode_stay_with_the_engine_of_the_first(chat: Renderer) -> None:
    async def run() -> None:
        episode, engine = of(chat, stays=True)
        draw, engines, offered = engine.instead or engine, iter([2, 2, 3, 3, 3]), list[int]()

        async def answer(call: Call) -> EngineAnswer:
            offered.append(call.near)
            engine.instead = None
            made = dataclasses.replace(await draw(call), engine=next(engines))
            engine.instead = answer
            return made

        engine.instead = answer
        llm = model_of(episode, {})
        for number in range(5):
            await llm.chat([{"role": "user", "content": f"Part {number}."}])
        assert offered == [-1, 2, 2, 3, 3], "no call continues another, and the second engine is gone after two"
        assert episode.counts["opponent_switched"] == 1

    asyncio.run(run())


def test_parallel_calls_are_all_kept_and_at_most_so_many_run(chat: Renderer) -> None:
    async def sub(llm: Llm, number: int) -> None:
        messages = [{"role": "user", "content": f"Part {number % 3}."}]
        for _ in range(3):
            messages += [await llm.chat(messages), {"role": "user", "content": "Go on."}]

    async def run() -> None:
        episode, engine = of(chat, parallel=4)
        await asyncio.gather(*(sub(model_of(episode, {}), number) for number in range(12)))
        assert engine.world.exact() == (0, 0, 0, 0) and engine.most == 4
        assert len(episode.tree.sequences()) == 12 and len(episode.tree.turns) == 36

    asyncio.run(run())


def test_a_call_waits_for_others_room_and_is_refused_without_any(chat: Renderer) -> None:
    async def run() -> None:
        episode, engine = of(chat, limits={"sampled": 90}, max_new_tokens=40)
        llm, user = model_of(episode, {}), [{"role": "user", "content": "A?"}]
        await asyncio.gather(*(llm.chat(user) for _ in range(4)))
        assert len(episode.tree.turns) == 4 and engine.most == 2, "two calls of 40 fit, the others have waited"
        for _ in range(40):
            try:
                await llm.chat(user)
            except CallRefused as refused:
                assert refused.code == "context_length_exceeded" and "agents.sampled" in str(refused)
                break
        else:
            raise AssertionError("a budget of 90 tokens was never used up")
        assert sum(len(turn.ids) for turn in episode.tree.turns) == 90
        assert episode.tree.turns[-1].finish == Finish.LENGTH

    asyncio.run(run())


@pytest.mark.parametrize("limits", [{"turns": 2}, {"sequences": 2}, {"sampled": 2}, {"tokens": 33}])
def test_several_answers_are_asked_for_only_where_all_have_room(chat: Renderer, limits: dict[str, int]) -> None:
    async def run() -> None:
        episode, engine = of(chat, limits=limits, max_new_tokens=20)
        with pytest.raises(CallRefused) as refused:
            await model_of(episode, {}).chat([{"role": "user", "content": "A?"}], n=3)
        assert refused.value.code == "context_length_exceeded" and engine.calls == 0

    asyncio.run(run())


def test_several_answers_share_the_room_that_is_left(chat: Renderer) -> None:
    async def run() -> None:
        episode, _ = of(chat, limits={"sampled": 6}, max_new_tokens=20)
        assert len(await model_of(episode, {}).chat([{"role": "user", "content": "A?"}], n=3)) == 3
        assert [len(turn.ids) for turn in episode.tree.turns] == [2, 2, 2]

    asyncio.run(run())


def test_an_engine_that_fails_leaves_nothing_behind(chat: Renderer) -> None:
    async def run() -> None:
        episode, engine = of(chat)
        engine.fails = 1
        llm, user = model_of(episode, {}), [{"role": "user", "content": "A?"}]
        with pytest.raises(ConnectionError):
            await llm.chat(user, n=3)
        await asyncio.sleep(0.01)
        assert episode.tree.open == 0 and engine.running == 0
        await llm.chat(user)
        trajectory = episode.tree.trajectory()
        assert trajectory is not None and engine.world.exact()[0] == 0
        assert episode.tree.used()["turns"] == len(episode.tree.turns)

    asyncio.run(run())


def test_ids_in_are_ids_behind_the_turn_that_they_begin_with(chat: Renderer) -> None:
    async def run() -> None:
        episode, engine = of(chat)
        llm = model_of(episode, {})
        first = await llm.complete("Once upon")
        path = episode.tree.turns[0].path_ids.tolist()
        second = await llm.complete([*path, 300, 301])
        third = await llm.untrained().complete([*path, 300])
        assert (first.turn, second.turn, third.turn, llm.version) == (0, 1, 2, 2)
        await llm.reward(0.25)
        await llm.reward(0.5, turn=0)
        trajectory = episode.tree.trajectory()
        assert trajectory is not None
        assert trajectory.turns[:, 0].tolist() == [0, 0, 1] and trajectory.turns[:, 7].tolist() == [1, 1, 0]
        assert trajectory.turn_rewards is not None and trajectory.turn_rewards.tolist() == [0.5, 0.25, 0]
        assert engine.world.exact() == (0, 0, 0, 0)

    asyncio.run(run())


@pytest.mark.parametrize("ask, text", [
    (lambda llm: llm.chat([]), "messages is empty"),
    (lambda llm: llm.chat([{"role": "user", "content": "A"}], n=9), "n = 9: must be 1 to 8"),
    (lambda llm: llm.chat([{"role": "user", "content": "A"}], max_tokens=-1), "must be at least 1"),
    (lambda llm: llm.chat([{"role": "user", "content": "A"}], tools=["add"]), "tools must be a list of objects"),
    (lambda llm: llm.chat([{"role": "user", "content": object()}]), "can not be written as JSON"),
    (lambda llm: llm.complete("\ud800"), "half of a character"),
    (lambda llm: llm.chat([{"role": "assistant", "content": "", "tool_calls": [{"function": {
        "name": "add", "arguments": r'{"a": "\ud800"}'}}]}, {"role": "tool", "content": "3"}]), "half of a character"),
    (lambda llm: llm.complete([]), "no token"), (lambda llm: llm.complete([-1]), "-1 must be from 0 to"),
    (lambda llm: llm.complete([1, 1 << 30]), f"token id {1 << 30} must be from 0 to"),
    (lambda llm: llm.reward(1.0), "no such turn"),
])
def test_a_refused_request_leaves_the_episode_going_on(
    chat: Renderer, ask: Callable[[Llm], Awaitable[Any]], text: str
) -> None:
    async def run() -> None:
        episode, engine = of(chat)
        with pytest.raises(CallRefused, match=text):
            await ask(model_of(episode, {}))
        assert engine.calls == 0 and episode.tree.open == 0
        assert (await model_of(episode, {}).chat([{"role": "user", "content": "A"}]))["content"] == "Word 1."

    asyncio.run(run())


class Tool:
    """As the libraries of clients have them."""

    def model_dump(self, **how: Any) -> dict[str, Any]:
        return ADD


def test_objects_of_clients_libraries_may_stand_in_a_list(chat: Renderer) -> None:
    async def run() -> None:
        episode, _ = of(chat)
        user = [{"role": "user", "content": "A"}]
        await model_of(episode, {}).chat(user, tools=[Tool()])
        await model_of(episode, {}).chat(user, tools=[ADD])
        first, second = episode.tree.turns
        assert first.path_ids[: first.begin].tolist() == second.path_ids[: second.begin].tolist()

    asyncio.run(run())


# -- clients that ask again, or go away ----


def request_of(content: str) -> ChatRequest:
    return ChatRequest([msgspec.Raw(json.dumps({"role": "user", "content": content}).encode())])


def test_a_client_that_asks_again_gets_the_first_answer_others_their_own(chat: Renderer) -> None:
    async def run() -> None:
        episode, engine = of(chat, linger_s=60)
        engine.open.clear()
        first = asyncio.ensure_future(episode.answer_once(b"body", False, request_of("A?")))
        twin = asyncio.ensure_future(episode.answer_once(b"body", False, request_of("A?")))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        again = asyncio.ensure_future(episode.answer_once(b"body", True, request_of("A?")))
        await asyncio.sleep(0)
        engine.open.set()
        (delivery, _), (others, _) = await asyncio.gather(again, twin)
        late, _ = await episode.answer_once(b"body", True, request_of("A?"))
        assert engine.calls == 2 and delivery.turns != others.turns and late.turns in (delivery.turns, others.turns)
        assert episode.counts["joined"] == 2
        delivery.delivered()
        assert engine.world.exact()[:3] == (0, 0, 0) and episode.tree.undelivered == 1

    asyncio.run(run())


def test_the_call_of_a_vanished_client_is_cancelled_after_a_while(chat: Renderer) -> None:
    async def run() -> None:
        episode, engine = of(chat, linger_s=0.01)
        engine.open.clear()
        gone = asyncio.ensure_future(episode.answer_once(b"body", False, request_of("A?")))
        await asyncio.sleep(0)
        gone.cancel()
        while engine.running or not engine.calls:  # a hang ends with the test's own time
            await asyncio.sleep(0.005)
        assert episode.tree.open == 0 and not episode.tree.turns
        engine.open.set()
        _, response = await episode.answer_once(b"body", True, request_of("A?"))
        assert not isinstance(response, Refusal) and engine.calls == 2

    asyncio.run(run())


def test_a_call_is_not_cancelled_while_a_copy_of_it_waits(chat: Renderer) -> None:
    async def run() -> None:
        episode, engine = of(chat, linger_s=0.01)
        engine.open.clear()
        first, copy, third = (asyncio.ensure_future(episode.answer_once(b"body", retried, request_of("A?")))
                              for retried in (False, True, True))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        third.cancel()
        await asyncio.sleep(0.1)
        assert engine.running == 1 and not copy.done()
        engine.open.set()
        _, response = await copy
        assert not isinstance(response, Refusal) and engine.calls == 1

    asyncio.run(run())


def test_a_returning_client_stops_the_end_of_its_call(chat: Renderer) -> None:
    async def run() -> None:
        episode, engine = of(chat, linger_s=0.05)
        engine.open.clear()
        for retried in (False, True, True):
            gone = asyncio.ensure_future(episode.answer_once(b"body", retried, request_of("A?")))
            await asyncio.sleep(0)
            gone.cancel()
            await asyncio.sleep(0)
        assert episode.waiting == 0
        back = asyncio.ensure_future(episode.answer_once(b"body", True, request_of("A?")))
        await asyncio.wait({back}, timeout=0.2)  # longer than what is left of the time for a client that comes back
        assert episode.waiting == 1 and not back.done()
        engine.open.set()
        assert not isinstance((await back)[1], Refusal) and engine.calls == 1

    asyncio.run(run())


def test_a_delivered_answer_is_kept_and_a_call_while_it_runs(chat: Renderer) -> None:
    async def run() -> None:
        now = [0.0]
        episode, engine = of(chat, clock=lambda: now[0], retry_s=10)
        engine.open.clear()
        first = asyncio.ensure_future(episode.answer_once(b"body", False, request_of("A?")))
        await asyncio.sleep(0)
        now[0] = 500.0
        copy = asyncio.ensure_future(episode.answer_once(b"body", True, request_of("A?")))
        await asyncio.sleep(0)
        engine.open.set()
        await asyncio.gather(first, copy)
        now[0] = 509.0
        await episode.answer_once(b"body", True, request_of("A?"))
        assert engine.calls == 1
        now[0] = 520.0
        await episode.answer_once(b"body", True, request_of("A?"))
        assert engine.calls == 2

    asyncio.run(run())


def test_a_copy_joins_a_request_without_client_then_one_without_answer() -> None:
    async def run() -> None:
        def answer() -> asyncio.Future[Any]:
            return asyncio.get_running_loop().create_future()

        retries = Retries(keep_s=10)
        assert retries.again(b"k", 0.0) is None
        first, second = retries.first(b"k", answer()), retries.first(b"k", answer())
        first.waiting = 1
        assert retries.again(b"k", 1.0) is second
        second.waiting = 1
        assert retries.again(b"k", 1.0) is first
        first.delivered_at = second.delivered_at = 1.0
        assert retries.again(b"k", 1.0) is second, "one that was answered is answered again"
        assert retries.again(b"k", 12.0) is None
        failed = retries.first(b"k", answer())
        failed.answer.set_exception(ConnectionError())
        assert retries.again(b"k", 12.0) is None, "a request that came to nothing is asked anew"

    asyncio.run(run())


def test_own_time_does_not_pass_while_a_call_is_under_way(chat: Renderer) -> None:
    async def run() -> None:
        now = [0.0]
        episode, engine = of(chat, clock=lambda: now[0])
        now[0] = 3.0
        engine.open.clear()
        call = asyncio.ensure_future(model_of(episode, {}).chat([{"role": "user", "content": "A"}]))
        await asyncio.sleep(0)
        now[0] = 50.0
        assert episode.own_s() == 3.0
        engine.open.set()
        await call
        now[0] = 52.0
        assert episode.own_s() == 5.0

    asyncio.run(run())


# -- how episodes end ----


async def failing(task: Any, llm: Llm) -> float:
    raise Failed({"style": 0.25, "sum": -1.0}, "it gave up")


async def again(task: Any, llm: Llm) -> float:
    raise Again("the site was down")


async def leaving(task: Any, llm: Llm) -> float:
    raise SystemExit(3)


async def words(task: Any, llm: Llm) -> Any:
    return "three"


async def talkative(task: Any, llm: Llm) -> float:
    messages: list[Any] = [{"role": "user", "content": "A"}]
    while True:
        messages += [await llm.chat(messages), {"role": "user", "content": "More."}]


def blocking(task: Any, llm: Blocking) -> dict[str, float]:
    reply = llm.chat([{"role": "user", "content": task["prompt"]}])
    llm.untrained().complete("x")
    llm.reward(1.0, turn=reply.turn)
    return {"long": float(reply.completion_tokens > 1), "version": float(llm.version)}


class Kept:
    async def __call__(self, task: Any, llm: Llm) -> float:
        return 0.5


@pytest.mark.parametrize("function, how, reward, text", [
    (failing, "failed", -0.75, "it gave up"), (again, "again", 0.0, "the site was down"),
    (leaving, "raised", 0.0, "SystemExit: 3"), (words, "malformed", 0.0, "must be a number"),
    (talkative, "used_up", 0.0, "agents.turns 4 of 4"), (blocking, "returned", 2.0, ""), (Kept(), "returned", 0.5, ""),
])
def test_every_end_of_an_episode_has_a_name(
    chat: Renderer, function: Any, how: str, reward: float, text: str
) -> None:
    async def run() -> None:
        episode, _ = of(chat, limits={"turns": 4})
        ended = await play(function, TASK, model_of(episode, TASK))
        assert (ended.how, ended.reward) == (how, reward) and text in ended.text

    asyncio.run(run())


def test_a_fault_of_an_episode_names_its_place(chat: Renderer) -> None:
    async def broken(task: Any, llm: Llm) -> float:
        return float(task["missing"])

    episode, _ = asyncio.run(_made(chat))
    ended = asyncio.run(play(broken, TASK, model_of(episode, TASK)))
    assert ended.how == "raised" and ended.text.startswith("KeyError: 'missing' (") and "test_episode.py" in ended.text


async def _made(chat: Renderer) -> tuple[Episode, Engine]:
    return of(chat)
