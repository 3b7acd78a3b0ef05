"""Real runs with weights by broadcast and two rollout processes: deaths in each phase, of the learner or an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from checks import check_end
from harness import ROOT, Run, read_lines, running

from busrl.cli.command import main

DYING = Path(__file__).with_name("dying")
BROADCAST = ["weights.transport='broadcast'", "weights.timeout_s=6", "weights.bucket_mb=1", "process.rollout.count=2"]


def run_with_a_death(tmp_path: Path, role: str, point: str, *settings: str) -> Run:
    mark = tmp_path / "mark"
    run = Run(
        tmp_path / "run", *BROADCAST,
        f"process.{role}.env={{DIE_IN='{point}', DIE_MARK='{mark}', PYTHONPATH='{DYING}:{ROOT}'}}", *settings, steps=12,
    )
    with running(run):
        if role == "rollout":
            wait_for_the_dying(run, mark)
        code = run.wait()
    assert mark.exists(), run.tail()
    check_end(run, code)
    return run


def wait_for_the_dying(run: Run, mark: Path) -> None:
    """No step is made before rollout/0 takes part: on a busy machine the run would end before that."""
    run.until_step(1)
    assert main(["pause", str(run.directory)]) == 0
    run.until("rollout/0 took part", lambda: mark.exists() or has_ready(run, "rollout/0"))
    assert main(["resume", str(run.directory)]) == 0


def has_ready(run: Run, name: str) -> bool:
    process = run.processes().get(name)
    return process is not None and process.state == "ready"


@pytest.mark.slow
@pytest.mark.parametrize("point", ["roll call", "connecting", "sending", "bucket 0@3", "commit@3"])
def test_a_run_goes_on_when_the_learner_dies_in(point: str, tmp_path: Path, quickstart: None) -> None:
    run = run_with_a_death(tmp_path, "learner", point)
    assert run.restarts("learner") == 1


@pytest.mark.slow
@pytest.mark.parametrize("point", ["roll call", "manifest", "connect", "bucket 0@3", "commit@3"])
def test_a_run_goes_on_when_an_engine_dies_in(point: str, tmp_path: Path, quickstart: None) -> None:
    run = run_with_a_death(tmp_path, "rollout", point)
    assert run.restarts("rollout/0") == 1


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "broadcast"])
def test_a_run_with_sparse_updates_and_digests_ends_well(transport: str, tmp_path: Path, quickstart: None) -> None:
    run = Run(
        tmp_path / "run", f"weights.transport='{transport}'", "weights.sparse.enabled=true", "weights.checksum=true",
        "weights.sparse.threshold=1.0", "process.rollout.count=2", steps=12,
    )
    with running(run):
        code = run.wait()
    check_end(run, code)
    versions = {line.get("version", 0) for line in read_lines(run.paths.train_log)}
    assert len(versions) > 5, versions
