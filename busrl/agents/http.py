"""Episodes over HTTP: OpenAI's and vLLM's routes, and the routes by which a client claims and ends an episode.

Talks to clients (aiohttp), to `Episode`s by their keys, and to a `ClaimDesk` where clients may claim samples. The
bodies are those of `busrl.agents.openai`. Knows nothing of slots, rings or engines.

- The key of a request names its episode: a wrong or old key is 401, never another episode. Of several seats each has a
  key too; with that of the episode the field `model` names the seat.
- An answer is delivered once it is written. A client that goes away before that may ask again.
- Waiting for an engine is no error: the connection stays open, and a stream sends a comment every few seconds.
- The context limits the length of a body, and the length limits the time in which it may come. Long bodies are worked
  on in a thread. A client without a key gets one request per connection (`busrl.system.listener`).
- OpenAI's clients repeat a request after 409 and 429: 409 is for `/end` alone, 429 is never used.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import itertools
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import msgspec

from busrl.agents import openai
from busrl.agents.episode import Delivery, Episode, beside, require_some_fit
from busrl.agents.llm import Refusal, Request
from busrl.agents.renderer import Renderer
from busrl.agents.seats import Seat, seat_asked
from busrl.agents.tree import Tree
from busrl.errors import CallRefused, CallUnanswered, UserError
from busrl.system.listener import Listener, room

try:
    from aiohttp import web
except ImportError as missing:
    raise UserError('episodes over HTTP need aiohttp, which is not installed: pip install "busrl[agents]"') from missing

TOKEN_BYTES = 64  # of a body, per token of the context: several times the size of text, escapes and ids
ROOM_BYTES = 1 << 20  # of a body, besides: for tools, and for parts that a template leaves out
BODY_S, BODY_BYTES_PER_S = 10.0, 1 << 16  # the time for a body
KEPT_S = 120.0  # for which the connection of a client with a key may stay open without a request
STATUS = {"invalid_api_key": 401, "model_not_found": 404, "too_slow": 408, "ended": 409, "too_large": 413}  # else 400
WAIT_S = 5.0  # between two signs of life in a stream
MOST_CLAIMS, LONGEST_WAIT_S = 256, 30.0
CALLS = {  # path: its body, and the shape of its answer (a method of `openai.Answers`)
    "/v1/chat/completions": (openai.ChatBody, "chat"), "/v1/completions": (openai.CompletionBody, "completion"),
    "/generate": (openai.CompletionBody, "native"), "/inference/v1/generate": (openai.GenerateBody, "generated"),
}
log = logging.getLogger("busrl")
EVENT_STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


class ClaimBody(msgspec.Struct):
    """`POST /busrl/v1/episodes`."""

    n: int = 1
    wait_s: float = 0.0
    name: str = ""


class EndBody(msgspec.Struct):
    """`POST /busrl/v1/episodes/{id}/end`. `turn_rewards`: a map by call number, or a list from call 0 on; of several
    seats one by seat. `rewards`: by seat, a number or a map of parts."""

    reward: float | None = None
    parts: dict[str, float] = {}
    rewards: dict[str, float | dict[str, float]] = {}
    turn_rewards: dict[str, float | dict[str, float] | list[float]] | list[float] = {}
    failed: bool = False
    again: bool = False
    why: str = ""


class ClaimDesk(Protocol):
    """Gives episodes to clients. Raises `CallRefused` with the code `ended` for an episode that its client has lost."""

    async def claim(self, body: ClaimBody) -> list[dict[str, Any]]: ...
    def end(self, name: str, body: EndBody) -> dict[str, Any]: ...
    def renew(self, name: str) -> dict[str, Any]: ...
    def look(self, name: str) -> dict[str, Any]: ...
    def touch(self, episode: Episode) -> None: ...
    def key_of(self, name: str) -> str: ...


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


# -- keys and bodies of requests -----


class EpisodeKeys:
    """The episodes that clients may reach, by their keys. `run_key`: the key of the run, "" where it has none; `desk`:
    renews the lease of an episode with each request of its client."""

    def __init__(self, run_key: str = "", desk: ClaimDesk | None = None) -> None:
        self._run_key, self._desk = run_key, desk
        # By a digest: the time of a look-up reveals no byte of a key. With the seat of the key, "" if it is for all.
        self._episodes: dict[bytes, tuple[Episode, str]] = {}

    def open(self, episode: Episode, base_url: str) -> None:
        """Let clients reach an episode by new keys (its `openai` and `keys`) until it is closed."""
        seats = ["", *episode.seats] if len(episode.seats) > 1 else [""]
        keys = {seat: secrets.token_hex(16) for seat in seats}
        self._episodes |= {_digest(key): (episode, seat) for seat, key in keys.items()}

        def close() -> None:
            for key in keys.values():
                self._episodes.pop(_digest(key), None)

        openai = {"base_url": base_url, "api_key": keys[""]}
        episode.reached_by(openai, close, {seat: key for seat, key in keys.items() if seat})

    def key_of(self, request: web.Request) -> str:
        """The key of a request: that of the first of three headers that is there."""
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        bearer = key.strip() if kind.lower() == "bearer" else ""
        return request.headers.get("x-busrl-episode", "") or bearer or request.headers.get("x-api-key", "")

    def episode_of(self, request: web.Request) -> tuple[Episode, str]:
        """The episode whose key the request has, and the seat that it is the key of, if of one alone; renews the
        episode's lease. CallRefused if there is none."""
        found = self._episodes.get(_digest(self.key_of(request)))
        if found is None:
            raise CallRefused("invalid_api_key", "no episode has this key: it is over, or the key is wrong")
        self._touch(found[0])
        return found

    def touch(self, request: web.Request) -> None:
        """Renew the lease of the request's episode, if it has one."""
        if (found := self._episodes.get(_digest(self.key_of(request)))) is not None:
            self._touch(found[0])

    def is_the_runs(self, request: web.Request) -> bool:
        return same_key(self.key_of(request), self._run_key)

    def is_known(self, request: web.Request) -> bool:
        """True if the request has a key of this server."""
        return self.is_the_runs(request) or _digest(self.key_of(request)) in self._episodes

    def seat_of(self, request: web.Request) -> str:
        """The seat that the key of a request is for, "" if it is for all. CallRefused if nobody has the key."""
        return "" if self.is_the_runs(request) else self.episode_of(request)[1]

    def _touch(self, episode: Episode) -> None:
        if self._desk is not None:
            self._desk.touch(episode)


