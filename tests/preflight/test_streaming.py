"""Where the parts of a step may be computed before all of it is there, in a run and in the simulator."""

from __future__ import annotations

from pathlib import Path

import pytest

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
