"""Every update is proved: an engine that has other weights than its version says is found at that version."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from proof_scene import Proving
from transformers import AutoModelForCausalLM, Qwen3Config

from busrl.engines.torch.engine import TorchEngine
from busrl.errors import CannotTrain

pytestmark = pytest.mark.long

WRONG = 3  # the version at which the update goes wrong
Tensors = dict[str, torch.Tensor]


class Text:
    """A tokenizer that is never asked; its end token is drawn like any other."""

    eos_token_id = 1


def make_model(seed: int) -> Any:
    torch.manual_seed(seed)
    config = Qwen3Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, vocab_size=32, max_position_embeddings=256, tie_word_embeddings=False, eos_token_id=1,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def weights_of(version: int) -> Tensors:
    """Those of version 0, and a step away from them for each further one, about as large as real ones."""
    moved = make_model(0)
    torch.manual_seed(version)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01 * version)
    return dict(moved.named_parameters())


class Sent:
    """A receiver that has the tensors of a version."""

    kind = "tensors"

    def __init__(self, version: int, tensors: Tensors) -> None:
        self.version, self.tensors = version, tensors

    def fetch(self, params: Tensors) -> tuple[int, int]:
        with torch.no_grad():
            for name, target in params.items():
                target.copy_(self.tensors[name])
        return self.version, self.version


def nothing_new(tensors: Tensors, before: Tensors) -> Tensors:
    return before


def a_layer_left_out(tensors: Tensors, before: Tensors) -> Tensors:
    return {name: before[name] if ".layers.1." in name else tensor for name, tensor in tensors.items()}


def one_tensor_left_out(tensors: Tensors, before: Tensors) -> Tensors:
    return {name: before[name] if name.endswith("layers.0.mlp.up_proj.weight") else tensor
            for name, tensor in tensors.items()}


def two_tensors_swapped(tensors: Tensors, before: Tensors) -> Tensors:
    gate, up = "model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"
    return {**tensors, gate: tensors[up], up: tensors[gate]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model(0).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def run(folder: Path, spoil: Callable[[Tensors, Tensors], Tensors] | None, last: int, *settings: str) -> list[Any]:
    """Versions and what was said of them, with an engine whose updates are wrong from WRONG on."""
    engine = TorchEngine(make_model(0), Text(), capacity=16, max_length=64)
    proving, said = Proving(folder, make_model(0), *settings), []
    for version in range(1, last + 1):
        tensors = weights_of(version)
        proving.publish(version, tensors)
        spoilt = spoil(tensors, weights_of(version - 1)) if spoil and version >= WRONG else tensors
        engine.update_weights(Sent(version, spoilt))
        proving.answer(engine, version)
        said += [(version, verdict) for verdict in proving.judged(version)]
    return said


def test_honest_updates_are_proved_without_a_word(folder: Path) -> None:
    assert run(folder, None, 6) == []


@pytest.mark.parametrize("spoil", [nothing_new, a_layer_left_out, one_tensor_left_out, two_tensors_swapped])
def test_an_update_that_went_wrong_later_is_named_and_ends_the_run(
    folder: Path, spoil: Callable[[Tensors, Tensors], Tensors]
) -> None:
    [(version, verdict)] = run(folder, spoil, WRONG)
    assert version == WRONG
    assert f"engine torch of rollout-0, version {WRONG}: over 8 tokens" in verdict.text
    assert f"differ by {verdict.gap:.3g} on average" in verdict.text and "Give every engine the model" in verdict.text
    with pytest.raises(CannotTrain, match=rf"version {WRONG + 1}: over.*So it was at version {WRONG}: the run ends"):
        run(folder, spoil, WRONG + 1)
    assert [version for version, _ in run(folder, spoil, 5, "learner.parity.updates=warn")] == [3, 4, 5]
