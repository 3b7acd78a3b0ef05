"""What the examples' tests need: the harness of real runs, the quickstart's model, and the JavaScript packages."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(ROOT / "tests" / "run"))
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def quickstart() -> None:
    from busrl.quickstart import ensure

    ensure("tiny:sort")


@pytest.fixture(scope="session")
def javascript() -> Path:
    """A copy of the examples with their packages installed; made once per content, in the user's cache."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed: the JavaScript examples can not run")
    files = [EXAMPLES / name for name in ("package.json", ".npmrc")]
    files += sorted(path for path in EXAMPLES.glob("js-*/*") if path.is_file())
    content = hashlib.sha256(b"\0".join(str(path).encode() + path.read_bytes() for path in files)).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "busrl"
    ready = cache / f"examples-{content}"
    if not ready.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        install(files, Path(tempfile.mkdtemp(prefix="examples.", dir=cache)), ready)
    return ready


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
