"""What ends a team, and whose name it has. A process has one group at a time, so each test makes its own team."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from busrl.errors import RankLost, RanksDiffer
from busrl.training.trainer import TrainerSettings
from tests.training.test_team import SETTINGS, a_step, team_of

pytestmark = pytest.mark.slow


def test_a_rank_of_another_run_is_refused_with_both_values(tmp_path: Path) -> None:
    said = r"topology is \w+ on rank 1 and \w+ on rank 0"
    with pytest.raises(RanksDiffer, match=said), team_of(tmp_path, wrong="facts"):
        pass


def test_a_rank_that_counts_other_tokens_ends_the_team_before_the_update(lab: Any, tmp_path: Path) -> None:
    with team_of(tmp_path, wrong="count") as team:
        trainer = team.trainer(lab.folder("qwen3"), TrainerSettings(**SETTINGS))
        with pytest.raises(RankLost, match=r"rank 1 .* counted \d+ tokens for this step, rank 0 planned"):
            a_step(trainer, lab, 0)


def test_a_rank_that_is_stopped_is_named_within_its_time(lab: Any, tmp_path: Path) -> None:
    with team_of(tmp_path, collective_s=3) as team:
        trainer = team.trainer(lab.folder("qwen3"), TrainerSettings(**SETTINGS))
        a_step(trainer, lab, 0)
        (process,) = team.processes
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(RankLost, match=rf"rank 1 \(pid {process.pid}\) says nothing: it is stopped or stuck"):
            a_step(trainer, lab, 1)
        process.kill()
