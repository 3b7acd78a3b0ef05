"""The door over HTTP: real sockets and OpenAI's own client, over an engine that disobeys its tokenizer."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import agent_worlds as worlds
import aiohttp
import pytest
from agent_worlds import ADD, Engine, calling, of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import APIError, AsyncOpenAI, AuthenticationError, BadRequestError

from busrl.agents import openai as bodies
from busrl.agents.episode import Call, EngineAnswer, Episode
from busrl.agents.http import EpisodeServer
from busrl.agents.renderer import Renderer
from busrl.errors import CallRefused, CallUnanswered

FAMILIES = ("qwen3", "qwen2_5", "llama3", "gemma")
HELLO: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "Hello?"}]}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Renderer]:
    renderers: dict[str, Renderer] = {}

    def chat(name: str) -> Renderer:
        if name not in renderers:
            renderers[name] = worlds.renderer(tmp_path_factory.mktemp(name), name)
        return renderers[name]

    return chat


@asynccontextmanager
async def opened(chat: Renderer, *episodes: Episode, sampling: str = "override") -> AsyncIterator[EpisodeServer]:
    async with EpisodeServer(4096, chat, sampling) as door:
        for episode in episodes:
            door.open(episode)
        yield door


def client_of(episode: Episode, **how: Any) -> AsyncOpenAI:
    return AsyncOpenAI(**{"max_retries": 0, **episode.openai, **how})


async def converse(client: AsyncOpenAI, chance: random.Random, template: str) -> None:
    """Four turns with a tool, each time with the history as it came, or as frameworks write it back."""
    tools: Any = [ADD] if template in ("qwen3", "qwen2_5") else None
    messages: list[Any] = [{"role": "user", "content": f"Question {chance.random()}?"}]
    for turn in range(4):
        more: Any = {"tools": tools} if tools else {}
        completion = await client.chat.completions.create(model="policy", messages=messages, **more)
        answer = completion.choices[0].message.model_dump(exclude_none=True)
        messages.append(worlds.rebuilt(answer) if chance.random() < 0.5 else worlds.dumped(answer))
        calls = messages[-1].get("tool_calls") or []
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in calls]
        if not calls:
            messages.append({"role": "user", "content": f" Go on {turn}. "})


def exact(chat: Renderer, template: str, count: int, seed: int) -> float:
    """Play so many episodes; 0 tokens wrong, lost or doubled. Sequences per episode."""
    async def run() -> float:
        chance, sequences = random.Random(seed), 0
        for _ in range(count):
            called = calling(template, (1, 2), text="Adding.") if template in ("qwen3", "qwen2_5") else "I add them."
            texts = [called, f" So: {chance.random()}\n", "Word.", "Right, é."]
            if template == "qwen3":
                texts = [f"<think>\nhm {chance.random()}\n</think>\n\n{text}" for text in texts]
            episode, engine = of(chat, texts)
            async with opened(chat, episode), client_of(episode) as client:
                await converse(client, chance, template)
            assert engine.world.exact() == (0, 0, 0, 0)
            assert len(episode.tree.turns) == 4
            sequences += len(episode.tree.sequences())
        return sequences / count

    return asyncio.run(run())


@pytest.mark.parametrize("template", FAMILIES)
def test_conversations_of_openais_client_are_one_sequence_each_with_every_token_once(
    chats: Callable[[str], Renderer], template: str
) -> None:
    assert exact(chats(template), template, 4, seed=1) == 1.0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("template", FAMILIES)
def test_a_thousand_episodes_are_exact_in_four_families(chats: Callable[[str], Renderer], template: str) -> None:
    assert exact(chats(template), template, 250, seed=2) == 1.0


Work = Callable[[Episode, Engine, EpisodeServer], Any]


def ask(chat: Renderer, work: Work, texts: list[str] | None = None, **how: Any) -> Any:
    async def run() -> Any:
        sampling = how.pop("sampling", "override")
        episode, engine = of(chat, texts, **how)
        async with opened(chat, episode, sampling=sampling) as door:
            return await work(episode, engine, door)

    return asyncio.run(run())


async def until(seen: Callable[[], Any], limit_s: float = 60.0) -> None:
    """Let the loop run until it is seen."""
    end = asyncio.get_running_loop().time() + limit_s
    while not seen():
        assert asyncio.get_running_loop().time() < end, f"not seen within {limit_s:g} s"
        await asyncio.sleep(0.005)


def test_an_answer_has_what_clients_read(chats: Callable[[str], Renderer]) -> None:
    async def work(episode: Episode, engine: Engine, door: EpisodeServer) -> None:
        async with client_of(episode) as client:
            completion = await client.chat.completions.create(
                **HELLO, logprobs=True, n=2, tools=[ADD], extra_body={"return_token_ids": True})
            both = completion.choices
            assert [token.finish_reason for token in both] == ["tool_calls", "stop"]
            assert both[0].message.tool_calls and json.loads(both[0].message.tool_calls[0].function.arguments)["b"] == 2
            turns = episode.tree.turns
            for choice, turn in zip(both, turns, strict=True):
                assert choice.logprobs and choice.logprobs.content
                assert [token.logprob for token in choice.logprobs.content] == turn.logprobs.tolist()
                assert choice.model_dump()["token_ids"] == turn.ids.tolist()
            assert completion.usage and completion.usage.prompt_tokens == turns[0].begin
            assert completion.usage.completion_tokens == sum(len(turn.ids) for turn in turns)
            raw = completion.model_dump()
            assert raw["prompt_token_ids"] == turns[0].call.prompt.tolist()
            assert raw["busrl"] == {"version": int(turns[1].versions[-1]), "turn": turns[1].number}
            assert all(turn.delivered for turn in turns)
            assert (await client.models.list()).data[0].model_dump()["max_model_len"] == 4096

    ask(chats("qwen2_5"), work, [calling("qwen2_5", (1, 2)), "Plain."])


def test_a_stream_brings_the_same_message(chats: Callable[[str], Renderer]) -> None:
    async def work(episode: Episode, engine: Engine, door: EpisodeServer) -> None:
        async with client_of(episode) as client:
            text, calls, reasons, usage = "", [], [], None
            stream = await client.chat.completions.create(
                **HELLO, stream=True, tools=[ADD], stream_options={"include_usage": True})
            async for chunk in stream:
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    calls += choice.delta.tool_calls or []
                    reasons += [choice.finish_reason] if choice.finish_reason else []
            assert text.strip() == "Let me." and len(calls) == 1 and reasons == ["tool_calls"]
            assert calls[0].function.name == "add"
            assert usage and usage.total_tokens == len(episode.tree.turns[0].path_ids)
            assert episode.tree.turns[0].delivered

    ask(chats("qwen2_5"), work, [calling("qwen2_5", (1, 2), text="Let me.")])


@pytest.mark.parametrize("numbers", [False, True])
def test_a_stream_brings_text_while_it_is_drawn_and_ends_whole(
    chats: Callable[[str], Renderer], numbers: bool
) -> None:
    """Two answers at once, one of which thinks; with numbers for each token they come whole."""
    async def work(episode: Episode, engine: Engine, door: EpisodeServer) -> None:
        engine.ending.clear()
        parts = [{"reasoning_content": "", "content": ""} for _ in range(2)]
        roles, early = [0, 0], False
        async with client_of(episode) as client:
            asking = client.chat.completions.create(**HELLO, n=2, stream=True, logprobs=numbers)
            if numbers:
                engine.ending.set()
            async for chunk in await asking:
                for choice in chunk.choices:
                    roles[choice.index] += choice.delta.role == "assistant"
                    for name, text in choice.delta.model_dump(exclude_none=True).items():
                        if name in ("content", "reasoning_content"):
                            parts[choice.index][name] += text
                if not engine.ending.is_set() and all(part["content"] for part in parts):
                    early = True
                    engine.ending.set()
            assert early != numbers, "the end of both was drawn only when words of both had come"
            assert roles == [1, 1]
            for part, turn in zip(parts, episode.tree.turns, strict=True):
                assert part == {"reasoning_content": "", **{name: turn.message[name] for name in part
                                                            if name in turn.message}}
                assert turn.delivered
            asking = client.completions.create(model="policy", prompt="Go.", stream=True)
            texts = [chunk.choices[0].text async for chunk in await asking]
            assert "".join(texts) == episode.tree.turns[-1].message["content"] and len(texts) > 2

    ask(chats("qwen3"), work, ["<think>\nhm\n</think>\n\nOne é word.", "<thin ice, and more.", "Plain text."])


def test_a_stream_whose_engine_fails_says_so_behind_what_it_brought(chats: Callable[[str], Renderer]) -> None:
    async def work(episode: Episode, engine: Engine, door: EpisodeServer) -> None:
        async def lost(call: Call) -> EngineAnswer:
            assert call.on_ids is not None
            call.on_ids(chats("qwen3").encode("Some words, and more"))
            raise CallUnanswered("lost", "it became another answer")

        engine.instead, gone = lost, []
        episode.on_unanswered(gone.append)
        async with client_of(episode) as client:
            text = ""
            with pytest.raises(APIError, match="this episode is over"):
                async for chunk in await client.chat.completions.create(**HELLO, stream=True):
                    text += chunk.choices[0].delta.content or ""
        assert text.startswith("Some") and len(gone) == 1

    ask(chats("qwen3"), work)


def test_sub_agents_that_call_each_other_are_sequences_of_an_episode(
    chats: Callable[[str], Renderer]
) -> None:
    async def talk(client: AsyncOpenAI, name: str, turns: int, streams: bool) -> str:
        """A conversation under the episode's key; returns its last answer."""
        messages: list[Any] = [{"role": "system", "content": f"You are {name}."}, {"role": "user", "content": "Begin."}]
        for turn in range(turns):
            if streams:
                parts = [chunk.choices[0].delta.content or "" async for chunk in await client.chat.completions.create(
                    model="policy", messages=messages, stream=True) if chunk.choices]
                answer = "".join(parts)
            else:
                completion = await client.chat.completions.create(model="policy", messages=messages)
                answer = completion.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"More {turn}."}]
        return answer

    async def work(episode: Episode, engine: Engine, door: EpisodeServer) -> None:
        async with client_of(episode) as client:
            heard = await asyncio.gather(*(talk(client, f"helper {n}", 3, n % 2 == 0) for n in range(4)))
            await talk(client, f"the head, told {heard}", 2, False)
        assert engine.world.exact() == (0, 0, 0, 0)
        assert len(episode.tree.turns) == 14 and len(episode.tree.sequences()) == 5

    ask(chats("qwen2_5"), work, [f"Answer {n}." for n in range(14)])


