"""What the predictors that learn have in common: logs of lengths, and prompts collected until a batch is worth it.

Pure. A subclass says what it makes of a batch of new prompts, and what it expects of candidates. Knows nothing of
their models.

- An answer counts at once for its prompt; the text of a new prompt is learned when `WORTH` of them have come (at the
  start sooner), since work on a batch costs hardly more than on one.
- All that is learned is learned from logs, so twice as long is as far off as half as long.
- Asking changes nothing; `state` has everything, the prompts collected so far too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from busrl.scheduling.predictors.base import Candidate, Finished, Floats, limited
from busrl.scheduling.predictors.level import Level

WORTH = 16
HIGHEST_LOG = 40.0


@dataclass
class Fresh:
    """A prompt whose text is still to be learned: its first answer, and the mean of all so far (logs)."""

    candidate: Candidate
    first: float
    mean: float
    answers: int = 1

    def add(self, value: float) -> None:
        self.answers += 1
        self.mean += (value - self.mean) / self.answers


class Learning(ABC):
    """Base of the predictors that learn online."""

    name = ""

    def __init__(self) -> None:
        self.level = Level()
        self.prompts = 0  # whose text was learned
        self._fresh: dict[int, Fresh] = {}  # by draw

    def predict(self, candidates: Sequence[Candidate]) -> Floats:
        if not candidates:
            return np.zeros(0)
        logs = self._expect(candidates) + self.level.value
        return limited(np.exp(np.minimum(logs, HIGHEST_LOG)), candidates)

    def observe(self, finished: Sequence[Finished]) -> None:
        for candidate, tokens in finished:
            value = self.level.relative(tokens)
            known = self._answer(candidate, value)
            waiting = self._fresh.get(candidate.draw)
            if waiting is not None:
                waiting.add(value)
            elif not known:
                self._fresh[candidate.draw] = Fresh(candidate, value, value)
        if self._fresh and len(self._fresh) >= min(WORTH, 1 + self.prompts // 4):
            fresh, self._fresh = list(self._fresh.values()), {}
            self.prompts += len(fresh)
            self._learn(fresh)

    def state(self) -> dict[str, Any]:
        waiting = [asdict(one) for one in self._fresh.values()]
        return {"level": self.level.state(), "prompts": self.prompts, "fresh": waiting, **self._state()}

    def load(self, state: Mapping[str, Any]) -> None:
        other = self._empty()  # filled first: a state that does not fit changes nothing
        other.level.load(state["level"])
        other.prompts = int(state["prompts"])
        for one in state["fresh"]:
            fresh = Fresh(**{**one, "candidate": Candidate(**one["candidate"])})
            other._fresh[fresh.candidate.draw] = fresh
        other._load(state)
        self.__dict__.update(other.__dict__)

    # -- a subclass says ----------------------------------------------------------------------------------------

    def _empty(self) -> Learning:
        """One of the same kind that has learned nothing."""
        return type(self)()

    @abstractmethod
    def _expect(self, candidates: Sequence[Candidate]) -> Floats:
        """Logs of lengths, around the level."""

    @abstractmethod
    def _answer(self, candidate: Candidate, value: float) -> bool:
        """An answer, as a log around the level; False if the text of its prompt is still to be learned."""

    @abstractmethod
    def _learn(self, fresh: Sequence[Fresh]) -> None:
        """New prompts."""

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """What it adds to `state`."""

    @abstractmethod
    def _load(self, state: Mapping[str, Any]) -> None:
        """Take over what `_state` gave."""
