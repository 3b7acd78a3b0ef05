"""What tests of routes need: helpers beside them, the harness of real runs, a small topology on disk."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "run"))
sys.path.insert(0, str(Path(__file__).parent))

from topologies import here, loaded

__all__ = ["here", "loaded"]
