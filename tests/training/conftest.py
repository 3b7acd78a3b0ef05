"""Fixtures of training: the lab's models, and what tests compare with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helpers beside the tests

from lab import Lab, behaved, distance, plain_score


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def apart() -> Any:
    """`distance`, as a fixture."""
    return distance


@pytest.fixture(scope="session")
def scored() -> Any:
    """`plain_score`, likewise."""
    return plain_score


@pytest.fixture(scope="session")
def with_logprobs() -> Any:
    return behaved
