"""Checkpoints of four ranks, continued by one, two and three. A process has one group at a time: a team per part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from busrl.training import checkpoint
from busrl.training.model import load
from busrl.training.settings import TrainerSettings
from busrl.training.trainer import Trainer
from tests.training.test_team import SETTINGS, a_step, in_shards, team_of

pytestmark = pytest.mark.slow


def losses(trainer: Any, lab: Any, seeds: range) -> list[float]:
    return [a_step(trainer, lab, seed).loss for seed in seeds]


def tensors_of(trainer: Any) -> dict[str, torch.Tensor]:
    """Weights and moments, whole."""
    state = trainer.optimizer_state()["state"]
    moments = {f"{number} {name}": value for number, own in state.items() for name, value in own.items()}
    return {name: value.clone() for name, value in {**trainer.named_weights(), **moments}.items()}


@pytest.mark.parametrize("kind, tensor", [("llama", 1), ("qwen3", 2)])
def test_what_four_ranks_saved_is_continued_by_one_two_and_three(
    lab: Any, tmp_path: Path, kind: str, tensor: int
) -> None:
    """Of one axis, and of two: weights and moments are the same to the bit, and so the steps after them."""
    source, settings = lab.folder(kind), TrainerSettings(**SETTINGS)
    with team_of(tmp_path, 4, tensor=tensor) as team:
        trainer = team.trainer(source, settings)
        losses(trainer, lab, range(3))
        expected_tensors = tensors_of(trainer)
        saved = in_shards(trainer, tmp_path / "checkpoints", 3)
        expected = losses(trainer, lab, range(3, 6))

    def continued(again: Any, ranks: int) -> None:
        assert again.restore(saved) == []
        tensors = tensors_of(again)
        assert tensors.keys() == expected_tensors.keys()
        assert [name for name in tensors if not torch.equal(tensors[name], expected_tensors[name])] == []
        np.testing.assert_allclose(losses(again, lab, range(3, 6)), expected, atol=1e-5, err_msg=str(ranks))

    continued(Trainer(load(source), settings), 1)
    for ranks in (2, 3):
        with team_of(tmp_path, ranks) as team:
            continued(team.trainer(source, settings), ranks)
    with team_of(tmp_path, 2, tensor=2) as team:
        continued(team.trainer(source, settings), 2)


def test_three_ranks_continue_what_one_saved_in_a_model_folder(lab: Any, tmp_path: Path) -> None:
    source, settings = lab.folder("qwen3"), TrainerSettings(**SETTINGS)
    alone = Trainer(load(source), settings)
    losses(alone, lab, range(2))
    saved = checkpoint.save(tmp_path / "checkpoints", 2, model=alone.model, optimizer_state=alone.optimizer_state(),
                            meta={}, source=source)
    expected = losses(alone, lab, range(2, 4))
    with team_of(tmp_path, 3) as team:
        again = team.trainer(saved.model, settings)
        assert again.restore(saved) == []
        np.testing.assert_allclose(losses(again, lab, range(2, 4)), expected, atol=1e-6)
