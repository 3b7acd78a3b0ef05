"""Where the parts of a step may be computed before all of it is there, in a run and in the simulator."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from busrl.algorithms import catalog
from busrl.preflight.load import load
from busrl.scheduling.plan import make_plan

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.toml"


@pytest.mark.parametrize("settings, streams", [
    ([], True),
    (["learner.deterministic=true"], False),
    (["learner.updates_per_batch=2"], False),
    (["learner.passes_per_batch=2"], False),
    (["learner.recipe=reinforce_pp"], False),
    (["learner.loss=m2po"], False),
])
def test_a_step_that_needs_all_of_its_samples_is_held_back(settings: list[str], streams: bool) -> None:
    topology = load(QUICKSTART, settings)
    assert make_plan(topology).streaming is streams
    assert not make_plan(topology, streamable=False).streaming


def test_a_step_with_balance_is_not_divided_after_its_gradient() -> None:
    """The balance of experts is no share of the advantages, which the deviation of the step divides."""
    learner = load(QUICKSTART, ["learner.advantage=batch_std", "learner.loss=ppo_clip"]).learner
    assert not catalog.held_back(learner)
    assert "not all of the loss scales" in catalog.held_back(dataclasses.replace(learner, balance=0.01))
