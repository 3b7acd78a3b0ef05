"""What tests of several models need: helpers beside them, the harness of real runs, a small topology on disk, and the
models of examples/several, made once."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "run"))
sys.path.insert(0, str(Path(__file__).parent))

from tagged import read
from topologies import here, loaded, refused

__all__ = ["here", "loaded", "read", "refused"]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "several"


@pytest.fixture(scope="session")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of examples/several with its models, which are kept in the user's cache for as long as their maker stays
    as it is."""
    maker = EXAMPLES / "make_several.py"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "busrl"
    made = cache / f"several-{hashlib.sha256(maker.read_bytes()).hexdigest()[:12]}"
    if not made.is_dir():
        begun = made.with_name(f".{made.name}.{os.getpid()}")
        subprocess.run([sys.executable, maker, begun], check=True, timeout=600)
        try:
            begun.rename(made)
        except OSError:  # another process was faster
            shutil.rmtree(begun)
    folder = tmp_path_factory.mktemp("several") / "several"
    shutil.copytree(EXAMPLES, folder, ignore=shutil.ignore_patterns("made", "__pycache__"))
    (folder / "made").symlink_to(made)
    return folder