class BodyReader:
    """Reads bodies: at most as long as a `context` of so many ids allows, in a time that follows from the length."""

    def __init__(self, context: int, keys: EpisodeKeys) -> None:
        self._context, self._most, self._keys = context, ROOM_BYTES + TOKEN_BYTES * context, keys

    async def whole(self, request: web.Request, most: int = 0) -> bytes:
        """Read a body of at most `most` bytes (0: as the context allows). CallRefused if it is too long or too slow."""
        most, length = most or self._most, request.content_length
        if length is not None and length > most:
            raise self._too_large(most)
        limit_s = BODY_S + (most if length is None else length) / BODY_BYTES_PER_S
        try:
            reading = self._pieces(request, most)
            return await (reading if request.content.is_eof() else asyncio.wait_for(reading, limit_s))
        except asyncio.TimeoutError:
            raise CallRefused("too_slow", f"the body was not whole after {limit_s:.0f} s") from None

    async def read(self, request: web.Request, kind: type[Any], instead: bytes = b"") -> Any:
        """Read a body as this type; an empty one is read as `instead`."""
        raw = await self.whole(request) or instead
        return await beside(len(raw), openai.read, raw, kind)

    async def _pieces(self, request: web.Request, most: int) -> bytes:
        """Read a body as it comes; each piece renews the lease of its client's episode."""
        body = bytearray()
        while piece := await request.content.readany():
            body += piece
            if len(body) > most:
                raise self._too_large(most)
            self._keys.touch(request)
        return bytes(body)

    def _too_large(self, most: int) -> CallRefused:
        return CallRefused("too_large", f"the body is larger than the {most:,} bytes that the context of "
                           f"{self._context:,} tokens allows (agents.context)")


# -- the server -----


@dataclass(frozen=True)
class Card:
    """A model that clients may call: its seat, the number of ids of its longest call, and its tokens."""

    seat: Seat
    context: int
    renderer: Renderer


