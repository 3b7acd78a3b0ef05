"""Rows that are kept for calls which continue them: every answer is that of a prompt computed anew."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published import Published
from requests_ import endless, plain_logprobs, request, run
from transformers import AutoModelForCausalLM

from busrl.engines import Finished, Request
from busrl.engines.torch.engine import TorchEngine

Folder = Callable[[str], Path]
FIRST = [5, 6, 7, 8, 9, 10]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def engine_of(folder: Path, capacity: int = 4, **changes: Any) -> TorchEngine:
    return endless(folder, capacity=capacity, **{"prefix_keep_s": 30.0, **changes})


def ask(engine: TorchEngine, *prompts: Any, count: int = 6, first: int = 0) -> list[Finished]:
    requests = [request(first + k, prompt, max_new_tokens=count) for k, prompt in enumerate(prompts)]
    results = run(engine, requests)
    return [results[sent.key] for sent in requests]


def after(prompt: Any, answer: Finished, *new: int) -> list[int]:
    return [*np.asarray(prompt).tolist(), *answer.token_ids.tolist(), *new]


def used(engine: TorchEngine) -> tuple[int, int]:
    """Tokens of prompts that were computed, and that were not."""
    seen = engine.statistics()
    return seen.prefill_tokens, seen.prefix_tokens


def agrees(model: Any, prompt: Any, got: Finished) -> None:
    wanted = plain_logprobs(model, np.asarray(prompt), got.token_ids, 1.0)
    np.testing.assert_allclose(got.logprobs, wanted, atol=1e-4)


def other(folder: Path) -> Any:
    """A model that answers differently."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "qwen3-window", "lfm2", "mamba"])
