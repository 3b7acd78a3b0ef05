"""Facts of a pretrained model's folder, read without torch: sizes, token ids, names and shapes of tensors.

Reads config.json, tokenizer.json and the headers of safetensors files. Knows nothing of topologies, nor of what a run
needs beside the model.

- A size is 0 where the folder does not state it: weights in another format, a tiny model not yet made.

"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from busrl.data.vocabulary import language_of, named_ids, pieces, token_rows
from busrl.errors import ModelNotLoaded
from busrl.states import TINY
from busrl.system.files import as_map, read_map

# -- tasks that are made on first use -----

MAKER = "busrl.quickstart"  # the module that makes what a name beginning with TINY stands for; imported for these alone


def maker() -> Any:
    """The module, imported at the first such name. It has RECIPES by name; `paths` of a task, None before it is made;
    and `ensure`, which makes a task that is not there."""
    return importlib.import_module(MAKER)


def _paths_of_task(name: str) -> Any:
    """Paths of the model folder and the two prompt files of a task; None if it is not made yet, or unknown."""
    return maker().paths(name) if name in maker().RECIPES else None


def model_at(path: str) -> Path | None:
    """The folder of `model.path`; None for the model of a task that is not made yet."""
    if not path.startswith(TINY):
        return Path(path)
    there = _paths_of_task(path)
    return Path(there.model) if there else None


def task_prompts(path: str) -> Path | None:
    """The prompt file of the task that `data.train` names; None for a path, or if it is not made yet."""
    there = _paths_of_task(path) if path.startswith(TINY) else None
    return Path(there.train) if there else None


# -- a model folder -----


def import_classes(folder: str | Path) -> None:
    """Import transformers' classes for the model and tokenizer of a folder; what is wrong with it, loading says.

    No tokenizer is made: one that has worked has threads, and its processes are forked after this.
    """
    hf: Any = importlib.import_module("transformers")
    importlib.import_module("transformers.models.auto.modeling_auto")
    tokenizers: Any = importlib.import_module("transformers.models.auto.tokenization_auto")
    with contextlib.suppress(Exception):
        config = hf.AutoConfig.from_pretrained(str(folder), local_files_only=True)
        hf.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with contextlib.suppress(Exception):
        settings = tokenizers.get_tokenizer_config(str(folder), local_files_only=True)
        tokenizers.tokenizer_class_from_name(settings["tokenizer_class"])


def require_whole(folder: str | Path, info: Mapping[str, Any]) -> None:
    """ModelNotLoaded where the files lack weights of the model, in whose place transformers puts random ones. `info`:
    what it says of the load."""
    if missing := sorted(info["missing_keys"]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelNotLoaded(f"{folder}: its files have no weights for {missing[0]}{more}, which its config.json asks "
                             "for; put the config.json of these weights there, or copy the missing files")


Shapes = dict[str, tuple[int, ...]]
SPECIAL = ("eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id")
EMBEDDINGS = (["embed_tokens"], ["wte"], ["embed_in"], ["word_embeddings"])
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")  # in the name of a tensor
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
BYTES_OF = {"float32": 4, "bfloat16": 2}
HEADS = ("lm_head", "embed_out", "output", "score")
TINY_PARAMETERS = 100_000
LONGEST_HEADER = 100 << 20
DEFAULT_TOKEN_BYTES = 128  # longest text of one token, where the tokenizer cannot be read


@dataclass(frozen=True)
class ModelFacts:
    """Facts that a model folder states about itself; `parameters` is 0 where the weights are no safetensors."""

    kind: str
    hidden: int
    layers: int
    vocabulary: int
    context: int
    parameters: int


def model_facts(folder: Path | None) -> ModelFacts:
    """Read config.json and the headers of the weights; `folder` None, for a task that is not made yet, has no facts."""
    if folder is None:
        return ModelFacts("", 0, 0, 0, 0, 0)
    config = read_config(folder)
    text = language_of(config)
    kinds = config.get("architectures") or [config.get("model_type", "unknown")]
    hidden, layers = size_in(text, "hidden_size", "n_embd", "d_model"), size_in(text, *LAYERS)
    return ModelFacts(
        str(kinds[0]), hidden, layers, size_in(text, "vocab_size"), context_of(config),
        count_of(tensor_shapes(folder)),
    )


def parameters(path: str) -> int:
    """The number of a model's parameters: from its weights, or else from the widths of config.json; 0 without both."""
    if path.startswith(TINY):
        return TINY_PARAMETERS
    folder = Path(path)  # its weights may be elsewhere, or only a part of them here
    return max(count_of(tensor_shapes(folder)), estimate(read_config(folder)))


