"""Environments of other libraries as episodes: `load` makes the adapter that `busrl.agents.child` plays.

Talks to gymnasium, textarena and verifiers, which are imported where they are used, and to OpenEnv's servers over their
WebSocket. Knows nothing of slots, rings or topologies.

- `index` of the data's line is the seed of an environment, or the number of a task: the same line is the same episode.
- What an environment shows is a message of the user. The reward of a step belongs to the turn with the action; that of
  the last step is the episode's.
- Steps run in threads. An environment belongs to one episode at a time; if a step raises it is not used again.
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

THREADS = 1024  # at most so many environments step at once
REPLY_S = 120.0  # an OpenEnv server answers within this time
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
USED_UP = "context_length_exceeded"  # the code of a call without room
DIGITS = 4  # after the point, of the numbers in an observation


class NoAction(Exception):
    """The answer holds no valid action of the environment."""


class Shown(NamedTuple):
    """The text that an environment shows. `seat`: that of the player whose turn is next."""

    text: str
    reward: float = 0.0
    over: bool = False
    seat: int = 0


class Game(ABC):
    """An episode of an environment. The trained model has the `trained_seat`; all others are played untrained."""

    trained_seat = 0

    @abstractmethod
    async def reset(self) -> Shown: ...

    @abstractmethod
    async def step(self, answer: str) -> Shown:
        """Take the action in an answer; `NoAction` if it holds none."""


class Adapter(ABC):
    """Plays episodes of one environment, which `options` configure. `beside`: the folder of the topology."""

    package, remedy = "", ""

    def __init__(self, name: str, options: Mapping[str, Any], beside: str = ".") -> None:
        self.name, self.options, self.beside = name, dict(options), beside

    async def setup(self) -> None:
        """Import and make what the episodes share."""

    async def trial(self) -> None:
        """Begin an episode as a check, where that needs no model."""

    @abstractmethod
    async def episode(self, task: dict[str, Any], llm: Llm) -> float:
        """Play an episode to its end; returns its reward."""

    async def close(self) -> None:
        """Close what `setup` made."""


class Games(Adapter):
    """Plays an environment turn by turn. Takes its own keys from the options; the others configure the environment."""

    def __init__(self, name: str, options: Mapping[str, Any], beside: str = ".") -> None:
        super().__init__(name, options, beside)
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
                trained = shown.seat == game.trained_seat
                model = llm if trained else llm.untrained()
                answer = await self._ask(model, messages.setdefault(shown.seat, list(first)), shown.text)
                try:
                    shown = await game.step(self._action_in(answer))
                except NoAction as problem:
                    raise Failed(self._no_action if trained else 0.0, str(problem)) from None
                if trained and shown.reward and not shown.over:
                    await llm.reward(shown.reward)
            return shown.reward

    async def _ask(self, llm: Llm, messages: list[Any], text: str) -> str:
        """The model's answer to the conversation, or without `chat` to the bare text."""
        if not self._chat:
            return str((await llm.complete(self._system + text)).text)
        messages.append({"role": "user", "content": text})
        reply = await llm.chat(messages)
        messages.append(reply)
        return str(reply.get("content") or "")

    def _action_in(self, answer: str) -> str:
        """The last match of `action` (its first group, if it has one); the whole answer if `action` is empty."""
        if not self._action.pattern:
            return answer.strip()
        if not (matches := list(self._action.finditer(answer))):
            raise NoAction(f"nothing in the answer matches action = {self._action.pattern!r}")
        match = matches[-1]
        return str(match[1] if match.re.groups else match[0])

    async def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)


# -- gymnasium --------------------------------------------


class Gymnasium(Games):
    package, remedy = "gymnasium", "pip install gymnasium"

    def __init__(self, name: str, options: Mapping[str, Any], beside: str = ".") -> None:
        super().__init__(name, options, beside)
        self._free: list[Any] = []  # environments without an episode

    async def setup(self) -> None:
        import gymnasium

        self._make = lambda: gymnasium.make(self.name, **self.options)
        self._free.append(await self._run(self._make))

    @asynccontextmanager
    async def game(self, index: int) -> AsyncIterator[Game]:
        environment = self._free.pop() if self._free else await self._run(self._make)
        try:
            yield _GymnasiumGame(environment, index, self._run)
        except Failed:  # an answer was no action
            self._free.append(environment)  # the next episode resets it
            raise
        except BaseException:
            environment.close()
            raise
        self._free.append(environment)

    async def close(self) -> None:
        for environment in self._free:
            environment.close()
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
        """The rendering of an environment that renders text, else the observation."""
        return str(self._environment.render() if self._environment.render_mode == "ansi" else text_of(observation))


