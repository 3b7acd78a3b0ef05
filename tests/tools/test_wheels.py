"""The tool that builds a release: which interpreters it takes, which tests it gives them, what its sdist holds."""

from __future__ import annotations

import json
import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from tools import wheels

ROOT = Path(__file__).resolve().parents[2]


def python(folder: Path, name: str, implementation: str, version: list[int], free_threaded: bool = False) -> Path:
    """A program that answers the tool's question as this Python would."""
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{json.dumps([implementation, version, free_threaded])}'\n")
    path.chmod(0o755)
    return path


def test_the_newest_cpython_of_each_version_from_3_10_is_taken(tmp_path: Path) -> None:
    older = python(tmp_path, "a", "CPython", [3, 12, 1])
    newer = python(tmp_path, "b", "CPython", [3, 12, 9])
    lowest = python(tmp_path, "c", "CPython", [3, 10, 2])
    others = [
        python(tmp_path, "d", "CPython", [3, 9, 18]), python(tmp_path, "e", "PyPy", [3, 11, 1]),
        python(tmp_path, "f", "CPython", [3, 13, 0], free_threaded=True), tmp_path / "nothing",
    ]
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 127\n")
    broken.chmod(0o755)
    found = wheels.interpreters([older, newer, lowest, *others, broken])
    assert [(one.tag, one.path) for one in found] == [("cp310", lowest), ("cp312", newer)]


def test_a_failed_step_shows_its_command_and_its_last_words() -> None:
    with pytest.raises(wheels.Failed, match=r"(?s)sh -c .*exit code 3\n.*it hurts"):
        wheels.run("sh", "-c", "echo it hurts; exit 3")


def test_a_python_without_torch_gets_no_test_that_needs_it() -> None:
    files = wheels.without_torch(ROOT, wheels.FOLDERS)
    assert "tests/ring/test_ring_state.py" in files and "tests/ring/test_ring_tensors.py" not in files
    assert len(files) > 60
    names = {Path(file).parts[1] for file in files}
    assert names == set(wheels.FOLDERS)


def test_every_folder_of_the_repository_is_in_the_sdist() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("the list of files is git's")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folders = {line.partition("/")[0] for line in listed.splitlines() if "/" in line and not line.startswith(".")}
    grafted = set(re.findall(r"^graft (\S+)", (ROOT / "MANIFEST.in").read_text(), re.MULTILINE))
    assert folders - {"busrl"} == grafted


def test_a_wheel_that_names_a_file_of_the_repository_is_refused(tmp_path: Path) -> None:
    made = tmp_path / "busrl-1-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("busrl/configs/a.toml", "# docs/x.md; configs/a.toml, /my/docs/y.md\nf = '../z.py:f'\n")
        archive.writestr("busrl/configs/b.toml", "# https://site/docs/x/, configs/c.toml\n")
        archive.writestr("busrl/a.py", "# examples/z.py\n")
        archive.writestr("busrl-1.dist-info/METADATA", "examples/z.py [a](docs/x.md) [b](https://site/x) [c](#c)\n")
    assert wheels.unreachable(made) == [
        "busrl/configs/a.toml: docs/x.md", "busrl/configs/a.toml: ../z.py", "busrl/configs/b.toml: configs/c.toml",
        "busrl-1.dist-info/METADATA: docs/x.md",
    ]
