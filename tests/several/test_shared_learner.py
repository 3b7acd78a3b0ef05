"""One base for the learners of several adapters: the same tensors in all, and each number as with a base of its own."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from busrl.quickstart.cache import ensure
from busrl.several.shared_learner import Bases
from busrl.training.model import Adapter, LoraSettings, load

# Not imported where tests are only collected: it takes seconds.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="pip install peft")
CPU = torch.device("cpu")
IDS = torch.arange(3, 13).view(1, 10)


def adapted(model: Any, rank: int) -> tuple[Any, Adapter]:
    adapter = Adapter(model, LoraSettings(rank, 2.0, seed=rank))
    with torch.no_grad():
        for tensor in adapter.tensors().values():
            tensor.add_(0.05)
    return model, adapter


def step(model: Any, adapter: Adapter) -> float:
    """A step of gradient descent; returns the loss before it."""
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                assert ".lora_" in name, "the base has no gradient"
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return float(loss.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_on_one_base_train_as_each_on_its_own(dtype: torch.dtype) -> None:
    folder, bases = Path(ensure("tiny:sort").model), Bases()
    together = [adapted(bases.read(folder, dtype, CPU, ""), rank) for rank in (2, 4)]
    apart = [adapted(load(folder, dtype, CPU, ""), rank) for rank in (2, 4)]
    for _ in range(3):  # in turns
        assert [step(*each) for each in together] == [step(*each) for each in apart]
    for (_, mine), (_, own) in zip(together, apart):
        for name, tensor in own.tensors().items():
            assert torch.equal(mine.tensors()[name], tensor), name


def test_the_base_is_in_memory_once_and_the_adapters_are_not() -> None:
    folder, bases = Path(ensure("tiny:sort").model), Bases()
    (first, _), (second, _) = (adapted(bases.read(folder, torch.float32, CPU, ""), 2) for _ in range(2))
    base = [{name.replace(".base_layer", ""): tensor.data_ptr() for name, tensor in model.named_parameters()
             if ".lora_" not in name} for model in (first, second)]
    assert base[0] == base[1] and len(base[0]) > 8
    adapters = [{tensor.data_ptr() for name, tensor in model.named_parameters() if ".lora_" in name}
                for model in (first, second)]
    assert not adapters[0] & adapters[1]
    assert not any(".lora_" in name for name, _ in bases.read(folder, torch.float32, CPU, "").named_parameters())
    assert bases.read(folder, torch.bfloat16, CPU, "").dtype == torch.bfloat16
