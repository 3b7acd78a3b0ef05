"""What every length predictor is: the question it is asked, its protocol, and the range of its answers.

Talks to nothing. A prediction is in tokens, but only its order matters: judge a predictor by Kendall's tau, not by its
error. Knows nothing of groups' fates, ages or who uses the number.

- A prediction is finite, at least 1 and at most the task's max_new_tokens.
- Same prompt, same prediction, until `observe` says more; the other prompts of a batch do not matter.
- The same observations in the same order give the same predictor, also through `state` and `load`.
"""

from __future__ import annotations

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


Finished = tuple[Candidate, int]  # a finished answer: what was predicted about, and its real tokens


class Predictor(Protocol):
    """Predicted tokens per answer."""

    name: str

    def predict(self, candidates: Sequence[Candidate]) -> Floats:
        """One number per candidate, in their order."""
        ...

    def observe(self, finished: Sequence[Finished]) -> None:
        """Answers that finished since the last call, one entry per answer."""
        ...

    def state(self) -> dict[str, Any]:
        """All that was learned, as plain data: numbers, strings, lists, dicts with string keys, NumPy arrays."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` gave. ValueError or KeyError if it does not fit; nothing is changed then."""
        ...


def limited(tokens: Floats, candidates: Sequence[Candidate]) -> Floats:
    """`tokens` kept within 1 and the limit of each candidate."""
    limit = np.fromiter((c.max_new_tokens for c in candidates), np.float64, len(candidates))
    return np.clip(tokens, 1.0, np.maximum(1.0, limit))
