"""What the examples' tests need: the harness of real runs, the quickstart's model, and the JavaScript packages."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "run"))
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def quickstart() -> None:
    from busrl.quickstart import ensure

    ensure("tiny:sort")


@pytest.fixture(scope="session")
def javascript() -> Path:
    """A copy of the examples with their packages installed; made once per content, in the user's cache."""
    from outside import EXAMPLES, install

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
