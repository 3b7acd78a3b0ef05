"""Real runs with weights by broadcast and two rollout processes: deaths in each phase, of the learner or an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from checks import check_end
from harness import ROOT, Run, read_lines, running

DYING = Path(__file__).with_name("dying")
BROADCAST = ["weights.transport='broadcast'", "weights.timeout_s=6", "weights.bucket_mb=1", "process.rollout.count=2"]


def run_with_a_death(tmp_path: Path, role: str, point: str, *settings: str) -> Run:
    mark = tmp_path / "mark"
    run = Run(
        tmp_path / "run", *BROADCAST,
        f"process.{role}.env={{DIE_IN='{point}', DIE_MARK='{mark}', PYTHONPATH='{DYING}:{ROOT}'}}", *settings, steps=12,
    )
    with running(run):
        code = run.wait()
    assert mark.exists(), run.tail()
    check_end(run, code)
    return run


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
