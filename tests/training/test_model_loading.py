"""Loading a model folder: float32, no dropout, and errors that name the path and the remedy before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from busrl.data.pretrained import require_whole
from busrl.errors import ModelNotLoaded
from busrl.training.model import load, named_weights, vocabulary


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])
def test_a_folder_is_loaded_in_float32_without_dropout_whatever_it_holds(lab: Any, tmp_path: Path, kind: str) -> None:
    lab.model(kind).to(torch.bfloat16).save_pretrained(str(tmp_path))
    model = load(tmp_path)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    ids = torch.arange(5)[None]
    assert not model.training
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    assert vocabulary(model) == 23


def test_tied_weights_are_published_once(lab: Any) -> None:
    names = named_weights(lab.model("qwen3"))
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert "lm_head.weight" in named_weights(lab.model("llama"))


def test_published_weights_are_views_of_the_parameters(lab: Any) -> None:
    model = lab.model("gpt2")
    weights = named_weights(model)
    with torch.no_grad():
        model.transformer.ln_f.weight.fill_(3.0)
    assert bool((weights["transformer.ln_f.weight"] == 3.0).all())
    assert not weights["transformer.ln_f.weight"].requires_grad


def test_a_model_of_more_layers_than_its_weights_is_refused(lab: Any, tmp_path: Path) -> None:
    lab.model("qwen3").save_pretrained(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    config["num_hidden_layers"] += 2
    config.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelNotLoaded, match=r"its files have no weights for model\.layers\.\d+\..* and \d+ more"):
        load(tmp_path)
    with pytest.raises(ModelNotLoaded, match="or copy the missing files"):
        require_whole(tmp_path, {"missing_keys": {"lm_head.weight"}})


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotLoaded, match=r"nowhere: no such folder; set model\.path"):
        load(tmp_path / "nowhere")


def test_a_folder_without_a_config_or_weights_says_which(lab: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelNotLoaded, match=r"no config\.json in it"):
        load(tmp_path)
    (tmp_path / "config.json").write_text((lab.folder("qwen3") / "config.json").read_text())
    with pytest.raises(ModelNotLoaded, match=r"no weights .* nothing is downloaded"):
        load(tmp_path)


def test_what_transformers_can_not_load_is_passed_on_with_the_path(lab: Any, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    config = json.loads((lab.folder("qwen3") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "no-such-model"}))
    with pytest.raises(ModelNotLoaded, match="cannot load it as a causal language model"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelNotLoaded, match="cannot load it as a causal language model"):
        load(tmp_path)
