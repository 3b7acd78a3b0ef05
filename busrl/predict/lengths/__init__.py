"""Predictors of answer lengths: rules, learned, history, blend, and an oracle for simulations."""

from __future__ import annotations

from busrl.predict.lengths.base import LengthsOf, OraclePredictor
from busrl.predict.lengths.guard import Guard, kendall_tau
from busrl.predict.lengths.history import BlendPredictor, HistoryPredictor
from busrl.predict.lengths.learned import LearnedPredictor
from busrl.predict.lengths.rules import Keywords, RulesPredictor
from busrl.scheduling.predictor import Predictor

__all__ = [
    "BlendPredictor", "Guard", "HistoryPredictor", "Keywords", "LearnedPredictor", "LengthsOf", "OraclePredictor",
    "RulesPredictor", "kendall_tau", "make_predictor",
]


def make_predictor(name: str, *, keywords: Keywords | None = None, lengths_of: LengthsOf | None = None) -> Predictor:
    """The predictor that `scheduler.predictor` names; `lengths_of` gives the oracle its lengths."""
    if name == "oracle":
        if lengths_of is None:
            raise ValueError("predictor = 'oracle': nobody knows the lengths of answers beforehand; use blend")
        return OraclePredictor(lengths_of)
    if name in ("learned", "history"):
        return LearnedPredictor() if name == "learned" else HistoryPredictor()
    rules = RulesPredictor(keywords)
    return rules if name == "rules" else BlendPredictor(rules)