def test_token_ids_go_in_and_come_out_by_both_routes(chats: Callable[[str], Renderer]) -> None:
    async def work(episode: Episode, engine: Engine, door: EpisodeServer) -> None:
        head, root = {"x-busrl-episode": episode.openai["api_key"]}, door.base_url.removesuffix("/v1")
        async with aiohttp.ClientSession(headers=head) as session, client_of(episode) as client:
            async with session.post(f"{root}/tokenize", json={"prompt": "One two."}) as answer:
                ids = (await answer.json())["tokens"]
            body = {"token_ids": ids, "sampling_params": {"max_tokens": 7}}
            async with session.post(f"{root}/inference/v1/generate", json=body) as answer:
                first = (await answer.json())["choices"][0]
            assert first["logprobs"]["content"][0]["token"] == f"token_id:{first['token_ids'][0]}"
            longer = [*ids, *first["token_ids"], *ids]
            second = await client.completions.create(model="policy", prompt=longer, max_tokens=5)
            assert second.choices[0].text and len(episode.tree.sequences()) == 1, "it continues the first by its ids"
            async with session.post(f"{root}/detokenize", json={"tokens": ids}) as answer:
                assert (await answer.json())["prompt"] == "One two."
            assert engine.world.exact() == (0, 0, 0, 0)

    ask(chats("qwen2_5"), work)


