"""`history` and `blend`: predictions from the lengths of other answers, alone or mixed with rules and text.

`history`: the expectation for a prompt without answers comes from near prompts; its own answers then correct it,
siblings most. `blend`: the expectation is a fitted mixture of the rules, the linear model and the neighbours (rules
alone while there is no data), corrected in the same way. Knows nothing of how rules and models of text work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from busrl.predict.lengths.base import Evidence, Ints, Kept, PromptTable, Table, key_of
from busrl.predict.lengths.learned import BITS, Features, Fresh, Learning, Ridge, add_to, features
from busrl.predict.lengths.rules import RulesPredictor
from busrl.scheduling.predictor import Candidate, Floats

# -- other answers -------------------------------------------------------------------------------------------

DIMENSIONS = 64
SQUARINGS = 4  # similarity to the power of 2^4
LEAST = 1e-12  # weight below which nothing is near


class Neighbours(Table):
    """Prompts with similar texts: an index of at most `capacity` unit vectors (the oldest go) over a table of prompts.

    Every vector is compared (one matrix product for a whole batch). The weight of a neighbour is its similarity to the
    power of 16, so that only near ones count. A prompt is no neighbour of itself. `prompt_rows`: by vector, the row in
    the table of prompts.
    """

    KEPT = ("vectors", "keys")
    KEYS, PLACE = "keys", "next"

    def __init__(self, table: PromptTable, capacity: int) -> None:
        super().__init__(capacity)
        self.table = table
        self.vectors = np.zeros((capacity, DIMENSIONS), np.float32)
        self.keys, self.prompt_rows = np.zeros((2, capacity), np.int64)

    def add(self, keys: Sequence[int], rows: Ints, f: Features) -> None:
        """Add prompts with their rows in the table; a prompt that has a vector keeps it."""
        vectors = f.dense(DIMENSIONS)
        for i, key in enumerate(keys):
            if key not in self._row:
                row = self.new(key)
                self.vectors[row], self.prompt_rows[row] = vectors[i], rows[i]

    def predict(self, f: Features, keys: Sequence[int], typical: float) -> Floats:
        """The weighted mean of the neighbours of each row of `f`; `typical` where nothing is near."""
        used = len(self)
        if not used:
            return np.full(f.rows, typical)
        weights = f.dense(DIMENSIONS) @ self.vectors[:used].T
        np.maximum(weights, 0, out=weights)
        for _ in range(SQUARINGS):
            np.multiply(weights, weights, out=weights)
        itself = self.rows(keys)
        weights[np.flatnonzero(itself >= 0), itself[itself >= 0]] = 0
        value, sure = self._values(used, typical)
        total = weights @ sure
        mean = (weights @ (sure * value)) / np.maximum(total, LEAST)
        return typical + np.where(total > LEAST, mean, 0.0).astype(np.float64)

    def _values(self, used: int, typical: float) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """The mean of the answers of each neighbour (around `typical`), and its weight, 0 to 1."""
        rows = self.prompt_rows[:used]
        count, mean = self.table.overall(rows)
        sure = np.where(self.table.key[rows] == self.keys[:used], count / (count + 1), 0.0)
        return (mean - typical).astype(np.float32), sure.astype(np.float32)

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, after the table has: the rows are looked up there. `_values` gives a prompt that the
        table has lost the weight 0."""
        super().load(state)
        self.prompt_rows = np.maximum(self.table.rows(self.keys.tolist()), 0)


PROMPTS = 1 << 16  # prompts in the table, about 200 bytes each
VECTORS = 4096  # texts in the index


class HistoryPredictor(Learning):
    """The predictor `history`: length from the lengths of other answers."""

    name = "history"

    def __init__(self, prompts: int = PROMPTS, vectors: int = VECTORS) -> None:
        super().__init__()
        self.table = PromptTable(prompts)
        self.evidence = Evidence(self.table)
        self.neighbours = Neighbours(self.table, min(prompts, vectors))
        self.parts = {"evidence": self.evidence, "neighbours": self.neighbours}

    def _expect(self, candidates: Sequence[Candidate]) -> Floats:
        keys, f = keyed(candidates)
        return self.evidence.combine(candidates, keys, self.neighbours.predict(f, keys, self.level.typical))

    def _answer(self, candidate: Candidate, value: float) -> bool:
        return not self.evidence.add(candidate, value)

    def _learn(self, fresh: Sequence[Fresh]) -> None:
        keys, f = keyed([prompt.candidate for prompt in fresh])
        near = self.neighbours.predict(f, keys, self.level.typical)
        self.evidence.surprised(np.array([prompt.first for prompt in fresh]) - near)
        self.neighbours.add(keys, self.table.rows(keys), f)


def keyed(candidates: Sequence[Candidate]) -> tuple[list[int], Features]:
    return [key_of(candidate) for candidate in candidates], features(candidates, BITS)


# -- a mixture of sources ------------------------------------------------------------------------------------

LOOK_BACK = 1024  # prompts
PENALTY = 8.0  # weight of the first guess, in prompts per unit of variance of a source


