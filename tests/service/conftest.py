"""The harness of real runs, and the quickstart's model, for tests of a whole service."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "run"))
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def quickstart() -> None:
    from busrl.quickstart import ensure

    ensure("tiny:sort")
