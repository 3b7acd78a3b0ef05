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

from busrl.predict.controller import Controller, ControllerSettings, Decision, Inputs

CALM = {"reward": 0.5, "clip": 0.01, "ess": 0.99}


def make(**more: Any) -> Controller:
    values = {"n_min": 32, "n_lo": 16, "n_hi": 64, "mode": "act", **more}
    return Controller(ControllerSettings(**values))


def feed(controller: Controller, steps: Iterable[int], **more: Any) -> list[Decision]:
    """Steps of which every fifth scores the probe; `more` may be numbers or functions of the step."""
    decisions = []
    for step in steps:
        values = {name: value(step) if callable(value) else value for name, value in {**CALM, **more}.items()}
        probe = values.pop("probe", 0.5)
        scored = probe if controller.probe_is_due(step) else None
        decision = controller.observe(Inputs(step, 32, probe=scored, **values))
        decisions += [decision] if decision else []
    return decisions


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
    changes = moves(feed(it, range(1, 200), probe=lambda step: 0.5 if step <= 20 else (0.1, 2.0)[step // 5 % 2]))
    steps = [step for step, *_ in changes]
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
    decisions = feed(it, range(1, 61), probe=lambda step: 0.5 if step <= 20 else 0.5 + 0.05 * (step - 20), **more)
    vetoed = [d for d in decisions if d.vetoes]
    assert vetoed and all(veto in d.vetoes[0] for d in vetoed) and it.knobs.n_min == 32
    assert not any(d.applied or d.moved for d in vetoed)


def test_nothing_vetoes_larger_steps() -> None:
    it = make()
    feed(it, range(1, 61), probe=lambda step: 0.5 if step <= 20 else 0.1, ess=0.1)
    assert it.knobs.n_min == 64


def test_advice_is_what_act_would_do_and_is_never_applied() -> None:
    runs = {mode: make(mode=mode) for mode in ("advise", "act")}
    decisions = {m: feed(it, range(1, 80), probe=lambda s: 0.5 if s <= 20 else 0.1) for m, it in runs.items()}
    assert moves(decisions["advise"]) == moves(decisions["act"]) != []
    assert not any(d.applied for d in decisions["advise"]) and any(d.applied for d in decisions["act"])


# -- anything -------------------------------------------------------------------------------------------------------

SHARE = st.one_of(st.none(), st.floats(0, 1))
STEP = st.fixed_dictionaries({
    "reward": SHARE, "probe": st.one_of(st.none(), st.floats(0, 5)), "clip": SHARE, "ess": SHARE,
})
RUNS = st.lists(STEP, min_size=5, max_size=120)
OPTIONS = st.fixed_dictionaries({
    "ema": st.sampled_from([0.0, 0.5, 0.9]),
    "every": st.integers(1, 6), "cooldown": st.integers(0, 12), "t_max_ms": st.sampled_from([math.inf, 500.0]),
    "reference_steps": st.integers(1, 10), "mode": st.sampled_from(["advise", "act"]),
})


def through_json(inputs: Inputs) -> Inputs:
    return Inputs.from_dict(json.loads(json.dumps(inputs.to_dict())))


@settings(max_examples=60)
@given(run=RUNS, options=OPTIONS, cut=st.integers(0, 120))
def test_equal_inputs_give_equal_decisions_even_from_a_log_or_restart(
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


@settings(max_examples=60)
@given(run=RUNS, options=OPTIONS)
def test_knobs_stay_in_range_and_move_singly_and_rest_between_moves(
    run: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    it = make(**options)
    last = -math.inf
    for step, values in enumerate(run, 1):
        before = it.knobs
        decision = it.observe(Inputs(step, 32, **values))
        now = it.knobs
        assert 16 <= now.n_min <= 64
        changed = {f.name for f in dataclasses.fields(now) if getattr(now, f.name) != getattr(before, f.name)}
        assert (decision is not None) == (step % options["every"] == 0)
        assert not changed or (decision is not None and decision.moved and not decision.vetoes)
        if changed:
            assert step - last >= options["cooldown"]
        last = step if changed else last


def test_the_state_of_rules_that_are_gone_is_not_loaded() -> None:
    it = make()
    assert not it.load({**it.state(), "rules": "full"}) and it.state() == make().state()


def test_a_state_written_by_an_older_program_loads_without_removed_parts() -> None:
    it, fresh = make(), make()
    feed(it, range(1, 61), probe=lambda step: 0.5 if step <= 20 else 0.1)
    old = json.loads(json.dumps(it.state()))
    old["knobs"] |= {"eta": None, "gate": False}
    old["signals"] |= {"norms": [1.0], "broken": False, "jump": 0.0}
    old["signals"]["sums"] |= {"masked": [0.0, 0.5], "noise_signal": [1.0, 0.5]}
    assert fresh.load(old) and fresh.knobs == it.knobs and fresh.knobs.n_min == 64


def test_numbers_that_are_not_finite_are_left_out() -> None:
    assert Inputs.measured(3, 8, reward=math.nan, clip=0.5, probe=math.inf, ess=None) == Inputs(3, 8, clip=0.5)


def test_a_controller_joining_late_makes_its_reference_from_then_on() -> None:
    it = make()
    feed(it, range(501, 521))
    decisions = feed(it, range(521, 561), probe=0.2)
    assert it.knobs.n_min == 64 and decisions[0].reason != "no reference entropy yet"
