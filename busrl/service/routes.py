"""Means of all routes of a service: bodies, what belongs to a key, and refusals in words.

Used by the door and the routes of runs. Talks to the `Desk` for what exists. Knows nothing of which routes there are.

- What belongs to another key does not exist for a client: the refusal is the same, so nobody learns of it.
- A body counts with what it is unpacked to, before it is. So the bodies of a key that are in memory have a bound.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from aiohttp import web

from busrl.service import bodies, folders
from busrl.service.bodies import read_body
from busrl.service.desk import Desk
from busrl.service.folders import ServiceFolders
from busrl.service.keys import Account
from busrl.service.registry import FULL, AdapterOf, Model, Sampler, Session, saved, session_of
from busrl.service.wire import unpack, unpacked_bytes
from busrl.topology.schema import Tinker

BODY_BYTES = 64 << 20
IDLE_BODY_S = 30.0  # between two parts of a body
BESIDE_BYTES = 1 << 18  # larger bodies are read beside the loop
MOST_READ_BYTES = 1 << 29  # of larger bodies of a key that are in memory at a time
READERS = 4  # bodies that are unpacked or read beside the loop at a time: meanwhile each takes several times its size
EPHEMERAL = "ephemeral-"  # begins the names of weights that were saved for a sampler alone
NO_SUCH = "does not exist"
ACCOUNT: ContextVar[Account] = ContextVar("account")  # whose request is handled, in the task that handles it
Kind = TypeVar("Kind", bound=bodies.Fields)
Asked = ParamSpec("Asked")
Read = TypeVar("Read")


async def whole_body(request: web.Request) -> bytes:
    """A body as it came. `request.read()` copies a large one twice more, while all clients wait."""
    chunks, size = [], 0
    while chunk := request.content.read_nowait(-1) or await _next_chunk(request):
        size += len(chunk)
        if size > BODY_BYTES:
            raise web.HTTPRequestEntityTooLarge(BODY_BYTES, size)
        chunks.append(chunk)
    return b"".join(chunks)


async def _next_chunk(request: web.Request) -> bytes:
    """The next part of a body, b"" at its end. HTTPRequestTimeout for a client that is gone, or sends nothing: what it
    announced counts meanwhile."""
    try:
        return await asyncio.wait_for(request.content.readany(), IDLE_BODY_S)
    except asyncio.TimeoutError:
        raise web.HTTPRequestTimeout(reason=f"nothing of the body came for {IDLE_BODY_S:g} s") from None


class Refusal(Exception):
    """An answer with a status that the SDK shows to its user, or obeys."""

    def __init__(self, status: int, text: str, retry_after_s: int = 0) -> None:
        super().__init__(text)
        self.status, self.retry_after_s = status, retry_after_s


class Held:
    """The larger bodies of a request, while they are in memory. `of`: bytes of those of each owner."""

    def __init__(self, of: Counter[str], owner: str) -> None:
        self._of, self._owner, self._size = of, owner, 0

    def add(self, size: int) -> None:
        """Count a body. Refusal where those of other requests of its key are too many already."""
        size = size if size > BESIDE_BYTES else 0
        others = self._of[self._owner] - self._size
        if size and others and others + self._size + size > MOST_READ_BYTES:
            raise Refusal(429, f"{others >> 20} MiB of bodies of {self._owner} are being read, and "
                          f"{MOST_READ_BYTES >> 20} may be", 1)
        self._size += size
        self._of[self._owner] += size

    def release(self) -> None:
        self._of[self._owner] -= self._size


HELD: ContextVar[Held] = ContextVar("held")  # of the request that is handled


@dataclass(frozen=True)
class BaseModel:
    """The model that all adapters are of: its name for clients, its kind, its ids, whether its head can be adapted."""

    name: str
    arch: str
    vocabulary: int
    tied_head: bool


class Things:
    """All that belongs to one account. Refusal 404 for what does not exist, or is another's."""

    def __init__(self, account: Account, desk: Desk, where: ServiceFolders) -> None:
        self.account, self._desk, self._where = account, desk, where
        self._registry = desk.registry

    def session(self, id: str) -> Session:
        session = self._registry.sessions.get(id)
        if session is None or session.owner != self.account.name:
            raise Refusal(404, f"session {id[:100]} {NO_SUCH}")
        return session

    def open_session(self, id: str | None) -> Session:
        """A session that goes on; Refusal 410 if it has ended."""
        session = self.session(id or "")
        if session.ended:
            raise Refusal(410, f"session {session.id} has ended: {session.ended}")
        self._desk.census.heard(session.id)
        return session

    def model(self, id: str) -> Model:
        model = self._registry.models.get(id)
        if model is None or model.owner != self.account.name:
            raise Refusal(404, f"model {id[:100]} {NO_SUCH}")
        return model

    def sampler(self, id: str) -> Sampler:
        sampler = self._registry.samplers.get(id)
        if sampler is None or sampler.owner != self.account.name:
            raise Refusal(404, f"sampler {id[:100]} {NO_SUCH}")
        return sampler

    def numbered(self, id: str) -> Model | Sampler | None:
        """A model or sampler, whose requests have numbers; None where there is none."""
        known = self._registry.models.get(id) or self._registry.samplers.get(id)
        return known if known is not None and known.owner == self.account.name else None

    def sessions(self) -> list[Session]:
        return [session for session in self._registry.sessions.values() if session.owner == self.account.name]

    def models(self) -> Iterator[Model]:
        return (model for model in self._registry.models.values() if model.owner == self.account.name)

    def require_not_anothers(self, path: str) -> None:
        """Refusal if this path is one of another account's model, whether something is saved there or not."""
        found = saved(path)
        if found is None or found[0] not in self._registry.models:
            return
        self.model(found[0])

    def saved(self, path: str, kind: str) -> dict[str, Any]:
        """The description of saved weights."""
        found = saved(path)
        if found is not None and found[1] == kind:
            described = folders.about(self._where.saved_as(*found))
            if described is not None:
                save = self.model(found[0]).saves.get(int(described["by"].rpartition(":")[2]))
                if save is None or not save.is_over(time.time()):
                    return described
        raise Refusal(404, f"{path} {NO_SUCH}")

    def adapter(self, path: str) -> AdapterOf:
        """The adapter of saved weights, or of those that a sampler without a name draws with."""
        named = saved(path)
        if named is None:
            raise Refusal(404, f"{path} {NO_SUCH}")
        model, number = self.model(named[0]), named[2].removeprefix(EPHEMERAL)
        made = model.requests.get(int(number)) if number.isascii() and number.isdigit() else None
        if number == named[2] or made is None or made.op != "save_weights_for_sampler":
            self.saved(path, named[1])
        return model.adapter

    def require_tokens(self) -> None:
        """Refusal 429 if the day's tokens are used up."""
        most = self.account.tokens_per_day
        if most and self._desk.tokens_today(self.account.name) >= most:
            raise Refusal(429, f"{self.account.name} has used its {most} tokens of this day (tokens_per_day); the next "
                          "one begins at midnight UTC", 60)