class EpisodeServer:
    """A listener, and the episodes that clients reach through it. Use `async with`. `context`: the number of ids of the
    longest call; `sampling`: the rule of agents.sampling; `desk`: where clients with the `key` of the run may claim
    samples; `tell` takes lines about connections of strangers; `cards`: the models in several seats."""

    def __init__(self, context: int, renderer: Renderer, sampling: str, host: str = "127.0.0.1", port: int = 0,
                 model: str = "policy", desk: ClaimDesk | None = None, key: str = "",
                 tell: Callable[[str], object] = log.warning, keys: EpisodeKeys | None = None,
                 cards: Sequence[Card] = ()) -> None:
        self._host, self._port, self._desk, self._tell = host, port, desk, tell
        self.keys = EpisodeKeys(key, desk) if keys is None else keys
        cards = cards if len(cards) > 1 else (Card(Seat(model), context, renderer),)
        self.bodies = BodyReader(max(card.context for card in cards), self.keys)
        self._calls = CallRoutes(cards, sampling, self.keys, self.bodies)

    async def __aenter__(self) -> EpisodeServer:
        app = web.Application(middlewares=[self._guard])
        app.add_routes(self.routes())
        # A client that goes away cancels its handler: an answer that nobody gets is not trained.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0,
                                     keepalive_timeout=KEPT_S)
        await self._runner.setup()
        try:
            bound = await _bound(self._host, self._port)
        except OSError as problem:
            await self._runner.cleanup()
            raise UserError(f"serve.host = {self._host!r}, serve.port = {self._port}: cannot listen there: {problem}; "
                            "take another, or port = 0 for any") from None
        self._port, self._listener = bound.getsockname()[1], Listener(bound, room(), self._tell)
        await self._listener.open(self._runner.server)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listener.close()
        await self._runner.cleanup()

    @property
    def base_url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}/v1"

    def open(self, episode: Episode) -> None:
        """Let clients reach an episode by new keys (its `openai` and `keys`) until it is closed."""
        self.keys.open(episode, self.base_url)

    def routes(self) -> list[web.RouteDef]:
        claims = [] if self._desk is None else ClaimRoutes(self._desk, self.keys, self.bodies).routes()
        return [*self._calls.routes(), *claims]

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer refusals in OpenAI's shape. A stranger's connection ends with its answer."""
        connection, stranger = request.protocol, not self.keys.is_known(request)
        self._listener.heard(connection)
        response = await self._answered(request, handler)
        if stranger:
            response.force_close()
            self._listener.answered(connection)
        return response

    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except CallRefused as refused:
            return answer_of(openai.error(str(refused), refused.code, refused.param), STATUS.get(refused.code, 400))
        except web.HTTPException as problem:
            text = f"{request.method} {request.path}: {problem.reason}"
            return answer_of(openai.error(text, "not_found"), problem.status)


class CallRoutes:
    """Routes of model calls, and of questions about the models."""

    def __init__(self, cards: Sequence[Card], rule: str, keys: EpisodeKeys, bodies: BodyReader) -> None:
        self._cards, self._rule, self._keys, self._bodies = cards, rule, keys, bodies
        self._numbers = itertools.count()

    def routes(self) -> list[web.RouteDef]:
        return [
            *(web.post(path, partial(self._call, kind, shape)) for path, (kind, shape) in CALLS.items()),
            web.get("/v1/models", self._models), web.get("/health", self._health),
            web.post("/tokenize", self._tokenize), web.post("/detokenize", self._detokenize),
        ]

    # -- calls -----

    async def _call(self, kind: type[Any], shape: str, request: web.Request) -> web.StreamResponse:
        """Answer a body of this `kind` in a `shape` of `openai.Answers`."""
        (whole, own), raw = self._keys.episode_of(request), await self._bodies.whole(request)
        with whole.at_work():
            body, call, changed, episode = await beside(len(raw), self._read, raw, kind, shape, whole, own)
        episode.counts["overridden"] += changed
        model = self._cards[0].seat.name if len(self._cards) == 1 else episode.seat.name
        answers = openai.Answers([], body, model, next(self._numbers), episode.renderer.decode)
        stream = Stream(request, answers, shape) if body.stream else None
        try:
            delivery = await self._played(request, episode, raw, call, stream)
        except CallRefused as refused:
            if stream is None or not stream.begun:
                raise
            return await stream.refused(refused)
        answers = replace(answers, turns=delivery.turns)
        if stream is not None:
            response = await stream.ended(answers)
        else:
            response = answer_of(getattr(answers, shape)())
            await response.prepare(request)
            await response.write_eof()
        delivery.delivered()
        return response

    async def _played(self, request: web.Request, episode: Episode, raw: bytes, call: Request,
                      stream: Stream | None) -> Delivery:
        """Wait for the answer; a stream brings the text as it is drawn."""
        retried = request.headers.get("x-stainless-retry-count", "0").strip() not in ("", "0")
        on_draft = stream.on_draft if stream is not None else None
        work = asyncio.ensure_future(episode.answer_once(request.path.encode() + raw, retried, call, on_draft))
        try:
            if stream is not None:
                await stream.follow(work)
            delivery, response = await work
        except CallUnanswered as problem:
            episode.unanswered(problem)
            raise CallRefused("invalid_api_key", f"this episode is over: {problem}") from None
        except asyncio.CancelledError:
            if not episode.closed or not work.cancelled():
                raise  # the client went away
            raise CallRefused("invalid_api_key", "this episode is over") from None
        finally:
            work.cancel()
        if isinstance(response, Refusal):
            raise CallRefused(response.code, response.text, response.param)
        return delivery

    # -- about the model -----

    async def _models(self, request: web.Request) -> web.Response:
        cards = [{"id": card.seat.name, "object": "model", "created": 0, "owned_by": "busrl",
                  "max_model_len": card.context} for card in self._cards]
        return answer_of({"object": "list", "data": cards})

    async def _health(self, request: web.Request) -> web.Response:
        return answer_of({})

    async def _tokenize(self, request: web.Request) -> web.Response:
        own = self._keys.seat_of(request)
        body: openai.TokenizeBody = await self._bodies.read(request, openai.TokenizeBody)
        card, size = self._card(own, body.model), sum(map(len, body.messages)) + len(body.prompt) + len(body.tools)
        require_some_fit(card.context, max(1, len(body.messages)), size)
        ids = await beside(size, _ids_of, card.renderer, body)
        return answer_of({"tokens": ids, "count": len(ids), "max_model_len": card.context})

    async def _detokenize(self, request: web.Request) -> web.Response:
        own = self._keys.seat_of(request)
        body: openai.DetokenizeBody = await self._bodies.read(request, openai.DetokenizeBody)
        card = self._card(own, body.model)
        require_some_fit(card.context, len(body.tokens), 0)
        if wrong := [token for token in body.tokens if not 0 <= token < card.renderer.vocabulary]:
            raise CallRefused("invalid", f"tokens: {wrong[0]} is no token id", "tokens")
        return answer_of({"prompt": card.renderer.decode(body.tokens)})

    def _card(self, own: str, model: str | None) -> Card:
        asked = seat_asked([card.seat for card in self._cards], own, model or "")
        return next(card for card in self._cards if card.seat.name == asked)

    def _read(self, raw: bytes, kind: type[Any], shape: str, whole: Episode, own: str
              ) -> tuple[Any, Request, bool, Episode]:
        """The body of a call, its request, whether sampling parameters were overridden, and the seat that is asked."""
        body = openai.read(raw, kind)
        if isinstance(body, openai.GenerateBody):
            body = body.completion()
        if body.stream and shape == "native":
            raise CallRefused("unsupported", "stream: /generate answers whole; /v1/completions streams", "stream")
        episode = whole.seats[seat_asked(whole.places, own, body.model)]
        make = openai.chat_request if shape == "chat" else openai.complete_request
        return (body, *make(body, (self._rule, episode.settings.temperature, episode.settings.top_p)), episode)


def _ids_of(renderer: Renderer, body: openai.TokenizeBody) -> list[int]:
    if not body.messages:
        return renderer.encode(body.prompt)
    tree = Tree()
    history = tree.read(body.messages, body.tools)
    return renderer.prompt(tree, history, msgspec.json.decode(body.tools)).new


class ClaimRoutes:
    """Routes by which clients claim episodes, renew and end them."""

    def __init__(self, desk: ClaimDesk, keys: EpisodeKeys, bodies: BodyReader) -> None:
        self._desk, self._keys, self._bodies = desk, keys, bodies

    def routes(self) -> list[web.RouteDef]:
        path = "/busrl/v1/episodes/{name}"
        return [web.post("/busrl/v1/episodes", self._claim), web.post(path + "/end", self._end),
                web.post(path + "/extend", self._extend), web.get(path, self._look)]

    async def _claim(self, request: web.Request) -> web.Response:
        if not self._keys.is_the_runs(request):
            raise CallRefused("invalid_api_key", "claiming needs the run's key: serve.key in its directory")
        body: ClaimBody = await self._bodies.read(request, ClaimBody, b"{}")
        if not 1 <= body.n <= MOST_CLAIMS or not 0 <= body.wait_s <= LONGEST_WAIT_S:
            rule = f"1 to {MOST_CLAIMS} episodes, at most {LONGEST_WAIT_S:g} s"
            raise CallRefused("invalid", f"n = {body.n}, wait_s = {body.wait_s:g}: {rule}", "n")
        return answer_of(await self._desk.claim(body))

    async def _end(self, request: web.Request) -> web.Response:
        name = self._owned(request)
        body: EndBody = await self._bodies.read(request, EndBody, b"{}")
        return answer_of(self._desk.end(name, body))

    async def _extend(self, request: web.Request) -> web.Response:
        return answer_of(self._desk.renew(self._owned(request)))

    async def _look(self, request: web.Request) -> web.Response:
        return answer_of(self._desk.look(self._owned(request)))

    def _owned(self, request: web.Request) -> str:
        """The name of the episode in the address. CallRefused unless the client has the run's key or the episode's,
        which is valid as long as the answer to its `/end` is kept."""
        name = request.match_info["name"]
        key = self._keys.key_of(request)
        if not self._keys.is_the_runs(request) and not same_key(key, self._desk.key_of(name)):
            raise CallRefused("invalid_api_key", "this is neither the run's key nor that of the episode")
        return name


class Stream:
    """A response of events. It brings the text as it is drawn, then the rest of the answer."""

    def __init__(self, request: web.Request, answers: openai.Answers, shape: str) -> None:
        self._request, self._answers, self._chat = request, answers, shape == "chat"
        self._response = web.StreamResponse(headers=EVENT_STREAM)
        self._news: asyncio.Queue[tuple[int, dict[str, str]] | None] = asyncio.Queue()
        self._sent: dict[int, dict[str, str]] = {}
        self.begun = False
        self.on_draft = None if openai.wants_numbers(answers.body) else self._put

    async def follow(self, work: asyncio.Future[Any]) -> None:
        """Write the text as it is drawn until the work is done, and a comment when nothing came for `WAIT_S`."""
        work.add_done_callback(lambda _: self._news.put_nowait(None))
        while True:
            try:
                news = await asyncio.wait_for(self._news.get(), WAIT_S)
            except asyncio.TimeoutError:
                await self._write(b": wait\n\n")
                continue
            if news is None:
                return
            place, new = news
            before = self._sent.setdefault(place, {})
            await self._event(self._answers.piece(place, new, not before, self._chat))
            before.update({name: before.get(name, "") + text for name, text in new.items()})

    async def ended(self, answers: openai.Answers) -> web.StreamResponse:
        """Write the rest of the answer, and the end of the stream."""
        for chunk in (answers.chunks if self._chat else answers.completion_chunks)(self._sent):
            await self._event(chunk)
        await self._write(b"data: [DONE]\n\n")
        await self._response.write_eof()
        return self._response

    async def refused(self, refused: CallRefused) -> web.StreamResponse:
        """Write a refusal as the end of the stream."""
        await self._event(openai.error(str(refused), refused.code, refused.param))
        await self._response.write_eof()
        return self._response

    def _put(self, place: int, new: dict[str, str]) -> None:
        self._news.put_nowait((place, new))

    async def _event(self, value: Mapping[str, Any]) -> None:
        await self._write(b"data: " + openai.written(value) + b"\n\n")

    async def _write(self, data: bytes) -> None:
        if not self.begun:
            self.begun = True
            await self._response.prepare(self._request)
        await self._response.write(data)


async def _bound(host: str, port: int) -> socket.socket:
    """A socket bound to the first address of a name."""
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, *_, address = addresses[0]
    return socket.create_server(address, family=family)


def same_key(key: str, expected: str) -> bool:
    """Compare two keys in constant time; no key is equal to an empty one."""
    return bool(expected) and hmac.compare_digest(_digest(key), _digest(expected))


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode(errors="replace"), digest_size=16).digest()


def answer_of(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=openai.written(value), status=status, content_type="application/json")
