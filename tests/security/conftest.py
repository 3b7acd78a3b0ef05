"""The fixtures of this folder; `tests/fuzz` uses them too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fixtures import broker, key_directory, short_dir  # noqa: F401
