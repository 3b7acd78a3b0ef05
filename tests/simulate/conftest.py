"""Simulated runs that check themselves; the harness of real runs is borrowed from tests/run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "run")]


@pytest.fixture(scope="session")
def checked() -> Callable[..., Any]:
    """Makes a `Checked` world: topology, times, answers, and what `World` takes besides."""
    from worlds import Checked

    def make(loaded: Any, times: Any, drawn: Any, **more: Any) -> Checked:
        return Checked(loaded, times, drawn, **{"actors": 1, "steps": 5, **more})

    return make
