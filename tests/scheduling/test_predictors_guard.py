"""The guard around a predictor: nothing that it does wrong reaches the scheduler; all is counted, and told once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from busrl.predict.lengths import Guard, RulesPredictor
from busrl.predict.lengths import guard as guard_module
from busrl.scheduling.predictor import Candidate

ASKED = [Candidate(0, "prove it", 4096), Candidate(1, "yes or no?", 4096), Candidate(2, "2+2", 8)]
Says = Callable[[Sequence[Candidate]], Any]


class Faulty:
    """Says what it is told to."""

    name = "faulty"

    def __init__(self, says: Says, learns: Callable[[], None] = lambda: None) -> None:
        self.says, self.learns = says, learns
        self.seen = 0

    def predict(self, candidates: Sequence[Candidate]) -> npt.NDArray[np.float64]:
        lengths: npt.NDArray[np.float64] = self.says(candidates)
        return lengths

    def observe(self, finished: Sequence[tuple[Candidate, int]]) -> None:
        self.learns()
        self.seen += len(finished)

    def state(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load(self, state: Mapping[str, Any]) -> None:
        self.seen = int(state["seen"])


def broken() -> None:
    raise ZeroDivisionError("no")


@pytest.mark.parametrize(
    ("says", "kind"),
    [
        (lambda c: 1 / 0, "predict raised ZeroDivisionError"),
        (lambda c: np.full(len(c), np.nan), "not finite"),
        (lambda c: np.array([5.0, np.inf, 5.0]), "not finite"),
        (lambda c: np.full(len(c), -1.0), "negative"),
        (lambda c: np.ones(len(c) + 1), "wrong shape"),
        (lambda c: ["many"] * len(c), "predict raised ValueError"),
        (lambda c: None, "wrong shape"),
    ],
)
def test_an_unusable_batch_goes_by_rules_and_is_counted_and_told_once(says: Says, kind: str) -> None:
    told: list[str] = []
    guard = Guard(Faulty(says), report=told.append)
    for _ in range(3):
        assert guard.predict(ASKED).tolist() == RulesPredictor().predict(ASKED).tolist()
    assert guard.faults == {kind: 3} and guard.fallbacks == 9
    assert len(told) == 1 and kind in told[0] and "faulty" in told[0] and "rules" in told[0]


def test_only_the_bad_batch_falls_back() -> None:
    answers: Iterator[Any] = iter([np.array([7.0, 8.0, 3.0]), np.full(3, np.nan), np.array([1.0, 2.0, 3.0])])
    guard = Guard(Faulty(lambda c: next(answers)))
    assert guard.predict(ASKED).tolist() == [7.0, 8.0, 3.0]
    assert guard.predict(ASKED).tolist() == RulesPredictor().predict(ASKED).tolist()
    assert guard.predict(ASKED).tolist() == [1.0, 2.0, 3.0] and guard.fallbacks == 3


@given(st.lists(st.floats(), min_size=3, max_size=3))
def test_whatever_a_predictor_says_what_comes_out_is_in_range(numbers: list[float]) -> None:
    said = Guard(Faulty(lambda c: np.array(numbers))).predict(ASKED)
    assert all(1 <= tokens <= c.max_new_tokens for tokens, c in zip(said, ASKED))


def test_an_observe_that_raises_is_counted_and_scoring_goes_on() -> None:
    told: list[str] = []
    guard = Guard(Faulty(lambda c: np.arange(len(c)) + 1.0, broken), report=told.append)
    for draw in range(0, 99, 3):
        asked = [Candidate(draw + i, "", 4096) for i in range(3)]
        guard.predict(asked)
        guard.observe([(c, 10 * (i + 1)) for i, c in enumerate(asked)])
    assert guard.faults == {"observe raised ZeroDivisionError": 33} and len(told) == 1
    assert guard.tau == pytest.approx(1.0) and guard.metrics()["predictor_faults"] == 33


def test_tau_uses_the_last_prediction_before_an_answer_in_a_window() -> None:
    says = iter([1.0, -1.0])
    guard = Guard(Faulty(lambda c: sign * np.array([c_.draw % 100 for c_ in c]) + 200.0))
    for sign in (next(says), next(says)):
        asked = [Candidate(d, "", 4096) for d in range(600)]
        guard.predict(asked)
        guard.observe([(c, 1 + c.draw % 100) for c in asked])
        assert guard.tau == pytest.approx(sign)
    assert guard.metrics()["predictor_pairs"] == 512


def test_tau_stays_silent_at_first_and_ignores_answers_nobody_asked_about() -> None:
    guard = Guard(RulesPredictor())
    guard.observe([(Candidate(d, "", 8), 3) for d in range(100)])
    assert np.isnan(guard.tau) and guard.metrics()["predictor_pairs"] == 0


def test_predictions_waiting_for_answers_are_bounded_and_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_module, "REMEMBERED", 20)
    guard = Guard(RulesPredictor())
    for draw in range(40):
        guard.predict([Candidate(draw, "", 8), Candidate(0, "", 8)])  # draw 0 is asked about again and again
    guard.observe([(Candidate(draw, "", 8), 3) for draw in range(40)])
    assert guard.metrics()["predictor_pairs"] == 20


def test_costs_are_told_in_microseconds_per_prompt_and_per_answer() -> None:
    now = iter(np.arange(100) * 0.001)
    guard = Guard(RulesPredictor(), clock=lambda: float(next(now)))
    guard.predict(ASKED[:2])
    guard.observe([(ASKED[0], 5)] * 4)
    told = guard.metrics()
    assert told["predictor_us_per_prompt"] == pytest.approx(500) and told["predictor_us_per_answer"] == pytest.approx(
        250
    )


def test_the_state_of_another_predictor_is_refused() -> None:
    first, second = Guard(Faulty(lambda c: c)), Guard(RulesPredictor())
    first.observe([(ASKED[0], 5)])
    again = Guard(Faulty(lambda c: c))
    again.load(first.state())
    assert again.inner.state() == {"seen": 1}
    with pytest.raises(ValueError, match="it is of the predictor 'faulty', not 'rules'"):
        second.load(first.state())
