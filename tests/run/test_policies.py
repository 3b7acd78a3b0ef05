"""Every order of dispatch in a real run: all steps, nothing lost; also when the scheduler dies."""

from __future__ import annotations

from pathlib import Path

import pytest
from checks import check_end
from harness import Run, read_lines, running

FEW_ROWS = "generation.max_batch=16"  # so that the order decides something


def check_records(run: Run, policy: str) -> None:
    """What `scheduler.jsonl` says of the groups that ended: each once, within the bound."""
    lines = read_lines(run.paths.scheduler_log)
    assert lines and {line["policy"] for line in lines} == {policy}
    draws = [draw for line in lines for draw in line["draw"]]
    assert len(set(draws)) == len(draws) >= run.steps
    for line in lines:
        assert all(0 < actual <= longest <= 64 for actual, longest in zip(line["actual"], line["longest"]))
        assert all(-1 <= wait <= 2 * 16 - 2 for wait in line["wait"])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "batch-async"])
@pytest.mark.parametrize("policy", ["sjf", "ljf", "adaptive"])
def test_a_run_of_any_policy_ends_in_order(
    policy: str, mode: str, tmp_path: Path, quickstart: None
) -> None:
    settings = (f'scheduler.policy="{policy}"', f'weights.mode="{mode}"', FEW_ROWS)
    run = Run(tmp_path / "run", *settings, steps=6)
    with running(run):
        code = run.wait()
    check_end(run, code)
    check_records(run, policy)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_run_survives_five_deaths_of_its_scheduler_at_random_steps(
    seed: int, tmp_path: Path, quickstart: None
) -> None:
    run = Run(tmp_path / "run", 'scheduler.policy="sjf"', FEW_ROWS, steps=30)
    with running(run):
        killed = run.kill_at_random_steps(["scheduler"], 5, seed)
        code = run.wait()
    check_end(run, code)
    assert len(set(killed)) == 5 and run.restarts("scheduler") == 5
