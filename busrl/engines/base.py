"""The interface of an inference engine: requests in, finished sequences out, new weights between two decoding steps.

The rollout role talks to `Engine` alone, so an embedded engine, a server or a script behind it look the same. `Engine`
also holds what all of them share: requests under way, pauses, counts. Beside it: the answer under way, and the seeds
and random streams of samples. Knows nothing of slots, the bus or rewards, and imports no torch.

- Sequences join before a decoding step and leave after it; new weights enter between two steps.
- Every token carries its id, its log-probability under the distribution that it was drawn from, and the version of
  the weights that produced it.
- A sample is a function of (seed, uid, segment, weights): what it is batched with does not matter. (A server that
  draws its own numbers can promise less; docs/engines.md says which.)
"""

from __future__ import annotations

import hashlib
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from busrl.engines.tokens import NO_IDS, Ids
from busrl.states import Finish

if TYPE_CHECKING:
    from busrl.data import Prompt
    from busrl.weights.base import Receiver
    from busrl.weights.factory import TransportSettings

PIECE = 1 << 32  # segments are numbered below it, so piece k of segment s draws from stream s + k * PIECE
_MASK = (1 << 64) - 1
Pause = Literal["keep", "wait", "abort"]
Routes = npt.NDArray[Any]  # ids of experts, [positions, layers with experts, experts of a token]


@dataclass(frozen=True)
class Request:
    """A segment to generate. The caller chooses `key` (a slot's number). `prefix_ids` are the tokens of earlier
    segments; `stop_ids` end the answer, as the model's own end tokens do. `routes_from`: of how many tokens of prompt
    and prefix, from the first on, the caller has the routes already."""

    key: int
    uid: int
    segment: int
    prompt_ids: Ids
    prefix_ids: Ids
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop_ids: tuple[int, ...] = ()
    routes_from: int = 0
    extra: dict[str, Any] = field(default_factory=dict)  # of a model call: what only some engines know, as `weights`


@dataclass(frozen=True)
class Finished:
    """The new tokens of one request. `finish` is a code of `Finish`; an aborted request may have no token at all.

    `text` is the text of the whole answer where the engine has it; otherwise the caller decodes the ids. `refused` is
    the reason why a server will never answer this request. `computed` counts the prompt tokens whose keys and values
    were computed for this request instead of being found in the cache.

    Of an engine that was made with a `Routing`, wherever there are tokens: `routes` has a row for each, that of the
    position that predicts it; `prompt_routes` those of the positions before the first of them, from the request's
    `routes_from` on. The last token was never read, and has none.
    """

    key: int
    token_ids: Ids
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.uint32]
    finish: int
    text: str | None = None
    refused: str = ""
    computed: int = 0
    routes: Routes | None = None
    prompt_routes: Routes | None = None
    extra: dict[str, npt.NDArray[Any]] = field(default_factory=dict)


