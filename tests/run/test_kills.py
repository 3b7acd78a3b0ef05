"""SIGKILL of any process at seeded random moments: the run ends with every step, nothing lost, nothing trained twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import Run, running

ROLES = ["bus", "keeper", "scheduler", "rollout/0", "reward/0", "learner", "validator"]


def check_end(run: Run, code: int, steps: int) -> None:
    assert code == 0, run.tail()
    report = run.audit()
    assert report.lost == 0 and report.trained_twice == 0, report
    assert report.accidents == {}, report
    assert run.step() == steps
    assert run.leftovers() == []


def survive(tmp_path: Path, role: str, kills: int, seed: int, steps: int) -> Run:
    run = Run(tmp_path / "run", steps=steps)
    with running(run):
        killed = run.kill_at_random_steps(role, kills, seed)
        code = run.wait()
    assert len(killed) == kills
    check_end(run, code, steps)
    return run


@pytest.mark.parametrize("role", [role for role in ROLES if role != "validator"])
def test_a_run_survives_the_death_of(role: str, tmp_path: Path, quickstart: None) -> None:
    survive(tmp_path, role, kills=2, seed=len(role), steps=24)


def test_a_run_survives_the_death_of_the_validator(tmp_path: Path, quickstart: None) -> None:
    survive(tmp_path, "validator", kills=1, seed=1, steps=24)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("role", ROLES)
def test_a_run_survives_three_deaths_of(role: str, seed: int, tmp_path: Path, quickstart: None) -> None:
    survive(tmp_path, role, kills=3, seed=seed, steps=40)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("role", ROLES)
def test_a_run_survives_five_deaths_of(role: str, seed: int, tmp_path: Path, quickstart: None) -> None:
    survive(tmp_path, role, kills=5, seed=100 + seed, steps=80)
