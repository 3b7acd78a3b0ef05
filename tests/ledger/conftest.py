"""Fixtures of the ledger: runs made by hand, and a bound on a file's size."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from busrl.ledger.wal import Wal

sys.path.insert(0, str(Path(__file__).parent))  # helpers beside the tests

from fake_run import VALIDATE, FakeRun


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    """A run with groups of 4 and nothing in it."""
    return FakeRun(tmp_path / "run")


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., FakeRun]:
    """Runs with other settings."""
    return lambda **settings: FakeRun(tmp_path / "run", **settings)


@pytest.fixture
def trained(run: FakeRun) -> FakeRun:
    """A clean run that ended: steps 1 and 2 in a checkpoint, 3 in the log, a re-roll, reasons, open samples."""
    run.step(1, run.group(0) + run.group(1))
    run.step(2, run.group(2))
    run.checkpoint(2)
    Wal(run.root / "wal", sync=False).drop_before(3)
    survivors = [*run.group(4)[:3], run.uid(4, 3, again=1)]
    run.step(3, survivors + run.group(3))
    run.fates[run.uid(4, 3)] = "P"
    run.fates.update(dict.fromkeys(run.group(5), "f"))
    run.fates.update(dict.fromkeys(run.group(6), "o"))
    run.fates.update(dict.fromkeys(run.group(8), "D"))
    run.validate_fates.update({0: "V", 1: "V", 2: "D"})
    run.open(*run.group(8), VALIDATE | 2)
    return run


@pytest.fixture
def largest_file() -> Callable[[int], AbstractContextManager[None]]:
    """No file may grow beyond this: what a full disk looks like to a writer."""

    @contextmanager
    def limited(nbytes: int) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited
