"""The controller's rules one by one, and what holds for any inputs: bounds, one knob, cooldown, equal replays."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busrl.scheduling.control import Controller, ControlSettings, Decision, Inputs, noise_pair

CALM = {"reward": 0.5, "clip": 0.01, "k3": 0.001, "ess": 0.99, "masked": 0.0, "grad_norm": 1.0}


def make(**more: Any) -> Controller:
    values = {"n_min": 32, "n_lo": 16, "n_hi": 64, "mode": "act", "eta_max": 4, "eta_min": 3, **more}
    return Controller(ControlSettings(**values))


def feed(controller: Controller, steps: Iterable[int], **more: Any) -> list[Decision]:
    """Steps of which every fifth scores the probe; `more` may be numbers or functions of the step."""
    found = []
    for step in steps:
        values = {name: value(step) if callable(value) else value for name, value in {**CALM, **more}.items()}
        probe = values.pop("probe", 0.5)
        scored = probe if controller.probe_is_due(step) else None
        decision = controller.observe(Inputs(step, 32, probe=scored, **values))
        found += [decision] if decision else []
    return found


def moves(decisions: list[Decision]) -> list[tuple[int, str, Any, Any]]:
    return [(d.step, d.rule, d.old, d.new) for d in decisions if d.moved]


# -- entropy --------------------------------------------------------------------------------------------------------


def test_nothing_moves_before_there_is_a_reference() -> None:
    decisions = feed(make(), range(1, 20), probe=lambda step: 5.0 if step > 2 else 0.5)
    assert {d.reason for d in decisions} == {"no reference entropy yet"} and not moves(decisions)


def test_low_entropy_makes_large_rare_steps_and_high_entropy_small_frequent_ones() -> None:
    it = make(t_max_ms=500.0)
    feed(it, range(1, 21))
    feed(it, range(21, 61), probe=0.2)
    assert (it.knobs.n_min, it.knobs.t_max_ms) == (64, 1000.0)
    feed(it, range(61, 121), probe=1.0)
    assert (it.knobs.n_min, it.knobs.t_max_ms) == (16, 250.0)
    feed(it, range(121, 181), probe=0.5)
    assert (it.knobs.n_min, it.knobs.t_max_ms) == (32, 500.0)


def test_a_run_without_steps_by_time_gets_none() -> None:
    it = make()
    feed(it, range(1, 61), probe=lambda step: 0.5 if step <= 20 else 0.1)
    assert it.knobs.n_min == 64 and math.isinf(it.knobs.t_max_ms)


def test_a_band_is_left_only_inside_of_its_threshold() -> None:
    it = make(ema=0.0)
    feed(it, range(1, 21))
    feed(it, range(21, 41), probe=0.5 * 1.31)
    assert it.knobs.n_min == 16
    feed(it, range(41, 61), probe=0.5 * 1.25)
    assert it.knobs.n_min == 16
    feed(it, range(61, 81), probe=0.5 * 1.19)
    assert it.knobs.n_min == 32


def test_one_move_in_ten_steps_even_if_entropy_jumps_to_and_fro() -> None:
    it = make(ema=0.0)
    found = moves(feed(it, range(1, 200), probe=lambda step: 0.5 if step <= 20 else (0.1, 2.0)[step // 5 % 2]))
    steps = [step for step, *_ in found]
    assert len(steps) > 5 and min(b - a for a, b in itertools.pairwise(steps)) >= 10


@pytest.mark.parametrize(
    ("more", "veto"),
    [
        ({"ess": 0.4}, "ESS"),
        ({"clip": lambda step: 0.01 if step <= 20 else 0.2}, "clip fraction"),
        ({"reward": lambda step: 1 / step}, "while reward falls"),
    ],
)
def test_a_danger_vetoes_smaller_steps_and_the_log_says_which(more: dict[str, Any], veto: str) -> None:
    it = make()
    found = feed(it, range(1, 61), probe=lambda step: 0.5 if step <= 20 else 0.5 + 0.05 * (step - 20), **more)
    vetoed = [d for d in found if d.vetoes]
    assert vetoed and all(veto in d.vetoes[0] for d in vetoed) and it.knobs.n_min == 32
    assert not any(d.applied or d.moved for d in vetoed)


def test_nothing_vetoes_larger_steps() -> None:
    it = make()
    feed(it, range(1, 61), probe=lambda step: 0.5 if step <= 20 else 0.1, ess=0.1)
    assert it.knobs.n_min == 64


def test_advice_is_what_act_would_do_and_is_never_applied() -> None:
    runs = {mode: make(mode=mode) for mode in ("advise", "act")}
    found = {m: feed(it, range(1, 80), probe=lambda s: 0.5 if s <= 20 else 0.1) for m, it in runs.items()}
    assert moves(found["advise"]) == moves(found["act"]) != []
    assert not any(d.applied for d in found["advise"]) and any(d.applied for d in found["act"])


# -- full -----------------------------------------------------------------------------------------------------------


def full(**more: Any) -> Controller:
    return make(**{"rules": "full", "eta_max": 8, "eta_min": 1, "sigma": 0.2, **more})


@pytest.mark.parametrize("danger", [{"ess": 0.3}, {"k3": 0.2}, {"masked": 0.1}, {"broken": True},
                                    {"grad_norm": lambda step: 1.0 if step < 24 else 9.0}])
def test_a_danger_halves_the_bound_and_rests_twenty_steps(danger: dict[str, Any]) -> None:
    it = full()
    feed(it, range(1, 21))
    found = feed(it, range(21, 66), **danger)
    eta = [d.new["eta"] for d in found if d.rule == "safety" and d.moved]
    assert eta[:2] == [4, 2] or (eta == [4] and callable(danger.get("grad_norm")))
    steps = [d.step for d in found if d.rule == "safety"]
    assert min((b - a for a, b in itertools.pairwise(steps)), default=20) >= 20
    assert it.knobs.n_min == 16


def test_at_the_end_of_its_range_safety_says_so_and_goes_no_further() -> None:
    it = full(eta_min=8)
    found = [d for d in feed(it, range(1, 60), ess=0.1) if d.rule == "safety"]
    assert found and not any(d.moved for d in found) and "can not be lowered" in found[0].reason


def test_the_gate_is_a_schmitt_trigger_and_collapse_freezes_growth() -> None:
    it = full()
    noisy = {"noise_signal": 1.0, "noise_spread": 64.0}
    feed(it, range(1, 21))
    found = feed(it, range(21, 120), probe=0.17, **noisy)
    assert it.knobs.gate and [d.step for d in found if d.rule == "gate"] and it.knobs.n_min > 16
    feed(it, range(120, 160), probe=0.21)
    assert it.knobs.gate
    feed(it, range(160, 240), probe=0.3)
    assert not it.knobs.gate and it.rules.alert == ""
    before = it.knobs.n_min
    frozen = full()
    feed(frozen, range(1, 21))
    found = feed(frozen, range(21, 160), probe=0.02, **noisy)
    assert "collapsed" in frozen.rules.alert and frozen.knobs.n_min == 16 < before
    assert any("frozen" in d.reason for d in found)


def test_the_batch_follows_the_noise_scale_after_three_decisions_in_a_row() -> None:
    it = full()
    found = moves(feed(it, range(1, 200), noise_signal=1.0, noise_spread=1000.0))
    sizes = [new["n_min"] for _, _, _, new in found]
    assert found[0][0] == 15 and sizes == [20, 25, 31, 39, 49, 61, 64]
    it.load({**it.state(), "signals": full().signals.state()})
    feed(it, range(1, 301), noise_signal=1.0, noise_spread=4.0)
    assert it.knobs.n_min in range(16, 24)


def test_signal_and_spread_are_averaged_apart() -> None:
    it = full(ema=0.9)
    feed(it, range(1, 400), noise_signal=lambda s: (3.0, -1.0)[s % 2], noise_spread=lambda s: (10.0, 30.0)[s % 2])
    assert it.signals.noise_scale == pytest.approx(20.0, rel=0.15)


def test_an_idle_learner_earns_staleness_slowly_and_idle_engines_give_it_back() -> None:
    it = full(eta_max=8)
    it.load({**it.state(), "knobs": {**it.knobs.to_dict(), "eta": 2}})
    found = moves(feed(it, range(1, 41), idle_train=0.5, idle_rollout=0.0))
    assert [new["eta"] for *_, new in found][:2] == [3, 4]
    assert found[1][0] - found[0][0] >= max(10, 2 * (3 + 1))
    feed(it, range(41, 300), idle_train=0.0, idle_rollout=0.6)
    assert it.knobs.eta == 1


def test_without_safety_margins_staleness_does_not_grow() -> None:
    it = full()
    it.load({**it.state(), "knobs": {**it.knobs.to_dict(), "eta": 2}})
    feed(it, range(1, 100), idle_train=0.9, k3=0.02)
    assert it.knobs.eta == 2


def test_noise_pair_refuses_sizes_that_carry_no_information() -> None:
    assert noise_pair(7.25, 8, 3.8125, 32) == pytest.approx((8 / 3, 110 / 3))
    for small, big in ((8, 8), (0, 4), (9, 8)):
        with pytest.raises(ValueError, match="batch sizes"):
            noise_pair(1.0, small, 1.0, big)


# -- anything -------------------------------------------------------------------------------------------------------

SHARE = st.one_of(st.none(), st.floats(0, 1))
STEP = st.fixed_dictionaries({
    "reward": SHARE, "probe": st.one_of(st.none(), st.floats(0, 5)), "clip": SHARE, "ess": SHARE, "masked": SHARE,
    "k3": st.one_of(st.none(), st.floats(0, 1)), "grad_norm": st.one_of(st.none(), st.floats(0, 1e6)),
    "broken": st.booleans(), "noise_signal": st.one_of(st.none(), st.floats(-10, 10)),
    "noise_spread": st.one_of(st.none(), st.floats(-1e3, 1e3)), "idle_train": SHARE, "idle_rollout": SHARE,
})
RUNS = st.lists(STEP, min_size=5, max_size=120)
OPTIONS = st.fixed_dictionaries({
    "rules": st.sampled_from(["entropy", "full"]), "ema": st.sampled_from([0.0, 0.5, 0.9]),
    "every": st.integers(1, 6), "cooldown": st.integers(0, 12), "t_max_ms": st.sampled_from([math.inf, 500.0]),
    "reference_steps": st.integers(1, 10), "streak": st.integers(1, 3), "mode": st.sampled_from(["advise", "act"]),
})


def through_json(inputs: Inputs) -> Inputs:
    return Inputs.from_dict(json.loads(json.dumps(inputs.to_dict())))


@settings(max_examples=60, deadline=None)
@given(run=RUNS, options=OPTIONS, cut=st.integers(0, 120))
def test_the_same_inputs_give_the_same_decisions_also_from_a_log_and_after_a_restart(
    run: list[dict[str, Any]], options: dict[str, Any], cut: int
) -> None:
    steps = [Inputs(step, 32, **values) for step, values in enumerate(run, 1)]
    living, reading = make(**options), make(**options)
    first = [living.observe(inputs) for inputs in steps]
    again: list[Decision | None] = []
    for inputs in steps:
        if inputs.step == cut:  # killed: a successor loads the checkpoint
            state = json.loads(json.dumps(reading.state(), allow_nan=False))
            reading = make(**options)
            assert reading.load(state)
        again.append(reading.observe(through_json(inputs)))
    assert first == again and living.state() == reading.state()


@settings(max_examples=60, deadline=None)
@given(run=RUNS, options=OPTIONS)
def test_knobs_stay_in_range_one_moves_at_a_time_and_rest_is_kept(
    run: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    it = make(**options)
    last = -math.inf
    for step, values in enumerate(run, 1):
        before = it.knobs
        decision = it.observe(Inputs(step, 32, **values))
        now = it.knobs
        assert 16 <= now.n_min <= 64 and (now.eta is None or 3 <= now.eta <= 4)
        changed = {f.name for f in dataclasses.fields(now) if getattr(now, f.name) != getattr(before, f.name)}
        assert changed <= {"n_min", "t_max_ms"} or len(changed) == 1
        assert (decision is not None) == (step % options["every"] == 0)
        assert not changed or (decision is not None and decision.moved and not decision.vetoes)
        if changed & {"n_min", "t_max_ms"}:
            assert step - last >= options["cooldown"]
        last = step if changed else last


def test_the_state_of_other_rules_is_not_loaded() -> None:
    it = full()
    assert not it.load(make().state()) and it.knobs == full().knobs


def test_numbers_that_are_not_finite_are_left_out_and_counted_as_broken() -> None:
    made = Inputs.made(3, 8, reward=math.nan, clip=0.5, grad_norm=math.inf, ess=None)
    assert made == Inputs(3, 8, clip=0.5, broken=True)


def test_a_controller_that_joins_a_run_late_makes_its_reference_from_then_on() -> None:
    it = make()
    feed(it, range(501, 521))
    found = feed(it, range(521, 561), probe=0.2)
    assert it.knobs.n_min == 64 and found[0].reason != "no reference entropy yet"
