"""Requests to an OpenAI-compatible endpoint, on an event loop in its own thread, until each has its answer.

Used by the served engine, which hands over `Sent` requests and reads `Message`s. Talks HTTP (aiohttp). Knows nothing of
slots, text or weights; a policy version is a number that it writes on tokens.

- Token ids come as `token_ids` (vLLM's `return_token_ids`) or as tokens that read `token_id:7`. Text is never encoded
  to ids: the trained tokens might not be those that were drawn. An id without a finite log-probability, or one beyond
  the model's vocabulary, is garbage.
- By completions a retry continues after the tokens that have arrived, so nothing is generated twice. By chat an answer
  cannot be continued and begins again.
- No usable answer to any request for `patience_s` is an error that names the endpoint, the phase and the last failure.
  A request that fails `retries` times while others get their answers is given up alone.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import os
import queue
import random
import threading
import time
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec

from busrl.engines.base import Request, seed_of
from busrl.errors import PeerTimeout, UserError, may_pass, retry_after_s
from busrl.system.proxies import named, proxy_of

try:
    import aiohttp
except ImportError as missing:
    raise UserError('engine = "openai" needs aiohttp, which is not installed: pip install "busrl[agents]"') from missing

if TYPE_CHECKING:
    from busrl.topology.schema import Openai

log = logging.getLogger("busrl")
SHOWN = 200  # characters of an answer in a message
ABOVE_ZERO = 1e-3  # a log-probability is at most 0, give or take the server's rounding
ID_PREFIX = "token_id:"
FIRST_WAIT_S, MOST_WAIT_S = 0.25, 15.0  # between attempts
EXPONENT_MOST = 30  # 2**30 first waits are more than any limit
CONNECT_S = 10.0
LINE_BYTES = 1 << 20  # of a stream; a chunk is some hundred bytes
ERROR_BYTES = 2000  # of the body of an error
LOG_EVERY_S = 10.0
CANCEL_AGAIN_S = 0.02
CALL_S = 30.0  # a call into the loop that does not wait for the server
T = TypeVar("T")
Body = Mapping[str, Any] | None


def headers_of(settings: Openai) -> dict[str, str]:
    """The headers of every request; UserError if the key is not in the environment."""
    if not settings.api_key_env:
        return {}
    key = os.environ.get(settings.api_key_env, "")
    if not key:
        raise UserError(f"openai.api_key_env names ${settings.api_key_env}, which is not set in this environment")
    return {"Authorization": f"Bearer {key}"}


def tools_of(settings: Openai) -> list[dict[str, Any]]:
    """The tools that every chat request names, from a JSON file; none by completions."""
    if not settings.tools or settings.endpoint != "chat":
        return []
    try:
        return msgspec.json.decode(Path(settings.tools).read_bytes(), type=list[dict[str, Any]])
    except (OSError, msgspec.DecodeError) as problem:
        raise UserError(f"openai.tools: {settings.tools}: not a list of objects, each a tool: {problem}") from problem


# -- reading answers strictly -----

class Garbage(Exception):
    """An answer that cannot be used; the message says why, and shows its beginning."""

    def __init__(self, why: str, shown: object = "") -> None:
        super().__init__(f"{why}: {str(shown)[:SHOWN]!r}" if shown else why)


@dataclass
class Part:
    """New tokens of an answer; `finish`: the server's finish_reason, `counted`: its count of the answer's tokens."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    prompt_ids: list[int] | None = None
    counted: int | None = None

    def extend(self, later: Part) -> None:
        self.ids += later.ids
        self.logprobs += later.logprobs
        self.finish, self.counted = later.finish or self.finish, later.counted or self.counted
        self.prompt_ids = later.prompt_ids or self.prompt_ids

    def until(self, ends: frozenset[int]) -> Part:
        """Cut after the first token that ends an answer: a server that lacks one of these ids continues after it."""
        at = next((k for k, token in enumerate(self.ids) if token in ends), None)
        if at is None:
            return self
        return Part(self.ids[: at + 1], self.logprobs[: at + 1], "stop", self.prompt_ids)


Id = Annotated[int, msgspec.Meta(ge=0)]
Logprob = Annotated[float, msgspec.Meta(le=ABOVE_ZERO)]  # JSON has no NaN and no infinity


class Measured(msgspec.Struct):
    logprob: Logprob
    token: Any = None


