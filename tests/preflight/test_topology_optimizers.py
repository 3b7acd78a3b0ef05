"""The keys of the optimiser: what is refused before anything starts, and what a run records."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from busrl.topology import Topology

Loaded = Callable[..., Topology]
Refused = Callable[..., list[str]]
OWN = """
import torch

class Own(torch.optim.SGD):
    pass
"""


def test_a_class_of_the_users_is_tried_with_its_options(loaded: Loaded, refused: Refused, here: Path) -> None:
    (here / "own.py").write_text(OWN)
    text = '[learner]\noptimizer = "own.py:Own"\n[learner.options]\nmomentum = {}\n'
    learner = loaded(text.format("0.9")).learner
    assert learner.optimizer == f"{here}/own.py:Own" and learner.options == {"momentum": 0.9}
    (problem,) = refused(text.format("-1.0"))
    assert "learner.optimizer" in problem and "Invalid momentum value: -1.0" in problem and "t.toml:" in problem


def test_what_a_run_records_has_the_options(loaded: Loaded) -> None:
    topology = loaded('[learner]\noptimizer = "adafactor"\noptions = { d = 2.0, eps = [1e-3, 1e-2] }\n')
    assert Topology.from_json(topology.to_json()).learner.options == {"d": 2.0, "eps": [1e-3, 1e-2]}


@pytest.mark.parametrize(("text", "expected"), [
    ('optimizer = "adamw16bit"', "did you mean \"adamw8bit\"?"),
    ("options = { momentum = 0.9 }", "adamw takes none: its settings are learner.betas, eps and weight_decay"),
    ('optimizer = "adafactor"\noptions = { when = 2020-01-01 }', "expected a table of strings, finite numbers"),
])
def test_settings_that_cannot_be_used_are_refused(refused: Refused, text: str, expected: str) -> None:
    (problem,) = refused(f"[learner]\n{text}\n")
    assert expected in problem and "t.toml:" in problem


def test_settings_of_adamw_that_another_optimiser_does_not_read_are_told(loaded: Loaded) -> None:
    text = '[learner]\noptimizer = "adafactor"\nbetas = [0.9, 0.95]\nweight_decay = 0.1\n'
    (warning,) = loaded(text).derived.warnings
    assert "it is AdamW's, and adafactor does not read it" in warning and "learner.betas" in warning


def test_8_bit_states_without_their_package_are_refused_with_the_remedy(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name))
    (problem,) = refused('[learner]\noptimizer = "adamw8bit"\n')
    assert "busrl[adam8]" in problem and "learner.optimizer" in problem
