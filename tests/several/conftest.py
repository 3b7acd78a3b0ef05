"""Makes the helpers beside the tests importable, and a small topology on disk (`topologies`)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from tagged import read
from topologies import here, loaded, refused

__all__ = ["here", "loaded", "read", "refused"]
