"""A model filled from the files of its folder is the one that transformers loads; what the files lack is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from busrl.errors import ModelNotLoaded
from busrl.ranks.loading import WeightFiles, fill, first_layers
from busrl.training.forward import choose_forward
from busrl.training.model import load, load_empty
from tests.training.rank_program import FAMILIES, build

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        build(family).save_pretrained(str(root / family), max_shard_size="40KB")
    return root


@pytest.mark.parametrize("family", FAMILIES)
def test_a_filled_model_is_the_one_that_transformers_loads(folders: Path, family: str) -> None:
    model, expected = load_empty(folders / family), load(folders / family)
    assert all(parameter.device.type == "meta" for parameter in model.parameters()), "no memory before it is filled"
    fill(model, files := WeightFiles(folders / family, model), CPU)
    assert files.read == sum(parameter.nbytes for parameter in model.parameters())
    assert not model.training
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    for name, buffer in expected.named_buffers():
        assert torch.equal(dict(model.named_buffers())[name], buffer), name
    ids = torch.arange(12)[None]
    assert torch.equal(model(input_ids=ids).logits, expected(input_ids=ids).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_way_is_proved_on_the_first_layers_as_on_all(folders: Path, family: str) -> None:
    proof = first_layers(folders / family)
    assert choose_forward(proof).name == choose_forward(load(folders / family)).name


def test_a_proof_holds_one_layer_of_each_kind_and_the_first_words(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=5000, hidden_size=16, intermediate_size=16, num_hidden_layers=6, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=False, pad_token_id=4999,
    ))
    model.save_pretrained(str(tmp_path))
    proof = first_layers(tmp_path)
    assert len(proof.base_model.layers) == 1
    assert proof.get_input_embeddings().weight.shape == proof.get_output_embeddings().weight.shape == (1024, 16)
    values, values_of_proof = (sum(parameter.numel() for parameter in each.parameters()) for each in (model, proof))
    assert values_of_proof < values / 4
    assert choose_forward(proof).name == "packed"


def test_a_tensor_that_the_files_do_not_have_is_named(folders: Path, tmp_path: Path) -> None:
    whole = load(folders / "llama")
    whole.save_pretrained(str(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model = load_empty(tmp_path)
    with pytest.raises(ModelNotLoaded, match=r"no file in it has 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        fill(model, WeightFiles(tmp_path, model), CPU)


def test_a_missing_file_of_several_is_named(folders: Path, tmp_path: Path) -> None:
    model = load(folders / "llama")
    model.save_pretrained(str(tmp_path), max_shard_size="40KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ModelNotLoaded, match=f"{gone.name} is missing, model.safetensors.index.json names it"):
        WeightFiles(tmp_path, load_empty(tmp_path))


def test_files_of_torch_are_read_in_parts_too(folders: Path, tmp_path: Path) -> None:
    whole = load(folders / "qwen2")
    whole.config.save_pretrained(str(tmp_path))
    torch.save(whole.state_dict(), tmp_path / "pytorch_model.bin")
    model = load_empty(tmp_path)
    fill(model, WeightFiles(tmp_path, model), CPU)
    assert all(torch.equal(parameter, whole.get_parameter(name)) for name, parameter in model.named_parameters())
