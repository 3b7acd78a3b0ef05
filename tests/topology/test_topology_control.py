"""[learner.controller]: what contradicts itself is refused with a remedy, and what acts is in the sums."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from busrl.roles.learner import checkpoint_is_due
from busrl.roles.limits import admission_limits, control_settings
from busrl.topology import Topology
from busrl.topology.control import batch_varies

Loaded = Callable[..., Topology]
Refused = Callable[..., list[str]]
ACT = "[weights]\nmax_staleness = 4\n[learner.controller]\nmode = 'act'\n"

REFUSED = [
    ("[learner.controller]\nlow = 1.4", "low < high", "the defaults are 0.6 and 1.3"),
    ("[learner.controller]\nlow = 1.1", "low < 1 < high", "the defaults"),
    ("[learner.controller]\nhysteresis = 0.5", "the gap of 0.7 has no middle left", "set hysteresis below 0.35"),
    ("[learner.controller]\nn_lo = 33", "n_lo <= n_min", "set n_lo <= 32"),
    ("[learner.controller]\nn_hi = 31", "n_min <= n_hi", "set n_hi >= 32"),
    ("[learner.controller]\nhigh_t_max = 2000", "high_t_max <= low_t_max", "250 and 1000"),
    ("[learner.controller]\nrules = 'full'\ngate_on = 1.2", "gate_on < gate_off", "raise gate_off"),
    ("[learner.controller]\nrules = 'full'\nk3_safe = 0.06", "k3_safe < k3_high", "raise k3_high"),
    ("[learner.controller]\nrules = 'full'\ngrow = 2", "a move must not call for its opposite", "1.25, 0.8"),
    ("[learner.controller]\nmode = 'act'", "no window is left for thresholds 16 to 64", "max_staleness >= 4"),
    ("[weights]\nmode = 'sync'\n[learner.controller]\nmode = 'act'", "a synchronous round", 'mode = "advise"'),
    (f"{ACT}[learner]\nupdates_per_batch = 20", "at most 16 updates", "lower updates_per_batch"),
    (f"{ACT}[learner.trigger]\nn_floor = 20\nt_max = 5", "n_floor <= n_lo = 16", "lower n_floor"),
    (f"{ACT}[learner.trigger]\ncount = 'ended'", "not of those that ended", 'count = "usable"'),
    (f"{ACT}rules = 'full'\n[learner]\ndeterministic = true", "idle times, which depend on the machine", "entropy"),
    (f"{ACT}rules = 'full'\neta_min = 5", "eta_min <= max_staleness", "lower eta_min"),
    (f"{ACT}rules = 'full'\neta_min = 2", "needs an admission bound of 3 steps of 16", "set it to 3 or more"),
    ("[weights]\nwindow = 49", "weights.window = 49 is larger than the buffer", "set window <= 48"),
    ("[weights]\nmode = 'fully-async'\nwindow = 129", "larger than the buffer: B = 128", "set window <= 128"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "rule", "remedy"), REFUSED)
def test_contradictions_are_refused_with_a_remedy(refused: Refused, text: str, rule: str, remedy: str) -> None:
    (found,) = refused(text + "\n")
    assert rule in found and remedy in found


def test_off_asks_nothing_of_its_other_keys(loaded: Loaded) -> None:
    topology = loaded("[learner.controller]\nmode = 'off'\nlow = 2.0\n")
    assert control_settings(topology) is None


def test_only_a_controller_that_acts_is_in_the_sums(loaded: Loaded) -> None:
    told = loaded("[weights]\nmax_staleness = 4\n")
    assert (told.derived.B, told.derived.W, told.derived.n_lo, told.derived.n_hi) == (124, 37, 32, 32)
    assert not batch_varies(told)
    acting = loaded(ACT)
    assert (acting.derived.B, acting.derived.W, acting.derived.n_lo, acting.derived.n_hi) == (64, 17, 16, 64)
    assert admission_limits(acting).max_age == 4 and batch_varies(acting)
    assert any("move n_min between 16 and 64" in line for line in acting.derived.explain)
    settings = control_settings(acting)
    assert settings is not None and (settings.n_lo, settings.n_hi, settings.eta_min, settings.eta_max) == (16, 64, 3, 4)


def test_the_defaults_are_those_of_the_outline(loaded: Loaded) -> None:
    settings = control_settings(loaded())
    assert settings is not None
    assert (settings.mode, settings.rules, settings.high, settings.low) == ("advise", "entropy", 1.3, 0.6)
    assert (settings.n_lo, settings.n_min, settings.n_hi) == (16, 32, 64)
    assert (settings.high_t_max, settings.low_t_max, settings.ema, settings.cooldown) == (250.0, 1000.0, 0.9, 10)


def test_publishing_rarely_must_leave_room_for_the_largest_step(refused: Refused) -> None:
    (found,) = refused(f"{ACT}[learner]\npublish_every = 2\n")
    assert "2 x n_hi = 128 > B = 64" in found


def test_an_explicit_window_is_in_the_sums(loaded: Loaded) -> None:
    derived = loaded("[weights]\nwindow = 5\n").derived
    assert (derived.B, derived.W) == (92, 5)


def test_checkpoints_count_groups_where_the_batch_varies(loaded: Loaded) -> None:
    fixed, varied = loaded("[learner]\ncheckpoint_every = 2\n"), loaded(f"{ACT}[learner]\ncheckpoint_every = 2\n")
    assert [step for step in range(1, 7) if checkpoint_is_due(fixed, step, 16 * step, 16)] == [2, 4, 6]
    # 2 steps of n_min = 32 groups: every 64 groups, wherever that is.
    assert [step for step in range(1, 9) if checkpoint_is_due(varied, step, 16 * step, 16)] == [4, 8]
    assert [step for step in range(1, 5) if checkpoint_is_due(varied, step, 48 * step, 48)] == [2, 3, 4]
    never = loaded("[learner]\ncheckpoint_every = 0\n")
    assert not any(checkpoint_is_due(never, step, 32 * step, 32) for step in range(1, 50))
