"""An installation that cannot work says so in one sentence: compiled parts, Python, torch, two busrl on one path."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from busrl.preflight import doctor

ROOT = Path(__file__).resolve().parents[2]


def python(*arguments: str, path: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{path}:{ROOT}"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )


def _removed(package: Path) -> None:
    # An editable installation finds the parts of the clone for any `busrl` that lacks its own.
    (package.parent / "sitecustomize.py").write_text(
        "import sys\nsys.meta_path = [finder for finder in sys.meta_path if 'editable' not in finder.__module__]\n"
    )


def _of_another_platform(package: Path) -> None:
    for path in (ROOT / "busrl").glob("_*.so"):
        (package / path.name).write_bytes(b"\x7fELF of another machine")


def _stale(package: Path) -> None:
    for name in ("_ring", "_wire", "_blocks", "_fields"):
        (package / f"{name}.py").write_text("")


@pytest.mark.parametrize("spoil", [_removed, _of_another_platform, _stale], ids=["removed", "platform", "stale"])
def test_compiled_parts_that_do_not_fit_are_one_sentence(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    shutil.copytree(ROOT / "busrl", tmp_path / "busrl", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    spoil(tmp_path / "busrl")
    done = python("-m", "busrl.cli", "check", str(ROOT / "configs/scripted.toml"), path=tmp_path, cwd=tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert f"{tmp_path}/busrl: its compiled parts are missing, or of another" in done.stderr
    assert f"{sys.executable} -m pip install --force-reinstall" in done.stderr


def test_a_python_below_3_10_is_told_which_one_to_use(tmp_path: Path) -> None:
    done = python("-c", "import sys; sys.version_info = (3, 9, 18); import busrl.cli", path=ROOT, cwd=tmp_path)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "busrl needs Python 3.10 or newer" in done.stderr


@pytest.mark.parametrize("version", ["2.5.1", "3.0.0"])
def test_a_torch_of_another_major_version_is_refused_before_a_start(tmp_path: Path, version: str) -> None:
    (info := tmp_path / f"torch-{version}.dist-info").mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    done = python("-m", "busrl.cli", "check", str(ROOT / "configs/scripted.toml"), path=tmp_path, cwd=tmp_path)
    assert done.returncode == 2 and f"has torch {version}, and learner needs 2.6 or newer, below 3" in done.stderr
    assert done.stderr.endswith("-m pip install 'torch>=2.6,<3'\n")


def test_two_busrl_on_one_path_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "busrl").mkdir()
    (tmp_path / "busrl/__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    line = next(line for line in doctor.LOOKS[0]() if str(tmp_path) in line.found)
    assert "comes before busrl in" in line.found and "PYTHONPATH" in line.remedy
