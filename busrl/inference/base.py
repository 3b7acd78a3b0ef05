"""What an inference engine is: requests in, finished sequences out, one decoding step at a time.

The rollout role talks to this protocol alone, so an embedded engine, a server or a script behind it look the same.
Knows nothing of slots, the bus or rewards, and imports no torch.

- One `step()` is one decoding step (or several at which nothing joins or leaves): sequences join before it and leave
  after it; new weights enter between two.
- Every token carries its id, its log-probability under the distribution that it was drawn from, and the version of
  the weights that produced it.
- A sample is a function of (seed, uid, segment, weights): what it is batched with does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

EOS = 1
LENGTH = 2


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


@dataclass(frozen=True)
class Finished:
    """The new tokens of one request. `finish` is EOS (the last token ends the sequence) or LENGTH (a limit cut it).

    `text` is the text of the whole answer where the engine knows it; otherwise it is decoded from the ids.
    """

    key: int
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.uint32]
    finish: int
    text: str | None = None


class Engine(Protocol):
    """An engine: `add` while `active < capacity`, `step` while `active`, weights in between."""

    @property
    def capacity(self) -> int:
        """How many requests may run at once."""
        ...

    @property
    def active(self) -> int:
        """How many requests run or wait for their first step."""
        ...

    @property
    def drawing(self) -> int:
        """How many tokens the next `step` will draw, all requests together."""
        ...

    @property
    def max_length(self) -> int:
        """The longest sequence, prompt included."""
        ...

    def add(self, requests: Sequence[Request]) -> None:
        """Take requests; they join at the next step. At most `capacity - active` of them."""
        ...

    def step(self) -> list[Finished]:
        """Do one decoding step for all; returns those that ended in it."""
        ...

    def cancel(self, key: int) -> bool:
        """Forget a request; False if it is not here (any more)."""
        ...

    def set_weights(self, version: int, step: int) -> None:
        """The weights behind `parameters()` are now `version`; tokens drawn from here on carry it."""
        ...

    def parameters(self) -> dict[str, torch.Tensor]:
        """Live tensors by the names of `model.named_parameters()`; written in place between two steps."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered prompt."""
        ...

    def decode(self, ids: Sequence[int] | npt.NDArray[np.int32], ended: bool = True) -> str:
        """Text of generated ids; with `ended` the final end-of-sequence token is left out."""
        ...