@dataclass
class PartialAnswer:
    """A request and the tokens that it has so far, from one start of an engine or from several."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    pieces: int = 0  # how often an engine was stopped after it had made tokens
    computed: int = 0  # as of `Finished`
    routes: list[Routes] = field(default_factory=list)  # of the tokens, piece after piece
    prompt_routes: Routes | None = None  # of the first piece with tokens; the later ones begin where it ended

    @property
    def known_ids(self) -> list[int]:
        """All tokens in order, those of the prompt and of earlier segments included."""
        return [*self.request.prompt_ids.tolist(), *self.request.prefix_ids.tolist(), *self.token_ids]

    def add(
        self, ids: Iterable[int], logprobs: Iterable[float], versions: Iterable[int], routes: Routes | None = None,
    ) -> None:
        """Add tokens, with their routes where the engine has any: then with each of them."""
        self.token_ids += ids
        self.logprobs += logprobs
        self.versions += versions
        if routes is not None:
            self.routes.append(routes)

    def add_piece(self, piece: Finished) -> None:
        """Add the tokens that an engine had drawn when it was stopped."""
        self.computed += piece.computed
        if len(piece.token_ids):
            self.add(piece.token_ids.tolist(), piece.logprobs.tolist(), piece.versions.tolist(), piece.routes)
            if self.prompt_routes is None:
                self.prompt_routes = piece.prompt_routes
            self.pieces += 1

    def rest(self) -> Request:
        """The request for what is left. It draws from a stream of random numbers that no piece before has used."""
        first = self.request
        prefix = np.concatenate([first.prefix_ids, np.array(self.token_ids, np.int32)])
        left = first.max_new_tokens - len(self.token_ids)
        have = len(first.prompt_ids) + len(prefix) - 1 if self.routes else first.routes_from
        return replace(
            first, segment=first.segment + PIECE * self.pieces, prefix_ids=prefix, max_new_tokens=left,
            routes_from=have,
        )

    def finished(self, finish: int, text: str | None = None, refused: str = "") -> Finished:
        logprobs = np.minimum(np.array(self.logprobs, np.float32), np.float32(0.0))
        if self.request.temperature <= 0:  # a distribution with one point
            logprobs[~np.isnan(logprobs)] = 0.0
        ids, versions = np.array(self.token_ids, np.int32), np.array(self.versions, np.uint32)
        routes = np.concatenate(self.routes) if self.routes else None
        return Finished(
            self.request.key, ids, logprobs, versions, finish, text, refused, self.computed, routes, self.prompt_routes,
        )


@dataclass
class Statistics:
    """Counts and seconds since the engine was made; `cache_*` are positions of the key-value cache, 0 if unknown."""

    active: int = 0  # requests that run or wait
    waiting: int = 0  # of them, those without a token of this round yet
    paused: bool = False
    version: int = 0
    steps: int = 0
    tokens: int = 0  # generated
    prefill_tokens: int = 0  # prompt tokens computed, those of recomputed caches included
    prefix_tokens: int = 0  # prompt tokens that were not: an earlier request had left their keys and values
    cache_tokens: int = 0
    cache_capacity: int = 0
    updates: int = 0
    update_s: float = 0.0
    pause_s: float = 0.0  # without a decoding step because of updates and pauses
    errors: int = 0  # answers of a server that could not be used


class Text(Protocol):
    """Prompts to ids, and ids to text."""

    def encode(self, prompt: Prompt) -> list[int]: ...
    def decode(self, ids: Sequence[int] | Ids, ended: bool = True) -> str: ...


class Engine(ABC):
    """An engine. Call `submit` while `active < capacity`, `step` while `active`, and `update_weights` in between.

    A request is in `_running`, by its key, until its end is in `_done`. A subclass implements the abstract methods:
    `_begin`, `_end_now` and `_update` do its part of `submit`, `abort` and `update_weights`.
    """

    def __init__(self, text: Text, capacity: int, max_length: int, clock: Callable[[], float] = time.monotonic) -> None:
        """At most `capacity` requests at once, sequences of at most `max_length` tokens, prompt included."""
        self._text, self.capacity, self.max_length = text, capacity, max_length
        self.version = 0
        self._running: dict[int, Any] = {}
        self._done: list[Finished] = []  # the next `step` returns them
        self._counts = Statistics()
        self._clock = clock
        self._paused_at: float | None = None

    # -- requests -----

    @property
    def active(self) -> int:
        """Requests that run or wait for their first step."""
        return len(self._running) + len(self._done)

    @property
    @abstractmethod
    def decoding(self) -> int:
        """Tokens that the next `step` will add to the counts, all requests together."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests; they join at the next step. At most `capacity - active` of them, else ValueError."""
        free = self.capacity - self.active
        if len(requests) > free:
            raise ValueError(f"{len(requests)} requests, but {free} rows are free; submit at most capacity - active")
        starting, cut = [], []
        for request in requests:
            room = min(request.max_new_tokens, self.max_length - len(request.prompt_ids) - len(request.prefix_ids))
            if room > 0:
                starting.append(replace(request, max_new_tokens=room))
            else:
                cut.append(PartialAnswer(request).finished(Finish.LENGTH))
        self._begin(starting)
        self._done += cut

    @abstractmethod
    def step(self) -> list[Finished]:
        """Do one decoding step for all; returns those that ended. An engine with its own loop returns what ended
        since the last call, and waits a moment if nothing did."""

    def sampled(self, key: int, begin: int) -> Ids:
        """Tokens of a running request from number `begin` on; none if the engine has them only at the end."""
        running = self._running.get(key)
        if not isinstance(running, PartialAnswer):
            return NO_IDS
        return np.array(running.token_ids[begin:], np.int32)

    def abort(self, key: int) -> Finished | None:
        """End a request now: its tokens so far, ABORTED if it had not ended; None if it is not here (any more)."""
        if key in self._running:
            self._end_now([key])
        ended = next((finished for finished in self._done if finished.key == key), None)
        self._done = [finished for finished in self._done if finished is not ended]
        return ended

    def pause(self, how: Pause) -> list[Finished]:
        """No step until `resume`; returns what has ended. keep: sequences stay as they are; wait: those under way end
        first; abort: all end now."""
        ended: list[Finished] = []
        while how == "wait" and self.active and not self.paused:
            ended += self.step()
        self.hold()
        if how == "abort":
            self._end_now(list(self._running))
        return ended + self._take_done()

    def resume(self) -> None:
        """Continue with the steps."""
        if self._paused_at is not None:
            self._counts.pause_s += self._clock() - self._paused_at
            self._paused_at = None

    @property
    def paused(self) -> bool:
        return self._paused_at is not None

    @property
    def _pause_s(self) -> float:
        """All pauses so far, the present one included."""
        return self._counts.pause_s + (0.0 if self._paused_at is None else self._clock() - self._paused_at)

    def hold(self) -> None:
        """Pause now, unless the engine is paused already, with the requests as they are."""
        if self._paused_at is None:
            self._paused_at = self._clock()

    def _take_done(self) -> list[Finished]:
        done, self._done = self._done, []
        return done

    @abstractmethod
    def _begin(self, requests: list[Request]) -> None:
        """Put requests into `_running`; each has room for `max_new_tokens`, which is at least one."""

    @abstractmethod
    def _end_now(self, keys: list[int]) -> None:
        """Move requests from `_running` to `_done` with the tokens that they have."""

    # -- weights -----

    def receiver(self, settings: TransportSettings, name: str) -> Receiver | None:
        """The engine's own receiver of weights, where its model is in another process or there is none; None: the
        caller makes the ordinary one. `name` is the process, as errors name it."""
        return None

    def update_weights(self, receiver: Receiver) -> tuple[int, int]:
        """Take the receiver's newest version between two steps; returns (version, learner's step). Tokens drawn from
        here on carry it. WeightsRefused leaves the engine as it was; after any other error it must not be used."""
        begun = time.monotonic()
        self.version, step = self._update(receiver)
        self._counts.updates += 1
        self._counts.update_s += time.monotonic() - begun
        return self.version, step

    @abstractmethod
    def _update(self, receiver: Receiver) -> tuple[int, int]: ...

    # -- the rest -----

    def statistics(self) -> Statistics:
        return replace(
            self._counts, active=self.active, paused=self.paused, version=self.version, pause_s=self._pause_s
        )

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, or of a chat as the model's template writes it, up to the start of the answer."""
        return self._text.encode(prompt)

    def decode(self, ids: Sequence[int] | Ids, ended: bool = True) -> str:
        """Text of generated ids; with `ended` the final end-of-sequence token is left out."""
        return self._text.decode(ids, ended)

    def close(self) -> None:
        """End what the engine started; it is not used any more."""


