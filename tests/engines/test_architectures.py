"""Models that keep other things than keys and values, or whose attention is not sdpa: generated and trained alike."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from architectures import OTHERS
from requests_ import crowd, plain_logprobs, request, run
from transformers import AutoModelForCausalLM

from busrl.engines.torch import decoder
from busrl.engines.torch.decoder import GenericDecoder, StateDecoder, WholeDecoder, whole_by_logits
from busrl.engines.torch.engine import TorchEngine
from busrl.errors import UserError
from busrl.training import forward
from busrl.training.batch import Sample, flatten
from busrl.training.model import load

Folder = Callable[[str], Path]
# Which decoder each gets with a transformers whose cache knows such layers; an older one leaves the slow way.
STATES = {"qwen3_5", "qwen3_next", "lfm2", "falcon_h1"}
SLOW = {"mamba2"}


@pytest.fixture(params=list(OTHERS))
def kind(request: pytest.FixtureRequest) -> str:
    if not hasattr(transformers, OTHERS[request.param][0]):
        pytest.skip(f"this transformers has no {request.param}")
    return str(request.param)


def test_an_engine_generates_with_the_log_probs_of_a_plain_forward(model_folder: Folder, kind: str) -> None:
    """Prompts of 1 to 14 tokens, some in pieces, more of them than rows, after new weights too."""
    folder = model_folder(kind)
    engine = TorchEngine.load(folder, capacity=5, prefill_tokens=8, on_update="recompute", max_length=128)
    expected = StateDecoder if kind in STATES else WholeDecoder if kind in SLOW else GenericDecoder
    assert type(engine.decoder).__name__ in (expected.__name__, WholeDecoder.__name__)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    requests = [request(100, [7]), *crowd(11, temperature=0.8, max_new_tokens=12), request(101, [9])]
    results = run(engine, requests)
    for sent in requests:
        got = results[sent.key]
        wanted = plain_logprobs(model, sent.prompt_ids, got.token_ids, sent.temperature)
        np.testing.assert_allclose(got.logprobs, wanted, atol=2e-4)


def test_the_learner_gives_a_sample_among_others_what_it_has_alone(model_folder: Folder, kind: str) -> None:
    model = load(model_folder(kind))
    original = load(model_folder(kind))
    way = forward.choose_forward(model)
    random = np.random.default_rng(0)

    def sample(prompt: int, answer: int) -> Sample:
        ids = random.integers(3, 35, prompt + answer).astype(np.int32)
        zeros = np.zeros(answer, np.float32)
        return Sample(0, 0, 0, ids[:prompt], ids[prompt:], zeros, zeros.astype(np.uint32))

    samples = [sample(3, 4), sample(11, 9), sample(1, 14)]
    with torch.no_grad():
        together, _ = way.score(samples, flatten(samples, torch.float32, model.device))
    plain = [plain_logprobs(original, s.prompt_ids, s.token_ids, 1.0) for s in samples]
    np.testing.assert_allclose(together.numpy(), np.concatenate(plain), atol=2e-4, rtol=2e-4)


def test_a_gradient_flows_through_every_parameter_that_the_logits_use(model_folder: Folder, kind: str) -> None:
    model = load(model_folder(kind))
    ids = torch.arange(3, 19)[None]
    model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)[0, :, 5].sum().backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert all("expert" in name for name in without), without


@pytest.mark.parametrize("way", [WholeDecoder, whole_by_logits])
def test_computing_everything_again_agrees_with_any_model(model_folder: Folder, way: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder("llama")).eval()
    assert decoder.disagreement(model, way, 64) < 1e-5


def test_the_slow_way_is_told_with_what_would_be_quicker(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder("llama")).eval()
    monkeypatch.setattr(GenericDecoder, "step", lambda *_: (_ for _ in ()).throw(IndexError("no such layer")))
    with caplog.at_level(logging.WARNING, "busrl"):
        assert isinstance(decoder.choose_decoder(model, 2, 64, fast=False), WholeDecoder)
    assert "GenericDecoder: IndexError: no such layer" in caplog.text and "engine = vllm is quicker" in caplog.text


def test_a_model_that_is_not_causal_is_refused_by_name(model_folder: Folder) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder("llama")).eval()
    plain = model.forward

    def both_ways(input_ids: torch.Tensor, **more: Any) -> Any:
        """Looks at the number of tokens that follow."""
        logits = plain(input_ids=input_ids, **more).logits
        return SimpleNamespace(logits=logits * input_ids.shape[1])

    model.forward = both_ways
    with pytest.raises(UserError, match="LlamaForCausalLM: decoding differs from its plain forward"):
        decoder.choose_decoder(model, 2, 64, fast=True)


def test_a_first_prompt_of_one_token_needs_no_prefill(model_folder: Folder) -> None:
    for name in ("llama", "gpt2"):
        engine = TorchEngine.load(model_folder(name), capacity=2)
        got = run(engine, [request(0, [5], max_new_tokens=4)])[0]
        model = AutoModelForCausalLM.from_pretrained(model_folder(name)).eval()
        np.testing.assert_allclose(
            got.logprobs, plain_logprobs(model, np.array([5]), got.token_ids, 1.0), atol=1e-4
        )
