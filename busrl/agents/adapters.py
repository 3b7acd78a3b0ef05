"""Environments of other libraries as episodes: `load` gives what `busrl.agents.child` plays instead of a function.

Talks to gymnasium, textarena and verifiers, which are imported where they are used, and to OpenEnv's servers by their
WebSocket. Knows nothing of slots, rings or topologies.

- `index` of the data's line is the seed of an environment, or the number of a task: the same line is the same episode.
- What an environment shows is a turn of the user; its step's reward is that of the turn, the last one's the return.
- Steps run in threads. An environment belongs to one episode at a time, and is thrown away where a step raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from itertools import islice
from typing import Any, NamedTuple

from busrl.agents.llm import Failed, Llm
from busrl.data.sources import INDEX, INDICES
from busrl.errors import AgentNotLoaded, CallRefused, cause
from busrl.states import ENVIRONMENT

THREADS = 1024  # environments that step at the same time
REPLY_S = 120.0  # an OpenEnv server answers within this time
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
USED_UP = "context_length_exceeded"  # of a call
DIGITS = 4  # of the numbers in an observation


class NoAction(Exception):
    """The answer holds no action that the environment takes."""


class Shown(NamedTuple):
    """The text that an environment shows. `seat`: of the player whose turn is next."""

    text: str
    reward: float = 0.0
    over: bool = False
    seat: int = 0


class Game(ABC):
    """An episode of an environment; the model that is trained has seat `own`, the others are played untrained."""

    own = 0

    @abstractmethod
    async def reset(self) -> Shown: ...

    @abstractmethod
    async def step(self, answer: str) -> Shown:
        """`NoAction` where the answer is none."""


class Adapter(ABC):
    """Plays episodes of one environment; `options` make the environment. `beside`: the folder of the topology."""

    package, remedy, beside = "", "", "."

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.name, self.options = name, dict(options)

    async def setup(self) -> None:
        """Import and make what every episode needs."""

    async def trial(self) -> None:
        """Begin one episode, as a check, where that needs no model."""

    @abstractmethod
    async def episode(self, task: dict[str, Any], llm: Llm) -> float:
        """Play one to its end; its return."""

    async def close(self) -> None:
        """Let go of what `setup` made."""


class Games(Adapter):
    """Plays an environment turn by turn. It takes its own options; the others make the environment."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        super().__init__(name, options)
        self._system = str(self.options.pop("system", ""))
        self._chat = bool(self.options.pop("chat", True))
        self._action = re.compile(str(self.options.pop("action", "")))
        self._no_action = float(self.options.pop("no_action", 0.0))
        self._threads = ThreadPoolExecutor(THREADS, "environment")

    async def trial(self) -> None:
        async with self.game(0) as game:
            await game.reset()

    @abstractmethod
    def game(self, index: int) -> AbstractAsyncContextManager[Game]: ...

    async def close(self) -> None:
        self._threads.shutdown(wait=False)

    async def episode(self, task: dict[str, Any], llm: Llm) -> float:
        async with self.game(int(task[INDEX])) as game:
            shown = await game.reset()
            first = [{"role": "system", "content": self._system}] if self._system else []
            messages: dict[int, list[Any]] = {}
            while not shown.over:
                mine = shown.seat == game.own
                model = llm if mine else llm.untrained()
                answer = await self._ask(model, messages.setdefault(shown.seat, list(first)), shown.text)
                try:
                    shown = await game.step(self._found(answer))
                except NoAction as problem:
                    raise Failed(self._no_action if mine else 0.0, str(problem)) from None
                if mine and shown.reward and not shown.over:
                    await llm.reward(shown.reward)
            return shown.reward

    async def _ask(self, llm: Llm, messages: list[Any], text: str) -> str:
        """The model's answer: to the conversation, or without `chat` to the text as it stands."""
        if not self._chat:
            return str((await llm.complete(self._system + text)).text)
        messages.append({"role": "user", "content": text})
        reply = await llm.chat(messages)
        messages.append(reply)
        return str(reply.get("content") or "")

    def _found(self, answer: str) -> str:
        """The last match of `action` (its first group, if it has one); without one the whole answer."""
        if not self._action.pattern:
            return answer.strip()
        if not (matches := list(self._action.finditer(answer))):
            raise NoAction(f"nothing in the answer matches action = {self._action.pattern!r}")
        found = matches[-1]
        return str(found[1] if found.re.groups else found[0])

    async def _run(self, function: Callable[..., Any], *given: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *given)


# -- gymnasium --------------------------------------------


