"""A part of the model is trained: what is frozen, what that saves, and what a checkpoint of it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from busrl.algorithms import trained_parameters
from busrl.errors import UserError
from busrl.training import checkpoint
from busrl.training.model import load
from busrl.training.settings import TrainerSettings
from busrl.training.trainer import Trainer

from .test_activations import kept_bytes

NAMES = [
    "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight",
    *(f"model.layers.{n}.{part}.weight" for n in range(12) for part in ("mlp.up_proj", "self_attn.q_proj", "q_norm")),
]


@pytest.mark.parametrize(
    ("text", "count"),
    [("", 39), ("3", 3), ("1-2", 6), ("0 - 1, 11", 9), ("lm_head", 1), ("mlp", 12), ("self_attn.q_proj", 12),
     ("*norm", 13), ("norm", 1), ("2, layers.3.mlp", 4), ("proj", 0), ("12", 0), ("weight", 39)],
)
def test_items_are_layers_or_parts_of_names(text: str, count: int) -> None:
    assert len(trained_parameters.chosen(text, NAMES)[0]) == count


@pytest.mark.parametrize("text", ["4-2", "a b", "1-2-3", "mlp,,norm", "-3", "/"])
def test_what_is_no_item_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        trained_parameters.parsed(text)


@given(st.lists(st.integers(0, 11), min_size=1))
def test_layers_are_those_of_the_names(numbers: list[int]) -> None:
    text = ", ".join(map(str, numbers))
    chosen, empty = trained_parameters.chosen(text, NAMES)
    assert not empty
    assert trained_parameters.layers(text, 12) == {int(name.split(".")[2]) for name in chosen} == set(numbers)


def values(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


@pytest.mark.parametrize("more", [{}, {"activation_checkpointing": "full"}, {"compute_dtype": "bfloat16"}])
def test_frozen_layers_stay_and_the_gradient_is_that_of_the_whole(lab: Any, apart: Any, more: Any) -> None:
    samples = lab.samples()
    advantages = lab.advantages(len(samples))
    double = "compute_dtype" not in more
    every, _ = lab.step(lab.trainer("llama", double=double, **more), [(samples, advantages)])
    trainer = lab.trainer("llama", double=double, train_layers="1, lm_head", **more)
    gradient, _ = lab.step(trainer, [(samples, advantages)])
    chosen = {name for name in every if ".1." in name or name == "lm_head.weight"}
    assert gradient.keys() == trainer.trained_tensors().keys() == chosen
    ratio = {name: float(gradient[name].norm() / every[name].norm()) for name in chosen}  # clipped to another norm
    assert max(ratio.values()) == pytest.approx(min(ratio.values()), rel=1e-6 if double else 1e-2)
    before = values(trainer)
    trainer.accumulate(samples, advantages)
    trainer.step(1e-2)
    moved = {name for name, value in values(trainer).items() if not torch.equal(value, before[name])}
    assert moved == chosen


def test_nothing_is_kept_below_the_first_trained_layer(lab: Any) -> None:
    samples = lab.samples(groups=6)
    whole, upper = (
        kept_bytes(lab.trainer("llama", double=False, train_layers=text), samples) for text in ("", "2")
    )
    assert upper < whole / 2


def saved(folder: Path, trainer: Trainer) -> checkpoint.Checkpoint:
    return checkpoint.save(folder, 1, model=trainer.model, optimizer_state=trainer.optimizer_state(), meta={})


def test_a_checkpoint_continues_with_the_same_layers_and_is_refused_with_others(lab: Any, tmp_path: Path) -> None:
    samples = lab.samples()
    advantages = lab.advantages(len(samples))

    def step(trainer: Trainer) -> None:
        trainer.accumulate(samples, advantages)
        trainer.step(1e-2)

    trainer = Trainer(load(lab.folder("llama")), TrainerSettings(train_layers="1-2"))
    step(trainer)
    written = saved(tmp_path, trainer)
    again = Trainer(load(written.model), TrainerSettings(train_layers="2, 1"))  # in other words
    assert again.restore(written) == []
    for one in (trainer, again):
        step(one)
    assert all(torch.equal(value, values(again)[name]) for name, value in values(trainer).items())
    for other in ("", "2", "1-2, norm"):
        with pytest.raises(UserError, match=r"train_layers = '1-2', the topology says .*set it back to '1-2'"):
            Trainer(load(written.model), TrainerSettings(train_layers=other)).restore(written)


def test_an_item_that_the_model_does_not_have_is_named(lab: Any) -> None:
    with pytest.raises(UserError, match=r"'7' is no part of the model: it has layers 0 to 2, and .*q_proj"):
        Trainer(load(lab.folder("llama")), TrainerSettings(train_layers="1, 7"))
    with pytest.raises(UserError, match=r"'lm_head' is no part .* \(a head that is the embedding"):
        Trainer(load(lab.folder("qwen3")), TrainerSettings(train_layers="lm_head"))  # tied
