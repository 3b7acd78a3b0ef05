"""Environments of other libraries, played by their adapters: what the model reads, what is an action, rewards."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import httpx
import msgspec
import pytest
from aiohttp import WSMsgType, web
from hypothesis import given
from hypothesis import strategies as st

from busrl.agents import adapters
from busrl.agents.llm import ChatRequest, Choice, Choices, Ended, Llm, Request, Response, RewardRequest, play
from busrl.errors import AgentNotLoaded
from busrl.system import imports

VENV = Path(__file__).resolve().parents[2] / ".venv"
AGENTS_PYTHON = VENV / "agents" / "bin" / "python"  # of `make agents-env`
OPENENV_PYTHON = VENV / "openenv" / "bin" / "python"  # of `make openenv-env`


class Model:
    """Answers to requests in turn, or as `say` decides by what was asked; it keeps what it read."""

    def __init__(self, say: Callable[[str], str] | Sequence[str]) -> None:
        rest = iter(say) if not callable(say) else None
        self.say = say if callable(say) else lambda read: next(rest)  # type: ignore[arg-type]
        self.read: list[str] = []
        self.conversations: list[list[Any]] = []
        self.trained: list[bool] = []
        self.rewards: list[tuple[int, float]] = []

    async def ask(self, request: Request) -> Response:
        if isinstance(request, RewardRequest):
            self.rewards.append((request.turn, request.value))
            return Choices([])
        if isinstance(request, ChatRequest):
            messages = [msgspec.json.decode(message) for message in request.messages]
            self.conversations.append(messages)
            read = messages[-1]["content"]
        else:
            read = str(request.prompt)
        self.read.append(read)
        self.trained.append(request.trained)
        text = self.say(read)
        message = msgspec.Raw(msgspec.json.encode({"role": "assistant", "content": text}))
        return Choices([Choice(message, text, [1], "stop", len(self.read) - 1, 0, 1)])


def played(environment: str, model: Model, index: int = 0, **options: Any) -> Ended:
    async def run() -> Ended:
        adapter = await adapters.load(environment, options, trial=True)
        try:
            task = {"index": index}
            return await play(adapter.episode, task, Llm(model.ask, task))
        finally:
            await adapter.close()

    return asyncio.run(run())


def refusal(environment: str, **options: Any) -> str:
    with pytest.raises(AgentNotLoaded) as refused:
        asyncio.run(adapters.load(environment, options, trial=True))
    return str(refused.value)


# -- gymnasium --------------------------------------------


@pytest.fixture
def gymnasium() -> Any:
    return pytest.importorskip("gymnasium")


def test_a_gymnasium_game_is_a_conversation_with_the_steps_rewards(gymnasium: Any) -> None:
    ways = Model(["1", "then 1", "2", "1", "2", "so: 2"])  # the way over the ice
    ice = {"render_mode": "ansi", "is_slippery": False}
    ended = played("gymnasium:FrozenLake-v1", ways, 3, system="Reach G.", **ice)
    assert (ended.how, ended.reward) == ("returned", 1.0) and ways.rewards == []
    assert all("SFFF" in entry.replace("\x1b[41m", "").replace("\x1b[0m", "") for entry in ways.read)
    assert [entry["role"] for entry in ways.conversations[-1]] == ["system", *["user", "assistant"] * 5, "user"]
    ended = played("gymnasium:FrozenLake-v1", Model(["down"]), 3, action="go ([0-3])", no_action=-0.5, **ice)
    assert (ended.how, ended.reward) == ("failed", -0.5) and "action" in ended.text


def test_rewards_of_steps_before_the_last_are_those_of_their_turns(gymnasium: Any) -> None:
    model = Model(lambda read: "0")  # to the left until the pole falls
    ended = played("gymnasium:CartPole-v1", model, 5)
    turns = len(model.read)
    assert 5 < turns < 15 and ended.reward == 1.0
    assert model.rewards == [(turn, 1.0) for turn in range(turns - 1)]
    again = Model(lambda read: "0")
    played("gymnasium:CartPole-v1", again, 5)
    assert again.read == model.read and len(json.loads(model.read[0])) == 4, "the index is the seed"


def test_an_environment_outlives_a_wrong_answer_and_is_closed_after_an_error(
    gymnasium: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments: list[Any] = []
    closed: list[Any] = []

    class Breaks(gymnasium.Env):  # type: ignore[misc]
        action_space = gymnasium.spaces.Discrete(2)
        observation_space = gymnasium.spaces.Discrete(2)

        def __init__(self) -> None:
            environments.append(self)

        def reset(self, **_: Any) -> tuple[int, dict[str, Any]]:
            return 0, {}

        def step(self, action: int) -> Any:
            raise RuntimeError("it fell over")

        def close(self) -> None:
            closed.append(self)

    async def run() -> None:
        monkeypatch.setattr(gymnasium, "make", lambda name, **options: Breaks())
        adapter = await adapters.load("gymnasium:Breaks-v0", {}, trial=True)
        for _ in range(3):
            await play(adapter.episode, {"index": 0}, Llm(Model(["no number here"]).ask, {}))
        assert len(environments) == 1 and not closed
        await play(adapter.episode, {"index": 0}, Llm(Model(["1"]).ask, {}))
        assert closed == environments
        await adapter.close()

    asyncio.run(run())


def test_without_chat_the_model_reads_what_the_environment_shows(gymnasium: Any) -> None:
    model = Model(lambda read: "1")
    played("gymnasium:CartPole-v1", model, 2, chat=False, system="Cart: ")
    assert not model.conversations and all(text.startswith("Cart: [") for text in model.read)


def test_what_an_environment_needs_is_said_before_the_start(gymnasium: Any) -> None:
    assert "NameNotFound" in refusal("gymnasium:NothingLikeIt-v0")
    assert "unexpected keyword" in refusal("gymnasium:CartPole-v1", gravitas=3)


def test_a_package_that_is_missing_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    assert refusal("textarena:Wordle-v0") == (
        "environment = 'textarena:Wordle-v0': the package textarena is not installed: pip install textarena"
    )


@given(st.text(max_size=40))
def test_an_answer_is_an_action_of_the_space_or_none(text: str) -> None:
    spaces = pytest.importorskip("gymnasium").spaces
    for space in (spaces.Discrete(4), spaces.Box(-1, 1, (2,)), spaces.MultiDiscrete([2, 3]), spaces.Text(8),
                  spaces.MultiBinary(3), spaces.Discrete(3, start=-1)):
        try:
            assert space.contains(adapters.gymnasium_action(space, text))
        except adapters.NoAction:
            pass


def test_numbers_of_an_answer_become_actions(gymnasium: Any) -> None:
    spaces, action_of = gymnasium.spaces, adapters.gymnasium_action
    assert action_of(spaces.Discrete(4), "first 1, or better 3") == 3
    assert action_of(spaces.Box(-1, 1, (2,)), "[0.5, -1e-1]").tolist() == pytest.approx([0.5, -0.1])
    assert action_of(spaces.MultiDiscrete([2, 3]), "1 and 2").tolist() == [1, 2]
    for space, text in ((spaces.Discrete(4), "4"), (spaces.Box(-1, 1, (2,)), "0.5"), (spaces.Discrete(4), "0.5")):
        with pytest.raises(adapters.NoAction):
            action_of(space, text)


# -- textarena, in an environment of its own --------------

GAMES = """
import asyncio, json, random, sys
from busrl.agents import adapters

