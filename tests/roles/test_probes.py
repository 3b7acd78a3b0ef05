"""Probes in a rollout process: which requests are asked under a version, and when the learner is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from busrl.engines import Finished, Request
from busrl.engines.tokens import NO_IDS
from busrl.preflight.load import load
from busrl.roles.learner.parity import Answered
from busrl.roles.probes import PROMPT_TOKENS, PROMPTS, TOKENS, Prober
from busrl.states import Finish

QUICK = Path(__file__).resolve().parents[2] / "configs" / "quickstart.toml"


def prober(*settings: str, only_validates: bool = False) -> Prober:
    return Prober(load(QUICK, ["learner.parity.every=1", *settings]), only_validates)


def request(*ids: int, temperature: float = 1.0) -> Request:
    return Request(
        key=7, uid=3, segment=2, prompt_ids=np.array(ids, np.int32), prefix_ids=np.array([9], np.int32),
        max_new_tokens=64, temperature=temperature, top_p=0.9, seed=5, stop_ids=(4,),
    )


def answered(request: Request, version: int, count: int = 3, finish: int = Finish.LENGTH) -> Finished:
    return Finished(request.key, np.arange(count, dtype=np.int32), np.full(count, -0.5, np.float32),
                    np.full(count, version, np.uint32), finish)


def test_the_first_prompts_are_asked_anew_and_whole_at_each_version() -> None:
    probes = prober()
    probes.see([request(1, 2), request(1, 2), request(3, 4, 5, temperature=0.7)])
    assert probes.take(8) == []
    probes.loaded(1)
    asked = probes.take(8)
    assert len(asked) == PROMPTS and probes.take(8) == []
    assert [request.prompt_ids.tolist() for request in asked] == [[1, 2], [3, 4, 5]] * 2
    assert all(request.key < 0 and request.max_new_tokens == TOKENS and request.top_p == 1.0 for request in asked)
    assert all(request.segment == 0 and request.prefix_ids is NO_IDS and not request.stop_ids for request in asked)
    probes.see([request(6)])
    probes.loaded(2)
    later = probes.take(8)
    assert {request.key for request in later}.isdisjoint(request.key for request in asked)
    assert [request.uid for request in later] == [request.uid for request in asked]  # the same random numbers


def test_the_learner_is_told_once_all_of_a_version_have_ended() -> None:
    probes = prober()
    probes.see([request(1, 2), request(3)])
    probes.loaded(1)
    first, *rest = probes.take(1) + probes.take(8)
    probes.ended(answered(first, 1))
    assert probes.messages("rollout-0") == []
    for probe in rest:
        probes.ended(answered(probe, 1, count=2))
    message, = probes.messages("rollout-0")
    assert probes.messages("rollout-0") == []
    told = Answered.of(message)
    assert told is not None and (told.worker, told.version, told.tokens) == ("rollout-0", 1, 9)
    assert [sample.prompt_ids.tolist() for sample in told.samples] == [[1, 2], [3], [1, 2], [3]]
    assert told.samples[0].token_ids.tolist() == [0, 1, 2] and told.samples[0].policy_versions.tolist() == [1, 1, 1]


def test_an_answer_that_was_cut_or_spans_two_versions_is_not_reported() -> None:
    probes = prober()
    probes.see([request(1, 2)])
    probes.loaded(1)
    before = probes.take(8)
    probes.loaded(2)
    after = probes.take(8)
    for probe in before:
        probes.ended(answered(probe, 1))
    for probe in after[1:]:
        probes.ended(answered(probe, 2, finish=Finish.ABORTED))
    assert probes.messages("rollout-0") == []
    probes.ended(answered(after[0], 2))
    message, = probes.messages("rollout-0")
    assert message is not None and message.version == 2 and message.lengths == [3]


def test_nothing_is_asked_where_nothing_can_be_compared() -> None:
    for probes in (prober("learner.parity.every=0"), prober(only_validates=True)):
        probes.see([request(1, 2)])
        probes.loaded(1)
        assert probes.take(8) == []
    greedy = prober()
    greedy.see([request(1, 2, temperature=0.0)])
    greedy.loaded(1)
    assert greedy.take(8) == []


def prompts_of(probes: Prober, *ids: int) -> Any:
    probes.see([request(*ids)])
    probes.loaded(1)
    return [request.prompt_ids.tolist() for request in probes.take(1)]


def test_a_long_prompt_is_cut_and_starts_later_where_old_keys_stay() -> None:
    assert prompts_of(prober(), *range(2 * PROMPT_TOKENS)) == [list(range(PROMPT_TOKENS))]
    assert prompts_of(prober("generation.on_update=keep"), 1, 2, 3) == [[2, 3]]
    assert prompts_of(prober("generation.on_update=keep"), 1) == []


def test_chat_prompts_are_asked_unchanged_or_not_at_all() -> None:
    topology = load(QUICK, ["learner.parity.every=1"])
    entries = tuple(
        replace(process, engine="openai") if process.role == "rollout" else process for process in topology.process
    )
    topology = replace(topology, process=entries, openai=replace(topology.openai, endpoint="chat"))
    assert prompts_of(Prober(topology, False), 1, 2, 3) == [[1, 2, 3]]
    assert prompts_of(Prober(topology, False), *range(PROMPT_TOKENS + 1)) == []