class Stack(Kept):
    """A linear mixture of `sources` predictions, fitted to their recent success.

    Remembers each source's predictions (`said`) for the last prompts, made before the source learned from them. The
    actual lengths come with each fit, since more answers of a prompt may have arrived. Without data the mixture is the
    first source alone. No source has a negative weight. Newer prompts count more, as the sources learn meanwhile.
    """

    KEPT = ("said", "keys", "weights")

    def __init__(self, sources: int) -> None:
        self.sources = sources
        self.said = np.zeros((0, sources))
        self.keys = np.zeros(0, np.int64)
        self.weights = self._guess()

    def _guess(self) -> Floats:
        guess = np.zeros(self.sources + 1)
        guess[0] = 1.0
        return guess

    def mix(self, inputs: Floats) -> Floats:
        """[n, sources] -> [n]."""
        mixed: Floats = inputs @ self.weights[:-1] + self.weights[-1]
        return mixed

    def remember(self, keys: Sequence[int], inputs: Floats) -> None:
        """Keep the sources' predictions for new prompts, [n, sources]."""
        self.keys = np.append(self.keys, np.array(keys, np.int64))[-LOOK_BACK:]
        self.said = np.vstack((self.said, inputs))[-LOOK_BACK:]

    def fit(self, real: Floats, sure: Floats, centre: float) -> None:
        """Fit the weights to the actual values `real` of `keys`, each of weight `sure` (0 to 1), relative to `centre`.

        Least squares near the first guess; sources with a negative weight are left out, the most negative first.
        """
        weight = sure * np.arange(1, len(sure) + 1) / max(1, len(sure)) * 2
        full = np.column_stack((self.said - centre, np.ones(len(real))))
        square, cross = full.T @ (full * weight[:, None]), full.T @ ((real - centre) * weight)
        used, guess = np.ones(self.sources + 1, np.bool_), self._guess()
        penalty = np.full(self.sources + 1, PENALTY)
        penalty[-1] = 1e-3
        while True:
            both = square[np.ix_(used, used)] + np.diag(penalty[used])
            weights = np.zeros(self.sources + 1)
            weights[used] = np.linalg.solve(both, cross[used] + penalty[used] * guess[used])
            worst = int(np.argmin(weights[:-1]))
            if weights[worst] >= 0:
                break
            used[worst] = False
        self.weights = weights

    def _fits(self, values: Mapping[str, Any]) -> bool:
        return len(values["said"]) == len(values["keys"]) <= LOOK_BACK and len(values["weights"]) == len(self.weights)


SOURCES = 3


class BlendPredictor(HistoryPredictor):
    """The predictor `blend`: length from rules, text and other answers."""

    name = "blend"

    def __init__(self, rules: RulesPredictor | None = None, prompts: int = PROMPTS, vectors: int = VECTORS) -> None:
        super().__init__(prompts, vectors)
        self.rules = rules or RulesPredictor()
        self.ridge, self.stack = Ridge(), Stack(SOURCES)
        self.parts = {**self.parts, "ridge": self.ridge, "stack": self.stack}

    def _expect(self, candidates: Sequence[Candidate]) -> Floats:
        keys, f = keyed(candidates)
        typical = self.level.typical
        mixed = self.stack.mix(self._sources(candidates, keys, f, typical)) + typical
        return self.evidence.combine(candidates, keys, mixed)

    def _sources(self, candidates: Sequence[Candidate], keys: Sequence[int], f: Features, typical: float) -> Floats:
        """[n, SOURCES]: the expectation of each source, as logs around the typical length."""
        rules = np.log(self.rules.predict(candidates)) - typical
        text = self.ridge.predict(f) - typical if len(self.ridge) else np.zeros(f.rows)
        near = self.neighbours.predict(f, keys, typical) - typical
        return np.column_stack((rules, text, near))

    def _answer(self, candidate: Candidate, value: float) -> bool:
        self.ridge.update(candidate.draw, value)
        return super()._answer(candidate, value)

    def _learn(self, fresh: Sequence[Fresh]) -> None:
        candidates = [prompt.candidate for prompt in fresh]
        keys, f = keyed(candidates)
        typical, first = self.level.typical, np.array([prompt.first for prompt in fresh])
        sources = self._sources(candidates, keys, f, typical)  # before they learn from these prompts
        mixed = self.stack.mix(sources)
        self.stack.remember(keys, sources + typical)
        self._fit(typical)
        # At the very first the scale of the rules is not fitted yet; that would count as a surprise.
        self.evidence.surprised(first - typical - (mixed if self.prompts > len(fresh) else self.stack.mix(sources)))
        add_to(self.ridge, fresh, f)
        self.neighbours.add(keys, self.table.rows(keys), f)

    def _fit(self, typical: float) -> None:
        """Fit the mixture to the mean lengths of its prompts; a prompt that the table has lost has weight 0."""
        rows = self.table.rows(self.stack.keys.tolist())
        count, mean = self.table.overall(np.maximum(rows, 0))
        self.stack.fit(mean, np.where(rows >= 0, count / (count + 1), 0.0), typical)
