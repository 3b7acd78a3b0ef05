"""What [openai] comes to: where to ask, with which key, how long to wait, which tools to name. Talks to no server.

What an OpenAI-compatible server may answer, read strictly: token ids with their log-probabilities, or garbage.

Pure; used by the client for whole answers and for chunks of a stream. Knows nothing of HTTP or of retries.

- Token ids come as `token_ids` (vLLM's `return_token_ids`) or as tokens that read `token_id:7`. Text is never made into
  ids: the tokens that would be trained are then not those that were drawn.
- An id without a log-probability, a log-probability that is not a number, an id that the model does not know: garbage.

What the served engine asks of its client, and what it hears from it.

Plain data between two threads: the engine's, which makes an `Ask`, and the client's event loop, which writes on it and
answers with `Message`s.

When to ask again after a failure: waits that double, jitter, and what the server itself asks for.

Pure; the client sleeps. Knows nothing of requests.

Requests to an OpenAI-compatible endpoint, on an event loop in a thread of its own, until each has its answer.

Used by the served engine, which reads what comes from `messages`. Talks HTTP (aiohttp). Knows nothing of slots, text or
what weights are; `version` is a number that it writes on tokens.

A request: closed -> asking -> (waiting -> asking)* -> ended; `close_gate` takes all that ask back to closed, with the
tokens that they have, and `open_gate` lets them go on.

- A failed try goes on from the tokens that came before it (completions), so nothing is generated twice; by chat an
  answer can not be continued and begins again.
- No usable answer to any request for `patience_s` is an error that names the endpoint, the phase and the last failure.
  A request that fails `retries` times while others get their answers is given up alone.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import logging
import math
import os
import queue
import random
import threading
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from busrl.errors import PeerTimeout, UserError

if TYPE_CHECKING:
    from busrl.config.schema import Openai



# -- What [openai] comes to: where to ask, with which key, how long to wait, which tools to name. Talks to no server --


@dataclass(frozen=True)
class Endpoint:
    """Where to ask and how long to wait; see [openai]."""

    url: str  # of the API, with /v1
    path: str  # "/completions" or "/chat/completions"
    headers: dict[str, str]
    timeout_s: float
    retries: int
    patience_s: float
    vocabulary: int = 0  # 0 = unknown
    eos_ids: frozenset[int] = frozenset()

    @property
    def chat(self) -> bool:
        return self.path.startswith("/chat")


def endpoint_of(settings: Openai, vocabulary: int, eos_ids: frozenset[int]) -> Endpoint:
    """UserError if the key is not in the environment."""
    headers = {}
    if settings.api_key_env:
        key = os.environ.get(settings.api_key_env, "")
        if not key:
            raise UserError(f"openai.api_key_env names ${settings.api_key_env}, which is not set in this environment")
        headers["Authorization"] = f"Bearer {key}"
    path = "/chat/completions" if settings.endpoint == "chat" else "/completions"
    return Endpoint(
        settings.base_url.rstrip("/"), path, headers, settings.timeout_s, settings.retries, settings.patience_s,
        vocabulary, eos_ids,
    )


def tools_of(settings: Openai) -> list[Any]:
    """The tools that every chat request names, from a JSON file; none by completions."""
    path = settings.tools if settings.endpoint == "chat" else ""
    if not path:
        return []
    try:
        found = json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as problem:
        raise UserError(f"openai.tools: {path}: {problem}") from problem
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise UserError(f"openai.tools: {path}: not a list of objects, each a tool as the chat endpoint takes it")
    return found


# -- What an OpenAI-compatible server may answer, read strictly: token ids with their log-probabilities, or garbage ---


SHOWN = 200  # characters of an answer in a message
ABOVE_ZERO = 1e-3  # a log-probability is at most 0, give or take the server's rounding
NAMED = "token_id:"


class Garbage(Exception):
    """An answer that can not be used; the message says why, and shows its beginning."""

    def __init__(self, why: str, shown: object = "") -> None:
        text = shown if isinstance(shown, str) else json.dumps(shown, default=str)
        super().__init__(f"{why}: {text[:SHOWN]!r}" if text else why)


@dataclass(frozen=True)
class Part:
    """New tokens of an answer; `finish` is the server's word where the answer ends with them."""

    ids: list[int]
    logprobs: list[float]
    finish: str | None = None
    prompt_ids: list[int] | None = None