def gymnasium_action(space: Any, answer: str) -> Any:
    """The action in an answer, by the kind of space: the text, the last whole number, or as many numbers as the space
    has. NoAction if the answer holds none."""
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
    """The text of an observation: a text as it is, all else as JSON."""
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
    """Games of one or more players: the trained seat is the index modulo `players`; the untrained model has all other
    seats."""

    package, remedy = "textarena", "pip install textarena"
    _lock = threading.Lock()  # all games draw from the random generator of the process

    async def setup(self) -> None:
        import textarena

        self.players = int(self.options.pop("players", 1))
        self._make = lambda: textarena.make(self.name, **self.options)

    @asynccontextmanager
    async def game(self, index: int) -> AsyncIterator[Game]:
        yield _TextArenaGame(self, index, await self._run(self._alone, self._make))

    def _alone(self, function: Callable[..., Any], *arguments: Any) -> Any:
        with self._lock:
            return function(*arguments)

    async def play(self, game: _TextArenaGame, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a part of a game with the generator in that game's state."""
        def run() -> Any:
            others = random.getstate()
            if game.state is not None:
                random.setstate(game.state)
            try:
                return function(*arguments)
            finally:
                game.state = random.getstate()
                random.setstate(others)

        return await self._run(self._alone, run)


class _TextArenaGame(Game):
    state: Any = None  # of the generator, after the newest part of the game

    def __init__(self, adapter: TextArena, index: int, environment: Any) -> None:
        self._adapter, self._index, self._environment = adapter, index, environment
        self.trained_seat = index % adapter.players

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
        return Shown("", float((rewards or {}).get(self.trained_seat, 0.0)), True)

    def _shown(self) -> Shown:
        seat, observation = self._environment.get_observation()
        if not isinstance(observation, str):  # without wrappers: (sender, text, kind) of each new message
            observation = "\n".join(str(message[1]) for message in observation if message[0] != seat)
        return Shown(observation, seat=int(seat))


# -- OpenEnv ----------------------------------------------


class Full(Exception):
    """The server has no room for another session."""


class OpenEnv(Games):
    """Sessions of a server, one for each episode. The answer's text is the action's field `field`, unless the answer is
    a JSON object, which is the whole action. `observation`: the field that is shown. `sessions`: open ones."""

    package, remedy = "aiohttp", "pip install 'busrl[agents]'"
    _client: Any = None

    async def setup(self) -> None:
        import aiohttp

        self._client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REPLY_S))
        self._url = re.sub(r"^ws", "http", self.name.rstrip("/").removesuffix("/ws"))
        self._shown, field = str(self.options.pop("observation", "")), str(self.options.pop("field", ""))
        self.sessions, self._ended = 0, asyncio.Event()
        async with self._client.get(f"{self._url}/schema") as response:
            response.raise_for_status()
            schema = (await response.json())["action"]
        self._properties = dict(schema.get("properties", {}))
        self._field = field or self._only(schema)

    def _only(self, schema: dict[str, Any]) -> str:
        """The only field that an action needs."""
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
        """Begin a session. If the server has no room, wait until another session of this process ends."""
        while True:
            ended = self._ended
            socket = await self._client.ws_connect(f"{self._url}/ws", max_msg_size=0, heartbeat=20.0)
            self.sessions += 1
            try:
                game = _OpenEnvGame(socket, self, index)
                await game.begin()
                return game
            except Full:
                await socket.close()
                self.sessions -= 1
                if not self.sessions and not ended.is_set():
                    raise
            except BaseException:
                self._tell_end()
                await socket.close()
                raise
            await ended.wait()

    def _tell_end(self) -> None:
        self.sessions -= 1
        self._ended.set()
        self._ended = asyncio.Event()

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
        await super().close()

    def action_of(self, answer: str) -> dict[str, Any]:
        try:
            if isinstance(action := json.loads(answer), dict):
                return action
        except json.JSONDecodeError:
            pass
        kind = str(self._properties.get(self._field, {}).get("type", "string"))
        if kind not in ("integer", "number"):
            return {self._field: answer}
        if not (numbers := NUMBER.findall(answer)):
            raise NoAction(f"the answer {answer[-60:]!r} holds no number, as {self._field} has to be")
        return {self._field: int(float(numbers[-1])) if kind == "integer" else float(numbers[-1])}

    def shown(self, data: dict[str, Any]) -> Shown:
        observation = data.get("observation") or {}
        if self._shown and self._shown not in observation:
            raise KeyError(f"observation = {self._shown!r}: the observation has the fields {', '.join(observation)}")
        if self._shown:
            content = observation[self._shown]
        else:
            content = {name: value for name, value in observation.items() if name != "metadata"}
        return Shown(text_of(content), float(data.get("reward") or 0.0), bool(data.get("done")))


