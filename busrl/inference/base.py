"""What an inference engine is: requests in, finished sequences out, new weights between two decoding steps.

The rollout role talks to this protocol alone, so an embedded engine, a server or a script behind it look the same.
Knows nothing of slots, the bus or rewards, and imports no torch.

- Sequences join before a decoding step and leave after it; new weights enter between two.
- Every token carries its id, its log-probability under the distribution that it was drawn from, and the version of
  the weights that produced it.
- A sample is a function of (seed, uid, segment, weights): what it is batched with does not matter. (A server that
  draws its own numbers can promise less; docs/engines.md says which.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from busrl.data import Prompt
    from busrl.weights.base import Receiver
    from busrl.weights.factory import Settings

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