class Gymnasium(Games):
    package, remedy = "gymnasium", "pip install gymnasium"

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        super().__init__(name, options)
        self._free: list[Any] = []  # environments that no episode has

    async def setup(self) -> None:
        import gymnasium

        self._make = lambda: gymnasium.make(self.name, **self.options)
        self._free.append(await self._run(self._make))

    @asynccontextmanager
    async def game(self, index: int) -> AsyncIterator[Game]:
        made = self._free.pop() if self._free else await self._run(self._make)
        try:
            yield _GymnasiumGame(made, index, self._run)
        except Failed:  # an answer was no action
            self._free.append(made)  # the next episode resets it
            raise
        except BaseException:
            made.close()
            raise
        self._free.append(made)

    async def close(self) -> None:
        for made in self._free:
            made.close()
        await super().close()


class _GymnasiumGame(Game):
    def __init__(self, environment: Any, index: int, run: Callable[..., Any]) -> None:
        self._environment, self._index, self._run = environment, index, run

    async def reset(self) -> Shown:
        observation, _ = await self._run(lambda: self._environment.reset(seed=self._index))
        return Shown(self._text(observation))

    async def step(self, answer: str) -> Shown:
        action = gymnasium_action(self._environment.action_space, answer)
        observation, reward, terminated, truncated, _ = await self._run(self._environment.step, action)
        return Shown(self._text(observation), float(reward), bool(terminated or truncated))

    def _text(self, observation: Any) -> str:
        """The rendering of a game that renders text, else the observation."""
        return str(self._environment.render() if self._environment.render_mode == "ansi" else text_of(observation))


def gymnasium_action(space: Any, answer: str) -> Any:
    """The action in an answer: its text, its last whole number, or as many numbers as the space has; NoAction if it
    has none."""
    kind = type(space).__name__
    numbers = NUMBER.findall(answer)
    if kind == "Text":
        action: Any = answer
    elif kind == "Discrete":
        action = int(numbers[-1]) if numbers and re.fullmatch(r"-?\d+", numbers[-1]) else None
    else:
        try:
            action = space.dtype.type(list(map(float, numbers))).reshape(space.shape)
        except (TypeError, ValueError, AttributeError, OverflowError):
            action = None
    if action is None or not space.contains(action):
        raise NoAction(f"the answer {answer[-60:]!r} is no action of {space}")
    return action


