"""Fixtures of the monitor's tests; what they make stands in `monitor_scene`."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import Forked

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "run"))

from monitor_scene import Scene


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory with a name that is short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="brl"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def scene(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_dir))
    watched = Scene(short_dir)
    yield watched
    watched.close()


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `busrl VERB ...` as a process of its own, with `cold` one that imports all itself; ends what is left after
    the test."""
    children: list[subprocess.Popen[str]] = []

    def start(*arguments: str, cold: bool = False, **options: Any) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "stdin": subprocess.DEVNULL}
        command = [sys.executable, "-m", "busrl.cli", *arguments] if cold else ["busrl", *arguments]
        children.append((subprocess.Popen if cold else Forked)(command, **{**pipes, **options}))
        return children[-1]

    yield start
    for child in children:
        if child.poll() is None:
            child.kill()
        child.communicate()


@pytest.fixture(scope="module")
def quickstart() -> None:
    """The quickstart's model, which a real run needs; made once and cached."""
    from busrl.quickstart import ensure

    ensure("tiny:sort")
