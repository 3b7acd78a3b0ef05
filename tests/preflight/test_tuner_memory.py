"""Sums of memory and disk of a service, of adapters and of all weights, and the refusal of what does not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from busrl.errors import DiskFull, TopologyError, UserError
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
    adapters = explain.report(topology(here, "tinker.weights=adapters", "tinker.max_rank=8"))
    assert "tuner memory, adapters of rank 8 (cpu)" in adapters and "unknown" not in adapters
    assert "optimiser" not in adapters and "learner memory" not in adapters


def test_adapters_are_summed_beside_one_base_as_far_as_memory_allows(here: Path) -> None:
    def parts(*settings: str) -> dict[str, int]:
        t = topology(here, "tinker.weights=adapters", "tinker.max_rank=16", *settings)
        return tuner_memory.of_tuner(t, tuner_memory.work_of(t))

    sizes = [(896 + 896) * 2 + (896 + 128) * 2 + (896 + 4864) * 3]  # q, o; k, v; gate, up, down
    one = 16 * 16 * 24 * sum(sizes)  # four float32 vectors of rank 16 in 24 layers; the head is tied
    few, many = parts("tinker.models=3"), parts()
    assert few["weights"] == few["weights of the engines"] == pytest.approx(4 * COUNT, rel=0.01)
    assert few["an adapter"] == one and few[tuner_memory.OTHERS] == 2 * one
    assert many[tuner_memory.OTHERS] == (8192 << 20) - one, "tinker.resident_mb bounds them together"


def test_adapters_that_may_wait_on_the_disk_are_no_reason_to_refuse(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    t = topology(here, "tinker.weights=adapters", "tinker.max_rank=16", "tinker.turn_tokens=512", "tinker.context=512")
    monkeypatch.setattr(tuner_memory, "memory_of", lambda kind: 8 * GIB)
    tuner_memory.require(t, here)
    assert "set tinker.resident_mb = " in "\n".join(tuner_memory.lines(t))
    monkeypatch.setattr(tuner_memory, "memory_of", lambda kind: 3 * GIB)
    with pytest.raises(UserError, match=r"adapters.*has 3\.00 GiB.*a lower tinker\.max_rank"):
        tuner_memory.require(t, here)


def test_a_context_beyond_the_positions_of_the_model_is_refused(here: Path) -> None:
    with pytest.raises(TopologyError, match=r"tinker\.context = 9000: .*9000 tokens.* takes 8192; set it to 8192"):
        topology(here, "tinker.context=9000")
    with pytest.raises(TopologyError, match=r"tinker\.context = 2048: .* takes 128; set it to 128"):
        topology(here, "model.path=tiny:sort")  # before it is made
    assert topology(here, "tinker.context=8192").longest == 8192


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