@dataclass
class Whole:
    """The chunks of an answer by chat, in one piece when all have come: it can not be continued, so no chunk counts
    alone. A server that keeps tokens back (a parser of tool calls or of reasoning does) is found out by its own count.
    """

    limit: int
    vocabulary: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    prompt_ids: list[int] | None = None
    counted: int | None = None

    def add(self, data: dict[str, Any]) -> None:
        part = read(data, self.vocabulary)
        self.ids += part.ids
        self.logprobs += part.logprobs
        self.finish, self.prompt_ids = part.finish or self.finish, part.prompt_ids or self.prompt_ids
        usage = data.get("usage")
        self.counted = usage.get("completion_tokens") if isinstance(usage, dict) else self.counted
        if len(self.ids) > self.limit:
            raise Garbage(f"more than the {self.limit} tokens that were asked for")

    def part(self) -> Part:
        if self.finish is None:
            raise Garbage("the stream ends before the answer does")
        if self.counted is not None and self.counted != len(self.ids):
            raise Garbage(f"{len(self.ids)} tokens came of an answer of {self.counted}, by the server's own count")
        return Part(self.ids, self.logprobs, self.finish, self.prompt_ids)


def load(data: bytes | str) -> dict[str, Any]:
    """One JSON object; an error that the server sends in place of an answer is garbage with its text."""
    try:
        found = json.loads(data)
    except ValueError:
        text = data if isinstance(data, str) else data.decode("utf-8", "replace")
        raise Garbage("not JSON", text) from None
    if not isinstance(found, dict):
        raise Garbage("not a JSON object", found)
    if found.get("error"):
        raise Garbage("an error in place of an answer", found["error"])
    return found


def read(data: dict[str, Any], vocabulary: int = 0) -> Part:
    """The tokens of an answer, or of a chunk of one, by completions or by chat. `vocabulary` 0 = unknown."""
    choices = data.get("choices")
    if not isinstance(choices, list):
        raise Garbage("no choices", data)
    if not choices:
        return Part([], [])  # a chunk with nothing but usage
    if len(choices) != 1 or not isinstance(choices[0], dict):
        raise Garbage("not one choice", data)
    choice = choices[0]
    finish = choice.get("finish_reason")
    if finish is not None and not isinstance(finish, str):
        raise Garbage("a finish_reason that is no word", choice)
    tokens, logprobs = _measured(choice)
    ids = _ids(choice, tokens)
    if len(ids) != len(logprobs):
        raise Garbage(f"{len(ids)} token ids and {len(logprobs)} log-probabilities", choice)
    _check(ids, logprobs, vocabulary)
    prompt = choice.get("prompt_token_ids") or data.get("prompt_token_ids")
    return Part(ids, [min(0.0, value) for value in logprobs], finish, prompt if isinstance(prompt, list) else None)


def until_end(part: Part, ends: frozenset[int]) -> Part:
    """The tokens up to the first that ends an answer: a server that does not know all of these goes on behind them."""
    at = next((k for k, token in enumerate(part.ids) if token in ends), None)
    return part if at is None else Part(part.ids[: at + 1], part.logprobs[: at + 1], "stop", part.prompt_ids)


