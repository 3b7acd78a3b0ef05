"""`busrl logs`: one log as it stands, all of them by name, and what is written while the run lives."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from commands import Forked

from busrl.paths import RunPaths
from busrl.ring.locks import OfdLock

LIMIT_S = 60.0


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    paths = RunPaths.of(tmp_path / "run")
    paths.logs.mkdir(parents=True)
    paths.log("rollout/0").write_bytes(b"one\ntwo \xff\nhalf")
    paths.log("bus").write_bytes(b"hello\n")
    return paths


def logs(*arguments: object) -> subprocess.Popen[bytes]:
    return Forked(["busrl", "logs", *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_one_log_is_printed_as_it_stands_and_all_with_their_names(run: RunPaths) -> None:
    assert logs(run.root, "rollout/0").communicate(timeout=LIMIT_S)[0] == b"one\ntwo \xff\nhalf\n"
    out, _ = logs(run.root).communicate(timeout=LIMIT_S)
    assert out.splitlines() == [
        b"bus       | hello", b"rollout-0 | one", b"rollout-0 | two \xff", b"rollout-0 | half"
    ]


def test_an_unknown_log_name_or_directory_is_refused_with_existing_names(run: RunPaths) -> None:
    child = logs(run.root, "learner")
    _, problem = child.communicate(timeout=LIMIT_S)
    assert child.returncode == 2 and b"there are bus, rollout-0" in problem
    child = logs(run.root / "nowhere")
    _, problem = child.communicate(timeout=LIMIT_S)
    assert child.returncode == 2 and b"no logs there" in problem


def test_a_log_is_followed_over_new_lines_and_files_until_the_end(run: RunPaths) -> None:
    lock = OfdLock(str(run.lock("run")))
    assert lock.try_acquire()
    child = logs(run.root, "-f")
    assert child.stdout is not None
    assert [child.stdout.readline() for _ in range(3)][-1] == b"rollout-0 | two \xff\n"
    with open(run.log("rollout/0"), "ab") as file:
        file.write(b" and whole\n")
    assert child.stdout.readline() == b"rollout-0 | half and whole\n"
    run.log("relay").write_bytes(b"late\nlast")
    assert child.stdout.readline() == b"relay     | late\n"
    lock.release()
    out, problem = child.communicate(timeout=LIMIT_S)
    assert (child.returncode, out) == (0, b"relay     | last\n"), problem
