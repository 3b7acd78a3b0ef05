"""Entries with a Python of their own: what is refused before anything starts, and a run whose engine is in another."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import busrl
from busrl.errors import UserError
from busrl.launcher import pythons
from busrl.preflight.load import load

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that sees the packages of this one, and says so when a process of a run starts in it."""
    folder = tmp_path_factory.mktemp("environment") / "other"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    packages = next(folder.glob("lib/python3*/site-packages"))
    (packages / "shared.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n")
    (packages / "sitecustomize.py").write_text(
        "import os, sys\nif 'BUSRL_NAME' in os.environ:\n"
        "  open(os.path.join(os.path.dirname(sys.prefix), 'seen'), 'a').write(os.environ['BUSRL_NAME'] + '\\n')\n"
    )
    return folder


def scripted(python: Path | str, *more: str):  # type: ignore[no-untyped-def]
    return load(ROOT / "configs/scripted.toml", [f"process.rollout.python={python}", *more])


def test_a_folder_equals_its_interpreter_and_a_check_reports_its_contents(environment: Path) -> None:
    (line,), (same,) = (
        pythons.lines(t, pythons.versions_of(t)) for t in (scripted(environment), scripted(environment / "bin/python"))
    )
    assert line == same
    assert f"{environment}/bin/python: Python 3." in line and f"busrl {busrl.__version__}" in line and "ring 3." in line
    pythons.require(scripted(environment))


def test_another_busrl_or_ring_is_refused_with_both_values(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pythons, "LAYOUT", (9, 9))
    with pytest.raises(UserError, match=r"other/bin/python.*ring 3\.\d+; this is busrl .* with ring 9\.9: .*pip"):
        pythons.require(scripted(environment))
    monkeypatch.undo()
    monkeypatch.setattr(busrl, "__version__", "9.9")
    with pytest.raises(UserError, match=r"busrl 0\.\S+ with ring .*; this is busrl 9\.9"):
        pythons.require(scripted(environment))


def test_a_python_without_busrl_or_without_a_package_is_refused(environment: Path, tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(UserError, match=r"No module named 'busrl'; this is busrl"):
        pythons.require(scripted(bare))
    (tmp_path / "silent").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "silent").chmod(0o755)
    with pytest.raises(UserError, match="cannot be asked for its busrl"):
        pythons.require(scripted(tmp_path / "silent"))
    with pytest.raises(UserError, match="no program that can be started"):
        scripted(tmp_path / "gone")


@pytest.mark.slow
def test_a_run_whose_engine_has_another_python_ends_well(environment: Path, tmp_path: Path) -> None:
    words = ["launch", str(ROOT / "configs/scripted.toml"), "--run-dir", str(tmp_path / "run")]
    words += ["--set", f"process.rollout.python={environment}", "--set", "run.max_steps=3"]
    done = subprocess.run([sys.executable, "-m", "busrl.cli", *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = set((environment.parent / "seen").read_text().split())
    assert seen and {name.partition("/")[0] for name in seen} == {"rollout"}
    assert json.loads((tmp_path / "run/summary.json").read_text())["steps"] == 3
