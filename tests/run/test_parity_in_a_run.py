"""Whole runs whose engine begins to compute something else at a version, and one that never does."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from checks import check_end
from harness import ROOT, Run, read_lines, running

SINCE = 3
# Each step waits for the engine's answer, so that no version goes by on a loaded machine.
EVERY = ("learner.parity.every=1", "learner.parity.wait_s=100", "groups.size=4", "validation.samples=8")
FAULTS = ("prefix cache", "layer", "dtype", "temperature", "shift", "version tag", "old weights")
BEGINS = {"dtype": 1, "prefix cache": 2}  # there from the start; a cache is old at the second version


def faulty(folder: Path, fault: str, *settings: str, steps: int) -> Run:
    command = [sys.executable, str(Path(__file__).with_name("faulty_rollout.py"))]
    return Run(
        folder / "run", *EVERY, "learner.lr=1e-3", "learner.parity.updates=warn", "learner.parity.copy=true",
        "generation.prefix_keep_s=60",
        f"process.rollout.command={json.dumps(command)}",
        f"process.rollout.env={{FAULT='{fault}', FAULT_SINCE='{SINCE}', PYTHONPATH='{ROOT}'}}", *settings, steps=steps,
    )


def differences(run: Run) -> list[str]:
    """What the gate said, in order."""
    return [row["text"] for row in read_lines(run.paths.errors) if row["text"].startswith("engine torch of rollout-0")]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_at_its_first_visible_version(
    tmp_path: Path, quickstart: None, fault: str
) -> None:
    run = faulty(tmp_path, fault, steps=7)
    with running(run):
        code = run.wait()
    assert code == 0, run.tail()
    first = differences(run)[0]
    assert f"Probable cause: {'version tag' if fault == 'old weights' else fault}" in first, first
    assert f"version {BEGINS.get(fault, SINCE)}:" in first, first


@pytest.mark.long
def test_a_run_ends_by_failing_updates_and_its_exit_names_the_cause(tmp_path: Path, quickstart: None) -> None:
    run = faulty(tmp_path, "layer", "learner.parity.updates=end", "learner.parity.every=10", steps=30)
    with running(run):
        code = run.wait()
    assert code != 0 and run.step() < 30
    first = int(re.findall(r"version (\d+):", differences(run)[0])[0])
    assert SINCE <= first <= SINCE + 2, first  # one step of one layer may be less than what rounding may make
    # The eight tokens of a proof may be right by chance: then it is not the first of two in a row that are wrong.
    again = re.search(r"version (\d+): over.*So it was at version (\d+): the run ends", run.text())
    assert again is not None and first <= int(again[2]) < int(again[1]), run.tail()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_versions_of_an_honest_run_are_compared_without_an_alarm(tmp_path: Path, quickstart: None) -> None:
    run = Run(
        tmp_path / "run", *EVERY, "learner.trigger.n_min=4", "learner.lr=1e-4", "learner.parity.copy=true",
        "generation.max_batch=32", "limits.idle_groups=0", steps=1010,
    )
    with running(run):
        code = run.wait(3000)
    check_end(run, code)
    compared = [row["parity"] for row in run.metrics() if row["parity_engines"]]
    assert len(compared) >= 1000 and max(compared) < 1e-4
    assert not differences(run) and not any("mismatch" in row["text"] for row in read_lines(run.paths.errors))