class Logprobs(msgspec.Struct):
    """Log-probabilities of a chat (`content`), or of completions."""

    content: list[Measured] | None = None
    tokens: list[Any] | None = None
    token_logprobs: list[Logprob] | None = None


class Choice(msgspec.Struct):
    finish_reason: Literal["stop", "length", "tool_calls", "function_call", "abort"] | None = None
    token_ids: list[Id] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: Logprobs | None = None


class Usage(msgspec.Struct):
    completion_tokens: int | None = None


class Chunk(msgspec.Struct):
    """An answer or a chunk of it, by completions or by chat, or an error that the server sends in its place."""

    error: Any = None
    choices: list[Choice] | None = None
    prompt_token_ids: list[int] | None = None
    usage: Usage | None = None


def read(data: bytes, vocabulary: int = 0) -> Part:
    """The tokens of an answer or of a chunk of it; Garbage if any part is wrong. `vocabulary` 0 = unknown."""
    try:
        chunk = msgspec.json.decode(data, type=Chunk)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise Garbage(str(problem), data.decode("utf-8", "replace")) from None
    if chunk.error:
        raise Garbage("an error in place of an answer", chunk.error)
    if chunk.choices is None or len(chunk.choices) > 1:
        raise Garbage("not one choice", data.decode())
    counted = chunk.usage.completion_tokens if chunk.usage else None
    if not chunk.choices:
        return Part(counted=counted)
    choice = chunk.choices[0]
    scores = choice.logprobs or Logprobs()
    measured = scores.content or ()
    logprobs = scores.token_logprobs or [entry.logprob for entry in measured]
    ids = choice.token_ids
    if ids is None:
        ids = _ids_of(scores.tokens or [entry.token for entry in measured])
    if len(ids) != len(logprobs):
        raise Garbage(f"{len(ids)} token ids and {len(logprobs)} log-probabilities", data.decode())
    if vocabulary and max(ids, default=0) >= vocabulary:
        raise Garbage(f"token id {max(ids)} (the model knows {vocabulary} tokens)")
    prompt = choice.prompt_token_ids or chunk.prompt_token_ids
    return Part(ids, [min(0.0, value) for value in logprobs], choice.finish_reason, prompt, counted)


def _ids_of(tokens: Iterable[Any]) -> list[int]:
    """The ids of tokens that read `token_id:7`."""
    names = [str(token) for token in tokens]
    texts = [name.removeprefix(ID_PREFIX) if name.startswith(ID_PREFIX) else "" for name in names]
    if not all(text.isdecimal() for text in texts):
        raise Garbage("no token ids: the server has to know return_token_ids, as vLLM does", texts)
    return [int(text) for text in texts]


# -- between the engine's thread and the client's event loop -----

@dataclass
class Sent:
    """A request on its way. closed -> asking -> (waiting -> asking)* -> ended. `close_gate` puts requests that ask back
    to closed, with the tokens that they have; `open_gate` lets them continue. `body` is the part of the HTTP body that
    does not depend on the tokens so far."""

    request: Request
    body: dict[str, Any]
    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    failures: int = 0  # in a row
    failing_since: float = 0.0
    task: asyncio.Task[None] | None = None
    attempt: asyncio.Task[None] | None = None  # the HTTP request under way, if any

    @property
    def key(self) -> int:
        return self.request.key

    @property
    def limit(self) -> int:
        return self.request.max_new_tokens


@dataclass(frozen=True)
class Message:
    """A report of the client. About a request: tokens, its end, or the reason of a refusal. About the server: an error
    that ends everything (`problem`), or that it went away (`lost`). A lost server may have lost its weights too, so the
    client has closed the gate."""

    key: int
    part: Part | None = None
    version: int = 0
    ended: bool = False
    refused: str = ""
    problem: Exception | None = None
    lost: bool = False


# -- failures -----

def backoff_s(failures: int, asked_s: float, chance: float) -> float:
    """The wait after so many failures in a row: it doubles, and is at least what the server asks for. `chance` in
    [0, 1) spreads clients over the upper half."""
    longest = min(MOST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(failures - 1, EXPONENT_MOST))
    return max(longest * (0.5 + 0.5 * chance), asked_s)


