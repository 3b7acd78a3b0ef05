"""Every optimiser of [learner]: it follows the schedule, continues from a checkpoint to the bit, and no other's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from busrl.errors import FunctionRefused, UserError
from busrl.training import checkpoint, optimizers
from busrl.training.trainer import Trainer

SGD = "torch.optim:SGD"
ALL: dict[str, dict[str, Any]] = {
    "adamw": {}, "adamw8bit": {}, "adafactor": {}, SGD: {"momentum": 0.9, "weight_decay": 0.1},
}
ADAM = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


def trainer_of(lab: Any, name: str, **more: Any) -> Trainer:
    if name == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    trainer: Trainer = lab.trainer("qwen3", double=False, **{"optimizer": name, "options": ALL[name], **more})
    return trainer


def train(lab: Any, trainer: Trainer, seed: int, lr: float) -> None:
    samples = lab.samples(seed=seed)
    trainer.accumulate(samples, lab.advantages(len(samples)))
    assert not trainer.step(lr).skipped


def values(trainer: Trainer) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in trainer.trained_tensors().values()]


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(torch.equal(mine, other) for mine, other in zip(one, two, strict=True))


def saved(root: Path, trainer: Trainer) -> checkpoint.Checkpoint:
    state = trainer.optimizer_state()
    weights = trainer.named_weights()
    return checkpoint.save(root, 1, model=trainer.model, optimizer_state=state, meta={}, weights=weights)


@pytest.mark.parametrize("name", ALL)
def test_the_schedule_drives_it(lab: Any, name: str) -> None:
    trainer = trainer_of(lab, name)
    before = values(trainer)
    train(lab, trainer, 0, 0.0)
    assert same(values(trainer), before), "a rate of 0 moves nothing"
    steps = []
    for lr in (1e-3, 1e-5):
        before = values(trainer)
        train(lab, trainer, 1, lr)
        steps.append(sum(float((now - old).norm()) for now, old in zip(values(trainer), before, strict=True)))
    assert steps[0] > 10 * steps[1] > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ALL)
def test_it_continues_from_a_checkpoint_to_the_bit(lab: Any, name: str, dtype: str, tmp_path: Path) -> None:
    trainer = trainer_of(lab, name, compute_dtype=dtype)
    for seed in range(3):
        train(lab, trainer, seed, 1e-2)
    written = saved(tmp_path, trainer)
    again = trainer_of(lab, name, compute_dtype=dtype)
    with torch.no_grad():
        for parameter, there in zip(again.model.parameters(), trainer.model.parameters(), strict=True):
            parameter.copy_(there)
    assert again.restore(written) == []
    for one in (trainer, again):
        train(lab, one, 5, 1e-2)
    assert same(values(trainer), values(again))


def test_states_of_8_bits_are_those_of_large_tensors_alone(lab: Any) -> None:
    pytest.importorskip("bitsandbytes")
    large, small = torch.randn(64, 64), torch.randn(63, 64)
    made = optimizers.make("adamw8bit", [large, small], ADAM, {}, ".")
    for one in (large, small):
        one.grad = torch.randn_like(one)
    made.step()
    assert [made.state[one]["state1"].dtype for one in (large, small)] == [torch.uint8, torch.float32]


def test_the_states_of_another_optimiser_are_refused_by_name(lab: Any, tmp_path: Path) -> None:
    trainer = trainer_of(lab, "adafactor")
    train(lab, trainer, 0, 1e-3)
    written = saved(tmp_path, trainer)
    with pytest.raises(UserError) as failure:
        trainer_of(lab, "adamw").restore(written)
    text = str(failure.value)
    assert str(written.path) in text and "learner.optimizer = 'adafactor'" in text and "'adamw'" in text
    assert f'learner.start_from = "{written.path}"' in text and "set it back" in text


def test_a_checkpoint_without_a_name_is_of_adamw(lab: Any) -> None:
    optimizers.require_same({"state": {}}, "adamw", "there")
    with pytest.raises(UserError, match="'adamw'"):
        optimizers.require_same({"state": {}}, SGD, "there")


def test_changed_options_are_those_of_now_and_are_told(lab: Any, tmp_path: Path) -> None:
    trainer = trainer_of(lab, SGD)
    train(lab, trainer, 0, 1e-3)
    written = saved(tmp_path, trainer)
    again = trainer_of(lab, SGD, options={"momentum": 0.5, "weight_decay": 0.1})
    assert again.restore(written) == ["learner.options.momentum = 0.5 (before: 0.9)"]
    assert [(group["momentum"], group["weight_decay"]) for group in again.optimizer.param_groups] == [
        (0.5, 0.1), (0.5, 0.0)]


OWN = """
import torch

class Own(torch.optim.Optimizer):
    def __init__(self, params, lr, scale=1.0):
        super().__init__(params, {"lr": lr, "scale": scale})
        self.hidden = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.hidden += 1
        for group in self.param_groups:
            for p in group["params"]:
                p -= STEP * p.grad
"""
FAULTS = {
    "moved the parameters at a learning rate of 0": "0.1",
    "did not move the parameters": "0 * group['lr']",
    "not finite": "(group['lr'] and float('nan'))",
    "raised NameError": "unknown",
    "made another update after its state was saved and loaded": "self.hidden * group['lr']",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_class_that_breaks_the_contract_is_refused(fault: str, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN.replace("STEP", FAULTS[fault]))
    with pytest.raises(FunctionRefused, match=fault):
        optimizers.try_optimizer(f"{file}:Own", ADAM, {}, ".")


def test_a_sound_class_is_taken_and_its_arguments_reach_it(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN.replace("STEP", "group['scale'] * group['lr']"))
    optimizers.try_optimizer(f"{file}:Own", ADAM, {"scale": 2.0}, ".")
    with pytest.raises(FunctionRefused, match="unexpected keyword"):
        optimizers.try_optimizer(f"{file}:Own", ADAM, {"scales": 2.0}, ".")
    with pytest.raises(FunctionRefused, match="no class of torch"):
        optimizers.try_optimizer("collections:OrderedDict", ADAM, {}, ".")
    with pytest.raises(FunctionRefused, match="closure"):
        optimizers.try_optimizer("torch.optim:LBFGS", ADAM, {}, ".")


@pytest.mark.parametrize("name", ["adafactor", SGD, "torch.optim:NAdam", "torch.optim:RAdam", "torch.optim:RMSprop"])
def test_optimisers_of_torch_pass_the_trial(name: str) -> None:
    optimizers.try_optimizer(name, ADAM, {}, ".")