def test_a_client_of_vllms_server_gets_ids_and_log_probabilities(
    chats: Callable[[str], Renderer],
) -> None:
    """As `VLLMServer` of atroposlib asks and reads it."""

    async def work(episode: Episode, engine: Engine, door: EpisodeServer) -> None:
        head, url = {"x-busrl-episode": episode.openai["api_key"]}, door.base_url.removesuffix("/v1") + "/generate"
        body = {"prompt": {"prompt_token_ids": chats("qwen2_5").encode("One two.")}, "logprobs": 0, "n": 2,
                "max_tokens": 7}
        async with aiohttp.ClientSession(headers=head) as session:
            async with session.post(url, json=body) as answer:
                reply = await answer.json()
            pairs = [[next(iter(place[0].items())) for place in turn] for turn in reply["logprobs"]]
            assert [[int(token) for token, _ in turn] for turn in pairs] == reply["token_ids"]
            assert [turn.ids.tolist() for turn in episode.tree.turns] == reply["token_ids"]
            assert [turn.logprobs.tolist() for turn in episode.tree.turns] == [[p for _, p in turn] for turn in pairs]
            assert reply["finish_reasons"] == ["stop", "stop"]
            async with session.post(url, json={**body, "stream": True}) as answer:
                assert answer.status == 400 and (await answer.json())["error"]["param"] == "stream"
        assert engine.world.exact() == (0, 0, 0, 0)

    ask(chats("qwen2_5"), work)


