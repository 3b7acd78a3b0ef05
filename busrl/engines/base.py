"""What an inference engine is: requests in, finished sequences out, new weights between two decoding steps.

The rollout role talks to this protocol alone, so an embedded engine, a server or a script behind it look the same.
Knows nothing of slots, the bus or rewards, and imports no torch.

- Sequences join before a decoding step and leave after it; new weights enter between two.
- Every token carries its id, its log-probability under the distribution that it was drawn from, and the version of
  the weights that produced it.
- A sample is a function of (seed, uid, segment, weights): what it is batched with does not matter. (A server that
  draws its own numbers can promise less; docs/engines.md says which.)

Whether an engine is paused, and for how long it was in all. Knows nothing else.

The random numbers of a sample: one stream for each (run seed, uid, segment), drawn when the request arrives.

Used by the engines; talks to nothing. A counter-based generator makes the streams independent without any state to
keep: the key is (seed, uid), the segment sits in the counter, and a repeated draw gives the same numbers.

- Uniforms lie strictly inside (0, 1) on a grid of 2**-32, so u * total < total holds in float64.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from busrl.data import Prompt
    from busrl.weights.base import Receiver
    from busrl.weights.factory import Settings



# -- What an inference engine is: requests in, finished sequences out, new weights between two decoding steps ---------


EOS = 1
LENGTH = 2
ABORTED = 3
Pause = Literal["keep", "wait", "abort"]


@dataclass(frozen=True)
class Request:
    """One segment to generate. `key` is the caller's (a slot); `prefix_ids` are the tokens of earlier segments."""

    key: int
    uid: int
    segment: int
    prompt_ids: npt.NDArray[np.int32]
    prefix_ids: npt.NDArray[np.int32]
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    stream: bool = False  # its tokens are told by `events` as they come


@dataclass(frozen=True)
class Finished:
    """The new tokens of one request. `finish` is EOS (the last token ends the sequence), LENGTH (a limit cut it) or
    ABORTED (it was told to end: it may have no token at all).

    `text` is the text of the whole answer where the engine knows it; otherwise it is decoded from the ids. `refused`
    says why a server will not answer this request at all.
    """

    key: int
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.uint32]
    finish: int
    text: str | None = None
    refused: str = ""


@dataclass(frozen=True)
class Event:
    """What a streaming request produced since its last event; `finish` is None while it goes on."""

    key: int
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.uint32]
    finish: int | None = None


@dataclass(frozen=True)
class Statistics:
    """Counts and seconds since the engine was made; `cache_*` are positions of the key-value cache, 0 if unknown."""

    active: int  # requests that run or wait
    waiting: int  # of them, those without a token of this round yet
    paused: bool
    version: int
    steps: int = 0
    tokens: int = 0  # generated
    prefill_tokens: int = 0  # prompt tokens computed, those of recomputed caches included
    cache_tokens: int = 0
    cache_capacity: int = 0
    updates: int = 0
    update_s: float = 0.0
    pause_s: float = 0.0  # without a decoding step because of updates and pauses
    errors: int = 0  # answers of a server that could not be used


class Engine(Protocol):
    """An engine: `submit` while `active < capacity`, `step` while `active`, weights in between."""

    @property
    def capacity(self) -> int:
        """How many requests may be active at once."""
        ...

    @property
    def active(self) -> int:
        """How many requests run or wait for their first step."""
        ...

    @property
    def drawing(self) -> int:
        """How many tokens the next `step` will add to the counts, all requests together."""
        ...

    @property
    def max_length(self) -> int:
        """The longest sequence, prompt included."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests; they join at the next step. At most `capacity - active` of them, else ValueError."""
        ...

    def step(self) -> list[Finished]:
        """Do one decoding step for all; returns those that ended. An engine with a loop of its own returns what ended
        since, and waits a moment if nothing did."""
        ...

    def abort(self, key: int) -> Finished | None:
        """End a request now: its tokens so far, ABORTED; None if it is not here (any more)."""
        ...

    def events(self) -> list[Event]:
        """What the requests with `stream` produced since the last call."""
        ...

    def pause(self, how: Pause) -> list[Finished]:
        """No step until `resume`. keep: sequences stay as they are; wait: those under way end first; abort: all
        end now."""
        ...

    def resume(self) -> None: ...

    def receiver(self, settings: Settings, name: str) -> Receiver | None:
        """The engine's own receiver of weights, where its model is in another process or there is none; None: the
        caller makes the ordinary one. `name` is the process, by which errors call it."""
        ...

    def update_weights(self, receiver: Receiver) -> tuple[int, int]:
        """Take the receiver's newest version between two steps; returns (version, learner's step). Tokens drawn from
        here on carry it. WeightsRefused leaves the engine as it was; after any other error it is not to be used."""
        ...

    def statistics(self) -> Statistics: ...

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, or of a chat as the model's template writes it, up to the start of the answer."""
        ...

    def decode(self, ids: Sequence[int] | npt.NDArray[np.int32], ended: bool = True) -> str:
        """Text of generated ids; with `ended` the final end-of-sequence token is left out."""
        ...

    def close(self) -> None:
        """End what the engine started; it is not used any more."""
        ...


# -- Whether an engine is paused, and for how long it was in all. Knows nothing else ----------------------------------


class Pauses:
    """running -> paused (`begin`) -> running (`end`); both may be called twice."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun: float | None = None
        self._seconds = 0.0

    @property
    def on(self) -> bool:
        return self._begun is not None

    @property
    def seconds(self) -> float:
        """All pauses so far, the present one included."""
        return self._seconds + (0.0 if self._begun is None else self._clock() - self._begun)

    def begin(self) -> None:
        if self._begun is None:
            self._begun = self._clock()

    def end(self) -> None:
        self._seconds, self._begun = self.seconds, None


# -- The random numbers of a sample: one stream for each (run seed, uid, segment), drawn when the request arrives -----


_MASK = (1 << 64) - 1


class Streams:
    """Draws uniforms for samples. One generator is re-keyed for each, which is cheaper than making one."""

    def __init__(self) -> None:
        self._philox = np.random.Philox(key=0)
        self._buffer = np.zeros(4, np.uint64)

    def uniforms(self, seed: int, uid: int, segment: int, count: int) -> npt.NDArray[np.float64]:
        """The first `count` numbers of the stream; a longer draw begins with the same ones."""
        key = np.array([uid & _MASK, seed & _MASK], np.uint64)
        counter = np.array([0, 0, segment & _MASK, 0], np.uint64)
        self._philox.state = {
            "bit_generator": "Philox",
            "state": {"counter": counter, "key": key},
            "buffer": self._buffer,
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }
        words: npt.NDArray[np.uint64] = self._philox.random_raw(count)
        drawn: npt.NDArray[np.float64] = ((words >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32
        return drawn
