"""Weights that change while sequences run: whose log-probabilities agree with a plain forward pass of which version."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from published import Published
from requests_ import endless, plain_logprobs, request, run
from transformers import AutoModelForCausalLM

from busrl.engines import Finished
from busrl.engines.torch.engine import TorchEngine
from busrl.states import Finish

Folder = Callable[[str], Path]
PROMPTS = ([5, 6, 7], [9, 8], [4], list(range(3, 17)))


def versions_of(folder: Path, count: int) -> list[Any]:
    """The model of the folder, and others that answer differently."""
    models = [AutoModelForCausalLM.from_pretrained(folder) for _ in range(count)]
    torch.manual_seed(1)
    for number, model in enumerate(models):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05 * number)
    return models


def answers(engine: TorchEngine, models: list[Any], at: dict[int, int]) -> dict[int, Finished]:
    """All prompts at once, and before step n of the engine the weights of version `at[n]`. The engine is endless, so
    that every sequence is long enough to see all versions."""
    engine.submit([request(k, prompt, temperature=0.7) for k, prompt in enumerate(PROMPTS)])
    results: dict[int, Finished] = {}
    for step in range(1000):
        if step in at:
            engine.update_weights(Published(at[step], 0, models[at[step]].state_dict()))
        results.update({finished.key: finished for finished in engine.step()})
        if not engine.active:
            return results
    raise AssertionError("the engine does not end")


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "mistral-window"])
@pytest.mark.parametrize("budget", [2048, 9])
def test_every_recomputed_token_matches_a_forward_pass_of_its_named_version(
    model_folder: Folder, kind: str, budget: int
) -> None:
    models = versions_of(model_folder(kind), 3)
    engine = endless(model_folder(kind), capacity=4, on_update="recompute", prefill_tokens=budget)
    results = answers(engine, models, {6: 1, 7: 2, 30: 1})
    seen = set()
    for key, prompt in enumerate(PROMPTS):
        got = results[key]
        wanted = [plain_logprobs(model, np.asarray(prompt), got.token_ids, 0.7) for model in models]
        for n, version in enumerate(got.versions.tolist()):
            assert abs(got.logprobs[n] - wanted[version][n]) < 1e-4, (key, n, version)
        seen |= set(got.versions.tolist())
        assert np.abs(wanted[0] - wanted[1]).max() > 1e-2  # or the test would prove nothing
    assert seen == {0, 1, 2}


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_only_tokens_kept_across_an_update_differ_from_one_version_alone(
    model_folder: Folder, kind: str
) -> None:
    old, new = versions_of(model_folder(kind), 2)
    engine = endless(model_folder(kind), capacity=4, on_update="keep")
    results = answers(engine, [old, new], {6: 1})
    apart = 0.0
    for key, prompt in enumerate(PROMPTS):
        got = results[key]
        assert got.versions.tolist() == [0] * 6 + [1] * (len(got.versions) - 6)
        before = plain_logprobs(old, np.asarray(prompt), got.token_ids, 0.7)
        after = plain_logprobs(new, np.asarray(prompt), got.token_ids, 0.7)
        np.testing.assert_allclose(got.logprobs[:6], before[:6], atol=1e-4)
        apart = max(apart, float(np.abs(got.logprobs - after)[6:].max()))
    assert apart > 1e-3  # over the keys and values of the old weights
    fresh = run(engine, [request(7, PROMPTS[0], temperature=0.7)])[7]
    np.testing.assert_allclose(
        fresh.logprobs, plain_logprobs(new, np.asarray(PROMPTS[0]), fresh.token_ids, 0.7), atol=1e-4
    )


def test_a_kept_token_after_an_update_uses_new_weights_over_old_keys(model_folder: Folder) -> None:
    old, new = versions_of(model_folder("llama"), 2)
    engine = endless(model_folder("llama"), capacity=1, on_update="keep")
    engine.submit([request(0, [5, 6, 7])])
    for _ in range(4):
        engine.step()
    engine.update_weights(Published(1, 1, new.state_dict()))
    got = run(engine, [])[0]
    ids = torch.tensor([[5, 6, 7, *got.token_ids.tolist()]])
    with torch.no_grad():  # the old weights made keys and values of all tokens but the last one known
        past = old(ids[:, :6], use_cache=True).past_key_values
        logits = new(ids[:, 6:7], past_key_values=past).logits[0, -1]
    assert abs(torch.log_softmax(logits, -1)[got.token_ids[4]] - got.logprobs[4]) < 1e-4


def test_an_update_while_a_long_prompt_is_computed_begins_it_again(model_folder: Folder) -> None:
    models = versions_of(model_folder("qwen3"), 2)
    engine = TorchEngine.load(model_folder("qwen3"), capacity=3, on_update="recompute", prefill_tokens=8)
    long = np.random.default_rng(0).integers(3, 30, 40)
    engine.submit([request(0, long), request(1, long), request(2, [5, 6])])
    for _ in range(3):
        engine.step()
    assert engine.decoding == 0  # 24 of 39 tokens are there
    engine.update_weights(Published(1, 1, models[1].state_dict()))
    for key, got in run(engine, []).items():
        prompt = np.asarray([5, 6]) if key == 2 else long
        assert set(got.versions.tolist()) == {1}
        np.testing.assert_allclose(got.logprobs, plain_logprobs(models[1], prompt, got.token_ids, 1.0), atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "qwen3-window"])
def test_a_long_prompt_in_pieces_stalls_nobody_and_is_computed_right(model_folder: Folder, kind: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder(kind))
    engine = endless(model_folder(kind), capacity=4, prefill_tokens=16)
    long = np.random.default_rng(0).integers(3, 30, 90)
    engine.submit([request(0, [5, 6, 7], max_new_tokens=30)])
    engine.step()
    engine.submit([request(1, long), request(2, long), request(3, [9])])
    drawn, results = [], {}
    while engine.active:
        before, announced = engine.statistics(), engine.decoding
        results.update({finished.key: finished for finished in engine.step()})
        after = engine.statistics()
        assert after.tokens - before.tokens == announced and after.prefill_tokens - before.prefill_tokens <= 16
        drawn.append(announced)
    assert drawn[:5] == [1] * 5 and max(drawn) == 4  # the first goes on through the pieces, then all three join
    for key, prompt in ((0, np.asarray([5, 6, 7])), (1, long), (2, long), (3, np.asarray([9]))):
        got = results[key]
        np.testing.assert_allclose(got.logprobs, plain_logprobs(model, prompt, got.token_ids, 1.0), atol=1e-4)


class Gone(Published):
    """A receiver whose learner has gone."""

    def fetch(self, params: dict[str, torch.Tensor]) -> tuple[int, int]:
        raise TimeoutError("the learner is gone")


def test_weights_that_do_not_come_leave_the_engine_as_it_was(model_folder: Folder) -> None:
    engine = TorchEngine.load(model_folder("qwen3"), capacity=2, on_update="recompute")
    wanted = run(engine, [request(0, [5, 6, 7])])[0]

    engine.submit([request(0, [5, 6, 7])])
    engine.step()
    with pytest.raises(TimeoutError):
        engine.update_weights(Gone(5, 5))
    got = run(engine, [])[0]
    assert got.token_ids.tolist() == wanted.token_ids.tolist() and set(got.versions.tolist()) == {0}
    assert got.finish == wanted.finish in (Finish.EOS, 2) and engine.statistics().updates == 0