# -- the random numbers of a sample -----

def seed_of(request: Request, produced: int) -> int:
    """63 bits for a generator outside this process: a function of (seed, uid, segment, tokens so far). The tokens so
    far are part of it because a continued answer must not draw the numbers of its beginning again."""
    text = struct.pack("<QQQQ", request.seed & _MASK, request.uid & _MASK, request.segment & _MASK, produced)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class Streams:
    """Streams of uniforms, one for each (run seed, uid, segment), from a counter-based generator.

    The key is (seed, uid) and the segment is in the counter, so no state is kept. One generator is re-keyed for each
    draw, which is cheaper than making a new one. Uniforms lie strictly inside (0, 1) on a grid of 2**-32, so
    u * total < total holds in float64.
    """

    def __init__(self) -> None:
        self._philox = np.random.Philox(key=0)
        self._buffer = np.zeros(4, np.uint64)

    def uniforms(self, seed: int, uid: int, segment: int, count: int) -> npt.NDArray[np.float64]:
        """The first `count` numbers of the stream; a longer draw begins with the same ones."""
        key = np.array([uid & _MASK, seed & _MASK], np.uint64)
        counter = np.array([0, 0, segment & _MASK, 0], np.uint64)
        self._philox.state = {
            "bit_generator": "Philox", "state": {"counter": counter, "key": key}, "buffer": self._buffer,
            "buffer_pos": 4, "has_uint32": 0, "uinteger": 0,
        }
        words: npt.NDArray[np.uint64] = self._philox.random_raw(count)
        uniforms: npt.NDArray[np.float64] = ((words >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32
        return uniforms

