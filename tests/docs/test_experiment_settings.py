"""The settings that the experiments try by default are settings that a run accepts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from busrl.config import load
from busrl.scheduling.dispatch import POLICIES

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "experiments"))

import dispatch  # noqa: E402
import quickstart_policies  # noqa: E402


@pytest.mark.parametrize("policy", quickstart_policies.POLICIES)
def test_what_is_tried_on_the_quickstart_is_accepted(policy: str) -> None:
    topology = load(ROOT / "configs" / "quickstart.toml", quickstart_policies.settings_of(policy))
    assert topology.scheduler.policy == policy.partition(",")[0].partition(":")[0]


def test_the_policies_of_the_dispatch_experiment_exist() -> None:
    tried = {policy.partition(":")[0] for several in dispatch.POLICIES.values() for policy in several}
    assert tried <= set(POLICIES) and dispatch.POLICIES.keys() == dispatch.RUNS.keys()
