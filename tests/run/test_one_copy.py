"""Runs whose learner trains the engine's own weights; on a CPU the memory they share is a file, all else the same."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from checks import check_end
from harness import Run, running

ONE_COPY = ("weights.transport=cuda_ipc", "model.device=cpu")


def log_of(run: Run, process: str) -> str:
    return run.paths.log(process).read_text(errors="replace")


def survive(tmp_path: Path, kills: Sequence[tuple[int, str]], starts: int, steps: int) -> None:
    """Kill at those steps; the learner then finds the engine's weights so many times in all."""
    run = Run(tmp_path / "run", *ONE_COPY, "learner.checkpoint_every=5", steps=steps)
    with running(run):
        for step, role in kills:
            run.until_step(step)
            run.kill(role)
        code = run.wait()
    check_end(run, code)
    learner = log_of(run, "learner")
    assert learner.count("trains the engine's own weights") == starts, learner
    assert "rollout-0 (pid" in learner and "held the weights and is gone" in learner
    rewards = [row["reward"] for row in run.metrics()]
    assert sum(rewards[-5:]) > sum(rewards[:5]), rewards


@pytest.mark.slow
def test_a_one_copy_run_learns_and_resumes_after_its_engine_dies(
    tmp_path: Path, quickstart: None
) -> None:
    survive(tmp_path, [(7, "rollout/0")], starts=2, steps=16)


@pytest.mark.slow
def test_either_side_of_one_copy_may_die(tmp_path: Path, quickstart: None) -> None:
    survive(tmp_path, [(6, "learner"), (14, "rollout/0"), (22, "learner")], starts=4, steps=30)


@pytest.mark.slow
def test_in_bfloat16_the_shared_weights_are_the_rounded_ones(tmp_path: Path, quickstart: None) -> None:
    run = Run(tmp_path / "run", *ONE_COPY, "model.dtype=bfloat16", steps=6)
    with running(run):
        check_end(run, run.wait())
    assert "trains the engine's own weights" in log_of(run, "learner")


@pytest.mark.slow
def test_a_one_copy_run_stops_in_order_and_continues_later(
    tmp_path: Path, quickstart: None
) -> None:
    """The engine waits until the learner has written its last checkpoint from the engine's memory."""
    run = Run(tmp_path / "run", *ONE_COPY, steps=12)
    with running(run):
        run.until_step(4)
        assert run.child is not None
        run.child.send_signal(signal.SIGTERM)
        run.wait(60)
    assert run.leftovers() == []
    assert "Traceback" not in log_of(run, "learner") + log_of(run, "rollout/0")
    stopped_at = run.step()
    assert [path.name for path in run.paths.checkpoints.iterdir()] == [f"global_step_{stopped_at}"]
    with running(run):
        check_end(run, run.wait())
    assert f"resumed at step {stopped_at} (0 of them trained again" in log_of(run, "learner")