class _OpenEnvGame(Game):
    def __init__(self, socket: Any, adapter: OpenEnv, index: int) -> None:
        self._socket, self._adapter, self._index = socket, adapter, index

    async def begin(self) -> None:
        """Reset the environment. A full server says so before it answers this."""
        self._first = await self._say("reset", {"seed": self._index})

    async def reset(self) -> Shown:
        return self._adapter.shown(self._first)._replace(reward=0.0)

    async def step(self, answer: str) -> Shown:
        return self._adapter.shown(await self._say("step", self._adapter.action_of(answer)))

    async def leave(self) -> None:
        """Close the session, which is over for the server when it closes the connection."""
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await self._socket.send_json({"type": "close"})
            await self._socket.receive(timeout=REPLY_S)
        await self._socket.close()

    async def _say(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        with contextlib.suppress(OSError):  # closed: its last message is still to be read
            await self._socket.send_json({"type": kind, "data": data})
        answer = await self._socket.receive_json(timeout=REPLY_S)
        reply: dict[str, Any] = answer.get("data") or {}
        if answer.get("type") == "observation":
            return reply
        code, text = reply.get("code"), str(reply.get("message", answer))
        if code == "CAPACITY_REACHED":
            raise Full(f"the server has no room for one more session: {text}")
        if code == "VALIDATION_ERROR" and kind == "step":
            raise NoAction(f"the server does not take {json.dumps(data)[:200]} as an action")
        raise RuntimeError(f"the OpenEnv server answers {kind} with {code}: {text}")


# -- verifiers --------------------------------------------


class Verifiers(Adapter):
    """Environments of verifiers, which play an episode by themselves with a client for the model; `index` is the number
    of a task. The options are verifiers' configuration of the environment, but for `client`, the configuration of the
    client: that for evaluation, which sends messages, or with `type = "train"` one that renders them and sends ids."""

    package, remedy = "verifiers", "an environment with it, and python = \"...\" with its Python (docs/environments.md)"
    _serving: Any = None

    def _client_config(self, vf: Any, settings: dict[str, Any]) -> Any:
        """The configuration of the episodes' clients, without address and key."""
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

        client = self.options.pop("client", {})
        if not isinstance(client, dict):
            raise AgentNotLoaded(f'client = {client!r}: expected a table, for example {{ type = "train" }}')
        self._client = self._client_config(vf, dict(client))
        defaults = {"taskset": {"id": self.name}, "agent": {"runtime": {"type": "subprocess"}}}
        self._vf, self._environment = vf, load_environment(resolve_env_config(_merged(defaults, self.options)))
        self._tasks = list(islice(iter(self._environment.taskset), INDICES))
        if not self._tasks:
            raise AgentNotLoaded("it has no task")
        share_tls()
        self._serving = self._environment.serving()
        await self._serving.__aenter__()

    async def episode(self, task: dict[str, Any], llm: Llm) -> float:
        access = llm.openai
        headers = {**self._client.headers, "x-busrl-episode": access["api_key"]}
        client = self._client.model_copy(update={"base_url": access["base_url"], "headers": headers})
        context = self._vf.ModelContext(model="policy", client=client)
        episode = await self._environment.run_episode(self._tasks[int(task[INDEX]) % len(self._tasks)], context)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            text = "; ".join(str(error.message) for error in errors)[:1000]
            if USED_UP in text:
                raise CallRefused(USED_UP, text)
            raise RuntimeError(f"verifiers: {text}")
        return float(sum(trace.reward for trace in episode.traces))

    async def close(self) -> None:
        if self._serving is not None:
            await self._serving.__aexit__(None, None, None)


def share_tls() -> None:
    """Make all clients of verifiers share a TLS context. verifiers makes a client for each episode, since each has its
    own key, and a context takes 20 to 50 ms of CPU time."""
    import httpx
    from verifiers.v1.clients import base
    from verifiers.v1.clients import eval as evaluating

    context = httpx.create_ssl_context()

    def client_of(config: Any) -> Any:
        timeout = httpx.Timeout(**config.timeout.model_dump())
        return httpx.AsyncClient(timeout=timeout, limits=base.DEFAULT_LIMITS, verify=context)

    base.build_async_httpx = evaluating.build_async_httpx = client_of


def _merged(defaults: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested tables; the options win."""
    both = {name: _merged(defaults[name], value) for name, value in options.items()
            if isinstance(value, Mapping) and isinstance(defaults.get(name), dict)}
    return {**defaults, **options, **both}


ADAPTERS: dict[str, type[Adapter]] = {
    "gymnasium": Gymnasium, "textarena": TextArena, "openenv": OpenEnv, "verifiers": Verifiers,
}


async def load(environment: str, options: Mapping[str, Any], trial: bool = False, beside: str = ".") -> Adapter:
    """The adapter of `kind:name`, set up; with `trial` it has begun an episode. AgentNotLoaded says what is missing."""
    setting = f"environment = {environment!r}"
    match = ENVIRONMENT.fullmatch(environment)
    if match is None:
        raise AgentNotLoaded(f"{setting}: must be one of {', '.join(ADAPTERS)}, a colon, and a name")
    kind = ADAPTERS[match[1]]
    try:
        adapter = kind(match[2], options, beside)
        async with AsyncExitStack() as failed:
            failed.push_async_callback(adapter.close)
            await adapter.setup()
            if trial:
                await adapter.trial()
            failed.pop_all()
        return adapter
    except Exception as problem:
        missing = isinstance(problem, ModuleNotFoundError) and (problem.name or "").partition(".")[0] == kind.package
        why = f"the package {kind.package} is not installed: {kind.remedy}" if missing else cause(problem)
        raise AgentNotLoaded(f"{setting}: {why}") from problem