def test_a_stop_text_ends_an_answer_at_the_token_that_completes_it(chats: Callable[[str], Renderer]) -> None:
    async def work(episode: Episode, engine: Engine, door: EpisodeServer) -> None:
        async with client_of(episode) as client:
            completion = await client.chat.completions.create(**HELLO, stop=["\nObservation:"])
            (choice,) = completion.choices
            assert choice.message.content == "Act: look" and choice.finish_reason == "stop"
            (turn,) = episode.tree.turns
            drawn = engine.world.log[0][1]
            assert turn.ids.tolist() == list(drawn[: len(turn.ids)]) and len(turn.ids) < len(drawn)
            texts = [chat.decode(turn.ids[:count].tolist()) for count in (len(turn.ids), len(turn.ids) - 1)]
            assert ["\nObservation:" in text for text in texts] == [True, False]
            again = [*HELLO["messages"], choice.message.model_dump(exclude_none=True), HELLO["messages"][0]]
            await client.chat.completions.create(model="policy", messages=again)
            assert len(episode.tree.sequences()) == 1, engine.world.chat.counts

    chat = chats("qwen2_5")
    ask(chat, work, ["Act: look\nObservation: made up by the model", "Fine."])


def test_the_key_of_a_body_is_that_of_its_turn(chats: Callable[[str], Renderer]) -> None:
    async def run() -> None:
        episode, _ = of(chats("qwen3"))
        async with opened(chats("qwen3"), episode):
            client = client_of(episode)
            await client.chat.completions.create(**HELLO, extra_body={"busrl_key": "plan"})
            await client.completions.create(model="policy", prompt=[5, 6])
            with pytest.raises(BadRequestError, match="a turn's key of 65 bytes") as refused:
                await client.chat.completions.create(**HELLO, extra_body={"busrl_key": "k" * 65})
            assert refused.value.param == "key"
        trajectory = episode.tree.trajectory()
        assert trajectory is not None and trajectory.keys == ("plan", "")

    asyncio.run(run())


def test_a_client_that_gives_up_and_asks_again_gets_the_first_answer(chats: Callable[[str], Renderer]) -> None:
    async def work(episode: Episode, engine: Engine, door: EpisodeServer) -> None:
        engine.open.clear()
        async with client_of(episode, max_retries=3, timeout=0.3) as client:
            asking = asyncio.ensure_future(client.chat.completions.create(**HELLO))
            await until(lambda: episode.counts["joined"])
            engine.open.set()
            await asking
        assert engine.calls == 1 and engine.world.exact() == (0, 0, 0, 0)

    ask(chats("qwen2_5"), work)


def test_an_answer_that_nobody_got_is_not_trained(chats: Callable[[str], Renderer]) -> None:
    async def work(episode: Episode, engine: Engine, door: EpisodeServer) -> None:
        engine.open.clear()
        async with client_of(episode) as client:
            asking = asyncio.ensure_future(client.chat.completions.create(**HELLO))
            await until(lambda: engine.calls)
            asking.cancel()
            await asyncio.wait({asking})
            await until(lambda: not episode.waiting)  # the server has seen that its client is gone
            engine.open.set()
            await client.chat.completions.create(**HELLO)
        await until(lambda: len(episode.tree.turns) == 2)
        assert engine.world.exact() == (0, 0, 0, 1), "the vanished client's turn is left out, the other one is whole"

    ask(chats("qwen2_5"), work)


