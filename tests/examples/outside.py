"""Processes that a run knows nothing of: the examples, installed and started beside it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def install(files: list[Path], folder: Path, ready: Path) -> None:
    """Copy, `npm install`, and take the final name; skips if the packages can not be had."""
    for path in files:
        target = folder / path.relative_to(EXAMPLES)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
    try:
        done = subprocess.run(["npm", "install"], cwd=folder / "js-reward", capture_output=True, text=True, timeout=120)
        problem = "" if done.returncode == 0 else done.stderr.strip()[-400:]
    except subprocess.TimeoutExpired:
        problem = "no answer within 120 s"
    if problem:
        shutil.rmtree(folder)
        pytest.skip(f"npm can not install the packages of the examples: {problem}")
    try:
        folder.rename(ready)
    except OSError:  # another session was faster
        shutil.rmtree(folder)


@contextmanager
def workers(*commands: list[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that the run knows nothing of; whatever happens, they are ended."""
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for command in commands
    ]
    try:
        yield started
    finally:
        for child in started:
            if child.poll() is None:
                child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()


def words_of(child: subprocess.Popen[str], limit_s: float = 20.0) -> str:
    """What a worker printed until its own end, which must be an orderly one."""
    text, _ = child.communicate(timeout=limit_s)
    assert child.returncode == 0, text
    return text


def node(javascript: Path, one: str) -> list[str]:
    """The command of a JavaScript example."""
    return ["node", str(javascript / f"js-{one}" / f"{one}.mjs")]


def finished(text: str) -> int:
    """The number of tasks that a worker says it finished."""
    match = re.search(r": (\d+) (tasks finished|answers judged); leaving: STOP", text)
    assert match, text
    return int(match[1])
