"""The parity gate: what is compared and when, what ends a run, and which cause is named; with planted numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from busrl.data.vocabulary import TokenRows
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
from busrl.preflight.load import load
from busrl.protocol import messages as m
from busrl.roles import probes
from busrl.roles.learner.parity import (
    CLEARLY,
    EXACT,
    ROUNDED,
    TOKENS,
    Alternative,
    Answered,
    Parity,
    explain,
    fitted,
    gap_of,
    looks_rounded,
    mixed,
    shifted,
    tolerance,
)
from busrl.topology import Topology
from busrl.training.batch import Sample

QUICK = Path(__file__).resolve().parents[2] / "configs" / "quickstart.toml"


def quick(*settings: str, engine: str = "torch") -> Topology:
    topology = load(QUICK, settings)
    entries = tuple(replace(one, engine=engine) if one.role == "rollout" else one for one in topology.process)
    return replace(topology, process=entries)


def gate(topology: Topology, score: Callable[[Sequence[Sample]], Any]) -> Parity:
    """A gate whose learner gives these log-probabilities; its model can be nothing else."""
    trainer = SimpleNamespace(score=score, model=None)
    training = SimpleNamespace(team=None, token_rows=TokenRows(rows=10), trainer=trainer)
    return Parity(topology, cast("Any", training))


def records(count: int, tokens: int, version: int = 0) -> list[SampleRecord]:
    """Samples of which every token has log-probability -1."""
    one = SampleRecord(
        uid=0, group=0, admission=0, member=0, attempt=0, prompt_crc=0, reward=0.0, temperature=1.0, version=version,
        step=0, finish=1, prompt_ids=np.ones(3, "<i4").tobytes(), token_ids=np.ones(tokens, "<i4").tobytes(),
        logprobs=np.full(tokens, -1, "<f4").tobytes(), versions=np.full(tokens, version, "<u4").tobytes(),
    )
    return [one] * count


def scorer(value: float) -> Callable[[Sequence[Sample]], Any]:
    return lambda asked: [np.full(one.generated, value, np.float32) for one in asked]


def refuse(asked: Sequence[Sample]) -> Any:
    raise AssertionError("it was looked at again")


def answer(version: int, worker: str = "rollout-0", **other: Any) -> m.ProbeDrawn:
    """A probe of two prompts, of which every token has log-probability -1."""
    said: dict[str, Any] = {
        "lengths": [9, 7], "prompt_lengths": [3, 2], "prompt_ids": np.ones(5, "<i4").tobytes(),
        "tokens": np.ones(16, "<i4").tobytes(), "logprobs": np.full(16, -1, "<f4").tobytes(),
        "versions": np.full(16, version, "<u4").tobytes(), "temperatures": [1.0, 1.0],
    }
    return m.ProbeDrawn(worker_id=worker, version=version, **{**said, **other})


# -- the first step, and what is trained ----


def test_a_difference_that_nothing_explains_ends_the_run_with_both_numbers() -> None:
    with pytest.raises(CannotTrain) as caught:
        gate(quick(), scorer(-3.5)).first(records(8, 16), 0, 0)
    text = str(caught.value)
    assert "engine torch, version 0: over 128 tokens" in text and "(mean -1)" in text and "(mean -3.5)" in text
    assert "differ by 2.5 on average" in text and "more than learner.mismatch_limit = 1" in text
    with pytest.raises(CannotTrain):
        gate(quick(), scorer(float("nan"))).first(records(8, 16), 0, 0)


def test_what_agrees_once_is_not_computed_again_and_few_tokens_decide_nothing() -> None:
    score: list[Any] = [refuse]
    agreement = gate(quick(), lambda asked: score[0](asked))
    agreement.first(records(1, TOKENS - 1), 0, 0)
    agreement.first(records(8, 16, version=3), 4, 0)
    score[0] = scorer(-1.0)
    assert agreement.first(records(8, 16), 0, 0) is None
    score[0] = refuse
    agreement.first(records(8, 16), 0, 0)


def test_a_difference_of_the_first_step_below_the_limit_is_a_warning() -> None:
    verdict = gate(quick(), scorer(-1.2)).first(records(8, 16), 0, 0)
    assert verdict is not None and "differ by 0.2 on average, where 0.001 can be rounding" in verdict.text


@pytest.mark.parametrize("engine", ["mock", "other"])
def test_nothing_ends_a_run_for_engines_that_are_no_models_of_ours(engine: str) -> None:
    topology = quick(engine="mock" if engine == "mock" else "torch")
    if engine == "other":
        entries = (replace(one, command=("node",)) if one.role == "rollout" else one for one in topology.process)
        topology = replace(topology, process=tuple(entries))
    agreement = gate(topology, refuse)
    agreement.first(records(8, 16), 0, 0)
    assert bool(agreement.trained(0, 0, 4.0)) == (engine == "other")


def test_the_limit_can_be_turned_off() -> None:
    assert gate(quick("learner.mismatch_limit=0"), refuse).first(records(8, 16), 0, 0) is None


def test_the_tolerance_is_that_of_the_coarsest_type_that_may_compute() -> None:
    assert tolerance(quick()) == EXACT
    assert tolerance(quick("model.dtype=bfloat16")) == tolerance(quick(engine="openai")) == ROUNDED


def test_a_warning_names_engine_and_version_and_both_numbers() -> None:
    agreement = gate(quick("weights.mode=sync"), refuse)
    text = agreement.trained(7, 7, 0.02)
    assert "step 8" in text and "engine torch, version 7" in text and "0.02" in text and "0.001" in text
    assert agreement.trained(7, 7, None) == agreement.trained(7, 7, 1e-4) == ""


def test_only_answers_begun_with_the_new_weights_are_judged_over_old_keys() -> None:
    assert mixed(quick()) and not mixed(quick("generation.on_update=recompute")) and not mixed(quick(engine="vllm"))
    agreement = gate(quick(), refuse)
    assert agreement.trained(0, 0, 0.02) and not agreement.trained(1, 1, 0.02, 1e-5)
    assert "differ from the learner's by 3 on average" in agreement.trained(1, 1, 0.5, 3.0)


def test_a_difference_of_nats_is_reported_even_without_fresh_answers() -> None:
    agreement = gate(quick(), refuse)
    assert not agreement.trained(9, 9, 0.2) and "by 3 on average" in agreement.trained(9, 9, 3.0)


def test_several_updates_per_batch_do_not_silence_the_comparison() -> None:
    assert gate(quick("weights.mode=sync", "learner.updates_per_batch=2"), refuse).trained(4, 4, 0.5)


# -- probes ----


def test_two_consecutive_versions_are_compared_and_then_none_for_a_while() -> None:
    assert [version for version in range(24) if probes.due(10, version)] == [9, 10, 19, 20]
    assert [version for version in range(4) if probes.due(1, version)] == [1, 2, 3]
    assert not any(probes.due(0, version) for version in range(24))


def test_a_step_waits_for_the_engines_that_answer_and_for_no_others() -> None:
    waiting = gate(quick("learner.parity.every=1", "learner.parity.wait_s=600"), scorer(-1.0))
    assert waiting.holds(1) and not waiting.holds(None) and not waiting.holds(0)
    waiting.take(answer(1))
    assert list(waiting.look(1)) == [] and not waiting.holds(1) and waiting.holds(2)
    assert waiting.numbers() == {"parity": 0.0, "parity_engines": 1}
    assert waiting.numbers() == {"parity": None, "parity_engines": 0}
    late = gate(quick("learner.parity.every=1", "learner.parity.wait_s=0"), scorer(-1.0))
    assert not late.holds(1)


def test_an_engine_that_missed_an_answer_is_awaited_again_once_it_answers() -> None:
    late = gate(quick("learner.parity.every=1", "learner.parity.wait_s=0"), refuse)
    assert not late.holds(1)
    late.config = replace(late.config, wait_s=600.0)
    assert not late.holds(2)
    late.take(answer(1))
    assert list(late.look(2)) == [] and late.holds(2)  # what came too late was not scored


def test_a_difference_above_one_limit_is_reported_and_above_another_fatal() -> None:
    settings = ["learner.parity.every=1", "learner.parity.end=0.5"]
    off = gate(quick(*settings), scorer(-1.3))
    off.take(answer(1))
    (verdict,) = off.look(1)
    assert "engine torch of rollout-0, version 1: over 16 tokens" in verdict.text
    assert "by 0.3 on average" in verdict.text
    assert off.trained(1, 1, 0.3, 0.3) == "" and off.trained(2, 2, 0.3, 0.3)
    far = gate(quick(*settings), scorer(-1.8))
    far.take(answer(1))
    with pytest.raises(CannotTrain, match=r"above learner\.parity\.end = 0\.5"):
        list(far.look(1))


@pytest.mark.parametrize(
    ("other", "cause"),
    [
        ({"versions": np.full(16, 6, "<u4").tobytes()}, "version tag"),
        ({"tokens": np.full(16, 10, "<i4").tobytes()}, "tokenizer"),
        ({"logprobs": np.full(16, np.nan, "<f4").tobytes()}, "values"),
        ({"logprobs": np.full(16, 0.5, "<f4").tobytes()}, "values"),
    ],
)
def test_what_cannot_be_is_named_without_a_score(other: dict[str, Any], cause: str) -> None:
    parity = gate(quick("learner.parity.every=1"), refuse)
    parity.take(answer(7, **other))
    assert [one.cause for one in parity.look(7)] == [cause]


def test_a_version_that_was_never_published_is_a_wrong_tag() -> None:
    parity = gate(quick("learner.parity.every=1"), refuse)
    parity.take(answer(9))
    assert [one.cause for one in parity.look(7)] == ["version tag"]


@pytest.mark.parametrize("settings", [("experiments.forced_age=1",), ("lora.rank=4", "lora.dropout=0.1")])
def test_engines_that_cannot_agree_are_not_compared(settings: tuple[str, ...]) -> None:
    topology = quick("learner.parity.every=1")
    if "forced" in settings[0]:
        topology = replace(topology, experiments=replace(topology.experiments, forced_age=1))
    else:
        topology = replace(topology, lora=replace(topology.lora, dropout=0.1))
    parity = gate(topology, refuse)
    parity.take(answer(1, versions=b"\0" * 64))
    assert list(parity.look(1)) == [] and not parity.holds(1)


@given(
    st.lists(st.integers(0, 5), max_size=4), st.lists(st.integers(0, 5), max_size=4),
    st.lists(st.floats(allow_nan=True), max_size=4), *[st.binary(max_size=64)] * 4,
)
def test_anything_from_the_bus_is_a_scorable_answer_or_none(
    lengths: list[int], prompts: list[int], temperatures: list[float], ids: bytes, tokens: bytes, logprobs: bytes,
    versions: bytes,
) -> None:
    answered = Answered.of(m.ProbeDrawn(
        worker_id="x", version=1, lengths=lengths, prompt_lengths=prompts, prompt_ids=ids, tokens=tokens,
        logprobs=logprobs, versions=versions, temperatures=temperatures,
    ))
    assert answered is None or answered.tokens == sum(lengths)
    assert answered is None or all(sample.generated for sample in answered.samples)


# -- causes, of planted numbers ----

ROWS = st.lists(st.integers(4, 9), min_size=2, max_size=5)


def drawn(sizes: Sequence[int], seed: int) -> tuple[Any, list[Any], list[Any]]:
    """Random logits for each token, which of them were drawn, and a function for their log-probabilities."""
    random = np.random.default_rng(seed)
    logits = [random.normal(0, 2, (size, 6)) for size in sizes]
    ids = [random.integers(0, 6, size) for size in sizes]

    def at(factor: float, noise: float = 0.0) -> list[Any]:
        moved = [(one + noise * random.normal(size=one.shape)) / factor for one in logits]
        every = [one - np.log(np.exp(one).sum(-1, keepdims=True)) for one in moved]
        return [row[np.arange(len(own)), own].astype(np.float32) for row, own in zip(every, ids)]

    return at, logits, ids


def spread(row: Sequence[Any]) -> float:
    return float(np.std(np.concatenate(row)))


@given(ROWS, st.integers(0, 1 << 16), st.sampled_from([0.3, 0.6, 0.8, 1.25, 1.5, 3.0]))
def test_a_temperature_is_found_with_its_value(sizes: list[int], seed: int, factor: float) -> None:
    at, _, _ = drawn(sizes, seed)
    theirs = at(factor)
    assume(gap_of(theirs, at(1.0)) > 0.01)
    assert gap_of(theirs, at(fitted(theirs, at))) < 1e-3


@given(ROWS, st.integers(0, 1 << 16), st.sampled_from([1, -1]))
def test_a_shift_is_named_and_the_other_one_is_not(sizes: list[int], seed: int, by: int) -> None:
    at, _, _ = drawn(sizes, seed)
    ours = at(1.0)
    theirs = [np.roll(row, by) for row in ours]
    gap = gap_of(theirs, ours)
    assume(gap > 0.1 and gap_of(theirs, shifted(ours, -by)) > CLEARLY * gap)
    explained = explain(theirs, gap, [Alternative(str(one), "", shifted(ours, one)) for one in (1, -1)])
    assert explained.cause == str(by) and explained.left == 0


@given(ROWS, st.integers(0, 1 << 16), st.permutations(["a", "b", "c", "d"]))
def test_what_predicts_the_numbers_is_named_whatever_else_is_offered(
    sizes: list[int], seed: int, names: list[str]
) -> None:
    at, _, _ = drawn(sizes, seed)
    ours, theirs = at(1.0), at(1.0, noise=0.5)
    offered = [Alternative(name, "", at(1.0, noise=0.5)) for name in names]
    offered[2] = offered[2]._replace(rows=[row + np.float32(1e-4) for row in theirs])
    gap = gap_of(theirs, ours)
    assume(gap > 0.01)
    assert explain(theirs, gap, offered).cause == names[2]


@given(ROWS, st.integers(0, 1 << 16))
def test_what_predicts_nothing_better_is_not_named(sizes: list[int], seed: int) -> None:
    at, _, _ = drawn(sizes, seed)
    ours, theirs = at(1.0), at(1.0, noise=0.5)
    assert explain(theirs, gap_of(theirs, ours), [Alternative("same", "", ours)]).cause == ""


@given(st.integers(0, 1 << 16), st.sampled_from([1e-3, 1e-2]))
def test_only_differences_of_rounding_size_look_like_fewer_bits(seed: int, noise: float) -> None:
    at, _, _ = drawn([40, 40], seed)
    ours, theirs, rounded = at(1.0), at(1.0, noise), at(1.0, noise)
    assert looks_rounded(theirs, ours, rounded)
    assert not looks_rounded(at(1.0, 20 * noise), ours, rounded)
    assert not looks_rounded([row + np.float32(noise) for row in ours], ours, rounded)


@given(ROWS, st.integers(0, 1 << 16))
def test_a_nan_is_an_infinite_difference_and_omissions_count_nothing(
    sizes: list[int], seed: int
) -> None:
    at, _, _ = drawn(sizes, seed)
    ours = at(1.0)
    broken = [row.copy() for row in ours]
    broken[0][0] = np.nan
    assert gap_of(broken, ours) == math.inf and gap_of(ours, broken) == 0.0
    assert gap_of(ours, [np.full_like(row, np.nan) for row in ours]) == math.inf


# -- how a process ends ----


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (CannotTrain("x"), RUN_FAILED), (UserError("x"), NEEDS_FIX), (RunInUse("x"), 1), (WeightsRefused("x"), 1),
        (PeerTimeout("x"), 1), (BugError("x"), 1),
    ],
)
def test_a_process_ends_with_what_another_life_could_change(problem: Any, code: int) -> None:
    assert process_code(problem) == code
