"""What the learner needs of memory: the sum of `busrl check`, its parts, the refusal with the keys that lower it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from busrl.errors import UserError
from busrl.preflight import explain, memory, model_folders
from busrl.preflight.memory import Widths, Work, learner_sum
from busrl.topology import Topology

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
TWO = "process.learner.ranks=2"


def test_parameters_are_those_of_the_models() -> None:
    assert Widths.of(HALF_BILLION).parameters == pytest.approx(0.494e9, rel=0.01)
    assert Widths.of(SEVEN_BILLION).parameters == pytest.approx(7.616e9, rel=0.01)
    wide = {  # Qwen3-0.6B, whose heads together are twice as wide as the model
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
        "tie_word_embeddings": True,
    }
    assert Widths.of(wide).parameters == pytest.approx(0.596e9, rel=0.01)


def test_a_parameter_takes_16_bytes_and_18_in_bfloat16() -> None:
    parameters = Widths.of(HALF_BILLION).parameters
    for dtype, optimizer, each in (
        ("float32", "adamw", 16), ("bfloat16", "adamw", 18), ("bfloat16", "adafactor", 10),
        ("float32", "adamw8bit", 10.04), ("float32", "mine.py:Own", 16),
    ):
        parts = learner_sum(HALF_BILLION, Work(4096, dtype, optimizer=optimizer))
        size = parts["weights"] + parts["gradient"] + parts[f"optimiser ({optimizer})"]
        assert size == pytest.approx(each * parameters, rel=1e-6)


def test_each_of_several_ranks_holds_its_share_and_what_is_gathered() -> None:
    alone, eight = (learner_sum(SEVEN_BILLION, Work(4096, "bfloat16", True, kind="cuda", ranks=n)) for n in (1, 8))
    for name in ("gradient", "optimiser (adamw)"):
        assert eight[name] == pytest.approx(alone[name] / 8, rel=1e-6)
    assert eight["weights"] == pytest.approx(4 * 7.616e9 / 8, rel=0.01)
    assert 2 * 2 * 152_064 * 3584 < eight["weights that are gathered"] < 4 * GIB  # both tables and two layers
    unsharded = learner_sum(SEVEN_BILLION, Work(4096, "bfloat16", True, kind="cuda", ranks=8, reshard=False))
    assert unsharded["weights that are gathered"] == pytest.approx(2 * 7.616e9, rel=0.01)


def test_frozen_layers_keep_neither_gradient_nor_inputs_below_trained_ones() -> None:
    every_layer, upper = (learner_sum(HALF_BILLION, Work(8192, train_layers=text)) for text in ("", "20-23"))
    assert every_layer["weights"] == upper["weights"]
    each = (Widths.of(HALF_BILLION).parameters - 151_936 * 896) / 24
    assert upper["gradient"] == pytest.approx(4 * 4 * each, rel=0.01)
    assert "gradient of the head" not in upper or upper["gradient of the head"] == 0
    keeps = [next(size for name, size in parts.items() if "kept" in name) for parts in (every_layer, upper)]
    assert 5 < keeps[0] / keeps[1] < 7


def test_a_reference_is_a_second_model(loaded: Loaded, here: Path) -> None:
    model(here, HALF_BILLION)
    (here / "earlier").mkdir()
    for file in (here / "model").iterdir():
        (here / "earlier" / file.name).write_bytes(file.read_bytes())
    settings = ("model.device=cpu", "learner.kl=k3", "learner.kl_coef=0.1", f"model.reference={here / 'earlier'}")
    t = loaded("", *settings)
    assert memory.of_topology(t)["reference model"] == pytest.approx(4 * 0.494e9, rel=0.01)


def test_an_adapter_leaves_its_base_in_its_own_type_and_trains_little() -> None:
    parts = learner_sum(SEVEN_BILLION, Work(4096, "bfloat16", lora_rank=16))
    assert parts["weights"] == pytest.approx(2 * 7.616e9, rel=0.03)
    assert parts["optimiser (adamw)"] < GIB and parts["gradient of the head"] == 0


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
    full = {**config, "architectures": ["TestLM"], "max_position_embeddings": 8192}
    (here / "model" / "config.json").write_text(json.dumps(full))


def test_check_prints_the_sum(loaded: Loaded, here: Path) -> None:
    model(here, HALF_BILLION)
    page = explain.report(loaded("", "model.device=cpu"))
    assert "learner memory (cpu): " in page and "optimiser (adamw) 3." in page and "published 3." in page
    assert "layers again" in explain.report(
        loaded("", "model.device=cpu", "learner.memory.activation_checkpointing=full"))


def test_a_sum_beyond_the_device_is_refused_with_keys_to_lower(
    loaded: Loaded, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model(here, SEVEN_BILLION)
    t = loaded("", "model.device=cpu")
    message = r"about 2\d\d\.\d\d GiB of memory, its cpu has 64\.00 GiB: weights 28\."
    monkeypatch.setattr(memory, "host_memory", lambda: 64 * GIB)
    with pytest.raises(UserError, match=message) as refused:
        explain.require_cores_and_disk(t, here)
    assert 'learner.memory.activation_checkpointing = "full" (then ' in str(refused.value)
    assert "lora.rank = 32" in str(refused.value) and "adamw8bit" in str(refused.value)
    small = float(str(refused.value).partition("lora.rank = 32 (then ")[2].partition(" GiB")[0])
    monkeypatch.setattr(memory, "host_memory", lambda: int(small * GIB) + GIB)
    explain.require_cores_and_disk(loaded("", "model.device=cpu", "lora.rank=32"), here)  # as was said
    monkeypatch.setattr(memory, "host_memory", lambda: 512 * GIB)
    explain.require_cores_and_disk(t, here)


def test_a_device_whose_memory_is_not_known_is_not_refused(
    loaded: Loaded, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model(here, SEVEN_BILLION)
    monkeypatch.setattr(memory.device, "memory", lambda kind: 0)
    monkeypatch.setattr(memory, "host_memory", lambda: 64 * GIB)
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


def test_a_host_without_room_for_published_weights_is_refused(
    loaded: Loaded, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model(here, SEVEN_BILLION)
    monkeypatch.setattr(memory.device, "memory", lambda kind: 1000 * GIB)
    monkeypatch.setattr(memory, "host_memory", lambda: 24 * GIB)
    t = loaded("", "model.device=cuda", "model.dtype=bfloat16")
    with pytest.raises(UserError, match=r"the model while it is read 28\.37 GiB of the host's memory, which has 24"):
        explain.require_cores_and_disk(t, here)
    assert "of the host's memory: the model while it is read 28" in explain.report(t)
    monkeypatch.setattr(memory, "host_memory", lambda: 32 * GIB)
    explain.require_cores_and_disk(t, here)


def test_axes_and_offload_lower_what_a_rank_holds() -> None:
    plain = learner_sum(SEVEN_BILLION, Work(4096, "bfloat16", True, kind="cuda", ranks=4))
    cut = learner_sum(SEVEN_BILLION, Work(4096, "bfloat16", True, kind="cuda", ranks=4, tensor=2))
    twice = learner_sum(SEVEN_BILLION, Work(4096, "bfloat16", True, kind="cuda", ranks=8, replicate=2))
    host = learner_sum(SEVEN_BILLION, Work(4096, "bfloat16", True, kind="cuda", ranks=4, offload=True))
    assert twice["weights"] == plain["weights"] < cut["weights"] < 1.2 * plain["weights"], "tables are whole"
    assert cut["weights that are gathered"] < plain["weights that are gathered"]
    assert host["weights"] == host["gradient"] == host["optimiser (adamw)"] == 0
    assert host["weights that are gathered"] == plain["weights that are gathered"]


def test_ranks_share_memory_on_a_cpu_and_not_on_devices(
    loaded: Loaded, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model(here, HALF_BILLION)
    on_cpu, on_gpus = (loaded("", f"model.device={kind}", TWO) for kind in ("cpu", "npu"))
    assert memory.of_topology(on_cpu)["gradient"] == 2 * memory.of_topology(on_gpus)["gradient"]
    assert "(cpu, 2 ranks together)" in memory.lines(on_cpu)[0] and "(npu, each rank)" in memory.lines(on_gpus)[0]


LAYERS = [
    ("learner.train_layers=5-1", "'5-1' begins after its end"),
    ("learner.train_layers=1 to 2", "'1 to 2' is no number, no range such as 20-31"),
    ("learner.train_layers=0-2", "'0-2' goes beyond the model, which has the layers 0 to 1"),
    ("learner.train_layers=mlp", "no parameter of the model has 'mlp' in its name"),
]


@pytest.mark.parametrize(("setting", "expected"), LAYERS)
def test_layers_that_the_model_does_not_have_are_refused(
    refused: Callable[..., list[str]], loaded: Loaded, here: Path, setting: str, expected: str
) -> None:
    names = {f"model.layers.{n}.w.weight": {"dtype": "F32", "shape": [1], "data_offsets": [n * 4, n * 4 + 4]}
             for n in range(2)}
    header = json.dumps(names).encode()
    (here / "model" / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    problems = [problem for problem in refused("", setting) if "train_layers" in problem]
    assert len(problems) == 1 and expected in problems[0], problems
    for sound in ("0-1", "1, 0", "w"):
        assert loaded("", f"learner.train_layers={sound}").learner.train_layers == sound


def test_layers_and_an_adapter_together_are_refused(refused: Callable[..., list[str]], here: Path) -> None:
    (here / "model" / "model.safetensors").write_bytes(b"")
    problems = refused("", "learner.train_layers=w", "lora.rank=4")
    assert any("an adapter is all that is trained" in problem for problem in problems), problems


def test_compiled_layers_need_a_compiler_and_may_be_on_several_ranks(
    refused: Callable[..., list[str]], loaded: Loaded, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "g++-that-is-not-there")
    settings = ("learner.memory.compile=true", "model.device=cpu")
    problems = refused("", *settings)
    text = "g++-that-is-not-there, which compiles the layers, is not on the PATH"
    assert any(text in problem for problem in problems), problems
    (here / "Python.h").write_text("")
    monkeypatch.setattr(model_folders.sysconfig, "get_path", lambda _: str(here))
    monkeypatch.setenv("CXX", "sh")
    assert loaded("", *settings, TWO).ranks == 2


def test_a_model_of_unknown_size_is_said_and_not_refused(loaded: Loaded, here: Path) -> None:
    model(here, {"vocab_size": 3})
    t = loaded()
    assert "learner memory: unknown" in explain.report(t)
    explain.require_cores_and_disk(t, here)


@pytest.mark.parametrize(
    ("extra", "expected"),
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
    refused: Callable[..., list[str]], extra: tuple[str, ...], expected: str
) -> None:
    problems = refused("", *extra)
    assert any(expected in problem and "attention" in problem for problem in problems), problems


def test_an_attention_by_name_is_accepted(loaded: Loaded) -> None:
    assert loaded("", "learner.memory.attention=sdpa").learner.memory.attention == "sdpa"
    settings = ("learner.memory.attention=flash_attention_2", "model.device=cuda", "model.dtype=bfloat16")
    assert loaded("", *settings).learner.memory.attention == "flash_attention_2"
