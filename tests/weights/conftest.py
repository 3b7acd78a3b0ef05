"""Processes of the weight tests, forked from one that has torch loaded, and ended with their test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forks import forks

sys.path[:0] = [str(Path(__file__).parent)]
import members  # noqa: E402


@pytest.fixture
def start() -> Iterator[Callable[..., members.Child]]:
    """Starts `members.engine` or `members.learner` as a process of its own."""
    started: list[members.Child] = []

    def start_child(target: Callable[..., None], *arguments: Any) -> members.Child:
        here, there = forks.Pipe()
        process = forks.Process(target=target, args=(there, *arguments), daemon=True)
        process.start()
        there.close()
        started.append(members.Child(process, here))
        return started[-1]

    yield start_child
    for child in started:
        child.end()