def estimate(config: dict[str, Any]) -> int:
    """A decoder's parameters from its widths: embeddings, attention and a gated feed-forward of each layer."""
    text = language_of(config)
    width, layers = size_in(text, "hidden_size", "n_embd", "d_model"), size_in(text, *LAYERS)
    inner = size_in(text, "intermediate_size", "n_inner", "d_ff") or 4 * width
    heads, shared = size_in(text, "num_attention_heads", "n_head"), size_in(text, "num_key_value_heads")
    queries = heads * size_in(text, "head_dim") or width
    attention = 2 * width * queries * (1 + (shared / heads if heads and shared else 1))
    feed = (3 if "intermediate_size" in text else 2) * width * inner
    embeddings = size_in(text, "vocab_size") * width * (1 if config.get("tie_word_embeddings", True) else 2)
    return int(embeddings + layers * (attention + feed))


def context_of(config: dict[str, Any]) -> int:
    """The longest sequence that a model takes; 0 if its config does not state it."""
    names = ("max_position_embeddings", "n_positions", "max_sequence_length")
    values = (part.get(name) for part in (config, language_of(config)) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


def read_json(path: Path) -> Any:
    """The content of a JSON file; None where it cannot be read."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """A map in a model folder, empty where it cannot be read."""
    return read_map(folder / name)


def size_in(config: Any, *names: str) -> int:
    """The first of these keys that holds a whole number; 0 if none does."""
    return next((config[name] for name in names if isinstance(config.get(name), int)), 0)


# -- names of the hub, where a file or folder is expected -----

MODEL, DATA_SET = "model", "data set"
_OF_HUB = re.compile(r"(?:(?:hf:|https?:/(?:huggingface|hf)\.co)/(?:datasets/)?)?([\w-][\w.-]*(?:/[\w-][\w.-]*)?)")
_OF_FILES = (".jsonl", ".json", ".parquet", ".pq", ".csv", ".toml", ".gz")


def of_hub(topology: str, path: str, what: str = MODEL) -> str:
    """The remedy for a missing path that reads like a name of the hub; empty for any other. A path in the file
    `topology` is relative to that file, an override to the current directory."""
    for base in (os.path.dirname(topology), os.getcwd()):
        name = _OF_HUB.fullmatch(os.path.relpath(path, base))
        if name and not path.endswith(_OF_FILES) and not os.path.isdir(os.path.join(base, name[1].partition("/")[0])):
            short = name[1].rpartition("/")[2]
            kind, where = (" --repo-type dataset", "as path of a [[data.source]]") if what == DATA_SET else ("", "here")
            fetch = f"`hf download {name[1]}{kind} --local-dir {short}`"
            return f"a {what} of the hub is downloaded first: {fetch}; then name the folder {where}"
    return ""


# -- token ids -----


@dataclass(frozen=True)
class Vocabulary:
    """Token ids of a model: those that end a sequence, and those that mean text (no special ones)."""

    eos: int
    plain: tuple[int, ...]


def vocabulary(folder: Path) -> Vocabulary | None:
    """From config.json, generation_config.json and the tokenizer; None where they do not state the number of ids, or
    the id that ends a sequence."""
    ends, rows = named_ids(folder, "eos_token_id"), token_rows(folder)
    special = {*named_ids(folder, *SPECIAL), *rows.left_out()}
    plain = tuple(token for token in range(rows.rows) if token not in special)
    return Vocabulary(ends[0], plain) if ends and ends[0] < rows.rows and plain else None


def token_bytes(folder: Path) -> int:
    """Bytes of the longest token of tokenizer.json (at least 4); a safe guess where it cannot be read."""
    vocabulary, added = pieces(folder)
    return max(4, max(len(token.encode()) for token in (*vocabulary, *added))) if vocabulary else DEFAULT_TOKEN_BYTES


def tied(config: Mapping[str, Any]) -> bool | None:
    """Tell whether the output head is the embedding itself; None where the config leaves it to the model's class."""
    value = config.get("tie_word_embeddings", language_of(config).get("tie_word_embeddings"))
    return value if isinstance(value, bool) else None


# -- what the learner finds in the model, before it starts -----

NUMBERED = re.compile(r"\.\d+\.")  # a layer's number, in the name of a parameter
LAYERED = re.compile(r"(\w+\.)?layers\.\d+\.")  # parameters of layers at the place where ranks and the compiler look
CONVOLVED = ("gpt2", "openai-gpt")  # their layers are no nn.Linear, and adapters need nn.Linear
TINY_PARTS = (
    "input_layernorm", "post_attention_layernorm", *(f"self_attn.{letter}_proj" for letter in "qkvo"),
    "self_attn.q_norm", "self_attn.k_norm", *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
)


def trainable(path: str) -> tuple[list[str], int]:
    """Names of the parameters that learner.train_layers chooses from, each once (none where the folder has no weights),
    and the number of layers."""
    if path.startswith(TINY):
        recipe = maker().RECIPES.get(path)
        count = recipe.layers if recipe else 0
        layers = [f"model.layers.{at}.{part}.weight" for at in range(count) for part in TINY_PARTS]
        return ["model.embed_tokens.weight", *layers, "model.norm.weight"] if count else [], count
    folder = Path(path)
    names = list(tensor_shapes(folder))
    if tied(read_config(folder)):  # a head that a file holds beside the embedding is the embedding all the same
        names = [name for name in names if not is_head(name)]
    return names, model_facts(folder).layers


def has_own_head(path: str) -> bool:
    """Tell whether the output head is a parameter of its own; True unless the folder states that it is the embedding.
    """
    return not path.startswith(TINY) and tied(read_config(Path(path))) is not True


def is_head(name: str) -> bool:
    """Tell whether that is the name of an output head's parameter."""
    return name.split(".")[-2:-1] in [[head] for head in HEADS] and not NUMBERED.search(name)


def cut_fault(path: Path) -> str:
    """The fault in a safetensors file's length; "" if there is none."""
    begin, header = _header(path)
    try:
        ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
        size = path.stat().st_size
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return "not a whole safetensors file: its header cannot be read"
    whole_size = begin + max(ends, default=0)
    return f"it has {size} bytes, and its header says {whole_size}" if size < whole_size else ""


# -- tensors -----


def tensor_shapes(folder: Path) -> Shapes:
    """Shape of every tensor in the safetensors of a folder, by name; empty where there are none to be read."""
    headers = [as_map(_header(path)[1]) for path in sorted(folder.glob("*.safetensors"))]
    entries = [(name, entry) for header in headers for name, entry in header.items() if isinstance(entry, dict)]
    return {name: tuple(entry["shape"]) for name, entry in entries if "shape" in entry}


def _header(path: Path) -> tuple[int, Any]:
    """The offset of the values in a safetensors file, and its header (JSON behind a length of 8 bytes), None where it
    cannot be read."""
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            text = file.read(min(length, LONGEST_HEADER))
        return 8 + length, json.loads(text) if len(text) == length else None
    except (OSError, ValueError, struct.error):
        return 0, None


def layers_in(shapes: Shapes) -> int:
    """The number of layers whose weights are there; 0 where the names do not tell."""
    numbers = (LAYER.search(name) for name in shapes)
    return max((int(found[1]) + 1 for found in numbers if found), default=0)


def count_of(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes.values()))


def adapted(shapes: Shapes, targets: tuple[str, ...]) -> list[tuple[int, ...]]:
    """Shapes of the weights that get an adapter, by names and shapes alone."""
    return [shape for layer, shape in _matrices(shapes) if (layer in targets if targets else not _outer(layer))]


def weight_layers(shapes: Shapes) -> set[str]:
    """Last names of the layers that may get an adapter, by names and shapes alone: matrices, except embeddings and the
    output head."""
    inner = {name: shape for name, shape in shapes.items() if not is_head(name)}
    return {layer for layer, _ in _matrices(inner) if layer in HEADS or not _outer(layer)}


def _matrices(shapes: Shapes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The last name of each matrix's layer, and the shape."""
    return ((n.split(".")[-2], shape) for n, shape in shapes.items() if len(shape) == 2 and n.endswith(".weight"))


def _outer(layer: str) -> bool:
    """Tell whether a layer is an embedding or an output head, which get no adapter unless they are named."""
    return layer in HEADS or "embed" in layer or layer in ("wte", "wpe")