def test_a_key_opens_its_own_episode_and_no_other(chats: Callable[[str], Renderer]) -> None:
    async def run() -> None:
        first, other = of(chats("qwen2_5"))[0], of(chats("qwen2_5"))[0]
        async with opened(chats("qwen2_5"), first, other):
            async with client_of(first) as client, client_of(other) as other_client:
                await client.chat.completions.create(**HELLO)
                assert (len(first.tree.turns), len(other.tree.turns)) == (1, 0)
                first.close()
                with pytest.raises(AuthenticationError, match="over"):
                    await client.chat.completions.create(**HELLO)
                await other_client.chat.completions.create(**HELLO)
            for key in ("", "wrong", other.openai["api_key"][:-1], "é"):
                async with aiohttp.ClientSession(headers={"x-api-key": key}) as session:
                    url = f"{other.openai['base_url']}/chat/completions"
                    async with session.post(url, json=HELLO) as answer:
                        assert answer.status == 401 and (await answer.json())["error"]["code"] == "invalid_api_key"
                    async with session.post(url.replace("/v1/chat/completions", "/busrl/v1/episodes")) as answer:
                        assert answer.status == 404, "an agent's door has nothing to claim"
            assert len(other.tree.turns) == 1

    asyncio.run(run())


def test_what_would_change_the_distribution_is_refused_or_overridden(chats: Callable[[str], Renderer]) -> None:
    async def work(episode: Episode, engine: Engine, door: EpisodeServer) -> None:
        async with client_of(episode) as client:
            for more in ({"response_format": {"type": "json_object"}}, {"top_logprobs": 3, "logprobs": True},
                         {"tool_choice": "required", "tools": [ADD]}, {"functions": [{"name": "f"}]},
                         {"stop": [""]}, {"n": 9}, {"max_tokens": 0}):
                with pytest.raises(BadRequestError) as refused:
                    await client.chat.completions.create(**HELLO, **more)
                assert refused.value.param in more, more
            await client.chat.completions.create(**HELLO, temperature=0.2, top_p=0.5)
            assert episode.counts["overridden"] == 1 and len(episode.tree.turns) == 1
            await client.chat.completions.create(**HELLO, temperature=1.0)
            assert episode.counts["overridden"] == 1

    async def strict(episode: Episode, engine: Engine, door: EpisodeServer) -> None:
        async with client_of(episode) as client:
            with pytest.raises(BadRequestError, match=r"temperature = 0\.2: samples are drawn with 1\.0"):
                await client.chat.completions.create(**HELLO, temperature=0.2)

    ask(chats("qwen2_5"), work)
    ask(chats("qwen2_5"), strict, sampling="refuse")


def test_an_episode_that_is_used_up_says_so_as_openai_does(chats: Callable[[str], Renderer]) -> None:
    async def work(episode: Episode, engine: Engine, door: EpisodeServer) -> None:
        async with client_of(episode) as client:
            with pytest.raises(BadRequestError) as refused:
                for _ in range(9):
                    await client.chat.completions.create(**HELLO)
            assert refused.value.code == "context_length_exceeded"

    ask(chats("qwen2_5"), work, limits={"turns": 3})


def test_an_engine_without_an_answer_ends_the_episode_and_tells_its_role(chats: Callable[[str], Renderer]) -> None:
    async def work(episode: Episode, engine: Engine, door: EpisodeServer) -> None:
        problems: list[CallUnanswered] = []
        episode.on_unanswered(problems.append)

        async def fails(call: Any) -> Any:
            raise CallUnanswered("late", "nobody had it")

        engine.instead = fails
        async with client_of(episode) as client:
            with pytest.raises(AuthenticationError, match="nobody had it"):
                await client.chat.completions.create(**HELLO)
        assert [problem.code for problem in problems] == ["late"]

    ask(chats("qwen2_5"), work)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4), max_leaves=12)
FIELDS = st.sampled_from([*bodies.ChatBody.__struct_fields__, *bodies.CompletionBody.__struct_fields__])
KINDS = (bodies.ChatBody, bodies.CompletionBody, bodies.GenerateBody, bodies.TokenizeBody, bodies.DetokenizeBody)


