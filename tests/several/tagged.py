"""Topologies of several models, made of rows: a head, models by tag, and an agent that plays episodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from busrl.preflight.load import load
from busrl.topology import Topology

HEAD = """\
[run]
max_steps = 9
[data]
train = "tiny:sort"
[groups]
size = 4
[learner]
lr = 1e-4
[learner.trigger]
n_min = 4
[agents]
context = 96
"""
SOLVER = '[[model]]\ntag = "solver"\npath = "tiny:sort"\n'
JUDGE = '[[model]]\ntag = "judge"\npath = "tiny:sort"\n'
SERVED = JUDGE + "trained = false\n"
AGENT = '[[process]]\nrole = "agent"\nfunction = "episode.py:episode"\n'
Read = Callable[..., Topology]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Load a head and rows, after overrides."""
    (tmp_path / "episode.py").write_text("async def episode(task, llm):\n    return 1.0\n")

    def run(text: str, *overrides: str, head: str = HEAD) -> Topology:
        (tmp_path / "t.toml").write_text(head + text)
        return load(tmp_path / "t.toml", overrides)

    return run
