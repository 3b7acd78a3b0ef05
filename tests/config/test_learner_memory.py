"""What the learner needs of memory: the sum of `busrl check`, its parts, the refusal with the keys that lower it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from busrl.config import Topology, explain, memory
from busrl.config.memory import Widths, Work, learner_sum
from busrl.errors import UserError

Loaded = Callable[..., Topology]
HALF_BILLION = {  # Qwen2.5-0.5B
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True,
}
SEVEN_BILLION = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064, "tie_word_embeddings": False,
}
GIB = 1 << 30


def test_parameters_are_those_of_the_models() -> None:
    assert Widths.of(HALF_BILLION).parameters == pytest.approx(0.494e9, rel=0.01)
    assert Widths.of(SEVEN_BILLION).parameters == pytest.approx(7.616e9, rel=0.01)
    wide = {  # Qwen3-0.6B, whose heads together are twice as wide as the model
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
        "tie_word_embeddings": True,
    }
    assert Widths.of(wide).parameters == pytest.approx(0.596e9, rel=0.01)


def test_weights_gradient_and_optimiser_are_16_bytes_a_parameter_and_18_in_bfloat16() -> None:
    size = Widths.of(HALF_BILLION).parameters
    for dtype, each in (("float32", 16), ("bfloat16", 18)):
        parts = learner_sum(HALF_BILLION, Work(4096, dtype))
        assert parts["weights"] + parts["gradient"] + parts["optimiser (AdamW)"] == each * size


def test_an_adapter_leaves_its_base_in_its_own_type_and_trains_little() -> None:
    parts = learner_sum(SEVEN_BILLION, Work(4096, "bfloat16", lora_rank=16))
    assert parts["weights"] == pytest.approx(2 * 7.616e9, rel=0.03)
    assert parts["optimiser (AdamW)"] < GIB and parts["head and embedding in backward"] == 0


def test_layers_computed_again_keep_a_twelfth_or_less() -> None:
    for config in (HALF_BILLION, SEVEN_BILLION):
        for dtype in ("float32", "bfloat16"):
            none, again = (
                sum(size for name, size in learner_sum(config, Work(16_384, dtype, way)).items() if "kept" in name)
                for way in (False, True)
            )
            assert again < none / 8  # one layer whole included, without it a thirtieth


def test_logits_do_not_grow_with_the_tokens() -> None:
    few, many = (learner_sum(HALF_BILLION, Work(tokens))["logits"] for tokens in (4096, 131_072))
    assert few == many < GIB
    assert learner_sum(HALF_BILLION, Work(4096, head_rows=1024))["logits"] == 3 * 1024 * 4 * 151_936


def model(here: Path, config: dict[str, object]) -> None:
    own = {**config, "architectures": ["TestLM"], "max_position_embeddings": 8192}
    (here / "model" / "config.json").write_text(json.dumps(own))


def test_check_prints_the_sum(loaded: Loaded, here: Path) -> None:
    model(here, HALF_BILLION)
    page = explain.report(loaded("", "model.device=cpu"))
    assert "learner memory (cpu): " in page and "optimiser (AdamW) 3." in page and "published 3." in page
    assert "layers again" in explain.report(
        loaded("", "model.device=cpu", "learner.memory.activation_checkpointing=full"))


def test_a_sum_that_the_device_cannot_hold_is_refused_with_the_keys_that_lower_it(
    loaded: Loaded, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model(here, SEVEN_BILLION)
    t = loaded("", "model.device=cpu")
    said = r"about 2\d\d\.\d\d GiB of memory, its cpu has 64\.00 GiB: weights 28\."
    monkeypatch.setattr(memory, "host_memory", lambda: 64 * GIB)
    with pytest.raises(UserError, match=said) as found:
        explain.require_cores_and_disk(t, here)
    assert 'learner.memory.activation_checkpointing = "full"' in str(found.value)
    assert "lora.rank" in str(found.value)
    monkeypatch.setattr(memory, "host_memory", lambda: 512 * GIB)
    explain.require_cores_and_disk(t, here)


def test_a_device_whose_memory_is_not_known_is_not_refused(
    loaded: Loaded, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model(here, SEVEN_BILLION)
    monkeypatch.setattr(memory.device, "memory", lambda kind: 0)
    t = loaded("", "model.device=npu", "model.dtype=bfloat16")
    explain.require_cores_and_disk(t, here)
    page = explain.report(t)
    assert "how much this machine's npu has is not known here" in page
    assert "layers again" in page  # "auto", from a billion parameters on
    monkeypatch.setattr(memory.device, "memory", lambda kind: 80 * GIB)
    with pytest.raises(UserError, match=r"its npu has 80\.00 GiB"):
        explain.require_cores_and_disk(t, here)


def test_memory_of_the_host_is_the_machines_or_the_control_groups(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:       24000000 kB\nMemFree:  1 kB\n")
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert memory.host_memory(tmp_path) == 24_000_000 << 10
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("1000000\n")
    assert memory.host_memory(tmp_path) == 1_000_000
    assert memory.host_memory(tmp_path / "nowhere") == 0


def test_a_model_of_unknown_size_is_said_and_not_refused(loaded: Loaded, here: Path) -> None:
    model(here, {"vocab_size": 3})
    t = loaded()
    assert "learner memory: unknown" in explain.report(t)
    explain.require_cores_and_disk(t, here)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (("learner.memory.attention=flash_attention_2", "model.device=cpu"), "flash_attention_2 runs on a GPU alone"),
        (("learner.memory.attention=flex_attention", "model.device=cpu"), "flex_attention runs on a GPU alone"),
        (
            ("learner.memory.attention=flash_attention_2", "model.device=cuda", "model.dtype=float32"),
            "flash_attention_2 takes no float32",
        ),
        (("learner.memory.attention=flash", "model.device=cpu"), 'one of "auto", "sdpa", "eager"'),
    ],
)
def test_an_attention_that_cannot_be_is_refused_with_a_remedy(
    refused: Callable[..., list[str]], extra: tuple[str, ...], said: str
) -> None:
    found = refused("", *extra)
    assert any(said in one and "attention" in one for one in found), found


def test_an_attention_by_name_is_accepted(loaded: Loaded) -> None:
    assert loaded("", "learner.memory.attention=sdpa").learner.memory.attention == "sdpa"
    given = ("learner.memory.attention=flash_attention_2", "model.device=cuda", "model.dtype=bfloat16")
    assert loaded("", *given).learner.memory.attention == "flash_attention_2"
