"""The learning rate has no default: what is advised, and what is warned of by number."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from busrl.data import pretrained
from busrl.errors import TopologyError
from busrl.preflight.explain import report
from busrl.preflight.load import load
from busrl.topology import Topology

Loaded = Callable[..., Topology]
HALF_A_BILLION = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}


def give_shape(here: Path, shape: dict[str, object]) -> None:
    (here / "model" / "config.json").write_text(json.dumps(shape))


def test_parameters_are_counted_from_the_widths_of_published_models() -> None:
    gpt2 = {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    seven = {**HALF_A_BILLION, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
             "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
             "tie_word_embeddings": False}
    assert pretrained.estimate(HALF_A_BILLION) == pytest.approx(494e6, rel=0.01)
    assert pretrained.estimate(seven) == pytest.approx(7.62e9, rel=0.01)
    assert pretrained.estimate(gpt2) == pytest.approx(124e6, rel=0.02)
    assert pretrained.estimate({"text_config": HALF_A_BILLION}) == pretrained.estimate(HALF_A_BILLION)
    assert pretrained.estimate({}) == 0


@pytest.mark.parametrize(("rank", "advice"), [
    (0, "for all weights of 494 M parameters 3e-06 is usual"),
    (8, "for a LoRA adapter of 494 M parameters 3e-05 is usual"),
])
def test_a_missing_learning_rate_is_asked_for_with_advice(
    here: Path, rank: int, advice: str
) -> None:
    give_shape(here, HALF_A_BILLION)
    (here / "without.toml").write_text('[model]\npath = "model"\n[data]\ntrain = "train.jsonl"\n')
    with pytest.raises(TopologyError) as refused:
        load(here / "without.toml", [f"lora.rank={rank}"])
    (problem,) = refused.value.problems
    assert "learner.lr is missing; add lr = ... to [learner]: " in str(problem) and advice in str(problem)


def test_a_far_learning_rate_is_warned_of_by_number(here: Path, loaded: Loaded) -> None:
    give_shape(here, HALF_A_BILLION)
    topology = loaded("", "learner.lr=3e-4")
    (warning,) = topology.derived.warnings
    assert "learner.lr = 0.0003: 100 times what is usual for all weights of 494 M parameters" in warning
    assert warning in report(topology)
    assert not loaded("", "learner.lr=3e-6").derived.warnings
    assert not loaded("", "learner.lr=3e-4", "lora.rank=8").derived.warnings
    (warning,) = loaded("", "learner.lr=3e-3", "lora.rank=8").derived.warnings
    assert "100 times what is usual for a LoRA adapter" in warning


def test_a_toy_may_have_any_learning_rate(loaded: Loaded) -> None:
    assert not loaded("", "learner.lr=1").derived.warnings


@pytest.mark.parametrize(("rate", "rank", "expected"), [
    ("3e-5", 0, "that is a rate for a LoRA adapter"), ("3e-6", 8, "that is a rate for all weights"),
    ("3e-6", 0, ""), ("3e-5", 8, ""), ("1e-9", 8, ""), ("1e-2", 0, ""),
])
def test_a_rate_of_the_other_kind_of_training_is_hinted_at(
    here: Path, loaded: Loaded, rate: str, rank: int, expected: str
) -> None:
    give_shape(here, HALF_A_BILLION)
    page = report(loaded("", f"learner.lr={rate}", f"lora.rank={rank}"))
    assert ("that is a rate for" in page) == bool(expected) and expected in page
