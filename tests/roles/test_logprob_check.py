"""Engines and learner with another model: the first batch ends the run, a smaller difference is a warning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from busrl.config import Topology, load
from busrl.errors import (
    NEEDS_FIX,
    RUN_FAILED,
    BugError,
    CannotTrain,
    PeerTimeout,
    RunInUse,
    UserError,
    WeightsRefused,
    process_code,
)
from busrl.ledger.wal import SampleRecord
from busrl.roles.learner.alarms import EXACT, ROUNDED, TOKENS, LogprobCheck, mixed, tolerance

QUICK = Path(__file__).resolve().parents[2] / "configs" / "quickstart.toml"


def quick(*settings: str, engine: str = "torch") -> Topology:
    topology = load(QUICK, settings)
    entries = tuple(replace(one, engine=engine) if one.role == "rollout" else one for one in topology.process)
    return replace(topology, process=entries)


def records(count: int, tokens: int, version: int = 0) -> list[SampleRecord]:
    """Samples of which every token has log-probability -1."""
    made = SimpleNamespace(
        version_array=lambda: np.full(tokens, version, np.uint32),
        logprob_array=lambda: np.full(tokens, -1.0, np.float32),
    )
    return cast("list[SampleRecord]", [made] * count)


def scorer(value: float) -> Callable[[Sequence[SampleRecord]], Any]:
    return lambda asked: [np.full(len(one.version_array()), value, np.float32) for one in asked]


def refuse(asked: Sequence[SampleRecord]) -> Any:
    raise AssertionError("it was looked at again")


def test_a_difference_that_nothing_explains_ends_the_run_with_both_numbers() -> None:
    with pytest.raises(CannotTrain) as caught:
        LogprobCheck(quick()).first(records(8, 16), 0, scorer(-3.5))
    text = str(caught.value)
    assert "engine torch, version 0: over 128 tokens" in text and "(mean -1)" in text and "(mean -3.5)" in text
    assert "differ by 2.5 on average, more than learner.mismatch_limit = 1" in text
    with pytest.raises(CannotTrain):
        LogprobCheck(quick()).first(records(8, 16), 0, scorer(float("nan")))


def test_what_agrees_once_is_not_computed_again_and_few_tokens_decide_nothing() -> None:
    agreement = LogprobCheck(quick())
    agreement.first(records(1, TOKENS - 1), 0, refuse)
    agreement.first(records(8, 16, version=3), 4, refuse)
    agreement.first(records(8, 16), 0, scorer(-1.2))
    agreement.first(records(8, 16), 0, refuse)


@pytest.mark.parametrize("engine", ["mock", "other"])
def test_nothing_is_concluded_of_engines_that_are_no_models_of_ours(engine: str) -> None:
    topology = quick(engine="mock" if engine == "mock" else "torch")
    if engine == "other":
        entries = (replace(one, command=("node",)) if one.role == "rollout" else one for one in topology.process)
        topology = replace(topology, process=tuple(entries))
    agreement = LogprobCheck(topology)
    agreement.first(records(8, 16), 0, refuse)
    assert bool(agreement.warning(0, 0, 4.0)) == (engine == "other")


def test_the_limit_can_be_turned_off() -> None:
    LogprobCheck(quick("learner.mismatch_limit=0")).first(records(8, 16), 0, refuse)


def test_the_tolerance_is_that_of_the_coarsest_type_that_may_compute() -> None:
    assert tolerance(quick()) == EXACT
    assert tolerance(quick("model.dtype=bfloat16")) == tolerance(quick(engine="openai")) == ROUNDED


def test_a_warning_names_engine_version_and_both_numbers_and_nothing_is_said_of_nothing() -> None:
    agreement = LogprobCheck(quick("weights.mode=sync"))
    text = agreement.warning(7, 7, 0.02)
    assert "step 8" in text and "engine torch, version 7" in text and "0.02" in text and "0.001" in text
    assert agreement.warning(7, 7, None) == agreement.warning(7, 7, 1e-4) == ""


def test_where_new_weights_go_on_over_old_keys_only_answers_that_began_with_them_are_judged() -> None:
    assert mixed(quick()) and not mixed(quick("generation.on_update=recompute")) and not mixed(quick(engine="vllm"))
    agreement = LogprobCheck(quick())
    assert agreement.warning(0, 0, 0.02) and not agreement.warning(1, 1, 0.02, 1e-5)
    assert "differ from the learner's by 3 on average" in agreement.warning(1, 1, 0.5, 3.0)


def test_without_an_answer_that_began_with_the_weights_a_difference_of_nats_is_told_all_the_same() -> None:
    agreement = LogprobCheck(quick())
    assert not agreement.warning(9, 9, 0.2) and "by 3 on average" in agreement.warning(9, 9, 3.0)


def test_several_updates_per_batch_do_not_silence_the_comparison() -> None:
    assert LogprobCheck(quick("weights.mode=sync", "learner.updates_per_batch=2")).warning(4, 4, 0.5)


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (CannotTrain("x"), RUN_FAILED), (UserError("x"), NEEDS_FIX), (RunInUse("x"), 1), (WeightsRefused("x"), 1),
        (PeerTimeout("x"), 1), (BugError("x"), 1),
    ],
)
def test_a_process_ends_with_what_another_life_could_change(problem: Any, code: int) -> None:
    assert process_code(problem) == code
