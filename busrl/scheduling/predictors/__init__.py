"""Predictors of answer lengths: rules, learned, history, blend, and an oracle for simulations."""

from __future__ import annotations

from busrl.scheduling.predictors.base import Candidate, Finished, Predictor
from busrl.scheduling.predictors.blend import BlendPredictor
from busrl.scheduling.predictors.guard import Guard
from busrl.scheduling.predictors.history import HistoryPredictor
from busrl.scheduling.predictors.keywords import Keywords
from busrl.scheduling.predictors.learned import LearnedPredictor
from busrl.scheduling.predictors.oracle import LengthsOf, OraclePredictor
from busrl.scheduling.predictors.ranking import kendall_tau
from busrl.scheduling.predictors.rules import RulesPredictor

__all__ = [
    "PREDICTORS",
    "BlendPredictor",
    "Candidate",
    "Finished",
    "Guard",
    "HistoryPredictor",
    "Keywords",
    "LearnedPredictor",
    "LengthsOf",
    "OraclePredictor",
    "Predictor",
    "RulesPredictor",
    "kendall_tau",
    "make_predictor",
]

PREDICTORS = ("rules", "learned", "history", "blend", "oracle")


def make_predictor(name: str, *, keywords: Keywords | None = None, lengths_of: LengthsOf | None = None) -> Predictor:
    """The predictor that `scheduler.predictor` names; `lengths_of` is what the oracle knows."""
    if name == "rules":
        return RulesPredictor(keywords)
    if name == "learned":
        return LearnedPredictor()
    if name == "history":
        return HistoryPredictor()
    if name == "blend":
        return BlendPredictor(RulesPredictor(keywords))
    if name == "oracle":
        if lengths_of is None:
            raise ValueError("predictor = 'oracle': nobody knows the lengths of answers beforehand; use blend")
        return OraclePredictor(lengths_of)
    raise ValueError(f"predictor = {name!r}: must be one of {', '.join(PREDICTORS)}")
