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

    def make(made: Any, times: Any, given: Any, **named: Any) -> Checked:
        return Checked(made, times, given, **{"actors": 1, "steps": 5, **named})

    return make
