"""Every optional part can be deleted: what does not ask for it runs as before, and what asks for it is told which part.

Each test works on a copy of busrl (sources and compiled modules) without the folder or module of a part.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from syntax import OPTIONAL, REPOSITORY

QUICKSTART = (REPOSITORY / "configs" / "quickstart.toml").read_text()
STEPS = 5

# part -> a topology that asks for it: what is written below that of the quickstart, and overrides.
ASKING: dict[str, tuple[str, tuple[str, ...]]] = {
    "agents": ('[[process]]\nrole = "agent"\nfunction = "mine.py:play"', ()),
    "service": ('[[process]]\nrole = "tinker"', ()),
    "hosts": ('[[process]]\nrole = "rollout"\nhosts = ["b"]', ()),
    "ranks": ('[[process]]\nrole = "learner"\nranks = 2', ()),
    "observe": ("", ('sinks.to=["mine.py:Sink"]',)),
    "routes": ("", ("learner.routes=replay",)),
    "several": ("", ('model.seats=["first", "second"]',)),
    "teachers": ("[[learner.teacher]]\nposted = true", ()),
    "predict": ("", ("scheduler.policy=sjf",)),
    "rewards/box": ('[[reward.part]]\nkind = "code"', ()),
    "rewards/judge": ('[[reward.part]]\nkind = "judge"', ()),
    "rewards/model": ('[[reward.part]]\nkind = "model"', ()),
    "engines/vllm": ("", ("process.rollout.engine=vllm",)),
    "engines/openai": ("", ("process.rollout.engine=openai",)),
    "weights/broadcast": ("", ("weights.transport=broadcast",)),
    "weights/one_copy": ("", ("weights.transport=cuda_ipc",)),
    "weights/folders": ("", ("weights.transport=checkpoint_restart",)),
}
COMMANDS = {
    "ledger/audit": ("audit", "run"), "observe": ("monitor",), "simulate": ("simulate", "quickstart.toml"),
    "service": ("tinker-key", "ann"),
}


def copy_without(folder: Path, *parts: str) -> Path:
    shutil.copytree(REPOSITORY / "busrl", folder / "busrl")
    for part in parts:
        place = folder / "busrl" / part
        shutil.rmtree(place) if place.is_dir() else place.with_suffix(".py").unlink()
    (folder / "quickstart.toml").write_text(QUICKSTART)
    return folder


def python(folder: Path, *arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True,
        text=True, timeout=timeout_s, check=False,
    )


def busrl(folder: Path, *arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    return python(folder, "-m", "busrl.cli", *arguments, timeout_s=timeout_s)


def trains(folder: Path) -> None:
    """Five steps of the quickstart, in the copy."""
    ended = busrl(
        folder, "launch", "quickstart.toml", "--run-dir", "run", "--set", f"run.max_steps={STEPS}", timeout_s=300.0
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len((folder / "run" / "metrics.jsonl").read_text().splitlines()) == STEPS


def test_the_table_asks_for_every_part_and_a_command_has_the_rest() -> None:
    assert set(ASKING) | set(COMMANDS) == set(OPTIONAL)


@pytest.mark.long
@pytest.mark.parametrize("part", OPTIONAL)
def test_check_passes_without(part: str, tmp_path: Path) -> None:
    folder = copy_without(tmp_path, part)
    checked = busrl(folder, "check", "quickstart.toml")
    assert checked.returncode == 0 and "quickstart.toml: ok" in checked.stdout, checked.stdout + checked.stderr


def test_what_asks_for_a_part_is_told_which_one_is_missing(tmp_path: Path) -> None:
    folder = copy_without(tmp_path, *OPTIONAL)
    code = """
import sys
from pathlib import Path
from busrl.errors import UserError
from busrl.preflight.load import load
from test_table import ASKING
for part, (text, overrides) in ASKING.items():
    path = Path("asking.toml")
    path.write_text(Path("quickstart.toml").read_text() + "\\n" + text)
    try:
        load(path, overrides)
    except UserError as error:
        assert f"need busrl/{part}, which is not part of this installation" in str(error), (part, str(error))
        assert "\\n" not in str(error)
    else:
        raise AssertionError(f"{part} was not missed")
"""
    (folder / "test_table.py").write_text(f"ASKING = {ASKING!r}\n")
    told = python(folder, "-c", code)
    assert told.returncode == 0, told.stderr
    for part in COMMANDS:
        told = busrl(folder, *COMMANDS[part])
        assert told.returncode == 2 and f"need busrl/{part}," in told.stderr, told.stderr


@pytest.mark.long
def test_the_quickstart_trains_without_all_of_them(tmp_path: Path, quickstart: None) -> None:
    trains(copy_without(tmp_path, *OPTIONAL))


@pytest.mark.slow
@pytest.mark.parametrize("part", OPTIONAL)
def test_the_quickstart_trains_without(part: str, tmp_path: Path, quickstart: None) -> None:
    trains(copy_without(tmp_path, part))
