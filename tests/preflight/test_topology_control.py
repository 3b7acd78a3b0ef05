"""[learner.controller]: what contradicts itself is refused with a remedy, and what acts is in the sums."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busrl.predict.observer import controller_settings
from busrl.scheduling.plan import checkpoint_is_due, checkpoint_may_follow
from busrl.topology import Topology

Loaded = Callable[..., Topology]
Refused = Callable[..., list[str]]
TABLE = "[experiments.controller]\n"
RULES = f"[learner.controller]\nmode = 'advise'\n{TABLE}"
ACT = "[weights]\nmax_staleness = 4\n[learner.controller]\nmode = 'act'\n"

REFUSED = [
    (f"{RULES}low = 1.4", "low < 1 < high", "the defaults are 0.6 and 1.3"),
    (f"{RULES}low = 1.1", "low < 1 < high", "the defaults"),
    (f"{RULES}hysteresis = 0.5", "the gap of 0.7 has no middle left", "set hysteresis below 0.35"),
    ("[learner.controller]\nmode = 'advise'\nn_lo = 33", "n_lo <= n_min", "set n_lo <= 32"),
    ("[learner.controller]\nmode = 'advise'\nn_hi = 31", "n_min <= n_hi", "set n_hi >= 32"),
    (f"{RULES}high_t_max_s = 2", "high_t_max_s <= low_t_max_s", "0.25 and 1"),
    ("[learner.controller]\nmode = 'act'", "no window is left for thresholds 16 to 64", "max_staleness >= 4"),
    ("[weights]\nmode = 'sync'\n[learner.controller]\nmode = 'act'", "a round is n_min groups", 'mode = "advise"'),
    (f"{ACT}[learner]\nupdates_per_batch = 20", "at most 16 updates", "lower updates_per_batch"),
    (f"{ACT}[learner.trigger]\nn_floor = 20\nt_max_s = 5", "n_floor <= n_lo = 16", "lower n_floor"),
    (f"{ACT}[learner.trigger]\ncount = 'ended'", "the number of groups trained, not ended", 'count = "usable"'),
    ("[weights]\nwindow = 49", "weights.window = 49 is larger than the buffer", "set window <= 48"),
    ("[weights]\nmode = 'fully-async'\nwindow = 129", "larger than the buffer: B = 128", "set window <= 128"),
]


@pytest.mark.parametrize(("text", "rule", "remedy"), REFUSED)
def test_contradictions_are_refused_with_a_remedy(refused: Refused, text: str, rule: str, remedy: str) -> None:
    (problem,) = refused(text + "\n")
    assert rule in problem and remedy in problem


WARNED = [
    ("[weights]\nmode = 'sync'\nwindow = 2", "a round is trained whole, so its window is the round", "remove it"),
]


@pytest.mark.parametrize(("text", "rule", "remedy"), WARNED)
def test_settings_without_an_effect_are_warned_about(loaded: Loaded, text: str, rule: str, remedy: str) -> None:
    (warning,) = loaded(text + "\n").derived.warnings
    assert rule in warning and remedy in warning


def test_off_asks_nothing_of_its_other_keys(loaded: Loaded) -> None:
    topology = loaded("[learner.controller]\nmode = 'off'\n[experiments.controller]\nlow = 2.0\n")
    assert controller_settings(topology) is None


def test_only_a_controller_that_acts_is_in_the_sums(loaded: Loaded) -> None:
    topology = loaded("[weights]\nmax_staleness = 4\n")
    limits = topology.derived.limits
    assert (limits.B, limits.W, limits.n_lo, limits.n_hi) == (124, 37, 32, 32)
    assert not topology.learner.batch_varies
    acting = loaded(ACT)
    limits = acting.derived.limits
    assert (limits.B, limits.W, limits.n_lo, limits.n_hi) == (64, 17, 16, 64)
    assert acting.derived.limits.max_age == 4 and acting.learner.batch_varies
    assert any("moves n_min between 16 and 64" in line for line in acting.derived.explain)
    settings = controller_settings(acting)
    assert settings is not None and (settings.n_lo, settings.n_hi) == (16, 64)


def test_the_defaults_are_those_of_the_outline(loaded: Loaded) -> None:
    settings = controller_settings(loaded("[learner.controller]\nmode = 'advise'\n"))
    assert settings is not None
    assert (settings.mode, settings.high, settings.low) == ("advise", 1.3, 0.6)
    assert (settings.n_lo, settings.n_min, settings.n_hi) == (16, 32, 64)
    assert (settings.high_t_max, settings.low_t_max, settings.ema, settings.cooldown) == (250.0, 1000.0, 0.9, 10)


def test_publishing_rarely_must_leave_room_for_the_largest_step(refused: Refused) -> None:
    (problem,) = refused(f"{ACT}[learner]\npublish_every = 2\n")
    assert "2 x n_hi = 128 > B = 64" in problem


def test_an_explicit_window_is_in_the_sums(loaded: Loaded) -> None:
    derived = loaded("[weights]\nwindow = 5\n").derived
    assert (derived.limits.B, derived.limits.W) == (92, 5)


def test_checkpoints_count_groups_where_the_batch_varies(loaded: Loaded) -> None:
    fixed, varied = loaded("[learner]\ncheckpoint_every = 2\n"), loaded(f"{ACT}[learner]\ncheckpoint_every = 2\n")
    assert [step for step in range(1, 7) if checkpoint_is_due(fixed, step, 16 * step, 16)] == [2, 4, 6]
    # 2 steps of n_min = 32 groups: every 64 groups, wherever that is.
    assert [step for step in range(1, 9) if checkpoint_is_due(varied, step, 16 * step, 16)] == [4, 8]
    assert [step for step in range(1, 5) if checkpoint_is_due(varied, step, 48 * step, 48)] == [2, 3, 4]
    never = loaded("[learner]\ncheckpoint_every = 0\n")
    assert not any(checkpoint_is_due(never, step, 32 * step, 32) for step in range(1, 50))


@settings(max_examples=60)
@given(every=st.integers(0, 5), steps=st.integers(1, 12), most=st.integers(0, 300), acts=st.booleans(), data=st.data())
def test_every_checkpoint_is_foreseen_a_step_before_it(
    loaded: Loaded, every: int, steps: int, most: int, acts: bool, data: st.DataObject
) -> None:
    topology = loaded(ACT if acts else "", f"run.max_steps={steps}", f"run.max_groups={most}",
                  f"learner.checkpoint_every={every}")
    total = 0
    for step in range(steps):
        groups = data.draw(st.integers(1, 64)) if acts else 32
        last = step + 1 == steps or 0 < most <= total + groups
        if last or checkpoint_is_due(topology, step + 1, total + groups, groups):
            assert checkpoint_may_follow(topology, step, total)
        total += groups
        if last:
            return


def test_steps_far_from_a_checkpoint_are_not_taken_for_one(loaded: Loaded) -> None:
    topology = loaded("[learner]\ncheckpoint_every = 4\n[run]\nmax_steps = 10\n")
    assert [step for step in range(10) if checkpoint_may_follow(topology, step, 32 * step)] == [3, 7, 9]
