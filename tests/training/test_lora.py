"""LoRA: only the adapter is trained, merged and unmerged agree, and its folder loads in peft."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_models import moe_folder

from busrl.engines.torch.lora import WeightLoader
from busrl.errors import ModelNotLoaded
from busrl.training import checkpoint
from busrl.training.model import Adapter, LoraSettings, load
from busrl.training.settings import TrainerSettings
from busrl.training.trainer import Trainer

# Not imported where tests are only collected: it takes seconds.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="pip install peft")
SETTINGS = LoraSettings(rank=4, scale=2.0)


def trained(
    lab: Any, kind: str = "qwen3", settings: LoraSettings = SETTINGS, steps: int = 2
) -> tuple[Trainer, Adapter]:
    model = load(lab.folder(kind))
    adapter = Adapter(model, settings)
    trainer = Trainer(model, TrainerSettings(), adapter=adapter)
    samples = lab.samples(seed=1)
    for step in range(steps):
        trainer.accumulate(samples, [1.0 if i % 2 else -1.0 for i in range(len(samples))], version=step)
        assert not trainer.step(1e-2).skipped
    return trainer, adapter


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
def test_merged_weights_are_the_adapted_model(lab: Any, kind: str, tmp_path: Path) -> None:
    trainer, _ = trained(lab, kind)
    plain = load(lab.folder(kind))
    assert trainer.named_weights().keys() == dict(plain.named_parameters()).keys()
    ids = torch.arange(9)[None]
    before = plain(ids).logits
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(trainer.named_weights()[name])
        adapted = trainer.model(ids).logits
        assert (plain(ids).logits - adapted).abs().max() < 1e-4 < (before - adapted).abs().max()


def test_only_the_adapter_is_trained(lab: Any) -> None:
    base = {name: value.clone() for name, value in load(lab.folder("qwen3")).named_parameters()}
    trainer, adapter = trained(lab)
    assert sum(p.numel() for p in trainer.parameters) == sum(p.numel() for p in adapter.tensors().values())
    for name, parameter in trainer.model.named_parameters():
        if ".lora_" not in name:
            assert torch.equal(parameter, base[name.replace(".base_layer.", ".")]), name
    assert all(bool(t.abs().sum() > 0) for t in adapter.tensors().values())


def test_an_adapter_of_the_same_seed_begins_the_same_and_as_nothing(lab: Any) -> None:
    one, two = (trained(lab, steps=0)[1].tensors() for _ in range(2))
    other = trained(lab, settings=LoraSettings(4, 2.0, seed=1), steps=0)[1].tensors()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    assert all(not value.any() for name, value in one.items() if ".lora_B." in name)


def test_packed_rows_go_through_the_layers_of_the_adapter(lab: Any, scored: Any) -> None:
    trainer, _ = trained(lab)
    assert trainer.forward.name == "packed"
    samples = lab.samples()
    for sample, row in zip(samples, trainer.score(samples), strict=True):
        assert row.tolist() == pytest.approx(scored(trainer.model, sample).tolist(), abs=1e-5)


def test_the_folder_loads_in_peft_and_in_an_adapter_of_ours(lab: Any, tmp_path: Path) -> None:
    from peft import PeftModel, get_peft_model_state_dict

    trainer, adapter = trained(lab)
    assert adapter.tensors().keys() == get_peft_model_state_dict(adapter.peft_model).keys()
    adapter.write(tmp_path / "adapter", adapter.tensors())
    names = sorted(path.name for path in (tmp_path / "adapter").iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    elsewhere = PeftModel.from_pretrained(load(lab.folder("qwen3")), str(tmp_path / "adapter"))
    ids = torch.arange(9)[None]
    with torch.no_grad():
        assert (elsewhere(ids).logits - trainer.model(ids).logits).abs().max() < 1e-6
    again = Adapter(load(lab.folder("qwen3")), SETTINGS)
    again.load(tmp_path / "adapter")
    assert all(torch.equal(value, again.tensors()[name]) for name, value in adapter.tensors().items())
    with pytest.raises(ModelNotLoaded, match="other layers or another rank"):
        Adapter(load(lab.folder("qwen3")), LoraSettings(8, 2.0)).load(tmp_path / "adapter")


def test_targets_choose_layers_and_unknown_ones_are_refused(lab: Any) -> None:
    _, adapter = trained(lab, settings=LoraSettings(2, 1.0, ("q_proj", "v_proj")), steps=0)
    assert {name.split(".")[-3] for name in adapter.tensors()} == {"q_proj", "v_proj"}
    with pytest.raises(ModelNotLoaded, match=r"no linear layer 'qproj'.*'q_proj'"):
        Adapter(load(lab.folder("qwen3")), LoraSettings(2, 1.0, ("qproj",)))
    with pytest.raises(ModelNotLoaded, match="no linear layer"):
        Adapter(load(lab.folder("gpt2")), LoraSettings(2, 1.0, ("c_attn",)))  # no nn.Linear: its weight is transposed


def test_dropout_acts_on_training_alone(lab: Any) -> None:
    trainer, _ = trained(lab, settings=LoraSettings(4, 2.0, dropout=0.5), steps=3)
    samples = lab.samples()
    one, two = trainer.score(samples), trainer.score(samples)
    assert all((a == b).all() for a, b in zip(one, two))
    ids = torch.arange(9)[None]
    assert not torch.equal(trainer.model(ids).logits, trainer.model(ids).logits)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_an_exported_model_is_the_adapted_one(lab: Any, kind: str, tmp_path: Path) -> None:
    trainer, _ = trained(lab, kind)
    checkpoint.export(trainer.model, tmp_path / "model", lab.folder(kind), trainer.named_weights())
    ids = torch.arange(9)[None]
    with torch.no_grad():
        assert (load(tmp_path / "model")(ids).logits - trainer.model(ids).logits).abs().max() < 1e-5


# -- some layers, and experts ---------------------------------------------------------------------------------


FAMILIES = {  # layers stand in lists of other names
    "llama": ("LlamaConfig", {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
                              "num_attention_heads": 4, "num_key_value_heads": 2}),
    "gpt_neox": ("GPTNeoXConfig", {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
                                   "num_attention_heads": 4}),
    "opt": ("OPTConfig", {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
                          "word_embed_proj_dim": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}),
    "falcon": ("FalconConfig", {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
                                "bos_token_id": 1, "eos_token_id": 2}),
    "mpt": ("MptConfig", {"d_model": 32, "n_layers": 4, "n_heads": 4}),
}


def of_family(kind: str) -> Any:
    import transformers as hf

    name, sizes = FAMILIES[kind]
    torch.manual_seed(3)
    return hf.AutoModelForCausalLM.from_config(getattr(hf, name)(vocab_size=23, **sizes)).eval()


@pytest.mark.parametrize("kind", FAMILIES)
def test_layers_by_number_get_an_adapter_in_every_family(kind: str, tmp_path: Path) -> None:
    from peft import PeftModel

    model = of_family(kind)
    adapter = Adapter(model, LoraSettings(2, 1.0, layers="0, 2-3"))
    assert {int(next(filter(str.isdigit, name.split(".")))) for name in adapter.tensors()} == {0, 2, 3}
    with torch.no_grad():
        for value in adapter.tensors().values():
            value.normal_(0, 0.3)
    adapter.write(tmp_path, adapter.tensors())
    ids, elsewhere = torch.arange(9)[None], PeftModel.from_pretrained(of_family(kind), str(tmp_path))
    engine = of_family(kind)
    WeightLoader(engine).swap(tmp_path)
    with torch.no_grad():
        for other in (elsewhere, engine):
            assert (other(ids).logits - model(ids).logits).abs().max() < 1e-5
        assert (of_family(kind)(ids).logits - model(ids).logits).abs().max() > 1e-2


def test_the_other_layers_stay_and_the_merged_model_is_the_adapted_one(lab: Any, tmp_path: Path) -> None:
    trainer, _ = trained(lab, "llama", LoraSettings(4, 2.0, layers="1-2"))
    merged, base = trainer.named_weights(), dict(load(lab.folder("llama")).named_parameters())
    changed = {name for name in merged if not torch.equal(merged[name], base[name])}
    assert {name.split(".")[2] for name in changed} == {"1", "2"} and len(changed) == 2 * 7
    checkpoint.export(trainer.model, tmp_path / "model", lab.folder("llama"), merged)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        assert (load(tmp_path / "model")(ids).logits - trainer.model(ids).logits).abs().max() < 1e-5


@pytest.mark.parametrize("layers", ["3", "1-3", "7-9"])
def test_layers_that_a_model_lacks_are_refused(lab: Any, layers: str) -> None:
    with pytest.raises(ModelNotLoaded, match=r"no such layers in LlamaForCausalLM: it has the layers 0 to 2"):
        Adapter(load(lab.folder("llama")), LoraSettings(2, 1.0, layers=layers))


def test_an_adapter_of_other_layers_is_not_continued(lab: Any, tmp_path: Path) -> None:
    upper = Adapter(load(lab.folder("llama")), LoraSettings(2, 1.0, layers="1-2"))
    upper.write(tmp_path, upper.tensors())
    with pytest.raises(ModelNotLoaded, match="other layers"):
        Adapter(load(lab.folder("llama")), LoraSettings(2, 1.0)).load(tmp_path)
    assert LoraSettings(2, 1.0).described() == {"rank": 2, "scale": 1.0, "targets": []}
    assert LoraSettings(2, 1.0, layers="1-2").described()["layers"] == "1-2"


@pytest.mark.parametrize("layers", ["", "1"])
def test_adapted_experts_merge_export_and_are_swapped_exactly(lab: Any, layers: str, tmp_path: Path) -> None:
    from peft import PeftModel

    folder = moe_folder(tmp_path / "base", vocab_size=23)
    model = load(folder)
    adapter = Adapter(model, LoraSettings(2, 2.0, ("q_proj",), layers=layers, experts=True))
    trainer = Trainer(model, TrainerSettings(), adapter=adapter)
    samples, ids = lab.samples(seed=1), torch.arange(9)[None] % 12
    for _ in range(2):
        trainer.accumulate(samples, [1.0 if i % 2 else -1.0 for i in range(len(samples))])
        assert not trainer.step(1e-2).skipped
    merged, base = trainer.named_weights(), dict(load(folder).named_parameters())
    changed = {name for name in merged if not torch.equal(merged[name], base[name])}
    wanted = [f"model.layers.{layer}.{part}" for layer in ([1] if layers else [0, 1])
              for part in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "self_attn.q_proj.weight")]
    assert changed == set(wanted)
    adapter.write(tmp_path / "adapter", adapter.tensors())
    checkpoint.export(model, tmp_path / "model", folder, merged)
    engine = load(folder).requires_grad_(False)
    WeightLoader(engine, folder).swap(tmp_path / "adapter")
    again = Adapter(load(folder), adapter.settings)
    again.load(tmp_path / "adapter")
    with torch.no_grad():
        adapted = model(ids).logits
        for other in (load(tmp_path / "model"), engine, again.model,
                      PeftModel.from_pretrained(load(folder), str(tmp_path / "adapter"))):
            assert (other(ids).logits - adapted).abs().max() < 1e-4
        assert (load(folder)(ids).logits - adapted).abs().max() > 1e-3
    WeightLoader(engine, folder).restart(tmp_path / "adapter")
    with torch.no_grad():
        assert (engine(ids).logits - adapted).abs().max() < 1e-4


@pytest.mark.parametrize("inner", [32, 16], ids=["square down", "square gate and up"])
def test_square_transposed_experts_are_swapped_exactly(inner: int, tmp_path: Path) -> None:
    """gpt-oss: its experts are [experts, in, out], and a square tensor does not show it."""
    import transformers as hf

    def made() -> Any:
        torch.manual_seed(3)
        return hf.AutoModelForCausalLM.from_config(hf.GptOssConfig(
            vocab_size=23, hidden_size=32, intermediate_size=inner, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2)).eval()

    model, engine = made(), made().requires_grad_(False)
    adapter = Adapter(model, LoraSettings(2, 2.0, ("q_proj",), experts=True))
    with torch.no_grad():
        for value in adapter.tensors().values():
            value.normal_(0, 0.3)
    adapter.write(tmp_path, adapter.tensors())
    WeightLoader(engine).swap(tmp_path)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        adapted = model(ids).logits
        assert (engine(ids).logits - adapted).abs().max() < 1e-4 < (made()(ids).logits - adapted).abs().max()


def test_experts_of_a_dense_model_are_refused(lab: Any) -> None:
    with pytest.raises(ModelNotLoaded, match=r"lora.experts: LlamaForCausalLM has no parameter that holds the experts"):
        Adapter(load(lab.folder("llama")), LoraSettings(2, 1.0, experts=True))