def _measured(choice: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Tokens as the server writes them, and their log-probabilities."""
    found = choice.get("logprobs")
    if not found:
        return [], []
    if not isinstance(found, dict):
        raise Garbage("logprobs that are no object", choice)
    content = found.get("content")
    if isinstance(content, list):
        if not all(isinstance(item, dict) for item in content):
            raise Garbage("logprobs.content that are no objects", choice)
        return [item.get("token") for item in content], [item.get("logprob") for item in content]
    tokens, logprobs = found.get("tokens") or [], found.get("token_logprobs") or []
    if not isinstance(tokens, list) or not isinstance(logprobs, list):
        raise Garbage("logprobs that are no lists", choice)
    return tokens, logprobs


def _ids(choice: dict[str, Any], tokens: list[Any]) -> list[int]:
    ids = choice.get("token_ids")
    if isinstance(ids, list):
        return ids
    named = [token[len(NAMED) :] for token in tokens if isinstance(token, str) and token.startswith(NAMED)]
    if len(named) != len(tokens) or not all(text.isdecimal() for text in named):
        raise Garbage("no token ids: the server has to know return_token_ids, as vLLM does", choice)
    return [int(text) for text in named]


def _check(ids: list[Any], logprobs: list[Any], vocabulary: int) -> None:
    for token in ids:
        if type(token) is not int or token < 0 or (vocabulary and token >= vocabulary):
            raise Garbage(f"token id {token!r} (the model knows {vocabulary or 'an unknown number of'} tokens)")
    for value in logprobs:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            raise Garbage(f"log-probability {value!r}")
        if value > ABOVE_ZERO:
            raise Garbage(f"log-probability {value!r}, above 0")


# -- What the served engine asks of its client, and what it hears from it ---------------------------------------------


@dataclass
class Ask:
    """One request: `body` without what depends on the tokens so far."""

    key: int
    body: dict[str, Any]
    prompt_ids: list[int]
    limit: int
    seed: int
    ids: list[int] = field(default_factory=list)
    failures: int = 0  # in a row
    failing_since: float = 0.0
    gone: bool = False
    attempt: asyncio.Task[None] | None = None


@dataclass(frozen=True)
class Message:
    """What the client has to tell: tokens of a request, its end, why it is refused; what ends everything; or that the
    server went away, and with it (perhaps) the weights that it was given: the gate is closed then."""

    key: int
    part: Part | None = None
    version: int = 0
    ended: bool = False
    refused: str = ""
    problem: Exception | None = None
    lost: bool = False


# -- When to ask again after a failure: waits that double, jitter, and what the server itself asks for ----------------


EXPONENT_MOST = 30  # 2**30 first waits are more than any limit


@dataclass(frozen=True)
class Backoff:
    """Seconds: of the first wait, and of the longest that is not asked for by the server."""

    first_s: float
    most_s: float

    def wait_s(self, failures: int, asked_s: float | None, chance: float) -> float:
        """The wait after so many failures in a row; `chance` in [0, 1) spreads clients over the upper half of it."""
        own = min(self.most_s, self.first_s * 2.0 ** min(failures - 1, EXPONENT_MOST)) * (0.5 + 0.5 * chance)
        return max(own, asked_s or 0.0)


def retry_after_s(header: str | None, now: datetime | None = None) -> float | None:
    """Seconds that a Retry-After header asks for, as a number or as a date; None if it says nothing usable."""
    if not header:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            when = parsedate_to_datetime(header)
        except ValueError:
            return None
        if when.tzinfo is None:
            when = when.replace(tzinfo=timezone.utc)
        seconds = (when - (now or datetime.now(timezone.utc))).total_seconds()
    return max(0.0, seconds) if math.isfinite(seconds) else None


# -- Requests to an OpenAI-compatible endpoint, on an event loop in a thread of its own, until each has its answer ----


try:
    import aiohttp
except ImportError as missing:
    raise UserError('engine = "openai" needs aiohttp, which is not installed: pip install "busrl[openai]"') from missing

log = logging.getLogger("busrl")
BACKOFF = Backoff(first_s=0.25, most_s=15.0)
CONNECT_S = 10.0
LINE_BYTES = 1 << 20  # of a stream; a chunk is some hundred bytes
ERROR_BYTES = 2000  # of the body of an error
TELL_EVERY_S = 10.0
CANCEL_AGAIN_S = 0.02
CALL_S = 30.0  # a call into the loop that does not wait for the server
STATES_OF_THE_SERVER = (408, 409, 425, 429)  # 4xx that say nothing about the request itself
T = TypeVar("T")
Body = Mapping[str, Any] | None


class Refused(Exception):
    """The server says that the request itself is wrong."""


class Failed(Exception):
    """A try without success; `asked_s` is the wait that the server asks for."""

    def __init__(self, text: str, asked_s: float | None = None) -> None:
        super().__init__(text)
        self.asked_s = asked_s


class Lost(Failed):
    """The server went away in the middle, or does not know a model that it was given."""


class Client:
    """Thread-safe from the outside; `version` is written on tokens that arrive from now on."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.given = False  # the server has weights that it would not have after a restart
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.version = 0
        self.model = ""
        self.errors = 0
        self._asks: dict[int, tuple[Ask, asyncio.Task[None]]] = {}
        self._quiet_since: float | None = None  # since the first failure after which nothing succeeded
        self._succeeded = 0.0
        self._told = 0.0
        self._random = random.Random()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="openai", daemon=True)
        self._thread.start()
        self._gate = self.call(self._begin(), CALL_S, "starting")

    async def _begin(self) -> asyncio.Event:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=self.endpoint.timeout_s)
        self._session = aiohttp.ClientSession(
            headers=self.endpoint.headers, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
        )
        gate = asyncio.Event()
        gate.set()
        return gate

    def call(self, work: Coroutine[Any, Any, T], limit_s: float, phase: str) -> T:
        """Run something on the loop and wait for it; PeerTimeout names the phase after `limit_s`."""
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop is over, and nobody would ever await this
            work.close()
            raise PeerTimeout(f"{self.endpoint.url}: {phase}: the connection is closed") from None
        try:
            return future.result(limit_s)
        except concurrent.futures.TimeoutError:
            if future.done():  # it is the work that ran out of time
                raise
            future.cancel()
            raise PeerTimeout(f"{self.endpoint.url}: {phase} took longer than {limit_s:g} s") from None

    # -- from outside -----------------------------------------------------------------------------------------------

    def ask(self, asks: list[Ask]) -> None:
        self._loop.call_soon_threadsafe(self._start, asks)

    def forget(self, key: int) -> None:
        """Drop a request; nothing is told of it once this returns."""
        self.call(self._forget(key), CALL_S, "dropping a request")

    def close_gate(self) -> None:
        """Nobody asks when this returns: tokens that arrived are told already, later ones belong to the next try."""
        self.call(self._close_gate(), CALL_S, "stopping requests")

    def hold_gate(self) -> None:
        """Nobody new asks when this returns; those that do go on."""
        self.call(self._hold_gate(), CALL_S, "holding requests")

    @property
    def asking(self) -> bool:
        """Whether any request is with the server."""
        return any(ask.attempt is not None for ask, _ in list(self._asks.values()))

    def open_gate(self) -> None:
        self._loop.call_soon_threadsafe(self._gate.set)

    def close(self) -> None:
        if self._loop.is_closed():
            return
        with contextlib.suppress(PeerTimeout):
            self.call(self._end(), CALL_S, "closing")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_S)
        if not self._thread.is_alive():
            self._loop.close()

    # -- one request ------------------------------------------------------------------------------------------------

    def _start(self, asks: list[Ask]) -> None:
        for ask in asks:
            self._asks[ask.key] = (ask, self._loop.create_task(self._serve(ask)))

    async def _serve(self, ask: Ask) -> None:
        """Try until there is an end; whatever goes wrong is told, so that nobody waits for this request for ever."""
        try:
            while not ask.gone:
                await self._gate.wait()
                if self._complete(ask):  # it only did not say so
                    self._tell(Message(ask.key, Part([], [], "length"), self.version, ended=True))
                    break
                ask.attempt = self._loop.create_task(self._attempt(ask))
                try:
                    await ask.attempt
                    break
                except asyncio.CancelledError:
                    if ask.gone:
                        raise
                except Failed as failure:
                    if isinstance(failure, Lost) and self.given and self._gate.is_set():
                        self._gate.clear()
                        self._tell(Message(ask.key, lost=True))
                    await self._after(ask, failure)
                finally:
                    ask.attempt = None
        except asyncio.CancelledError:
            return
        except Refused as refused:
            self._tell(Message(ask.key, refused=str(refused)))
        except Exception as problem:
            self._tell(Message(ask.key, problem=problem))
        self._asks.pop(ask.key, None)

    def _complete(self, ask: Ask) -> bool:
        return not self.endpoint.chat and bool(ask.ids) and (
            len(ask.ids) >= ask.limit or ask.ids[-1] in self.endpoint.eos_ids
        )

    async def _attempt(self, ask: Ask) -> None:
        """One HTTP request: told token by token; returns at its end, raises what is wrong."""
        if self.endpoint.chat:
            ask.ids.clear()
        try:
            async with self._session.post(self.endpoint.url + self.endpoint.path, json=self._body(ask)) as response:
                await self._usable(response)
                if "text/event-stream" not in response.headers.get("Content-Type", ""):
                    part = read(load(await response.read()), self.endpoint.vocabulary)
                    if part.finish is None:
                        raise Garbage("an answer without finish_reason")
                    self._take(ask, part)
                    return
                if self.endpoint.chat:
                    self._take(ask, await self._gathered(ask, response))
                    return
                # Closed here: left to the collector it may outlive the loop that has to close it.
                async with contextlib.aclosing(self._events(response)) as events:
                    async for data in events:
                        if self._take(ask, read(load(data), self.endpoint.vocabulary)):
                            return
                raise Garbage("the stream ends before the answer does")
        except Garbage as problem:
            raise Failed(f"garbage: {problem}") from problem
        except asyncio.TimeoutError as problem:
            raise Failed(f"nothing for {self.endpoint.timeout_s:g} s") from problem
        except (aiohttp.ClientError, OSError) as problem:
            raise Lost(f"{type(problem).__name__}: {problem}") from problem

    async def _gathered(self, ask: Ask, response: aiohttp.ClientResponse) -> Part:
        """A streamed answer by chat, whole. That chunks come shows that the server lives; the request has nothing yet.
        """
        whole = Whole(ask.limit, self.endpoint.vocabulary)
        async with contextlib.aclosing(self._events(response)) as events:
            async for data in events:
                whole.add(load(data))
                self._alive()
        return whole.part()

    def _body(self, ask: Ask) -> dict[str, Any]:
        body = {**ask.body, "model": self.model}
        if self.endpoint.chat:
            return {**body, "max_tokens": ask.limit, "seed": ask.seed}
        # Another seed for the rest of an answer, or its numbers would be those of the beginning.
        return {
            **body, "prompt": ask.prompt_ids + ask.ids, "max_tokens": ask.limit - len(ask.ids),
            "seed": (ask.seed + 0x9E3779B97F4A7C15 * len(ask.ids)) % (1 << 63),
        }

    async def _usable(self, response: aiohttp.ClientResponse) -> None:
        """Raise unless the server says 200."""
        if response.status == 200:
            return
        text = (await response.content.read(ERROR_BYTES)).decode("utf-8", "replace")
        said = f"{response.status} {response.reason}: {text}".strip()
        if response.status < 500 and response.status not in STATES_OF_THE_SERVER:
            if response.status == 404 and self.given:
                raise Lost(said)
            if response.status in (401, 403, 404):  # the same for all requests
                raise UserError(f"{self.endpoint.url}{self.endpoint.path}: {said}; see [openai] base_url, model, "
                                "api_key_env")
            raise Refused(f"{self.endpoint.url}: {said}")
        raise Failed(said, retry_after_s(response.headers.get("Retry-After")))

    async def _events(self, response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
        """The data of server-sent events up to [DONE]. Comments keep a connection, but are no progress."""
        rest, deadline = b"", time.monotonic() + self.endpoint.timeout_s
        while True:
            piece = await asyncio.wait_for(response.content.readany(), max(0.0, deadline - time.monotonic()))
            if not piece:
                return
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) > LINE_BYTES:
                raise Garbage(f"a line of more than {LINE_BYTES} bytes")
            for line in lines:
                if line.startswith(b"data:"):
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    deadline = time.monotonic() + self.endpoint.timeout_s
                    yield data

    def _take(self, ask: Ask, part: Part) -> bool:
        """Tokens came: pass them on; True if the answer ends with them. An answer that the server cut off on its own
        account goes on."""
        if part.finish not in (None, "stop", "length", "tool_calls", "function_call", "abort"):
            raise Garbage(f"finish_reason {part.finish!r}")
        part = until_end(part, self.endpoint.eos_ids)
        if len(ask.ids) + len(part.ids) > ask.limit:
            raise Garbage(f"{len(ask.ids) + len(part.ids)} tokens where {ask.limit} were asked for")
        ask.ids += part.ids
        if part.finish == "abort" and len(ask.ids) < ask.limit:
            if not self.endpoint.chat:
                self._tell(Message(ask.key, Part(part.ids, part.logprobs), self.version))
            raise Failed("the server aborted the request")
        if part.ids or part.finish:
            self._succeed(ask)
            self._tell(Message(ask.key, part, self.version, ended=part.finish is not None))
        return part.finish is not None

    # -- failures ---------------------------------------------------------------------------------------------------

    def _succeed(self, ask: Ask) -> None:
        ask.failures = 0
        self._alive()

    def _alive(self) -> None:
        self._succeeded = time.monotonic()
        if self._quiet_since is not None:
            log.info("%s answers again", self.endpoint.url)
            self._quiet_since = None

    async def _after(self, ask: Ask, failure: Failed) -> None:
        """Wait before the next try, or give up: this request alone, or the endpoint."""
        now = time.monotonic()
        self.errors += 1
        ask.failures += 1
        if ask.failures == 1:
            ask.failing_since = now
        if self._quiet_since is None:
            self._quiet_since, self._told = now, 0.0
        if ask.failures > self.endpoint.retries and self._succeeded > ask.failing_since:
            raise Refused(f"{self.endpoint.url}: {ask.failures} failures in a row, the last: {failure}")
        left = self._quiet_since + self.endpoint.patience_s - now
        wait_s = BACKOFF.wait_s(ask.failures, failure.asked_s, self._random.random())
        if wait_s > left:
            raise PeerTimeout(
                f"{self.endpoint.url}: no usable answer for {now - self._quiet_since:.1f} s and the next try would be "
                f"in {wait_s:.1f} s (openai.patience_s = {self.endpoint.patience_s:g}); phase: answering "
                f"{len(self._asks)} requests; the last failure: {failure}"
            )
        if now >= self._told + TELL_EVERY_S:
            self._told = now
            log.warning("%s: %s; asking again, for %.0f s more at most", self.endpoint.url, failure, left)
        await asyncio.sleep(wait_s)

    def _tell(self, message: Message) -> None:
        self.messages.put(message)

    # -- the gate ---------------------------------------------------------------------------------------------------

    async def _hold_gate(self) -> None:
        self._gate.clear()

    async def _close_gate(self) -> None:
        self._gate.clear()
        await _cancelled([ask.attempt for ask, _ in self._asks.values() if ask.attempt is not None])

    async def _forget(self, key: int) -> None:
        found = self._asks.pop(key, None)
        if found is not None:
            ask, task = found
            ask.gone = True
            await _cancelled([task] if ask.attempt is None else [ask.attempt, task])

    async def _end(self) -> None:
        for key in list(self._asks):
            await self._forget(key)
        await self._session.close()
        await self._loop.shutdown_default_executor()  # names are looked up there

    # -- anything else that is asked of the server ----------------------------------------------------------------

    async def _send(self, method: str, url: str, body: Body, limit_s: float) -> tuple[int, str, str]:
        """Status, text and Retry-After of one call."""
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=CONNECT_S)
        async with self._session.request(method, url, json=body, timeout=timeout) as response:
            text = (await response.read()).decode("utf-8", "replace")
            return response.status, text, response.headers.get("Retry-After", "")

    def send(
        self, method: str, url: str, body: Body, phase: str, deadline: float = math.inf, once: bool = False
    ) -> str:
        """The text of a 200, asked for until `patience_s` are over or the deadline of the monotonic clock is, or
        `once`; UserError for a 4xx, PeerTimeout otherwise."""
        begun, failures, last = time.monotonic(), 0, ""
        deadline = min(deadline, begun + self.endpoint.patience_s)
        while True:
            left, asked = deadline - time.monotonic(), None
            try:
                status, text, after = self.call(
                    self._send(method, url, body, max(0.1, left)), max(0.1, left) + CALL_S, phase
                )
                if 200 <= status < 300:
                    return text
                last = f"{status}: {text[:ERROR_BYTES]}"
                if status < 500 and status not in STATES_OF_THE_SERVER:
                    raise UserError(f"{url} ({phase}): {last}")
                asked = retry_after_s(after)
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as problem:
                last = f"{type(problem).__name__}: {problem}"
            failures += 1
            self.errors += 1
            wait_s = BACKOFF.wait_s(failures, asked, self._random.random())
            if once or wait_s > deadline - time.monotonic():
                spent = time.monotonic() - begun
                raise PeerTimeout(f"{url}: {phase} failed {failures} times in {spent:.1f} s; the last: {last}")
            log.warning("%s (%s): %s; asking again in %.1f s", url, phase, last, wait_s)
            self.call(asyncio.sleep(wait_s), wait_s + CALL_S, phase)


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel until all have ended: `asyncio.wait_for` loses a cancellation that comes together with its result."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)  # what they raised is of no interest any more
