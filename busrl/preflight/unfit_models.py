"""Faults of a model folder that no run can load: cut files, models of other kinds, their own code, ids without a row.

Reads config.json, tokenizer.json, the headers of safetensors files, and the source of the transformers that is
installed, without torch. Knows nothing of topologies: `model_folders` says which key is at fault.

- A fault is a rule and a remedy in words; what cannot be told is no fault.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from busrl.data import pretrained
from busrl.data.vocabulary import language_of, pieces, vocabulary_size
from busrl.system.files import as_map

# -- whole files, or not -----

OWN_CONFIG = "put the config.json of these weights there, or its own weights"


def weight_fault(folder: Path) -> tuple[str, str, str] | None:
    """File, rule and remedy of weights that no model can be made of: cut files, missing files, and weights of another
    model than that of config.json. Reads headers only; None for good weights, and without safetensors files."""
    for path in sorted(folder.glob("*.safetensors")):
        if fault := pretrained.cut_fault(path):
            return str(path), fault, "the download or the copy did not finish: copy the file again"
    listed = pretrained.read_config(folder, "model.safetensors.index.json").get("weight_map")
    names = set(map(str, listed.values())) if isinstance(listed, dict) else set()
    if gone := sorted(name for name in names if not (folder / name).is_file()):
        more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
        index = str(folder / "model.safetensors.index.json")
        return index, f"it names {gone[0]}{more}, which is not there", "copy the missing files too"
    config = pretrained.read_config(folder)
    text = language_of(config)
    width = pretrained.size_in(text, "embedding_size", "word_embed_proj_dim", "hidden_size", "n_embd")
    stated = pretrained.size_in(text, "vocab_size"), width
    embeddings = _embeddings(pretrained.tensor_shapes(folder))
    if all(stated) and embeddings and stated not in embeddings.values():
        name = max(embeddings, key=lambda name: math.prod(embeddings[name]))
        sizes = [" x ".join(map(str, shape)) for shape in (stated, embeddings[name])]
        rule = f"vocabulary and width are {sizes[0]}, and those of the weights ({name}) {sizes[1]}"
        return str(folder / "config.json"), rule, OWN_CONFIG
    asked, there = pretrained.size_in(text, *pretrained.LAYERS), pretrained.layers_in(pretrained.tensor_shapes(folder))
    if there and asked > there:
        return str(folder / "config.json"), f"{asked} layers, and the weights have {there}", OWN_CONFIG
    return None


def _embeddings(shapes: pretrained.Shapes) -> pretrained.Shapes:
    return {name: shape for name, shape in shapes.items() if name.split(".")[-2:-1] in pretrained.EMBEDDINGS}


# -- models of other kinds -----

OTHER_HEADS = (  # ends of architectures that give no next token
    "ForSequenceClassification", "ForTokenClassification", "ForMaskedLM", "ForQuestionAnswering", "ForMultipleChoice",
    "ForNextSentencePrediction", "ForImageClassification", "ForPreTraining", "ForRewardModel",
)
PLAIN = "give the folder of a causal language model in bfloat16 or float32"
IN_PLACE_OF_CONFIG = (  # for a folder without config.json: a file in it, what the folder is, and the remedy
    ("*.gguf", "a GGUF file, which is quantised or in another layout", "give the safetensors that it was made of"),
    ("params.json", "a model in its maker's own layout", "give the same model in the layout of transformers"),
    ("model_index.json", "a pipeline of several models (diffusers)", PLAIN),
    ("modules.json", "a sentence-transformers folder", PLAIN),
)
OTHER_WEIGHTS = (  # for a folder without safetensors: a file in it, what its weights are, and the remedy
    ("*.gguf", "its weights are a GGUF file, which is quantised or in another layout",
     "give the safetensors that it was made of"),
    ("*.h5", "its weights are TensorFlow's", "give its safetensors"),
    ("*.msgpack", "its weights are Flax's", "give its safetensors"),
    ("*.onnx", "its weights are an ONNX graph", "give its safetensors"),
    ("*.pth", "its weights are in their maker's own layout", "give the same model in the layout of transformers"),
)


def without_config(folder: Path) -> tuple[str, str]:
    """Rule and remedy for a folder that has no config.json."""
    if (folder / "adapter_config.json").is_file():
        base = pretrained.read_config(folder, "adapter_config.json").get("base_model_name_or_path") or "its base"
        merged = "PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(folder)"
        rule = f"an adapter of {base} (adapter_config.json), and no model"
        return rule, f"give the base, or merge both: peft's {merged}"
    kinds = (kind[1:] for kind in IN_PLACE_OF_CONFIG if any(folder.glob(kind[0])))
    rule, remedy = next(kinds, ("", "give a Hugging Face model folder"))
    return "no config.json in this folder" + (f": it holds {rule}" if rule else ""), remedy


def without_weights(folder: Path) -> tuple[str, str]:
    """The problem and remedy of a folder without weights that are read."""
    kinds = (kind[1:] for kind in OTHER_WEIGHTS if any(folder.glob(kind[0])))
    return next(kinds, ("no weights (*.safetensors) in this folder", "the download may not have finished"))


def kind_fault(folder: Path) -> tuple[str, str] | None:
    """Rule and remedy for a model that busrl does not train, by its config.json; None for any other."""
    config = pretrained.read_config(folder)
    language, kind = language_of(config), str(config.get("model_type", ""))
    listed = config.get("architectures")
    architectures = [str(name) for name in listed] if isinstance(listed, list) else []
    for part in (config, language):
        for name in ("quantization_config", "compression_config"):
            if (settings := part.get(name)) is not None:
                how = as_map(settings).get("quant_method") or "in fewer bits"
                return f"a quantised checkpoint ({name}: {how}), which cannot be trained", f"{PLAIN}, such as its base"
    if kind and own_code(config, kind):
        rule = f"model_type {kind!r} is code in this folder (auto_map), and busrl runs none from a model folder"
        return rule, "give a model that transformers has itself, or convert it (docs/from-a-folder.md)"
    seen = [name for name in ("vision_config", "audio_config") if config.get(name)]
    if seen and kind and not trains(kind):
        model = architectures[0] if architectures else kind
        return f"{model} reads more than text ({seen[0]})", f"{PLAIN}, such as its text part"
    if architectures and architectures[0].endswith(OTHER_HEADS):
        return f"{architectures[0]} has no head that gives the next token", PLAIN
    if kind in _mapped("MASKED_LM") and not config.get("is_decoder"):
        return f"{kind} is an encoder, whose tokens see those that follow", PLAIN
    if kind and not trains(kind):
        rule = f"the transformers that is installed has no causal language model of model_type {kind!r}"
        return rule, f"{PLAIN}, or install a transformers that knows it"
    return _headless(folder, config)


def own_code(config: Mapping[str, Any], kind: str) -> bool:
    """Tell whether the model needs code of its folder: transformers has no class of its own for it."""
    mapped = as_map(config.get("auto_map"))
    return bool(mapped.keys() & {"AutoConfig", "AutoModelForCausalLM", "AutoModel"}) and not trains(kind)


def trains(kind: str) -> bool:
    """Tell whether transformers has a causal language model of this model_type; True where that cannot be told."""
    kinds = _mapped("CAUSAL_LM")
    return not kinds or kind in kinds


@cache
def _mapped(head: str) -> frozenset[str]:
    """Every model_type that transformers has with this head, read from its source, as importing it takes seconds.
    Empty where the source cannot be read."""
    spec = importlib.util.find_spec("transformers")
    places = spec.submodule_search_locations or [] if spec else []
    for place in places:
        with contextlib.suppress(OSError):
            text = (Path(place) / "models" / "auto" / "modeling_auto.py").read_text(encoding="utf-8")
            table = re.search(rf"^MODEL_FOR_{head}_MAPPING_NAMES\b.*?^\)", text, re.M | re.S)
            return frozenset(re.findall(r'\(\s*"([^"]+)",', table[0])) if table else frozenset()
    return frozenset()


@cache
def has_plan(kind: str, name: str) -> bool | None:
    """Tell whether transformers has a plan of that name (how layers are cut, or experts dealt out) for models of this
    model_type; None where its source cannot be read."""
    spec = importlib.util.find_spec("transformers")
    for place in (spec.submodule_search_locations or [] if spec else []):
        for path in sorted((Path(place) / "models" / kind.replace("-", "_")).glob("configuration_*.py")):
            with contextlib.suppress(OSError):
                return f"    {name} = " in path.read_text(encoding="utf-8")
    return None


def _headless(folder: Path, config: dict[str, Any]) -> tuple[str, str] | None:
    """Rule and remedy for weights without an output head, where the head is not the embedding: it would begin at
    random."""
    shapes = pretrained.tensor_shapes(folder)
    rows = {shape[0] for shape in _embeddings(shapes).values() if len(shape) == 2}
    as_long = sum(len(shape) == 2 and shape[0] in rows for shape in shapes.values())  # the embedding is one of them
    if pretrained.tied(config) is False and as_long == 1:
        return "its weights have no output head, and config.json says that it is not the embedding", PLAIN
    return None


# -- tokenizers -----


def other_tokens(ours: Path, theirs: Path) -> str | None:
    """The first token for which the tokenizers of two model folders have different ids, as a sentence about `theirs`;
    "" if there is none, None where one of the folders has no tokenizer.json."""
    ids, others = ({**vocabulary, **added} for vocabulary, added in map(pieces, (ours, theirs)))
    if not ids or not others:
        return None
    apart = [token for token in ids.keys() | others.keys() if ids.get(token) != others.get(token)]
    if not apart:
        return ""
    first = min(apart, key=lambda token: (min(ids.get(token, 1 << 40), others.get(token, 1 << 40)), token))
    its_id, our_id = (f"{table[first]}" if first in table else "no token" for table in (others, ids))
    return f"its tokenizer has other ids for {len(apart)} tokens; {first!r} is {its_id}, in model.path {our_id}"


def token_fault(folder: Path) -> str:
    """The rule that a tokenizer breaks with ids for which the model has no row; "" for none, and where the number of
    rows is not known. Added tokens are left out: many tokenizers have some that no text contains."""
    size, (vocabulary, _) = vocabulary_size(folder), pieces(folder)
    name = "tokenizer.json"
    if not vocabulary and (folder / name).is_file() and pretrained.read_config(folder, name).get("model") is None:
        return f"{name} is no JSON object with a model: it was cut, or is another file"
    highest = max((number for number in vocabulary.values() if isinstance(number, int)), default=0)
    if not size or highest < size:
        return ""
    return f"tokenizer.json has ids up to {highest}, and by config.json the model has {size} (vocab_size)"
