"""The parity gate in a run with routes: probes bring them, the learner scores with them, and wrong ones are named."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from routed_ring import SHAPE, routes_at, topology

from busrl.data.vocabulary import TokenRows
from busrl.engines.base import Finished, Request
from busrl.errors import CannotTrain
from busrl.ledger.wal import SampleRecord
from busrl.protocol import messages as m
from busrl.roles.learner.parity import Answered, Parity
from busrl.roles.probes import Prober
from busrl.states import Finish
from busrl.training.batch import Sample

PROMPTS, VERSION = (5, 3), 10


def answered(request: Request) -> Finished:
    """An engine's answer of equal tokens, with routes that the test can compute again."""
    before, count = len(request.prompt_ids) - 1, request.max_new_tokens
    uid = len(request.prompt_ids)
    return Finished(
        request.key, np.ones(count, np.int32), np.full(count, -1, np.float32), np.full(count, VERSION, np.uint32),
        Finish.LENGTH, routes=routes_at(uid, before, before + count), prompt_routes=routes_at(uid, 0, before),
    )


def probes() -> list[m.ProbeDrawn]:
    """What a rollout process sends of a version, after an engine has answered."""
    prober = Prober(topology(), only_validates=False)
    prober.see([
        Request(i, i, 0, np.ones(size, np.int32), np.empty(0, np.int32), 30, 1.0, 1.0, 0, routes_from=size - 1)
        for i, size in enumerate(PROMPTS)
    ])
    prober.loaded(VERSION)
    asked = prober.take(100)
    assert not any(request.routes_from for request in asked)
    for request in asked:
        prober.ended(answered(request))
    return prober.messages("rollout-0")


def test_probes_bring_the_routes_of_prompts_and_answers() -> None:
    sent = probes()
    assert {type(message) for message in sent} == {m.ProbeRouted}
    for message in sent:
        read = Answered.of(message, SHAPE)
        assert read is not None
        for sample in read.samples:
            first = len(sample.prompt_ids) - 1
            np.testing.assert_array_equal(sample.prompt_routes, routes_at(first + 1, 0, first))
            np.testing.assert_array_equal(
                sample.routes, routes_at(first + 1, first, first + sample.generated))


@pytest.mark.parametrize("damage", [lambda raw: raw[:-1], lambda raw: raw[: -SHAPE.bytes_per_token], lambda raw: b""])
def test_a_probe_with_a_missing_row_is_no_answer(damage: Callable[[bytes], bytes]) -> None:
    message = probes()[-1]
    assert isinstance(message, m.ProbeRouted)
    message.routes = damage(message.routes)
    assert Answered.of(message, SHAPE) is None


def gate(score: Callable[[Sequence[Sample]], Any]) -> Parity:
    trainer = SimpleNamespace(score=score, model=None)
    return Parity(topology(), cast("Any", SimpleNamespace(team=None, token_rows=TokenRows(rows=10), trainer=trainer)))


def wrong_layers(samples: Sequence[Sample]) -> Any:
    """A model that agrees with the engine with its own experts, and is far off with those that came."""
    return [np.full(one.generated, -1.02 if one.routes is None else -4.0, np.float32) for one in samples]


def right_layers(samples: Sequence[Sample]) -> Any:
    return [np.full(one.generated, -1.3 if one.routes is None else -1.0, np.float32) for one in samples]


def records() -> list[SampleRecord]:
    one = SampleRecord(
        uid=0, group=0, admission=0, member=0, attempt=0, prompt_crc=0, reward=0.0, temperature=1.0, version=0,
        step=0, finish=1, prompt_ids=np.ones(3, "<i4").tobytes(), token_ids=np.ones(16, "<i4").tobytes(),
        logprobs=np.full(16, -1, "<f4").tobytes(), versions=np.zeros(16, "<u4").tobytes(),
        routes=routes_at(0, 2, 18).tobytes(), prompt_routes=routes_at(0, 0, 2).tobytes(), routes_shape=[2, 3, 8],
    )
    return [one] * 8


def test_routes_of_swapped_layers_end_the_run_by_their_name() -> None:
    with pytest.raises(CannotTrain, match=r"Probable cause: routes: .* lead elsewhere; .*learner\.routes = \"own\""):
        gate(wrong_layers).first(records(), 0, 0)
    assert gate(right_layers).first(records(), 0, 0) is None


def test_a_probe_with_an_id_of_no_expert_is_never_computed() -> None:
    def refuse(samples: Sequence[Sample]) -> Any:
        raise AssertionError("it was given to the model")

    for message in probes():
        read = Answered.of(message, SHAPE)
        assert read is not None
        routes = read.samples[0].routes
        assert routes is not None
        bad = routes.copy()
        bad[-1, 1, 0] = 9
        read.samples[0] = replace(read.samples[0], routes=bad)
        verdict = gate(refuse).judge(read.samples, VERSION, "rollout-0", 0.1)
        assert verdict is not None and verdict.cause == "routes" and math.isinf(verdict.gap)
        assert "layer 2: expert 9 of 8" in verdict.text
