"""A guard between a predictor and its user: counts and replaces faults, and scores predictions by Kendall's tau.

Wraps any predictor; talks to nothing else but the clock that its constructor gets. Knows nothing of the use of its
numbers.

- `predict` and `observe` never raise, and predictions are always within 1 and the limit. When a prediction raises, or
  is no usable number, `rules` predicts that batch instead.
- An answer is scored against the newest prediction for its draw: a dispatched draw gets no new one.
- Each kind of fault is reported once, and counted always.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from busrl.predict.lengths.base import limited
from busrl.predict.lengths.rules import RulesPredictor
from busrl.scheduling.predictor import Candidate, Floats, Observation, Predictor


def kendall_tau(predicted: Sequence[float] | npt.ArrayLike, actual: Sequence[float] | npt.ArrayLike) -> float:
    """Ranking quality, -1 to 1 (tau-b, ties corrected); 0 where one side does not vary. For some thousand pairs."""
    p, a = (_signs(np.asarray(side, np.float64)) for side in (predicted, actual))
    varied = float(np.count_nonzero(p)) * float(np.count_nonzero(a))
    return int((p * a).sum(dtype=np.int64)) / varied**0.5 if varied else 0.0


def _signs(values: Floats) -> npt.NDArray[np.int8]:
    """The order of each value against each: 1 above, -1 below, 0 equal."""
    return (values[:, None] > values).astype(np.int8) - (values[:, None] < values).astype(np.int8)


WINDOW = 512  # pairs from which tau is computed
EVERY = 64  # answers after which reading tau computes it again
LEAST_PAIRS = 16  # with fewer pairs tau is NaN
REMEMBERED = 1 << 17  # predictions waiting for their answers; as many prompts may be waiting to be dispatched
FADE_PROMPTS = 4096  # costs are means over about so many


class Guard(Predictor):
    """A predictor that never fails. `report(text)` is called once per kind of fault; `clock()` gives seconds."""

    def __init__(
        self, predictor: Predictor, rules: RulesPredictor | None = None, *, clock: Callable[[], float] = lambda: 0.0,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.inner, self.rules = predictor, rules or RulesPredictor()
        self.name = predictor.name
        self._clock, self._report = clock, report
        self.faults: Counter[str] = Counter()  # by kind
        self.fallbacks = 0  # prompts that `rules` predicted instead
        self.answers = 0
        self._newest: dict[int, float] = {}  # draw -> newest prediction
        self._pairs: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self._tau = math.nan
        self._tau_at = -EVERY
        self._asking, self._learning = _Cost(), _Cost()

    def predict(self, candidates: Sequence[Candidate]) -> Floats:
        """Tokens per candidate; by `rules` where the predictor fails."""
        if not candidates:
            return np.zeros(0)
        begun = self._clock()
        tokens = self._checked(candidates)
        if tokens is None:
            self.fallbacks += len(candidates)
            tokens = self.rules.predict(candidates)
        self._asking.add(self._clock() - begun, len(candidates))
        for candidate, number in zip(candidates, tokens.tolist()):
            self._newest.pop(candidate.draw, None)  # so that the newest are last
            self._newest[candidate.draw] = number
        while len(self._newest) > REMEMBERED:
            del self._newest[next(iter(self._newest))]
        return tokens

    def observe(self, finished: Sequence[Observation]) -> None:
        if not finished:
            return
        for candidate, tokens in finished:
            predicted = self._newest.get(candidate.draw)
            if predicted is not None:
                self._pairs.append((predicted, tokens))
        self.answers += len(finished)
        begun = self._clock()
        try:
            self.inner.observe(finished)
        except Exception as problem:
            self._fault(f"observe raised {type(problem).__name__}", str(problem))
        self._learning.add(self._clock() - begun, len(finished))

    def state(self) -> dict[str, Any]:
        return {"name": self.name, "inner": self.inner.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`; ValueError, and nothing changed, if it is another predictor's or does not fit."""
        if state["name"] != self.name:
            raise ValueError(f"it is of the predictor {state['name']!r}, not {self.name!r}")
        self.inner.load(state["inner"])

    @property
    def tau(self) -> float:
        """Kendall's tau of the last predictions with the actual lengths; NaN with fewer than LEAST_PAIRS."""
        if len(self._pairs) >= LEAST_PAIRS and self.answers - self._tau_at >= EVERY:
            self._tau_at = self.answers
            self._tau = kendall_tau(*zip(*self._pairs))
        return self._tau

    def metrics(self) -> dict[str, float]:
        """Numbers for the metrics: ranking quality and its pairs, microseconds per prompt and answer, faults."""
        return {
            "predictor_tau": self.tau,
            "predictor_pairs": float(len(self._pairs)),
            "predictor_us_per_prompt": self._asking.mean_us,
            "predictor_us_per_answer": self._learning.mean_us,
            "predictor_fallbacks": float(self.fallbacks),
            "predictor_faults": float(self.faults.total()),
        }

    def _checked(self, candidates: Sequence[Candidate]) -> Floats | None:
        """The prediction of the wrapped predictor; None if it cannot be used."""
        try:
            tokens = np.asarray(self.inner.predict(candidates), np.float64)
        except Exception as problem:
            self._fault(f"predict raised {type(problem).__name__}", str(problem))
            return None
        if tokens.shape != (len(candidates),):
            self._fault("wrong shape", f"{tokens.shape} for {len(candidates)} prompts")
        elif not np.isfinite(tokens).all():
            self._fault("not finite", f"{int((~np.isfinite(tokens)).sum())} of {len(tokens)} predictions")
        elif (tokens < 0).any():
            self._fault("negative", f"{tokens.min():g} tokens")
        else:
            return limited(tokens, candidates)
        return None

    def _fault(self, kind: str, text: str) -> None:
        self.faults[kind] += 1
        if self.faults[kind] == 1:
            self._report(f"predictor {self.name}: {kind} ({text}); rules predict in its place, later ones are counted")


class _Cost:
    """Mean seconds per prompt or answer, over about the last FADE_PROMPTS."""

    def __init__(self) -> None:
        self.seconds = self.things = 0.0

    def add(self, seconds: float, things: int) -> None:
        keep = max(0.0, 1 - things / FADE_PROMPTS)
        self.seconds = keep * self.seconds + seconds
        self.things = keep * self.things + things

    @property
    def mean_us(self) -> float:
        return 1e6 * self.seconds / self.things if self.things else 0.0
