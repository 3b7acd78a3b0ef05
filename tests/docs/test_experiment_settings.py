"""The settings that the experiments try by default are settings that a run accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.experiments import order, quickstart_policies
from busrl.preflight.load import load
from busrl.topology.kinds import POLICIES

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("policy", quickstart_policies.POLICIES)
def test_what_is_tried_on_the_quickstart_is_accepted(policy: str) -> None:
    topology = load(ROOT / "configs" / "quickstart.toml", quickstart_policies.settings_of(policy))
    assert topology.scheduler.policy == policy.partition(",")[0].partition(":")[0]


def test_the_policies_of_the_experiment_on_order_exist() -> None:
    tried = {policy.partition(":")[0] for several in order.POLICIES.values() for policy in several}
    assert tried <= set(POLICIES) and order.POLICIES.keys() == order.RUNS.keys()
