"""Requests to an OpenAI-compatible endpoint, on an event loop in its own thread, until each has its answer.

Used by the served engine, which hands over `Sent` requests and reads `Message`s. Talks HTTP (aiohttp). Knows nothing of
slots, text or what weights are; `version` is a number that it writes on tokens.

- Token ids come as `token_ids` (vLLM's `return_token_ids`) or as tokens that read `token_id:7`. Text is never made into
  ids: the tokens trained would not be those that were drawn. An id without a finite log-probability, or one that the
  model does not know, is garbage.
- A failed try continues after the tokens that came before it (completions), so nothing is generated twice; by chat an
  answer cannot be continued and begins again.
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

from busrl.engines.base import Request, seed_of
from busrl.errors import PeerTimeout, UserError

try:
    import aiohttp
except ImportError as missing:
    raise UserError('engine = "openai" needs aiohttp, which is not installed: pip install "busrl[openai]"') from missing

if TYPE_CHECKING:
    from busrl.config.schema import Openai

log = logging.getLogger("busrl")
SHOWN = 200  # characters of an answer in a message
ABOVE_ZERO = 1e-3  # a log-probability is at most 0, give or take the server's rounding
NAMED = "token_id:"
EXPONENT_MOST = 30  # 2**30 first waits are more than any limit
CONNECT_S = 10.0
LINE_BYTES = 1 << 20  # of a stream; a chunk is some hundred bytes
ERROR_BYTES = 2000  # of the body of an error
LOG_EVERY_S = 10.0
CANCEL_AGAIN_S = 0.02
CALL_S = 30.0  # a call into the loop that does not wait for the server
RETRIED_STATES = (408, 409, 425, 429)  # 4xx that say nothing about the request itself
FINISHES = (None, "stop", "length", "tool_calls", "function_call", "abort")
T = TypeVar("T")
Body = Mapping[str, Any] | None


@dataclass(frozen=True)
class Endpoint:
    """Where to send requests and how long to wait; see [openai]."""

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


# -- reading answers strictly -----

class Garbage(Exception):
    """An answer that cannot be used; the message says why, and shows its beginning."""

    def __init__(self, why: str, shown: object = "") -> None:
        text = shown if isinstance(shown, str) else json.dumps(shown, default=str)
        super().__init__(f"{why}: {text[:SHOWN]!r}" if text else why)


@dataclass(frozen=True)
class Part:
    """New tokens of an answer; `finish` is the server's finish_reason where the answer ends with them."""

    ids: list[int]
    logprobs: list[float]
    finish: str | None = None
    prompt_ids: list[int] | None = None


