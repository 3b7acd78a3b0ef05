"""Real runs of pages are started as those of tests/run; they need the quickstart's model once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "run")]


@pytest.fixture(scope="session")
def quickstart() -> None:
    from busrl.quickstart import ensure

    ensure("tiny:sort")
