"""Checkpoints of four ranks, continued by one, two and three. A process has one group at a time: a team per part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from busrl.training import checkpoint
from busrl.training.model import load
from busrl.training.trainer import Trainer, TrainerSettings
from tests.training.test_team import SETTINGS, a_step, in_shards, team_of

pytestmark = pytest.mark.slow


def losses(trainer: Any, lab: Any, seeds: range) -> list[float]:
    return [a_step(trainer, lab, seed).loss for seed in seeds]


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_what_four_ranks_saved_is_continued_by_one_two_and_three(lab: Any, tmp_path: Path, kind: str) -> None:
    source, settings = lab.folder(kind), TrainerSettings(**SETTINGS)
    with team_of(tmp_path, 4) as team:
        trainer = team.trainer(source, settings)
        losses(trainer, lab, range(3))
        saved = in_shards(trainer, tmp_path / "checkpoints", 3)
        expected = losses(trainer, lab, range(3, 6))
    alone = Trainer(load(source), settings)
    assert alone.restore(saved) == []
    np.testing.assert_allclose(losses(alone, lab, range(3, 6)), expected, atol=1e-6)
    for ranks in (2, 3):
        with team_of(tmp_path, ranks) as team:
            again = team.trainer(source, settings)
            assert again.restore(saved) == []
            np.testing.assert_allclose(losses(again, lab, range(3, 6)), expected, atol=1e-6, err_msg=str(ranks))


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
