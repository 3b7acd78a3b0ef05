"""What ends a team, and whose name it has. A process has one group at a time, so each test makes its own team."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from busrl.errors import RankFailed, RankLost, RanksDiffer
from busrl.training.settings import TrainerSettings
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


def test_a_rank_that_fails_is_named_with_its_words_and_its_samples(lab: Any, tmp_path: Path) -> None:
    with team_of(tmp_path, wrong="fails", collective_s=20) as team:
        trainer = team.trainer(lab.folder("qwen3"), TrainerSettings(**SETTINGS))
        with pytest.raises(RankFailed, match=r"rank 1 \(pid \d+\) failed: MemoryError: no memory") as failure:
            a_step(trainer, lab, 0)
        given = {sample.uid for sample in lab.samples(groups=2, seed=0)}
        assert failure.value.uids and set(failure.value.uids) < given, "those of its share alone"


def test_memory_that_rank_0_does_not_get_is_its_own_failure(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    with team_of(tmp_path, collective_s=20) as team:
        trainer = team.trainer(lab.folder("qwen3"), TrainerSettings(**SETTINGS))
        monkeypatch.setattr(trainer, "micro_batch", fail)
        with pytest.raises(RankFailed, match=r"rank 0 failed: .*can't allocate memory") as failure:
            a_step(trainer, lab, 0)
        assert failure.value.uids and "rank 1" not in str(failure.value)


def test_samples_are_no_suspects_where_another_rank_was_killed(lab: Any, tmp_path: Path) -> None:
    with team_of(tmp_path, ranks=3, collective_s=20) as team:
        trainer = team.trainer(lab.folder("qwen3"), TrainerSettings(**SETTINGS))
        a_step(trainer, lab, 0)
        first, _ = team.processes
        first.send_signal(signal.SIGSTOP)  # the others are in a collective when it is killed
        threading.Timer(2, first.kill).start()
        said = r"rank 1 \(pid \d+\) (has ended|is gone).*rank 2 \(pid \d+\) failed: "
        with pytest.raises(RankLost, match=said) as failure:
            a_step(trainer, lab, 1)
        assert not getattr(failure.value, "uids", ()), "rank 2 is well"


def test_a_rank_that_fails_in_the_update_names_its_samples(lab: Any, tmp_path: Path) -> None:
    with team_of(tmp_path, wrong="updates", collective_s=20) as team:
        trainer = team.trainer(lab.folder("qwen3"), TrainerSettings(**SETTINGS))
        with pytest.raises(RankFailed, match=r"rank 1 \(pid \d+\) failed: MemoryError: no memory") as failure:
            a_step(trainer, lab, 0)
        given = {sample.uid for sample in lab.samples(groups=2, seed=0)}
        assert failure.value.uids and set(failure.value.uids) < given
