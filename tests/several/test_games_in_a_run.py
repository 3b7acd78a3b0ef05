"""The taking game of examples/several in real runs: what one reward for both seats teaches, and what one each does."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Run, read_lines, running

from benchmarks.several import score_player


def game(folder: Path, where: Path, *settings: str, steps: int) -> Run:
    run = Run(where / "run", *settings, config=folder / "take_game.toml", steps=steps)
    ours = ("validation", "learner.trigger", "learner.warmup", "learner.checkpoint", "generation")  # the example's own
    run.settings = [setting for setting in run.settings if not setting.startswith(ours)]
    return run


@pytest.mark.long
def test_with_one_reward_for_both_seats_every_group_is_flat(several: Path, tmp_path: Path) -> None:
    """What they win together is always the same: nothing can be learnt, and the run says how seats get their own."""
    run = game(several, tmp_path, f"process.agent.function={several}/take_game.py:together", steps=5)
    with running(run):
        assert run.wait() == 1, run.tail()
    rows = read_lines(run.paths.groups)
    fates = "".join(row["fates"] for row in rows)
    assert len(fates) >= 8 and set(fates) <= {"f"} and run.step() == 0
    assert {reward for row in rows for rewards in row["rewards"] for reward in rewards} == {1.0}
    assert "return a map from each seat to its reward" in run.text()


@pytest.mark.slow
def test_self_play_finds_the_winning_move(several: Path, tmp_path: Path) -> None:
    run = game(several, tmp_path, steps=0)
    run.settings = [setting for setting in run.settings if not setting.startswith("run.max_steps")]
    with running(run):
        assert run.wait(300) == 0, run.tail()
    newest = max(run.paths.checkpoints.glob("global_step_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    start = several / "made" / "player"
    before, after = score_player(start, start), score_player(newest / "model", start)
    assert before["first"] < 0.6 and after["first"] > 0.9 and after["first_against_start"] > 0.9, (before, after)
    report = run.audit()
    assert report.counts.lost == report.counts.trained_twice == 0 and not report.errors
