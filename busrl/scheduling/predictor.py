"""The predictor of answer lengths as policies and the scheduler see it: tokens per answer, asked by prompt.

`busrl.predict` implements it and may be left out; `Unpredicted` stands in where the order of dispatch asks for no
lengths. Only the order of the numbers matters. Knows nothing of how lengths are predicted, nor of slots or clocks.

- A prediction is finite, at least 1 and at most the task's max_new_tokens.
- Same prompt, same prediction, until `observe` says more; the other prompts of a batch do not matter.
- What a predictor learned outlives the scheduler's process only through `KeptPredictor`; losing it costs order, never
  a sample.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A group that may be opened: its draw, the text of its prompt, the limit of its answers, its task's tag."""

    draw: int
    prompt: str
    max_new_tokens: int
    tag: str = ""


Observation = tuple[Candidate, int]  # a finished answer: what was predicted about, and its real tokens


class Predictor(ABC):
    """Predicts tokens per answer. One that learns nothing gives `predict` alone."""

    name: str

    @abstractmethod
    def predict(self, candidates: Sequence[Candidate]) -> Floats:
        """Predict a number for each candidate, in their order."""

    def observe(self, finished: Sequence[Observation]) -> None:
        """Learn from answers that finished since the last call, one entry per answer."""

    def metrics(self) -> dict[str, float]:
        """Numbers about itself, for the metrics and for people."""
        return {}

    def state(self) -> dict[str, Any]:
        """All that was learned, as plain data: numbers, strings, lists, dicts with string keys, NumPy arrays."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` gave. ValueError or KeyError if it does not fit; nothing is changed then."""


class KeptPredictor(Protocol):
    """The predictor of a run with what it learned, which outlives the scheduler's process."""

    @property
    def predictor(self) -> Predictor: ...

    def restore(self) -> bool:
        """Load what an earlier scheduler learned; False if there was nothing usable."""

    def keep(self, now: float, before: int | None = None) -> None:
        """Save from time to time, and once for each step `before` that may end in a checkpoint."""

    def close(self) -> None:
        """Save for the last time."""


class Unpredicted(Predictor):
    """Stands for the predictor of a policy that never asks it."""

    name = "none"

    def predict(self, candidates: Sequence[Candidate]) -> Floats:
        return np.ones(len(candidates))


class NothingKept:
    """Stands for the `KeptPredictor` of a policy that asks for no lengths: nothing is learned, nothing is saved."""

    def __init__(self) -> None:
        self.predictor: Predictor = Unpredicted()

    def restore(self) -> bool:
        return False

    def keep(self, now: float, before: int | None = None) -> None: ...

    def close(self) -> None: ...
