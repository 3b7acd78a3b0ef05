"""SIGKILL of any process at seeded random moments: the run ends with every step, nothing is lost or doubled."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from checks import check_end, check_tokens
from harness import LIMIT_S, Run, read_lines, running

ROLES = ["bus", "keeper", "scheduler", "rollout/0", "reward/0", "learner"]
STEPS = 40


def survive(
    tmp_path: Path, roles: Sequence[str], kills: int, seed: int, steps: int, undisturbed: Callable[[int], int]
) -> None:
    run = Run(tmp_path / "run", steps=steps)
    with running(run):
        killed = run.kill_at_random_steps(roles, kills, seed)
        code = run.wait()
    assert len(set(killed)) == kills * len(roles)
    assert all(run.restarts(role) == kills for role in roles), run.summary()["processes"]
    check_end(run, code)
    check_tokens(run, undisturbed(steps))


@pytest.mark.long
def test_a_run_survives_a_death_of_each_process(tmp_path: Path, undisturbed: Callable[[int], int]) -> None:
    survive(tmp_path, ROLES, 1, 0, STEPS // 2, undisturbed)


@pytest.mark.slow
def test_a_run_survives_two_deaths_of_each_process(tmp_path: Path, undisturbed: Callable[[int], int]) -> None:
    survive(tmp_path, ROLES, 2, 0, STEPS, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "roles", [("bus", "keeper"), ("scheduler", "reward/0"), ("rollout/0",), ("learner",)], ids=" and ".join
)
def test_a_run_survives_two_deaths_of(
    roles: Sequence[str], tmp_path: Path, undisturbed: Callable[[int], int]
) -> None:
    survive(tmp_path, roles, 2, 0, STEPS, undisturbed)


def survive_in_rounds(tmp_path: Path, kills: int, seed: int = 0) -> None:
    run = Run(tmp_path / "run", "validation.every=10", f"run.seed={seed}", steps=STEPS)
    with running(run):
        killed = [
            run.kill("validator", when=lambda process: process.activity.startswith("validate round"))
            for _ in range(kills)
        ]
        code = run.wait()
    assert len(set(killed)) == kills
    check_end(run, code)
    rows = read_lines(run.paths.validation)
    rounds = [row["round"] for row in rows]
    assert rounds == sorted(set(rounds)) and {0, STEPS} <= set(rounds), rounds
    assert all(row["samples"] == 32 and row["dropped"] == 0 for row in rows), rows


@pytest.mark.long
def test_a_validator_that_is_killed_in_a_round_finishes_it_afterwards(tmp_path: Path, quickstart: None) -> None:
    survive_in_rounds(tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
def test_a_run_survives_three_deaths_of(role: str, tmp_path: Path, undisturbed: Callable[[int], int]) -> None:
    survive(tmp_path, [role], 3, 1, 2 * STEPS, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
def test_a_validator_may_be_killed_three_times_in_its_rounds(seed: int, tmp_path: Path, quickstart: None) -> None:
    survive_in_rounds(tmp_path, 3, seed)


def survive_anything(tmp_path: Path, seed: int, kills: int, steps: int, *settings: str) -> None:
    """Kill anybody at any time: also while they start, and two at a time."""
    run = Run(tmp_path / "run", "validation.every=20", "limits.restart_attempts=20", *settings, steps=steps)
    chance = random.Random(seed)
    killed = 0
    with running(run):
        run.until("anybody was there", run.processes)
        while killed < kills:
            killed += run.kill_if_there(chance.choice([*ROLES, "validator"]))
            run.let_pass(chance.uniform(0.0, 2.0))
        code = run.wait(2 * LIMIT_S)
    check_end(run, code)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "fully-async", "batch-async"])
@pytest.mark.parametrize("transport", ["shm", "broadcast"])
def test_a_run_of_any_mode_survives_ten_deaths_of_anybody(
    mode: str, transport: str, tmp_path: Path, quickstart: None
) -> None:
    survive_anything(tmp_path, 0, 10, 4 * STEPS, f"weights.mode={mode}", f"weights.transport={transport}")


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_a_run_survives_twenty_deaths_of_anybody_at_any_time(seed: int, tmp_path: Path, quickstart: None) -> None:
    survive_anything(tmp_path, seed, 20, 4 * STEPS)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("role", ROLES)
def test_a_run_survives_five_deaths_of(
    role: str, seed: int, tmp_path: Path, undisturbed: Callable[[int], int]
) -> None:
    survive(tmp_path, [role], 5, seed, 4 * STEPS, undisturbed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4, 14))
def test_a_validator_may_be_killed_twice_in_its_rounds(seed: int, tmp_path: Path, quickstart: None) -> None:
    survive_in_rounds(tmp_path, 2, seed)