@given(st.dictionaries(FIELDS, JSON, max_size=6) | JSON, st.booleans())
def test_any_body_is_read_or_refused_with_its_field(body: Any, cut: bool) -> None:
    raw = json.dumps(body).encode()
    raw = raw[:-1] if cut else raw
    for kind in KINDS:
        try:
            parsed = bodies.read(raw, kind)
            if kind is bodies.ChatBody:
                bodies.chat_request(parsed, ("refuse", 1.0, 1.0))
            elif kind is bodies.CompletionBody:
                bodies.complete_request(parsed, ("override", 0.7, 0.9))
        except CallRefused as refused:
            assert refused.code in ("invalid", "unsupported") and str(refused)


ROUTES = ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate", "/generate", "/tokenize", "/detokenize")
HOSTILE = [b"", b"\xff\xfe", b"[" * 100_000, b'{"messages":' * 2000, b'{"messages": [{"role": "user"}]}', b"nonsense",
           json.dumps({"messages": [{"role": "user", "content": "x"}] * 100_000}).encode(),
           json.dumps({"messages": HELLO["messages"], "model": "x" * (1 << 20), "x" * (1 << 20): 1, "tools": [
               {"type": "function", "function": {"name": "x" * (1 << 20), "parameters": {}}}]}).encode(),
           json.dumps({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}).encode(),
           json.dumps({"messages": [{"role": "\ud800", "content": "\ud800"}]}).encode(),
           json.dumps({"token_ids": [1 << 40], "tokens": [-1], "prompt": [True]}).encode(),
           json.dumps({"messages": [{"role": "user", "content": "x" * (1 << 22)}], "tools": [{"a": []}] * 9}).encode()]


def barrage(chat: Renderer, some: list[bytes]) -> None:
    """Each to every route: no answer of 500, and another episode that goes on as before."""
    async def run() -> None:
        victim, _ = of(chat, limits={"context": 300}, max_new_tokens=20)
        other = of(chat)[0]
        async with opened(chat, victim, other), client_of(other) as client:
            head = {"Authorization": f"Bearer {victim.openai['api_key']}", "Content-Type": "application/json"}
            async with aiohttp.ClientSession(headers=head) as session:
                root = victim.openai["base_url"].removesuffix("/v1")
                for body in some:
                    for route in ROUTES:
                        async with session.post(root + route, data=body) as answer:
                            text = await answer.text()
                            assert answer.status in (200, 400, 413), (answer.status, route, body[:200], text[:500])
                            assert answer.status == 200 or json.loads(text)["error"]["message"]
            assert (await client.chat.completions.create(**HELLO)).choices
            assert len(other.tree.turns) == 1

    asyncio.run(run())


def test_hostile_bodies_are_refused_by_name_and_touch_no_other_episode(
    chats: Callable[[str], Renderer]
) -> None:
    barrage(chats("qwen2_5"), HOSTILE)


@pytest.mark.slow
@pytest.mark.timeout(2700)
@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(st.lists(st.dictionaries(FIELDS, JSON, max_size=6) | JSON, min_size=100, max_size=100))
def test_ten_thousand_bodies_crash_nothing(chats: Callable[[str], Renderer], some: list[Any]) -> None:
    barrage(chats("qwen2_5"), [json.dumps(body).encode() for body in some])


def test_a_body_over_the_limit_is_refused_before_it_is_read(
    chats: Callable[[str], Renderer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("busrl.agents.http.ROOM_BYTES", -64 * 4096 + 1000)

    async def work(episode: Episode, engine: Engine, door: EpisodeServer) -> None:
        async with (
            aiohttp.ClientSession(headers={"x-api-key": episode.openai["api_key"]}) as session,
            session.post(f"{door.base_url}/completions", data=b"x" * 5000) as answer,
        ):
            assert answer.status == 413 and "larger" in (await answer.json())["error"]["message"]

    ask(chats("qwen2_5"), work)


def test_a_port_that_is_taken_is_named(chats: Callable[[str], Renderer], tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(chats("qwen2_5")) as door:
            port = int(door.base_url.rpartition(":")[2].removesuffix("/v1"))
            with pytest.raises(Exception, match=f"serve.port = {port}: cannot listen there"):
                async with EpisodeServer(64, chats("qwen2_5"), "override", port=port):
                    raise AssertionError("it listens")

    asyncio.run(run())
