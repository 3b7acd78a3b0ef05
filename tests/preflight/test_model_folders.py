"""Model folders that no run can load, and keys that do not fit the model in one, are refused before a start."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from busrl.data import pretrained
from busrl.errors import UserError
from busrl.preflight import machine, unfit_models
from busrl.topology import Topology

Loaded = Callable[..., Topology]
Refused = Callable[..., list[str]]


def describe(folder: Path, **config: Any) -> None:
    """A config.json with these keys beside those that it has."""
    config_before = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config_before | config))


def store(folder: Path, names: list[str], vocabulary: int = 3, width: int = 8) -> None:
    """Weights of these names: embeddings and heads have a row for each token, other matrices are square."""
    header: dict[str, Any] = {}
    begin = 0
    for name in names:
        rows = vocabulary if any(part in name for part in ("embed", "head", "wte")) else width
        shape = [width] if "norm" in name else [rows, width]
        size = 4 * (shape[0] if len(shape) == 1 else shape[0] * shape[1])
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, begin + size]}
        begin += size
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(begin))


QUANTISED = [
    {"quantization_config": {"quant_method": "gptq", "bits": 4}}, {"quantization_config": {"quant_method": "awq"}},
    {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, {"compression_config": {}},
    {"text_config": {"quantization_config": {"quant_method": "fp8"}, "vocab_size": 3}},
]


def test_fewer_layers_of_weights_than_the_config_asks_for_are_refused(
    refused: Refused, loaded: Loaded, here: Path
) -> None:
    names = ["model.embed_tokens.weight", "lm_head.weight", *(f"model.layers.{n}.mlp.up_proj.weight" for n in (0, 1))]
    describe(here / "model", model_type="qwen2", num_hidden_layers=4, vocab_size=3, hidden_size=8)
    store(here / "model", names)
    (problem,) = refused()
    assert problem.startswith("model/config.json: 4 layers, and the weights have 2; put the config.json of these")
    describe(here / "model", num_hidden_layers=1)  # more may be there: layers that predict tokens further on, say
    loaded()


def test_architectures_that_are_no_list_end_no_check(loaded: Loaded, here: Path) -> None:
    describe(here / "model", architectures=5)
    loaded()


@pytest.mark.parametrize("config", QUANTISED)
def test_a_quantised_checkpoint_is_refused_by_its_method(refused: Refused, here: Path, config: dict[str, Any]) -> None:
    describe(here / "model", model_type="qwen2", **config)
    (problem,) = refused()
    assert problem.startswith("model/config.json: a quantised checkpoint (") and "bfloat16 or float32" in problem


@pytest.mark.parametrize(("config", "says"), [
    ({"model_type": "chatglm", "auto_map": {"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M"}},
     "is code in this folder (auto_map)"),
    ({"model_type": "qwen", "auto_map": {"AutoModelForCausalLM": "m.M"}, "vision_config": {"x": 1}},
     "is code in this folder"),
    ({"model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"], "vision_config": {"depth": 2}},
     "Qwen2VLForConditionalGeneration reads more than text (vision_config)"),
    ({"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "vision_config": {"depth": 2},
      "text_config": {"vocab_size": 3}}, "reads more than text"),
    ({"model_type": "qwen2_audio", "audio_config": {"depth": 2}}, "reads more than text (audio_config)"),
    ({"model_type": "qwen2", "architectures": ["Qwen2ForSequenceClassification"]}, "has no head that gives the next"),
    ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "has no head that gives the next token"),
    ({"model_type": "roberta", "architectures": ["RobertaModel"]}, "roberta is an encoder"),
    ({"model_type": "clip"}, "has no causal language model of model_type 'clip'"),
    ({"model_type": "qwen99"}, "has no causal language model of model_type 'qwen99'"),
    ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
])
def test_a_model_that_no_run_trains_is_one_problem(
    refused: Refused, here: Path, config: dict[str, Any], says: str
) -> None:
    describe(here / "model", **config)
    (problem,) = refused()
    assert says in problem, problem


@pytest.mark.parametrize("config", [
    {"model_type": "qwen2"}, {"model_type": "phi3", "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3"}}, {},
    {"model_type": "qwen2", "auto_map": {"AutoTokenizer": ["t.T", None]}}, {"model_type": "bert", "is_decoder": True},
    {"model_type": "gemma3", "text_config": {"vocab_size": 3, "hidden_size": 8}, "vision_config": {"depth": 1}},
])
def test_models_that_transformers_has_pass(loaded: Loaded, here: Path, config: dict[str, Any]) -> None:
    describe(here / "model", **config)
    loaded()


def test_what_transformers_has_is_what_its_source_says(tmp_path: Path) -> None:
    auto: Any = pytest.importorskip("transformers.models.auto.modeling_auto")
    kinds = set(pytest.importorskip("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES)
    kinds |= set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) | set(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    assert {kind for kind in kinds if unfit_models.trains(kind)} == set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    encoders = set()
    for kind in kinds:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        if (fault := unfit_models.kind_fault(tmp_path)) and "is an encoder" in fault[0]:
            encoders.add(kind)
    assert encoders == set(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)


@pytest.mark.parametrize(("files", "says"), [
    ({"adapter_config.json": '{"base_model_name_or_path": "Qwen/Qwen2.5-7B"}'}, "an adapter of Qwen/Qwen2.5-7B"),
    ({"adapter_config.json": "{}"}, "merge_and_unload"), ({"m-q4.gguf": "GGUF"}, "it holds a GGUF file"),
    ({"params.json": "{}"}, "in its maker's own layout"), ({"model_index.json": "{}"}, "a pipeline of several models"),
    ({}, "no config.json in this folder"),
])
def test_a_folder_without_a_model_says_what_it_is(
    refused: Refused, here: Path, files: dict[str, str], says: str
) -> None:
    (here / "model" / "config.json").unlink()
    for name, text in files.items():
        (here / "model" / name).write_text(text)
    (problem,) = refused("", "data.template=chat", "learner.train_layers=lm_head")
    assert "model.path = " in problem and says in problem, problem


@pytest.mark.parametrize(("name", "says"), [
    ("m.gguf", "its weights are a GGUF file"), ("tf_model.h5", "TensorFlow's"), ("flax_model.msgpack", "Flax's"),
    ("model.onnx", "ONNX"), ("consolidated.00.pth", "their maker's own layout"), ("README.md", "no weights (*."),
])
def test_weights_of_another_kind_are_named(refused: Refused, here: Path, name: str, says: str) -> None:
    (here / "model" / "model.safetensors").unlink()
    (here / "model" / name).write_text("x")
    (problem,) = refused()
    assert says in problem, problem


@pytest.mark.parametrize("key", ["model.reference", "model.teacher"])
def test_other_models_are_looked_at_in_the_same_way(refused: Refused, here: Path, key: str) -> None:
    (here / "other").mkdir()
    for path in (here / "model").iterdir():
        (here / "other" / path.name).write_bytes(path.read_bytes())
    describe(here / "other", quantization_config={"quant_method": "gptq"})
    problems = refused("", f"{key}={here}/other", "learner.kl=k3", "learner.kl_coef=0.1", "learner.teacher_coef=0.1")
    fault = "other/config.json: a quantised checkpoint (quantization_config: gptq)"
    assert any(problem.startswith(fault) for problem in problems), problems


PARTS = ("self_attn.q_proj", "mlp.up_proj", "input_norm")
LAYERS = [f"model.layers.{at}.{part}.weight" for at in range(2) for part in PARTS]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def test_weights_without_the_head_that_they_need_are_refused(refused: Refused, loaded: Loaded, here: Path) -> None:
    store(here / "model", [EMBEDDING, *LAYERS])
    describe(here / "model", tie_word_embeddings=False)
    (problem,) = refused()
    assert "no output head" in problem
    describe(here / "model", tie_word_embeddings=True)
    loaded()
    store(here / "model", [EMBEDDING, HEAD, *LAYERS])
    describe(here / "model", tie_word_embeddings=False)
    loaded()


# -- keys that do not fit the model --------------------------


@pytest.mark.parametrize("names", [[EMBEDDING, *LAYERS], [EMBEDDING, HEAD, *LAYERS]])
@pytest.mark.parametrize("items", ["1, lm_head", "lm_head", "0-1, lm_*"])
def test_the_head_of_a_tied_model_cannot_be_trained_alone(
    refused: Refused, here: Path, names: list[str], items: str
) -> None:
    store(here / "model", names)
    describe(here / "model", tie_word_embeddings=True)
    (problem,) = refused("", f'learner.train_layers="{items}"')
    assert "the head is the embedding (tie_word_embeddings); name embed_tokens" in problem


def test_a_tied_head_is_seen_without_names_of_weights(refused: Refused, here: Path) -> None:
    (here / "model" / "model.safetensors").rename(here / "model" / "pytorch_model.bin")
    describe(here / "model", tie_word_embeddings=True)
    (problem,) = refused("", 'learner.train_layers="lm_head"')
    assert "name embed_tokens" in problem


def test_a_head_of_its_own_and_the_embedding_may_be_trained(loaded: Loaded, here: Path) -> None:
    store(here / "model", [EMBEDDING, HEAD, *LAYERS])
    describe(here / "model", tie_word_embeddings=False)
    loaded("", 'learner.train_layers="1, lm_head, embed_tokens"')


def test_the_demo_model_has_the_parameters_that_train_layers_may_name(refused: Refused) -> None:
    transformers: Any = pytest.importorskip("transformers")
    recipe = pretrained.maker().RECIPES["tiny:sort"]
    config = transformers.Qwen3Config(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=recipe.layers, num_attention_heads=1,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=True,
    )
    names = {name for name, _ in transformers.Qwen3ForCausalLM(config).named_parameters()}
    assert set(pretrained.trainable("tiny:sort")[0]) == names
    text = '[model]\npath = "tiny:sort"\n[data]\ntrain = "tiny:sort"\n'
    for items, says in (("1, lm_head", "name embed_tokens"), ("900", "goes beyond"), ("gate", "no parameter")):
        (problem,) = refused("", f'learner.train_layers="{items}"', base=text)
        assert says in problem


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "input_norm"])
def test_an_adapter_goes_on_layers_that_training_can_put_one_on(refused: Refused, here: Path, target: str) -> None:
    pytest.importorskip("peft")
    store(here / "model", [EMBEDDING, HEAD, *LAYERS])
    (problem,) = refused("", "lora.rank=8", f'lora.targets=["{target}"]')
    assert f"no layer '{target}'" in problem and "it has q_proj, up_proj" in problem


def test_a_model_without_linear_layers_gets_no_adapter(refused: Refused, loaded: Loaded, here: Path) -> None:
    pytest.importorskip("peft")
    store(here / "model", ["transformer.wte.weight", *(f"transformer.h.{n}.attn.c_attn.weight" for n in (0, 1))])
    describe(here / "model", model_type="gpt2")
    (problem,) = refused("", "lora.rank=8")
    assert "'gpt2' has no linear layer that an adapter could be put on" in problem
    loaded()


def test_ranks_and_the_compiler_need_layers_where_most_models_have_them(
    refused: Refused, loaded: Loaded, here: Path
) -> None:
    store(here / "model", ["transformer.wte.weight", *(f"transformer.h.{n}.attn.c_attn.weight" for n in (0, 1))])
    (problem,) = refused("", "process.learner.ranks=2")
    assert "process.1.ranks = 2: the layers of this model are not where" in problem and "ranks = 1" in problem
    assert any("compile = false" in problem for problem in refused("", "learner.memory.compile=true"))
    store(here / "model", [EMBEDDING, *LAYERS])
    loaded("", "process.learner.ranks=2")


@pytest.mark.parametrize(("axis", "kind", "passes"), [
    ("tensor", "qwen2", True), ("tensor", "gpt2", False), ("tensor", "qwen99", True), ("expert", "qwen3_moe", True),
    ("expert", "qwen2", False),
])
def test_an_axis_that_transformers_cannot_cut_a_model_along_ends_check(
    loaded: Loaded, here: Path, axis: str, kind: str, passes: bool
) -> None:
    topology = loaded("", "process.learner.ranks=2", f"learner.parallel.{axis}=2")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4}
    describe(here / "model", model_type=kind, **heads)
    if passes:
        machine.require_axes(topology)
        return
    with pytest.raises(UserError, match=f"transformers has no plan .* for a model of model_type '{kind}'; set 1"):
        machine.require_axes(topology)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe", "gpt2", "llama", "mistral", "opt", "gpt_neox", "gpt-sw3"])
def test_no_plan_is_missed_that_transformers_has(kind: str) -> None:
    known: Any = pytest.importorskip("transformers.models.auto.configuration_auto").CONFIG_MAPPING[kind]
    for plan in machine.PLANS.values():
        assert unfit_models.has_plan(kind, plan) is not False or not getattr(known, plan, None)
