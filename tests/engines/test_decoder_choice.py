"""Which decoder an engine takes, and that one which computes something else is never taken."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from busrl.engines import make_engine
from busrl.engines.torch import decoder
from busrl.engines.torch.decoder import FastDecoder, GenericDecoder, RowCache, WholeDecoder
from busrl.errors import UserError
from busrl.topology.schema import Generation

Folder = Callable[[str], Path]


@pytest.fixture
def model(model_folder: Folder) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_folder("llama")).eval()


def test_both_decoders_agree_with_the_model(model: Any) -> None:
    assert decoder.disagreement(model, GenericDecoder, 64) < 1e-5
    assert decoder.disagreement(model, FastDecoder, 64) < 1e-5


def test_a_deviating_fast_decoder_is_rejected_and_the_log_states_the_difference(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FastDecoder, "_normed", lambda self, x, weight: x * weight)
    with caplog.at_level(logging.INFO, "busrl"):
        assert isinstance(decoder.choose_decoder(model, 2, 64, fast=True), GenericDecoder)
    assert "generic decoder for LlamaForCausalLM: its logits differ from the model's by" in caplog.text


def test_an_architecture_without_cache_support_recomputes_every_token(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = RowCache.update

    def forgetful(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = update(*arguments)
        return keys, torch.zeros_like(values)

    monkeypatch.setattr(RowCache, "update", forgetful)
    assert isinstance(decoder.choose_decoder(model, 2, 64, fast=False), WholeDecoder)
    monkeypatch.setattr(decoder, "WAYS", decoder.WAYS[:3])
    with pytest.raises(UserError, match="cannot run this architecture"):
        decoder.choose_decoder(model, 2, 64, fast=False)


def test_a_changed_activation_or_norm_is_seen_through_the_check(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.GELU()
    assert decoder.disagreement(model, FastDecoder, 64) < 1e-5
    model.model.layers[1].input_layernorm.variance_epsilon = 10.0
    assert decoder.disagreement(model, FastDecoder, 64) > 1e-3


@torch.no_grad()
def test_a_decoder_reads_new_values_of_the_models_own_parameters(model: Any) -> None:
    fast, names = FastDecoder(model, 2, 64), [name for name, _ in model.named_parameters()]
    layer = model.model.layers[0]
    for module in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj, layer.mlp.gate_proj):
        assert module.weight.is_contiguous()
        module.weight.mul_(-2.0)
    ids, row = torch.tensor([[5, 6, 7]]), torch.tensor([0])
    fast.prefill(ids[:, :2], row)
    logits = fast.step(ids[:, 2], torch.tensor([2]), 3)
    torch.testing.assert_close(logits, model(ids).logits[:, -1], atol=1e-4, rtol=1e-4)
    assert names == [name for name, _ in model.named_parameters()] and "model.layers.0.self_attn.q_proj.weight" in names


def test_a_cache_that_grows_keeps_what_it_holds(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("busrl.engines.torch.decoder.FIRST_ROOM", 3)
    assert decoder.disagreement(model, FastDecoder, 64) < 1e-5
    assert decoder.disagreement(model, GenericDecoder, 64) < 1e-5


def test_the_topology_makes_the_engine(model_folder: Folder) -> None:
    topology: Any = SimpleNamespace(
        model=SimpleNamespace(path=str(model_folder("qwen3")), dtype="bfloat16"),
        generation=Generation(max_batch=3, max_new_tokens=30),
        longest=50,
        prefix_keep_s=0.0,
        data=SimpleNamespace(template="none"),
        process=(),
        processes=list,
        device_of=lambda _: "cpu",
        is_service=False,
        derived=SimpleNamespace(routing=None),
    )
    engine = make_engine(topology, "rollout/0")
    assert (engine.capacity, engine.max_length, engine.active) == (3, 50, 0)
    assert {tensor.dtype for tensor in engine.parameters().values()} == {torch.bfloat16}
