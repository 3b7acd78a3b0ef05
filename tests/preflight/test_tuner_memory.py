"""Sums of memory and disk of a service that trains all weights, and the refusal of what does not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from busrl.errors import DiskFull, UserError
from busrl.preflight import explain, tuner_memory
from busrl.preflight.load import load
from busrl.topology import Topology

CONFIG = {  # Qwen2.5-0.5B
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True,
    "architectures": ["TestLM"], "max_position_embeddings": 8192,
}
COUNT = 0.494e9
GIB = 1 << 30


def topology(here: Path, *settings: str) -> Topology:
    (here / "model" / "config.json").write_text(json.dumps(CONFIG))
    (here / "service.toml").write_text(
        '[run]\nname = "s"\n[model]\npath = "model"\n[tinker]\nweights = "full"\n[[process]]\nrole = "tinker"\n')
    return load(here / "service.toml", ["model.device=cpu", *settings])


def test_the_sum_has_all_weights_gradient_moments_and_the_engine(here: Path) -> None:
    for dtype, tuner, engine in (("float32", 16, 4), ("bfloat16", 18, 2)):
        t = topology(here, f"model.dtype={dtype}")
        parts = tuner_memory.of_tuner(t, tuner_memory.work_of(t))
        size = parts["weights"] + parts["gradient"] + parts["optimiser (adamw)"]
        assert size == pytest.approx(tuner * COUNT, rel=0.01)
        assert parts["weights of the engines"] == pytest.approx(engine * COUNT, rel=0.01)
        assert tuner_memory.on_disk(t) == pytest.approx((36 + 2 * engine) * COUNT, rel=0.01)


def test_check_prints_the_sums_of_all_weights_alone(here: Path) -> None:
    whole = explain.report(topology(here))
    assert "tuner memory, all weights (cpu)" in whole and "optimiser (adamw) 3.68 GiB" in whole
    assert "learner memory" not in whole
    assert "tuner memory" not in explain.report(topology(here, "tinker.weights=adapters"))


def test_what_has_no_room_is_refused_with_settings_that_lower_it(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    t = topology(here, "tinker.context=512")
    monkeypatch.setattr(tuner_memory, "memory_of", lambda kind: 6 * GIB)
    with pytest.raises(UserError) as refusal:
        tuner_memory.require(t, here)
    for words in ('tinker.weights = "full"', "has 6.00 GiB", 'model.dtype = "bfloat16" (then',
                  "tinker.turn_tokens = 512", 'tinker.weights = "adapters"'):
        assert words in str(refusal.value)
    monkeypatch.setattr(tuner_memory, "memory_of", lambda kind: 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=GIB))
    with pytest.raises(DiskFull, match="3 states and 2 snapshots"):
        tuner_memory.require(t, here / "run")
