"""Adapters and folders enter a model exactly, replace each other, and are refused before anything is touched."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from busrl.engines.torch.lora import WeightLoader
from busrl.errors import WeightsRefused
from busrl.paths import ADAPTER_CONFIG, ADAPTER_WEIGHTS

IDS = torch.arange(2, 12)[None]
LAYERS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")


def config(**more: Any) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=16, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        intermediate_size=48, max_position_embeddings=64, eos_token_id=1, tie_word_embeddings=True, **more,
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("base")
    Qwen3ForCausalLM(config()).save_pretrained(path)
    return path


def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)


def adapter(folder: Path, base: Path, seed: int, rank: int = 4, layers: tuple[str, ...] = LAYERS) -> Path:
    """A random adapter in peft's format."""
    torch.manual_seed(seed)
    shapes = {name: value.shape for name, value in model(base).named_parameters()}
    tensors = {}
    for depth in range(2):
        for layer in layers:
            rows, columns = shapes[f"model.layers.{depth}.{layer}.weight"]
            name = f"base_model.model.model.layers.{depth}.{layer}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, columns) * 0.3
            tensors[f"{name}.lora_B.weight"] = torch.randn(rows, rank) * 0.3
    folder.mkdir()
    targets = [name.split(".")[-1] for name in layers]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets, "bias": "none"}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config))
    save_file(tensors, folder / ADAPTER_WEIGHTS)
    return folder


def by_peft(base: Path, folder: Path) -> torch.Tensor:
    peft = pytest.importorskip("peft")
    with torch.no_grad():
        logits: torch.Tensor = peft.PeftModel.from_pretrained(model(base), str(folder))(IDS).logits
    return logits


def test_adapters_replace_each_other_and_are_what_peft_makes_of_them(base: Path, tmp_path: Path) -> None:
    ours, first = model(base), adapter(tmp_path / "1", base, 1)
    second = adapter(tmp_path / "2", base, 2, rank=2, layers=("self_attn.q_proj", "mlp.up_proj"))
    files, plain = WeightLoader(ours, base), ours(IDS).logits
    for folder in (first, second, first, second):
        files.swap(folder)
        assert (ours(IDS).logits - by_peft(base, folder)).abs().max() < 1e-4
        assert (ours(IDS).logits - plain).abs().max() > 0.01


def test_an_engine_starts_again_with_an_adapter_or_a_whole_model(base: Path, tmp_path: Path) -> None:
    ours, folder = model(base), adapter(tmp_path / "1", base, 1)
    files = WeightLoader(ours, base)
    for _ in range(2):
        files.restart(folder)
        assert (ours(IDS).logits - by_peft(base, folder)).abs().max() < 1e-4
    other = Qwen3ForCausalLM(config())
    other.save_pretrained(tmp_path / "whole")
    files.restart(tmp_path / "whole")
    assert torch.equal(ours(IDS).logits, other.eval()(IDS).logits)


def test_a_bfloat16_model_uses_the_exact_sum_and_not_a_rounded_one(base: Path, tmp_path: Path) -> None:
    ours, folder = model(base).to(torch.bfloat16), adapter(tmp_path / "1", base, 1)
    name = "model.layers.0.mlp.down_proj"
    before = dict(ours.named_parameters())[f"{name}.weight"].clone()
    WeightLoader(ours, base).swap(folder)
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    low = tensors[f"base_model.model.{name}.lora_B.weight"] @ tensors[f"base_model.model.{name}.lora_A.weight"]
    assert torch.equal(dict(ours.named_parameters())[f"{name}.weight"], (before.float() + 2 * low).to(torch.bfloat16))


def change(**more: Any) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        told = json.loads((folder / ADAPTER_CONFIG).read_text())
        (folder / ADAPTER_CONFIG).write_text(json.dumps({**told, **more}))

    return do


def rename(old: str, new: str) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        tensors = load_file(folder / ADAPTER_WEIGHTS)
        save_file({name.replace(old, new): value for name, value in tensors.items()}, folder / ADAPTER_WEIGHTS)

    return do


def cut(folder: Path) -> None:
    whole = (folder / ADAPTER_WEIGHTS).read_bytes()
    (folder / ADAPTER_WEIGHTS).write_bytes(whole[: len(whole) // 2])


def lose(folder: Path) -> None:
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    tensors.pop(next(name for name in tensors if ".lora_B." in name))
    save_file(tensors, folder / ADAPTER_WEIGHTS)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (change(r=8), "no counterpart of rank 8"),
        (change(use_dora=True), "use_dora = True; only plain LoRA"),
        (change(bias="all"), "bias = 'all'"),
        (change(rank_pattern={"q_proj": 2}), "rank_pattern"),
        (rename("q_proj", "qkv_proj"), "'model.layers.0.self_attn.qkv_proj.weight'.*is not in this model"),
        (rename("down_proj", "up_proj"), r"which has shape \[48, 32\]"),
        (rename("lora_A", "lora_embedding_A"), "no part of a plain LoRA"),
        (cut, "no adapter that can be read"),
        (lose, "no counterpart"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    base: Path, tmp_path: Path, spoil: Callable[[Path], None], why: str
) -> None:
    ours, good = model(base), adapter(tmp_path / "good", base, 1)
    files = WeightLoader(ours, base)
    files.swap(good)
    before = ours(IDS).logits
    bad = adapter(tmp_path / "bad", base, 2)
    spoil(bad)
    for way in (files.swap, files.restart):
        with pytest.raises(WeightsRefused, match=why):
            way(bad)
        assert torch.equal(ours(IDS).logits, before)


def test_a_folder_of_another_model_is_refused_and_changes_nothing(base: Path, tmp_path: Path) -> None:
    ours = model(base)
    files, before = WeightLoader(ours, base), ours(IDS).logits
    Qwen3ForCausalLM(config(rope_theta=5e5)).save_pretrained(tmp_path / "turned")
    wider = Qwen3Config(**{**config().to_dict(), "intermediate_size": 64})
    Qwen3ForCausalLM(wider).save_pretrained(tmp_path / "wider")
    (tmp_path / "empty").mkdir()
    for name, why in (("turned", "rope"), ("wider", "intermediate_size"), ("empty", "no model that can be loaded")):
        with pytest.raises(WeightsRefused, match=why):
            files.restart(tmp_path / name)
    assert torch.equal(ours(IDS).logits, before)