class Refused(Exception):
    """The server refused the request itself, with this HTTP status."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class RequestFailed(Exception):
    """An attempt without success; `asked_s` is the wait that the server asks for."""

    def __init__(self, text: str, asked_s: float = 0.0) -> None:
        super().__init__(text)
        self.asked_s = asked_s


class Lost(RequestFailed):
    """The server went away during an answer, or has no longer a model that was loaded into it."""


# -- the client -----

class Client:
    """Requests to one endpoint. Any thread may call the public methods. Tokens that arrive carry `version`; requests
    name `model`."""

    def __init__(self, settings: Openai, vocabulary: int = 0, eos_ids: frozenset[int] = frozenset()) -> None:
        """`vocabulary`: the number of ids of the model, 0 = unknown."""
        self.settings, self.vocabulary, self.eos_ids = settings, vocabulary, eos_ids
        self.url = settings.base_url.rstrip("/")
        self._proxy = proxy_of(self.url)
        self.chat = settings.endpoint == "chat"
        self._answers_url = self.url + ("/chat/completions" if self.chat else "/completions")
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.version = 0
        self.model = settings.model
        self._updated = False  # the server has weights that a restart would lose
        self.errors = 0
        self._sent: dict[int, Sent] = {}  # until they end or are dropped
        self._failing_since: float | None = None  # the first failure after which nothing succeeded
        self._succeeded = 0.0
        self._logged = 0.0
        self._gate = asyncio.Event()
        self._gate.set()
        headers = headers_of(settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="openai", daemon=True)
        self._thread.start()
        self._session = self.call(_session(headers, settings.timeout_s), CALL_S, "starting")

    def call(self, work: Coroutine[Any, Any, T], limit_s: float, phase: str) -> T:
        """Run something on the loop and wait for it; PeerTimeout names the phase after `limit_s`."""
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop is over, and would never await this
            work.close()
            raise PeerTimeout(f"{self.url}: {phase}: the connection is closed") from None
        try:
            return future.result(limit_s)
        except concurrent.futures.CancelledError:
            raise PeerTimeout(f"{self.url}: {phase}: the connection was closed meanwhile") from None
        except concurrent.futures.TimeoutError:
            if future.done():  # it is the work that ran out of time
                raise
            future.cancel()
            raise PeerTimeout(f"{self.url}: {phase} took longer than {limit_s:g} s") from None

    # -- from other threads -----

    def name_model(self, name: str) -> None:
        """Requests name this model from now on."""
        self.model = name

    def note_version(self, version: int) -> None:
        """The server was given this version: tokens carry it from now on, and a server that restarts loses it."""
        self.version, self._updated = version, True

    def start(self, requests: list[Sent]) -> None:
        self._loop.call_soon_threadsafe(self._start, requests)

    def drop(self, key: int) -> None:
        """Drop a request; no message about it comes once this returns."""
        self.call(self._drop(key), CALL_S, "dropping a request")

    def close_gate(self, cut: bool = True) -> None:
        """Send no more requests. Those at the server continue, or are `cut`: their messages have the tokens that
        arrived, and later tokens belong to the next attempt."""
        self.call(self._close_gate(cut), CALL_S, "stopping requests")

    @property
    def asking(self) -> bool:
        """True while a request is at the server."""
        return any(sent.attempt is not None for sent in list(self._sent.values()))

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
            self._sent[sent.key] = sent
            sent.task = self._loop.create_task(self._serve(sent))

    async def _serve(self, sent: Sent) -> None:
        """Repeat attempts until the answer ends. An error becomes a message, so that nobody waits for it in vain."""
        try:
            while sent.key in self._sent:
                await self._gate.wait()
                complete = bool(sent.ids) and (len(sent.ids) >= sent.limit or sent.ids[-1] in self.eos_ids)
                if complete and not self.chat:  # the server left out the end alone
                    self.messages.put(Message(sent.key, Part(finish="length"), self.version, ended=True))
                    break
                sent.attempt = self._loop.create_task(self._attempt(sent))
                try:
                    await sent.attempt
                    break
                except asyncio.CancelledError:
                    if sent.key not in self._sent:
                        raise
                except RequestFailed as failure:
                    if isinstance(failure, Lost) and self._updated and self._gate.is_set():
                        self._gate.clear()
                        self.messages.put(Message(sent.key, lost=True))
                    await self._after(sent, failure)
                finally:
                    sent.attempt = None
        except asyncio.CancelledError:
            return
        except Refused as refused:
            self.messages.put(Message(sent.key, refused=f"{self.url}: {refused}"))
        except Exception as problem:
            self.messages.put(Message(sent.key, problem=problem))
        self._sent.pop(sent.key, None)

    async def _attempt(self, sent: Sent) -> None:
        """Send an HTTP request, a message for each chunk; returns at its end, raises what is wrong."""
        if self.chat:
            sent.ids.clear()
        try:
            async with self._session.post(self._answers_url, json=self._body(sent), proxy=self._proxy) as response:
                await self._check_status(response)
                # Closed here: left to the collector it may outlive the loop that has to close it.
                async with contextlib.aclosing(self._events(response)) as events:
                    if self.chat:
                        self._take(sent, await self._whole(sent, events))
                        return
                    async for data in events:
                        if self._take(sent, read(data, self.vocabulary)):
                            return
                raise Garbage("the stream ends before the answer does")
        except Refused as problem:
            if problem.status == 404 and self._updated:
                raise Lost(str(problem)) from problem
            if problem.status in (401, 403, 404):  # the same for all requests
                remedy = "see [openai] base_url, model, api_key_env"
                raise UserError(f"{self._answers_url}: {problem}; {remedy}") from problem
            raise
        except Garbage as problem:
            raise RequestFailed(f"garbage: {problem}") from problem
        except asyncio.TimeoutError as problem:
            raise RequestFailed(f"nothing for {self.settings.timeout_s:g} s") from problem
        except (aiohttp.ClientError, OSError) as problem:
            raise Lost(f"{type(problem).__name__}: {problem}{named(self._proxy)}") from problem

    async def _whole(self, sent: Sent, events: AsyncGenerator[bytes, None]) -> Part:
        """A streamed answer by chat, all at once: it cannot be continued, so the request gets no tokens before the last
        chunk. Chunks show that the server lives. The server's own count shows whether it withheld tokens, as a parser
        of tool calls or of reasoning does."""
        answer = Part()
        async for data in events:
            answer.extend(read(data, self.vocabulary))
            if len(answer.ids) > sent.limit:
                raise Garbage(f"more than the {sent.limit} tokens that were asked for")
            self._server_lives()
        if answer.finish is None:
            raise Garbage("the stream ends before the answer does")
        if answer.counted not in (None, len(answer.ids)):
            raise Garbage(f"{len(answer.ids)} tokens came of an answer of {answer.counted}, by the server's own count")
        return answer

    def _body(self, sent: Sent) -> dict[str, Any]:
        produced = len(sent.ids)
        prompt = {} if self.chat else {"prompt": sent.prompt_ids + sent.ids}
        limits = {"max_tokens": sent.limit - produced, "seed": seed_of(sent.request, produced)}
        return {**sent.body, "model": self.model, **prompt, **limits}

    async def _check_status(self, response: aiohttp.ClientResponse) -> None:
        """Raise unless the status is one of success."""
        if response.ok:
            return
        text = (await response.content.read(ERROR_BYTES)).decode("utf-8", "replace")
        reply = f"{response.status} {response.reason}{named(self._proxy)}: {text}".strip()
        if may_pass(response.status):
            raise RequestFailed(reply, retry_after_s(response.headers.get("Retry-After", "")))
        raise Refused(reply, response.status)

    async def _events(self, response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
        """The data of server-sent events up to [DONE], or the whole body if the server does not stream. Comments keep a
        connection open, but are no progress."""
        if "text/event-stream" not in response.headers.get("Content-Type", ""):
            yield await response.read()
            return
        rest, deadline = b"", time.monotonic() + self.settings.timeout_s
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
                    deadline = time.monotonic() + self.settings.timeout_s
                    yield data

    def _take(self, sent: Sent, part: Part) -> bool:
        """Pass tokens on; True if the answer ends with them (an answer that the server aborted does not)."""
        part = part.until(self.eos_ids)
        if len(sent.ids) + len(part.ids) > sent.limit:
            raise Garbage(f"{len(sent.ids) + len(part.ids)} tokens where {sent.limit} were asked for")
        sent.ids += part.ids
        if part.finish == "abort" and len(sent.ids) < sent.limit:
            if not self.chat:
                self.messages.put(Message(sent.key, Part(part.ids, part.logprobs), self.version))
            raise RequestFailed("the server aborted the request")
        if part.ids or part.finish:
            sent.failures = 0
            self._server_lives()
            self.messages.put(Message(sent.key, part, self.version, ended=part.finish is not None))
        return part.finish is not None

    # -- failures -----

    def _server_lives(self) -> None:
        self._succeeded = time.monotonic()
        if self._failing_since is not None:
            log.info("%s answers again", self.url)
            self._failing_since = None

    async def _after(self, sent: Sent, failure: RequestFailed) -> None:
        """Wait before the next attempt, or give up this request (Refused) or the endpoint (PeerTimeout)."""
        now = time.monotonic()
        self.errors += 1
        sent.failures += 1
        if sent.failures == 1:
            sent.failing_since = now
        if self._failing_since is None:
            self._failing_since, self._logged = now, 0.0
        if sent.failures > self.settings.retries and self._succeeded > sent.failing_since:
            raise Refused(f"{sent.failures} failures in a row, the last: {failure}")
        left = self._failing_since + self.settings.patience_s - now
        wait_s = backoff_s(sent.failures, failure.asked_s, random.random())
        if wait_s > left:
            raise PeerTimeout(
                f"{self.url}: no usable answer for {now - self._failing_since:.1f} s and the next try would "
                f"be in {wait_s:.1f} s (openai.patience_s = {self.settings.patience_s:g}); phase: answering "
                f"{len(self._sent)} requests; the last failure: {failure}"
            )
        if now >= self._logged + LOG_EVERY_S:
            self._logged = now
            log.warning("%s: %s; asking again, for %.0f s more at most", self.url, failure, left)
        await asyncio.sleep(wait_s)

    # -- the gate -----

    async def _close_gate(self, cut: bool) -> None:
        self._gate.clear()
        if cut:
            await _cancel([sent.attempt for sent in self._sent.values()])

    async def _drop(self, key: int) -> None:
        sent = self._sent.pop(key, None)
        if sent is not None:
            await _cancel([sent.attempt, sent.task])

    async def _end(self) -> None:
        self._sent.clear()
        await _cancel([task for task in asyncio.all_tasks() if task is not asyncio.current_task()])
        await self._session.close()
        await self._loop.shutdown_default_executor()  # names are looked up there

    # -- other calls of the server -----

    def send(
        self, method: str, url: str, body: Body, phase: str, deadline: float = math.inf, once: bool = False
    ) -> str:
        """The text of a 200. Asks again until `patience_s` or the deadline (of the monotonic clock) is over, or just
        `once`. UserError for a 4xx, PeerTimeout otherwise."""
        deadline = min(deadline, time.monotonic() + self.settings.patience_s)
        limit_s = max(0.0, deadline - time.monotonic()) + CALL_S
        return self.call(self._send(method, url, body, phase, deadline, once), limit_s, phase)

    async def _send(self, method: str, url: str, body: Body, phase: str, deadline: float, once: bool) -> str:
        begun, failures = time.monotonic(), 0
        while True:
            timeout = aiohttp.ClientTimeout(total=max(0.1, deadline - time.monotonic()), sock_connect=CONNECT_S)
            asked_s = 0.0
            try:
                asking = self._session.request(method, url, json=body, timeout=timeout, proxy=self._proxy)
                async with asking as response:
                    await self._check_status(response)
                    return (await response.read()).decode("utf-8", "replace")
            except Refused as problem:
                raise UserError(f"{url} ({phase}): {problem}") from problem
            except RequestFailed as problem:
                last, asked_s = str(problem), problem.asked_s
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as problem:
                last = f"{type(problem).__name__}: {problem}{named(self._proxy)}"
            failures += 1
            self.errors += 1
            wait_s = backoff_s(failures, asked_s, random.random())
            if once or wait_s > deadline - time.monotonic():
                spent = time.monotonic() - begun
                raise PeerTimeout(f"{url}: {phase} failed {failures} times in {spent:.1f} s; the last: {last}")
            log.warning("%s (%s): %s; asking again in %.1f s", url, phase, last, wait_s)
            await asyncio.sleep(wait_s)


async def _session(headers: dict[str, str], timeout_s: float) -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=timeout_s)
    return aiohttp.ClientSession(headers=headers, timeout=timeout, connector=aiohttp.TCPConnector(limit=0))


async def _cancel(maybe_tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    """Cancel until all have ended: `asyncio.wait_for` loses a cancellation that comes together with its result."""
    tasks = [task for task in maybe_tasks if task is not None]
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)  # takes what they raised