def text_of(value: Any) -> str:
    """An observation: a text as it is, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(_plain(value), ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return round(value, DIGITS)
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


# -- textarena --------------------------------------------


class TextArena(Games):
    """Games of one or more players: the trained one's seat is the index modulo `players`, the untrained model has the
    others."""

    package, remedy = "textarena", "pip install textarena"
    _lock = threading.Lock()  # games draw from the one generator of the process

    async def setup(self) -> None:
        import textarena

        self.players = int(self.options.pop("players", 1))
        self._make = lambda: textarena.make(self.name, **self.options)

    @asynccontextmanager
    async def game(self, index: int) -> AsyncIterator[Game]:
        yield _TextArenaGame(self, index, await self._run(self._alone, self._make))

    def _alone(self, function: Callable[..., Any], *given: Any) -> Any:
        with self._lock:
            return function(*given)

    async def play(self, game: _TextArenaGame, function: Callable[..., Any], *given: Any) -> Any:
        """Run a part of a game with its own state of the generator."""
        def run() -> Any:
            others = random.getstate()
            if game.state is not None:
                random.setstate(game.state)
            try:
                return function(*given)
            finally:
                game.state = random.getstate()
                random.setstate(others)

        return await self._run(self._alone, run)


class _TextArenaGame(Game):
    state: Any = None  # of the generator, after its newest part

    def __init__(self, adapter: TextArena, index: int, environment: Any) -> None:
        self._adapter, self._index, self._environment = adapter, index, environment
        self.own = index % adapter.players

    async def reset(self) -> Shown:
        return await self._adapter.play(self, self._reset)  # type: ignore[no-any-return]

    async def step(self, answer: str) -> Shown:
        return await self._adapter.play(self, self._step, answer)  # type: ignore[no-any-return]

    def _reset(self) -> Shown:
        self._environment.reset(num_players=self._adapter.players, seed=self._index)
        return self._shown()

    def _step(self, answer: str) -> Shown:
        over, _ = self._environment.step(action=answer)
        if not over:
            return self._shown()
        rewards, _ = self._environment.close()
        return Shown("", float((rewards or {}).get(self.own, 0.0)), True)

    def _shown(self) -> Shown:
        seat, observation = self._environment.get_observation()
        if not isinstance(observation, str):  # without wrappers: (from whom, text, kind) of each that is new
            observation = "\n".join(str(one[1]) for one in observation if one[0] != seat)
        return Shown(observation, seat=int(seat))


# -- OpenEnv ----------------------------------------------


class Full(Exception):
    """The server has no room for one more session."""


class OpenEnv(Games):
    """Sessions of a server, one for each episode. `field` of the action is the answer's text, and `observation` the
    field that is shown; an answer that is a JSON object is the whole action."""

    package, remedy = "aiohttp", "pip install 'busrl[openai]'"
    _client: Any = None

    async def setup(self) -> None:
        import aiohttp

        self._client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REPLY_S))
        self._url = re.sub(r"^ws", "http", self.name.rstrip("/").removesuffix("/ws"))
        self._shown, field = str(self.options.pop("observation", "")), str(self.options.pop("field", ""))
        self._open, self._ended = 0, asyncio.Event()
        async with self._client.get(f"{self._url}/schema") as found:
            found.raise_for_status()
            schema = (await found.json())["action"]
        self._properties = dict(schema.get("properties", {}))
        self._field = field or self._only(schema)

    def _only(self, schema: dict[str, Any]) -> str:
        """The one field that an action has to have."""
        needed = schema.get("required") or [name for name in self._properties if name != "metadata"]
        if len(needed) != 1:
            raise AgentNotLoaded(f"its actions have the fields {', '.join(self._properties)}: name that of the answer "
                                 'by options = { field = "..." }')
        return str(needed[0])

    @asynccontextmanager
    async def game(self, index: int) -> AsyncIterator[Game]:
        game = await self._begun(index)
        try:
            yield game
        finally:
            await game.leave()
            self._tell_end()

    async def _begun(self, index: int) -> _OpenEnvGame:
        """A session. One that the server has no room for waits until another one of this process ends."""
        while True:
            ended = self._ended
            socket = await self._client.ws_connect(f"{self._url}/ws", max_msg_size=0, heartbeat=20.0)
            self._open += 1
            try:
                game = _OpenEnvGame(socket, self, index)
                await game.begin()
                return game
            except Full:
                await socket.close()
                self._open -= 1
                if not self._open and not ended.is_set():
                    raise
            except BaseException:
                self._tell_end()
                await socket.close()
                raise
            await ended.wait()

    def _tell_end(self) -> None:
        self._open -= 1
        self._ended.set()
        self._ended = asyncio.Event()

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
        await super().close()

    def action_of(self, answer: str) -> dict[str, Any]:
        try:
            if isinstance(whole := json.loads(answer), dict):
                return whole
        except json.JSONDecodeError:
            pass
        kind = str(self._properties.get(self._field, {}).get("type", "string"))
        if kind not in ("integer", "number"):
            return {self._field: answer}
        if not (numbers := NUMBER.findall(answer)):
            raise NoAction(f"the answer {answer[-60:]!r} holds no number, as {self._field} has to be")
        return {self._field: int(float(numbers[-1])) if kind == "integer" else float(numbers[-1])}

    def shown(self, data: dict[str, Any]) -> Shown:
        found = data.get("observation") or {}
        if self._shown and self._shown not in found:
            raise KeyError(f"observation = {self._shown!r}: the observation has the fields {', '.join(found)}")
        found = found[self._shown] if self._shown else {k: v for k, v in found.items() if k != "metadata"}
        return Shown(text_of(found), float(data.get("reward") or 0.0), bool(data.get("done")))


class _OpenEnvGame(Game):
    def __init__(self, socket: Any, adapter: OpenEnv, index: int) -> None:
        self._socket, self._adapter, self._index = socket, adapter, index

    async def begin(self) -> None:
        """The server says that it is full before it answers anything."""
        self._first = await self._say("reset", {"seed": self._index})

    async def reset(self) -> Shown:
        return self._adapter.shown(self._first)._replace(reward=0.0)

    async def step(self, answer: str) -> Shown:
        return self._adapter.shown(await self._say("step", self._adapter.action_of(answer)))

    async def leave(self) -> None:
        """The server has let go of the session when it closes the connection."""
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await self._socket.send_json({"type": "close"})
            await self._socket.receive(timeout=REPLY_S)
        await self._socket.close()

    async def _say(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        with contextlib.suppress(OSError):  # closed: what it said before is still to be read
            await self._socket.send_json({"type": kind, "data": data})
        answer = await self._socket.receive_json(timeout=REPLY_S)
        found: dict[str, Any] = answer.get("data") or {}
        if answer.get("type") == "observation":
            return found
        code, text = found.get("code"), str(found.get("message", answer))
        if code == "CAPACITY_REACHED":
            raise Full(f"the server has no room for one more session: {text}")
        if code == "VALIDATION_ERROR" and kind == "step":
            raise NoAction(f"the server does not take {json.dumps(data)[:200]} as an action")
        raise RuntimeError(f"the OpenEnv server answers {kind} with {code}: {text}")


# -- verifiers --------------------------------------------


class Verifiers(Adapter):
    """Environments that play an episode by themselves, with a client of their own for the model; the index is that of a
    task. The options are the environment's configuration, as verifiers has it; `client` is the client's: verifiers' one
    for evaluation, which sends messages, or with `type = "train"` the one that renders them itself and sends ids."""

    package, remedy = "verifiers", "make agents-env, and python = \"...\" with the Python of that environment"
    _serving: Any = None

    def _client_config(self, vf: Any, settings: dict[str, Any]) -> Any:
        """The configuration of every episode's client, but for its address and its key."""
        settings["api_key_var"] = ""
        if settings.get("type") != "train":
            return vf.EvalClientConfig(**settings)
        name = str(settings.get("renderer_model_name", ""))
        folder = os.path.join(self.beside, name)
        if not name or not os.path.isdir(folder):
            raise AgentNotLoaded(f'client.renderer_model_name = {name!r}: a client of type "train" needs the folder of '
                                 f"the model; there is none at {folder}")
        return vf.TrainClientConfig(**{**settings, "renderer_model_name": folder})

    async def setup(self) -> None:
        import verifiers.v1 as vf
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        asked = self.options.pop("client", {})
        if not isinstance(asked, dict):
            raise AgentNotLoaded(f'client = {asked!r}: expected a table, for example {{ type = "train" }}')
        self._client = self._client_config(vf, dict(asked))
        own = {"taskset": {"id": self.name}, "agent": {"runtime": {"type": "subprocess"}}}
        self._vf, self._environment = vf, load_environment(resolve_env_config(_merged(own, self.options)))
        self._tasks = list(islice(iter(self._environment.taskset), INDICES))
        if not self._tasks:
            raise AgentNotLoaded("it has no task")
        _share_tls()
        self._serving = self._environment.serving()
        await self._serving.__aenter__()

    async def episode(self, task: dict[str, Any], llm: Llm) -> float:
        given = llm.openai
        headers = {**self._client.headers, "x-busrl-episode": given["api_key"]}
        client = self._client.model_copy(update={"base_url": given["base_url"], "headers": headers})
        context = self._vf.ModelContext(model="policy", client=client)
        found = await self._environment.run_episode(self._tasks[int(task[INDEX]) % len(self._tasks)], context)
        if not found.ok:
            errors = [*found.errors, *(one for trace in found.traces for one in trace.errors)]
            text = "; ".join(str(one.message) for one in errors)[:1000]
            if USED_UP in text:
                raise CallRefused(USED_UP, text)
            raise RuntimeError(f"verifiers: {text}")
        return float(sum(trace.reward for trace in found.traces))

    async def close(self) -> None:
        if self._serving is not None:
            await self._serving.__aexit__(None, None, None)


