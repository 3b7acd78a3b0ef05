"""The controller in a simulated run: what it is told, what it moves, and what it is refused for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from worlds import FREE_TIMES, QUICKSTART, answers, topology

from busrl.cli import main
from busrl.config import Topology
from busrl.errors import UserError

Make = Callable[..., Any]
SLOW_LEARNER = replace(FREE_TIMES, learner_step_s=5.0)


def controlled(mode: str, rules: str = "full") -> Topology:
    return topology(
        "groups.size=4", "learner.trigger.n_min=4", "generation.max_batch=64", "learner.checkpoint_every=0",
        "weights.max_staleness=5", f"learner.controller.mode={mode}", f"experiments.controller.rules={rules}",
        "learner.controller.n_lo=4", "learner.controller.n_hi=4", "learner.controller.every=1",
        "learner.controller.cooldown=1", "experiments.controller.eta_min=1",
    )


def test_idle_engines_before_a_slow_learner_make_it_take_fresher_groups(checked: Make) -> None:
    given_answers = answers([(50, 60, 70, 80)])
    fixed = checked(controlled("off"), SLOW_LEARNER, given_answers, steps=80).run()
    world = checked(controlled("act"), SLOW_LEARNER, given_answers, steps=80)
    found = world.run()
    assert fixed.actors_busy < 0.8 and fixed.learner_busy > 0.9
    assert found.told["control_eta"] < 5 and found.told["control_moves"] >= 2
    assert all(one.knob == "eta" and one.applied for one in world.control.decisions)
    assert found.rows[-1].age_mean < fixed.rows[-1].age_mean, "fresher,"
    assert found.samples_per_s > 0.9 * fixed.samples_per_s, "at little cost"


def test_advice_changes_nothing_and_is_told(checked: Make) -> None:
    given_answers = answers([(50, 60, 70, 80)])
    fixed = checked(controlled("off"), SLOW_LEARNER, given_answers, steps=40).run()
    found = checked(controlled("advise"), SLOW_LEARNER, given_answers, steps=40).run()
    assert found.rows == fixed.rows
    assert found.told["control_eta"] < 5
    assert not checked(controlled("advise", "entropy"), SLOW_LEARNER, given_answers, steps=3).run().told


def test_entropy_rules_that_would_act_are_refused_before_anything_is_played(
    checked: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="a simulation trains none"):
        checked(controlled("act", "entropy"), FREE_TIMES, answers([(5,) * 4]))
    given = ["--set", "weights.max_staleness=5", "--sweep", "learner.controller.mode=off,act"]
    assert main(["simulate", str(QUICKSTART), "--steps", "2", *given]) == 2
    out, err = capsys.readouterr()
    assert "experiments.controller.rules=full" in err and "samples/s" not in out