async def game(adapter, index, moves):
    texts = []
    async with adapter.game(index) as played:
        shown = await played.reset()
        while not shown.over:
            texts.append((shown.seat, shown.text))
            await asyncio.sleep(0)
            shown = await played.step(f"[{next(moves)}]")
        return [played.trained_seat, shown.reward, texts]

async def main():
    numbers = await adapters.load("textarena:GuessTheNumber-v0-raw", {}, trial=True)
    before = random.getstate()
    alone = [await game(numbers, index, iter(range(1, 30))) for index in (3, 1)]
    together = await asyncio.gather(*(game(numbers, index, iter(range(1, 30))) for index in (3, 1)))
    board = await adapters.load("textarena:TicTacToe-v0-raw", {"players": 2}, trial=True)
    won = [await game(board, index, iter((4, 0, 3, 1, 5))) for index in (0, 1)]
    print(json.dumps([alone, list(together), won, random.getstate() == before]))

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.skipif(not AGENTS_PYTHON.exists(), reason="make agents-env")
def test_textarena_games_have_seats_and_are_the_same_beside_each_other() -> None:
    environment = {**os.environ, "PYTHONPATH": imports.PACKAGES}
    done = subprocess.run([AGENTS_PYTHON, "-c", GAMES], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    alone, together, won, untouched = json.loads(done.stdout.splitlines()[-1])
    assert alone == together and untouched, "each game has the random numbers of its seed"
    assert alone[0][2] != alone[1][2] and "higher" in alone[0][2][1][1]
    assert [result[:2] for result in won] == [[0, 1.0], [1, -1.0]]
    assert [seat for seat, _ in won[0][2]] == [0, 1, 0, 1, 0]


# -- clients ------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))


def test_clients_of_verifiers_share_one_tls_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its modules by what the adapter takes of them: they are in another environment."""
    modules = {name: ModuleType(name) for name in (
        "verifiers", "verifiers.v1", "verifiers.v1.clients", "verifiers.v1.clients.base", "verifiers.v1.clients.eval")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    base, evaluating = modules["verifiers.v1.clients.base"], modules["verifiers.v1.clients.eval"]
    base.DEFAULT_LIMITS = httpx.Limits(max_connections=10)  # type: ignore[attr-defined]
    contexts = list[Any]()
    monkeypatch.setattr(httpx, "AsyncClient", lambda **settings: contexts.append(settings["verify"]))
    adapters.share_tls()
    config = SimpleNamespace(timeout=SimpleNamespace(model_dump=lambda: {"timeout": 5.0}))
    for build in (base.build_async_httpx, evaluating.build_async_httpx):  # type: ignore[attr-defined]
        build(config)
    assert len(contexts) == 2 and contexts[0] is contexts[1]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_no_example_makes_a_client_for_each_episode(path: Path) -> None:
    """Called where a module is imported, or in a `main`: not in what runs for an episode."""
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) and function.name != "main":
            called = {ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
            assert not any(name.endswith("OpenAI") for name in called), function.name


def test_the_page_of_clients_makes_one_for_all_episodes() -> None:
    page = (ROOT / "docs" / "serve.md").read_text()
    blocks = [block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "def episode" in block]
    assert blocks
    for block in blocks:
        assert "OpenAI(" not in block.partition("def episode")[2]


# -- OpenEnv ----------------------------------------------

MOST = 2


class Guessing:
    """A server as OpenEnv's: the number is the seed, of at most `MOST` sessions at a time."""

    def __init__(self) -> None:
        self.sessions = self.highest = self.refused = 0

    async def socket(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.sessions >= MOST:
            self.refused += 1
            data = {"message": "full", "code": "CAPACITY_REACHED", "active_sessions": MOST, "max_sessions": MOST}
            await socket.send_json({"type": "error", "data": data})
            await socket.close()
            return socket
        self.sessions += 1
        self.highest = max(self.highest, self.sessions)
        secret = tries = 0
        async for frame in socket:
            assert frame.type == WSMsgType.TEXT
            message = frame.json()
            if message["type"] == "close":
                break
            if message["type"] == "reset":
                secret, tries = message["data"]["seed"] % 10, 0
                await self.show(socket, "guess", None, False)
            elif not isinstance(message["data"].get("guess"), int) or len(message["data"]) != 1:
                data = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": []}
                await socket.send_json({"type": "error", "data": data})
            else:
                guess, tries = message["data"]["guess"], tries + 1
                hint = "right" if guess == secret else "higher" if guess < secret else "lower"
                await asyncio.sleep(0.002)
                await self.show(socket, hint, 1.0 if guess == secret else -0.25, guess == secret)
        self.sessions -= 1
        await socket.close()
        return socket

    async def show(self, socket: web.WebSocketResponse, hint: str, reward: float | None, done: bool) -> None:
        observation = {"said": hint, "tries": 0, "metadata": {"secret": True}}
        await socket.send_json({"type": "observation", "data": {"observation": observation, "reward": reward,
                                                                "done": done, "metadata": {}}})

    async def schema(self, request: web.Request) -> web.Response:
        properties = {"guess": {"type": "integer"}, "metadata": {"type": "object"}}
        return web.json_response({"action": {"type": "object", "properties": properties, "required": ["guess"]}})


@asynccontextmanager
async def serving(game: Guessing) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/ws", game.socket)
    app.router.add_get("/schema", game.schema)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"openenv:ws://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def guessed(environment: str) -> None:
    """24 episodes beside each other; then what no guess is, in words of the adapter and of the server."""
    adapter = await adapters.load(environment, {"observation": "said", "no_action": -1.0}, trial=True)

    async def one(index: int, *answers: str) -> tuple[Ended, Model]:
        model = Model(answers or [f"maybe {number}" for number in range(10)])
        return await play(adapter.episode, {"index": index}, Llm(model.ask, {})), model

    for index, (ended, model) in enumerate(await asyncio.wait_for(asyncio.gather(*map(one, range(24))), 60)):
        assert (ended.how, ended.reward) == ("returned", 1.0)
        assert model.read == ["guess", *["higher"] * (index % 10)]
        assert model.rewards == [(turn, -0.25) for turn in range(index % 10)]
    for answer, why in (("no idea", "holds no number"), ('{"guess": "four"}', "does not take")):
        ended, _ = await one(4, answer)
        assert (ended.how, ended.reward) == ("failed", -1.0) and why in ended.text
    assert (await one(4, '{"guess": 4}'))[0].reward == 1.0
    await adapter.close()


def test_many_episodes_share_the_sessions_that_an_openenv_server_has() -> None:
    async def run() -> Guessing:
        game = Guessing()
        async with serving(game) as environment:
            await guessed(environment)
        return game

    game = asyncio.run(run())
    assert game.highest == MOST and game.refused > 0 and game.sessions == 0


@pytest.mark.slow
@pytest.mark.skipif(not OPENENV_PYTHON.exists(), reason="make openenv-env")
def test_a_server_of_openenv_itself_is_played_as_the_one_here() -> None:
    command = [OPENENV_PYTHON, Path(__file__).with_name("openenv_server.py"), str(MOST)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            asyncio.run(guessed(f"openenv:ws://127.0.0.1:{int(server.stdout.readline())}"))
        finally:
            server.kill()


def test_without_a_field_all_of_an_observation_but_its_metadata_is_shown() -> None:
    async def run() -> None:
        async with serving(Guessing()) as environment:
            adapter = await adapters.load(environment, {})
            model = Model(["4"])
            assert (await play(adapter.episode, {"index": 4}, Llm(model.ask, {}))).reward == 1.0
            assert json.loads(model.read[0]) == {"said": "guess", "tries": 0}, "the metadata is not for the model"
            await adapter.close()

    asyncio.run(run())


def test_a_session_that_cannot_be_opened_is_not_counted_as_open() -> None:
    """Or one without room would wait for its end for ever."""
    async def run() -> None:
        async with serving(Guessing()) as environment:
            adapter = await adapters.load(environment, {})
        for _ in range(2):  # the server is gone
            ended = await play(adapter.episode, {"index": 4}, Llm(Model([]).ask, {}))
            assert ended.how != "ended"
        assert adapter.sessions == 0
        await adapter.close()

    asyncio.run(run())


def test_an_openenv_server_that_is_away_is_said_before_the_start() -> None:
    assert "openenv:ws://127.0.0.1:9" in refusal("openenv:ws://127.0.0.1:9")


def test_a_training_client_of_verifiers_needs_the_folder_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("verifiers", "verifiers.v1", "verifiers.v1.utils", "verifiers.v1.utils.loaders"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    assert "needs the folder of the model" in refusal("verifiers:any", client={"type": "train"})
    nowhere = {"type": "train", "renderer_model_name": "made/nothing"}
    assert "there is none at ./made/nothing" in refusal("verifiers:any", client=nowhere)
    assert "client = 'train': expected a table" in refusal("verifiers:any", client="train")