def _share_tls() -> None:
    """Let all clients of verifiers have one TLS context. It makes a client for each episode, as each has a key of its
    own, and a context takes 20 to 50 ms of CPU time."""
    import httpx
    from verifiers.v1.clients import base
    from verifiers.v1.clients import eval as evaluating

    context = httpx.create_ssl_context()

    def client_of(config: Any) -> Any:
        timeout = httpx.Timeout(**config.timeout.model_dump())
        return httpx.AsyncClient(timeout=timeout, limits=base.DEFAULT_LIMITS, verify=context)

    base.build_async_httpx = evaluating.build_async_httpx = client_of


def _merged(own: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables; what is given goes before."""
    both = {name: _merged(own[name], value) for name, value in given.items()
            if isinstance(value, Mapping) and isinstance(own.get(name), dict)}
    return {**own, **given, **both}


ADAPTERS: dict[str, type[Adapter]] = {
    "gymnasium": Gymnasium, "textarena": TextArena, "openenv": OpenEnv, "verifiers": Verifiers,
}


async def load(environment: str, options: Mapping[str, Any], trial: bool = False, beside: str = ".") -> Adapter:
    """The adapter of `kind:name`, set up; with `trial` an episode was begun. AgentNotLoaded says what is missing."""
    named = f"environment = {environment!r}"
    match = ENVIRONMENT.fullmatch(environment)
    if match is None:
        raise AgentNotLoaded(f"{named}: must be one of {', '.join(ADAPTERS)}, a colon, and a name")
    kind = ADAPTERS[match[1]]
    try:
        made = kind(match[2], options)
        made.beside = beside
        async with AsyncExitStack() as failed:
            failed.push_async_callback(made.close)
            await made.setup()
            if trial:
                await made.trial()
            failed.pop_all()
        return made
    except Exception as problem:
        missing = isinstance(problem, ModuleNotFoundError) and (problem.name or "").partition(".")[0] == kind.package
        why = f"the package {kind.package} is not installed: {kind.remedy}" if missing else cause(problem)
        raise AgentNotLoaded(f"{named}: {why}") from problem