@dataclass
class ChatAnswer:
    """The chunks of an answer by chat, in one piece when all have come: it cannot be continued, so no chunk counts
    alone. A server that keeps tokens back (a parser of tool calls or of reasoning does) is detected by its own count.
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


def load(data: bytes) -> dict[str, Any]:
    """One JSON object; an error that the server sends in place of an answer is garbage with its text."""
    try:
        found = json.loads(data)
    except ValueError:
        raise Garbage("not JSON", data.decode("utf-8", "replace")) from None
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
    """The tokens up to the first that ends an answer: a server that does not know all end tokens continues after it."""
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


# -- between the engine's thread and the client's event loop -----

@dataclass
class Sent:
    """A request on its way: closed -> asking -> (waiting -> asking)* -> ended; `close_gate` takes all that ask back to
    closed, with the tokens that they have, and `open_gate` lets them continue. `body` is what does not depend on the
    tokens so far."""

    request: Request
    body: dict[str, Any]
    prompt_ids: list[int]
    limit: int
    ids: list[int] = field(default_factory=list)
    failures: int = 0  # in a row
    failing_since: float = 0.0
    gone: bool = False
    attempt: asyncio.Task[None] | None = None

    @property
    def key(self) -> int:
        return self.request.key


@dataclass(frozen=True)
class Message:
    """One report of the client. About a request: tokens, its end, or why it is refused. About the server: an error that
    ends everything, or that it went away; its weights may be lost then, so the gate is closed."""

    key: int
    part: Part | None = None
    version: int = 0
    ended: bool = False
    refused: str = ""
    problem: Exception | None = None
    lost: bool = False


@dataclass(frozen=True)
class Backoff:
    """When to try again after a failure: waits that double, with jitter. Seconds of the first wait, and of the longest
    that the server does not ask for."""

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


# -- the client -----

BACKOFF = Backoff(first_s=0.25, most_s=15.0)


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
        self._sent: dict[int, tuple[Sent, asyncio.Task[None]]] = {}
        self._failing_since: float | None = None  # the first failure after which nothing succeeded
        self._succeeded = 0.0
        self._logged = 0.0
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
        except RuntimeError:  # the loop is over, and would never await this
            work.close()
            raise PeerTimeout(f"{self.endpoint.url}: {phase}: the connection is closed") from None
        try:
            return future.result(limit_s)
        except concurrent.futures.TimeoutError:
            if future.done():  # it is the work that ran out of time
                raise
            future.cancel()
            raise PeerTimeout(f"{self.endpoint.url}: {phase} took longer than {limit_s:g} s") from None

    # -- from outside -----

    def start(self, requests: list[Sent]) -> None:
        self._loop.call_soon_threadsafe(self._start, requests)

    def drop(self, key: int) -> None:
        """Drop a request; no message about it comes once this returns."""
        self.call(self._drop(key), CALL_S, "dropping a request")

    def close_gate(self) -> None:
        """No request is with the server when this returns: messages have the tokens that arrived; later ones belong
        to the next try."""
        self.call(self._close_gate(), CALL_S, "stopping requests")

    def hold_gate(self) -> None:
        """No request is sent any more when this returns; those with the server continue."""
        self.call(self._hold_gate(), CALL_S, "holding requests")

    @property
    def asking(self) -> bool:
        """Whether any request is with the server."""
        return any(sent.attempt is not None for sent, _ in list(self._sent.values()))

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

    # -- one request -----

    def _start(self, requests: list[Sent]) -> None:
        for sent in requests:
            self._sent[sent.key] = (sent, self._loop.create_task(self._serve(sent)))

    async def _serve(self, sent: Sent) -> None:
        """Try until there is an end; an error becomes a message, so that no request is waited for in vain."""
        try:
            while not sent.gone:
                await self._gate.wait()
                if self._complete(sent):  # the server only did not say so
                    self.messages.put(Message(sent.key, Part([], [], "length"), self.version, ended=True))
                    break
                sent.attempt = self._loop.create_task(self._attempt(sent))
                try:
                    await sent.attempt
                    break
                except asyncio.CancelledError:
                    if sent.gone:
                        raise
                except Failed as failure:
                    if isinstance(failure, Lost) and self.given and self._gate.is_set():
                        self._gate.clear()
                        self.messages.put(Message(sent.key, lost=True))
                    await self._after(sent, failure)
                finally:
                    sent.attempt = None
        except asyncio.CancelledError:
            return
        except Refused as refused:
            self.messages.put(Message(sent.key, refused=str(refused)))
        except Exception as problem:
            self.messages.put(Message(sent.key, problem=problem))
        self._sent.pop(sent.key, None)

    def _complete(self, sent: Sent) -> bool:
        return not self.endpoint.chat and bool(sent.ids) and (
            len(sent.ids) >= sent.limit or sent.ids[-1] in self.endpoint.eos_ids
        )

    async def _attempt(self, sent: Sent) -> None:
        """One HTTP request, a message for each chunk; returns at its end, raises what is wrong."""
        if self.endpoint.chat:
            sent.ids.clear()
        try:
            async with self._session.post(self.endpoint.url + self.endpoint.path, json=self._body(sent)) as response:
                await self._check_status(response)
                if "text/event-stream" not in response.headers.get("Content-Type", ""):
                    part = read(load(await response.read()), self.endpoint.vocabulary)
                    if part.finish is None:
                        raise Garbage("an answer without finish_reason")
                    self._take(sent, part)
                    return
                # Closed here: left to the collector it may outlive the loop that has to close it.
                async with contextlib.aclosing(self._events(response)) as events:
                    if self.endpoint.chat:
                        self._take(sent, await self._whole(sent, events))
                        return
                    async for data in events:
                        if self._take(sent, read(load(data), self.endpoint.vocabulary)):
                            return
                raise Garbage("the stream ends before the answer does")
        except Garbage as problem:
            raise Failed(f"garbage: {problem}") from problem
        except asyncio.TimeoutError as problem:
            raise Failed(f"nothing for {self.endpoint.timeout_s:g} s") from problem
        except (aiohttp.ClientError, OSError) as problem:
            raise Lost(f"{type(problem).__name__}: {problem}") from problem

    async def _whole(self, sent: Sent, events: AsyncGenerator[bytes, None]) -> Part:
        """A streamed answer by chat. Its chunks show that the server lives; the request has nothing before the last."""
        answer = ChatAnswer(sent.limit, self.endpoint.vocabulary)
        async for data in events:
            answer.add(load(data))
            self._server_lives()
        return answer.part()

    def _body(self, sent: Sent) -> dict[str, Any]:
        produced = len(sent.ids)
        prompt = {} if self.endpoint.chat else {"prompt": sent.prompt_ids + sent.ids}
        limits = {"max_tokens": sent.limit - produced, "seed": seed_of(sent.request, produced)}
        return {**sent.body, "model": self.model, **prompt, **limits}

    async def _check_status(self, response: aiohttp.ClientResponse) -> None:
        """Raise unless the status is 200."""
        if response.status == 200:
            return
        text = (await response.content.read(ERROR_BYTES)).decode("utf-8", "replace")
        reply = f"{response.status} {response.reason}: {text}".strip()
        if response.status >= 500 or response.status in RETRIED_STATES:
            raise Failed(reply, retry_after_s(response.headers.get("Retry-After")))
        if response.status == 404 and self.given:
            raise Lost(reply)
        if response.status in (401, 403, 404):  # the same for all requests
            url = f"{self.endpoint.url}{self.endpoint.path}"
            raise UserError(f"{url}: {reply}; see [openai] base_url, model, api_key_env")
        raise Refused(f"{self.endpoint.url}: {reply}")

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

    def _take(self, sent: Sent, part: Part) -> bool:
        """Tokens came: pass them on; True if the answer ends with them. An answer that the server aborted by itself
        continues with the next try."""
        if part.finish not in FINISHES:
            raise Garbage(f"finish_reason {part.finish!r}")
        part = until_end(part, self.endpoint.eos_ids)
        if len(sent.ids) + len(part.ids) > sent.limit:
            raise Garbage(f"{len(sent.ids) + len(part.ids)} tokens where {sent.limit} were asked for")
        sent.ids += part.ids
        if part.finish == "abort" and len(sent.ids) < sent.limit:
            if not self.endpoint.chat:
                self.messages.put(Message(sent.key, Part(part.ids, part.logprobs), self.version))
            raise Failed("the server aborted the request")
        if part.ids or part.finish:
            sent.failures = 0
            self._server_lives()
            self.messages.put(Message(sent.key, part, self.version, ended=part.finish is not None))
        return part.finish is not None

    # -- failures -----

    def _server_lives(self) -> None:
        self._succeeded = time.monotonic()
        if self._failing_since is not None:
            log.info("%s answers again", self.endpoint.url)
            self._failing_since = None

    async def _after(self, sent: Sent, failure: Failed) -> None:
        """Wait before the next try, or give up: this request alone, or the endpoint."""
        now = time.monotonic()
        self.errors += 1
        sent.failures += 1
        if sent.failures == 1:
            sent.failing_since = now
        if self._failing_since is None:
            self._failing_since, self._logged = now, 0.0
        if sent.failures > self.endpoint.retries and self._succeeded > sent.failing_since:
            raise Refused(f"{self.endpoint.url}: {sent.failures} failures in a row, the last: {failure}")
        left = self._failing_since + self.endpoint.patience_s - now
        wait_s = BACKOFF.wait_s(sent.failures, failure.asked_s, self._random.random())
        if wait_s > left:
            raise PeerTimeout(
                f"{self.endpoint.url}: no usable answer for {now - self._failing_since:.1f} s and the next try would "
                f"be in {wait_s:.1f} s (openai.patience_s = {self.endpoint.patience_s:g}); phase: answering "
                f"{len(self._sent)} requests; the last failure: {failure}"
            )
        if now >= self._logged + LOG_EVERY_S:
            self._logged = now
            log.warning("%s: %s; asking again, for %.0f s more at most", self.endpoint.url, failure, left)
        await asyncio.sleep(wait_s)

    # -- the gate -----

    async def _hold_gate(self) -> None:
        self._gate.clear()

    async def _close_gate(self) -> None:
        self._gate.clear()
        await _cancel([sent.attempt for sent, _ in self._sent.values() if sent.attempt is not None])

    async def _drop(self, key: int) -> None:
        found = self._sent.pop(key, None)
        if found is not None:
            sent, task = found
            sent.gone = True
            await _cancel([task] if sent.attempt is None else [sent.attempt, task])

    async def _end(self) -> None:
        for key in list(self._sent):
            await self._drop(key)
        await self._session.close()
        await self._loop.shutdown_default_executor()  # names are looked up there

    # -- anything else that is asked of the server -----

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
                if status < 500 and status not in RETRIED_STATES:
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


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel until all have ended: `asyncio.wait_for` loses a cancellation that comes together with its result."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)  # what they raised is of no interest any more