@pytest.mark.parametrize("budget", [2048, 3])
def test_a_conversation_computes_its_new_tokens_alone_and_says_the_same(
    model_folder: Folder, kind: str, budget: int
) -> None:
    folder, turns = model_folder(kind), 6
    keeping, plain = engine_of(folder, prefill_tokens=budget), engine_of(folder, prefix_keep_s=0.0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    paths: list[Any] = [FIRST, [9, 9, 4, 3], [5, 6, 7]]
    new = sum(map(len, paths))
    for turn in range(turns):
        got, wanted = ask(keeping, *paths, first=10 * turn), ask(plain, *paths, first=10 * turn)
        for path, answer, same in zip(paths, got, wanted):
            assert answer.token_ids.tolist() == same.token_ids.tolist()
            np.testing.assert_allclose(answer.logprobs, same.logprobs, atol=1e-4)
            agrees(model, path, answer)
        paths = [after(path, answer, 11, 12 + turn) for path, answer in zip(paths, got)]
        new += 3 * len(paths)  # the last id drawn was not computed either
    computed, reused = used(keeping)
    assert computed <= new and used(plain)[1] == 0
    assert computed + reused == used(plain)[0] > 2 * computed


def test_a_row_matches_by_all_its_ids_and_recomputes_after_one_change(
    model_folder: Folder,
) -> None:
    folder = model_folder("qwen3")
    model, turn = AutoModelForCausalLM.from_pretrained(folder), ask(engine_of(folder), FIRST)[0]
    path = after(FIRST, turn, 12)
    for place in range(len(path) - 2):  # the last id of the answer was drawn, and never read
        engine = engine_of(folder)
        ask(engine, FIRST)
        edited = [13 if k == place and token != 13 else token for k, token in enumerate(path)]
        got = ask(engine, edited, first=1)[0]
        agrees(model, edited, got)
        assert used(engine)[1] == (len(path) - 2 if edited == path else 0), place


def test_recomputed_caches_reuse_no_row_of_an_older_version(model_folder: Folder) -> None:
    folder = model_folder("qwen3")
    engine, new = engine_of(folder, on_update="recompute"), other(folder)
    turn = ask(engine, FIRST)[0]
    engine.update_weights(Published(1, 1, new.state_dict()))
    path = after(FIRST, turn, 12)
    got = ask(engine, path, first=1)[0]
    agrees(new, path, got)
    assert used(engine)[1] == 0 and set(got.versions.tolist()) == {1}


def test_kept_caches_continue_a_row_with_new_weights_over_old_keys(
    model_folder: Folder,
) -> None:
    folder = model_folder("llama")
    engine, old, new = engine_of(folder, on_update="keep"), AutoModelForCausalLM.from_pretrained(folder), other(folder)
    turn = ask(engine, FIRST)[0]
    engine.update_weights(Published(1, 1, new.state_dict()))
    path = after(FIRST, turn, 12, 4)
    got = ask(engine, path, first=1)[0]
    ids, held = torch.tensor([path]), len(path) - 3
    with torch.no_grad():
        past = old(ids[:, :held], use_cache=True).past_key_values
        logits = new(ids[:, held:], past_key_values=past).logits[0, -1]
    assert abs(torch.log_softmax(logits, -1)[got.token_ids[0]] - got.logprobs[0]) < 1e-4
    assert used(engine)[1] == held and set(got.versions.tolist()) == {1}


def test_concurrent_answers_and_forks_share_a_row_and_a_later_fork_recomputes(model_folder: Folder) -> None:
    folder = model_folder("qwen3")
    engine, model = engine_of(folder, capacity=6), AutoModelForCausalLM.from_pretrained(folder)
    path = after(FIRST, ask(engine, FIRST)[0], 12)
    before = used(engine)
    prompts = [path, path, [*path, 4, 5], path, [*path, 6]]
    for prompt, got in zip(prompts, ask(engine, *prompts, first=1)):
        agrees(model, prompt, got)
    assert used(engine) == (before[0] + 1 + 3 + 2, before[1] + 3 * (len(path) - 2))
    got = ask(engine, [*path, 7, 7, 7], first=9)[0]
    agrees(model, [*path, 7, 7, 7], got)
    assert used(engine)[1] == before[1] + 3 * (len(path) - 2), "the row went to those that were first"


def test_the_least_recently_used_row_leaves_first_and_all_expire(model_folder: Folder) -> None:
    clock = Clock()
    engine = engine_of(model_folder("qwen3"), capacity=3, clock=clock)
    paths = []
    for k, prompt in enumerate(([4] * 5, [5] * 6, [6] * 7)):
        clock.now = float(k)
        paths.append(after(prompt, ask(engine, prompt, first=k)[0], 9))
    assert engine.statistics().cache_tokens == 10 + 11 + 12  # an answer's last token is in no cache
    clock.now = 5.0
    ask(engine, paths[0], first=3)  # used again
    assert engine.statistics().cache_tokens == 17 + 11 + 12
    ask(engine, [7] * 9, first=4)
    assert engine.statistics().cache_tokens == 17 + 12 + 14, "the row of [5] was used longest ago"
    clock.now = 33.0
    ask(engine, [8], count=1, first=5)
    assert engine.statistics().cache_tokens == 17 + 14 + 1, "the time of [6] is over, those used later stay"
    clock.now = 36.0
    ask(engine, [9], count=1, first=6)
    assert engine.statistics().cache_tokens == 1 + 1


def test_kept_rows_never_block_and_a_cancelled_request_returns_its_row(
    model_folder: Folder,
) -> None:
    folder = model_folder("qwen3")
    engine, model = engine_of(folder, capacity=3), AutoModelForCausalLM.from_pretrained(folder)
    path = after(FIRST, ask(engine, FIRST)[0], 12)
    engine.submit([request(1, path)])
    assert engine.abort(1) is not None
    prompts = [[4] * 3, [5] * 4, path]
    for prompt, got in zip(prompts, ask(engine, *prompts, first=2)):
        agrees(model, prompt, got)
    assert used(engine)[1] == len(path) - 2
    assert engine.statistics().cache_tokens == sum(len(prompt) + 5 for prompt in prompts)


# -- trees of turns, in any order -----


class Talk:
    """A random program: goes on from any turn, forks, edits, asks for several answers, cancels, and gets new weights
    and new times in between, on an engine with few rows. `versions`: the models by number."""

    def __init__(self, engine: TorchEngine, versions: list[Any], seed: int) -> None:
        self.engine, self.versions, self.chance = engine, versions, random.Random(seed)
        self.paths: list[list[int]] = [[4], [5, 6], [7] * 9]
        self.asked: dict[int, Request] = {}
        self.count = self.answers = 0

    def ids(self, most: int) -> list[int]:
        return [self.chance.randrange(3, 30) for _ in range(self.chance.randint(1, most))]

    def prompt(self) -> list[int]:
        path = self.chance.choice(self.paths[-6:])
        if self.chance.random() < 0.15:
            return self.ids(12)
        if self.chance.random() < 0.15:
            edited = list(path)
            edited[self.chance.randrange(len(path))] = self.chance.randrange(3, 30)
            return edited
        return [*path, *self.ids(5)] if self.chance.random() < 0.8 else path

    def submit(self) -> None:
        prompt = self.prompt()
        if len(prompt) > 60:
            return
        for _ in range(min(self.engine.capacity - self.engine.active, self.chance.choice([1, 1, 1, 2, 3]))):
            self.count += 1
            sent = self.asked[self.count] = request(self.count, prompt, max_new_tokens=self.chance.randint(1, 7))
            self.engine.submit([sent])

    def step(self) -> None:
        for got in self.engine.step():
            sent = self.asked.pop(got.key)
            of_version = [plain_logprobs(model, sent.prompt_ids, got.token_ids, 1.0) for model in self.versions]
            wanted = np.choose(got.versions, of_version)
            np.testing.assert_allclose(got.logprobs, wanted, atol=1e-4)
            self.paths.append(after(sent.prompt_ids, got))
            self.answers += 1

    def go(self, clock: Clock, steps: int) -> None:
        for _ in range(steps):
            what = self.chance.random()
            if what < 0.3 and self.engine.active < self.engine.capacity:
                self.submit()
            elif what < 0.33 and self.asked:
                key = self.chance.choice(list(self.asked))
                del self.asked[key]
                self.engine.abort(key)
            elif what < 0.36 and len(self.versions) > 1:
                version = self.engine.version + 1
                self.versions.append(self.versions[version % 2])
                self.engine.update_weights(Published(version, version, self.versions[version].state_dict()))
            clock.now += self.chance.choice([0.0, 0.1, 3.0])
            self.step()


@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 3, 5]), st.sampled_from([4, 9, 2048]), st.booleans())
@pytest.mark.parametrize("kind", ["qwen3", "lfm2", pytest.param("gpt2", marks=pytest.mark.long)])
def test_every_answer_of_a_random_turn_tree_matches_a_plain_forward_pass(
    model_folder: Folder, kind: str, seed: int, rows: int, budget: int, updates: bool
) -> None:
    folder, clock = model_folder(kind), Clock()
    versions = [AutoModelForCausalLM.from_pretrained(folder)] + ([other(folder)] if updates else [])
    engine = engine_of(folder, rows, prefill_tokens=budget, on_update="recompute", clock=clock)
    talk = Talk(engine, versions, seed)
    talk.go(clock, 60)
    while engine.active:
        talk.step()
    assert not talk.asked and engine.statistics().cache_tokens <= engine.statistics().cache_capacity