class Service:
    """The means of all routes: bodies, and the things that a client names. `paused`: whether the run is, so that
    nothing is executed; `whole`: whether all weights are trained."""

    def __init__(self, desk: Desk, where: ServiceFolders, settings: Tinker, base: BaseModel,
                 paused: Callable[[], bool] = lambda: False) -> None:
        self.desk, self.where, self.settings, self.base = desk, where, settings, base
        self.paused = paused
        self.registry, self.whole = desk.registry, settings.weights == FULL
        self._readers = asyncio.Semaphore(READERS)

    async def beside(self, read: Callable[Asked, Read], *args: Asked.args, **kwargs: Asked.kwargs) -> Read:
        """Read a body beside the loop, with few others."""
        async with self._readers:
            return await asyncio.to_thread(read, *args, **kwargs)

    async def raw(self, request: web.Request) -> bytes:
        body = await whole_body(request)
        encoding = request.headers.get("Content-Encoding", "")
        if encoding == "zstd":
            HELD.get().add(unpacked_bytes(body, BODY_BYTES))
            return await self.beside(unpack, body, BODY_BYTES)
        if encoding not in ("", "identity"):
            raise Refusal(400, f"Content-Encoding: {encoding} is not read here; zstd is, or none")
        return body

    async def body(self, request: web.Request, kind: type[Kind]) -> Kind:
        return read_body(kind, await self.raw(request))

    def things(self) -> Things:
        """The things of the account whose request is handled."""
        return Things(ACCOUNT.get(), self.desk, self.where)

    def heard(self, id: str) -> None:
        """Note that the client is there that asks for something of this model or sampler."""
        self.desk.census.heard(session_of(id))

    def there(self, id: str) -> AbstractContextManager[None]:
        """Note that the client is there, while it waits for an answer of this model or sampler."""
        return self.desk.census.there(session_of(id))

    def goes_on(self, session: Session) -> bool:
        return self.desk.goes_on(session.id, self.settings.session_s)

    def require_base(self, name: str | None) -> None:
        if name != self.base.name:
            raise Refusal(400, f"base_model {name} is not served here; {self.base.name} is")
