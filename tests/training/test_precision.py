"""bfloat16 with float32 masters: what FSDP2's mixed precision computes, sums in float32, a base without a master."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from busrl.training.batch import flatten
from busrl.training.model import Adapter, LoraSettings, Masters, load
from busrl.training.settings import TrainerSettings
from busrl.training.trainer import Trainer

dist: Any = torch.distributed
ROUNDED = TrainerSettings(compute_dtype="bfloat16", max_grad_norm=1e9, micro_batch_tokens=60)


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def logits(model: Any) -> torch.Tensor:
    actual: torch.Tensor = model(input_ids=torch.arange(20).view(2, 10), use_cache=False).logits
    return actual.float()


@pytest.mark.parametrize("kind", ["qwen3", "llama"])  # a tied head and one of its own
def test_gradients_are_those_of_fsdp_with_mixed_precision_bit_for_bit(lab: Any, mesh: Any, kind: str) -> None:
    ours, theirs = lab.model(kind, double=False), lab.model(kind, double=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in theirs.base_model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(theirs, mesh=mesh, mp_policy=policy)
    masters = Masters(ours, torch.bfloat16)
    for _ in range(3):  # sums over micro-batches are float32 in both
        expected, actual = logits(theirs), logits(ours)
        assert torch.equal(actual, expected)
        for one in (expected, actual):
            one.square().mean().backward()  # type: ignore[no-untyped-call]
    for name, parameter in theirs.named_parameters():
        assert masters.named[name].grad.dtype == torch.float32
        assert torch.equal(masters.named[name].grad, parameter.grad.to_local()), name


def test_gradients_of_many_micro_batches_lose_no_small_ones(lab: Any) -> None:
    """A sum in bfloat16 would stop growing: after 2**8 times its size a gradient is below its last bit."""
    model = lab.model("qwen3", double=False)
    masters = Masters(model, torch.bfloat16)
    weight, master = model.base_model.norm.weight, masters.named["model.norm.weight"]
    for _ in range(600):
        (weight.float().sum() * 1.0).backward()
    assert master.grad is not None and torch.equal(master.grad, torch.full_like(master, 600.0))
    assert weight.grad is None


def test_masters_keep_small_updates_and_the_model_is_their_rounding(lab: Any) -> None:
    trainer = Trainer(lab.model("qwen3", double=False), ROUNDED)
    before = {name: value.clone() for name, value in trainer.trained_tensors().items()}
    samples = lab.samples()
    for _ in range(3):
        trainer.accumulate(samples, lab.advantages(len(samples)))
        assert not trainer.step(1e-6).skipped
    after = trainer.trained_tensors()
    assert all(not torch.equal(before[name], after[name]) for name in after)
    for name, parameter in trainer.model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, after[name].bfloat16()), name


def test_a_base_is_in_few_bits_and_its_adapter_keeps_all(lab: Any, tmp_path: Any) -> None:
    pytest.importorskip("peft")
    model = load(lab.folder("qwen3"), torch.bfloat16)
    adapter = Adapter(model, LoraSettings(4, 2.0))
    trainer = Trainer(model, ROUNDED, adapter=adapter)
    assert trainer.forward.name == "packed"  # probed in float32: rounding would hide a wrong way
    base = {name: value.clone() for name, value in model.named_parameters() if ".lora_" not in name}
    samples = lab.samples()
    for _ in range(2):
        trainer.accumulate(samples, lab.advantages(len(samples)))
        trainer.step(1e-2)
    parameters = dict(model.named_parameters())
    assert {value.dtype for value in parameters.values()} == {torch.bfloat16}
    assert all(torch.equal(parameters[name], value) for name, value in base.items())
    assert {value.dtype for value in adapter.tensors().values()} == {torch.float32}
    assert trainer.trained_tensors().keys() == {name for name in parameters if ".lora_" in name}
    merged = trainer.named_weights()
    changed = "model.layers.0.mlp.up_proj.weight"
    assert merged[changed].dtype == torch.bfloat16
    assert not torch.equal(merged[changed], base["model.layers.0.mlp.up_proj.base_layer.weight"])
    assert merged[changed].data_ptr() != merged[changed].data_ptr()  # made when asked for: no second model is kept
    adapter.write(tmp_path / "adapter", adapter.tensors())
    again = Adapter(load(lab.folder("qwen3"), torch.bfloat16), LoraSettings(4, 2.0))
    resumed = Trainer(again.model, ROUNDED, adapter=again)
    again.load(tmp_path / "adapter")
    resumed.load_optimizer_state(trainer.optimizer_state())
    flat = flatten(samples, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        ours, theirs = (one.forward.score(samples, flat)[0] for one in (trainer, resumed))
    assert torch.equal(ours, theirs)
