"""A run directory that belongs to somebody else: who, and what to do, before anything is made in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from busrl.cli.run import stop
from busrl.errors import UserError
from busrl.launcher.rundir import belongs_to_another, open_run
from busrl.preflight.load import load

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of this user, who becomes another one."""
    root = tmp_path / "run"
    root.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    return root


def test_a_start_in_it_is_refused_with_the_owners_name(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(
        UserError, match=r"run: it belongs to .*user \d+, not to you \(.*65534\); give a directory of your own"
    ):
        open_run(theirs, load(ROOT / "configs" / "quickstart.toml"))
    assert list(theirs.iterdir()) == [], "nothing was made in it"


def test_a_directory_that_may_be_written_to_is_used_whoever_owns_it(theirs: Path) -> None:
    assert "not to you" in belongs_to_another(theirs) and belongs_to_another(theirs / "nowhere") == ""


def test_stopping_it_names_its_owner(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, number: signal.Signals) -> None:
        raise PermissionError(1, "Operation not permitted")

    code = (
        "import os, sys, time\nfrom busrl.ring import OfdLock\nlock = OfdLock(sys.argv[1])\nlock.acquire(5)\n"
        "print('held', flush=True)\ntime.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(theirs / "run.lock")], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"held\n"
        (theirs / "run.json").write_text(json.dumps({"launch_pid": child.pid}))
        monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
        with pytest.raises(UserError, match=rf"only they \(or root\) can stop process {child.pid}"):
            stop(Namespace(run_dir=theirs, wait=1.0, now=False))
    finally:
        child.kill()
        child.communicate()
