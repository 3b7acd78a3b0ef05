"""What this machine and a model folder say without torch: memory, cores, sizes, versions on disk, usual learning rates.

Reads file headers and asks the operating system. Used by `busrl check` and `launch` before anything starts, by the
weight transports, which keep as many versions as are counted here, and by engines that need a model's token ids.

- Sizes are 0 where the model folder does not state them: weights that are no safetensors, a tiny model not yet made.
- A process whose entry names cores runs on those. All others share the cores that no entry names, or all if none is
  left. Where no entry names any, no process is bound.
- Learning rates are starting points, from published runs of policy gradients with AdamW (1e-6 for all weights of models
  of some billion parameters, ten times that for an adapter) and busrl's measurements for the quickstart. Only a rate
  FAR times the usual one gets a warning.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from busrl.config.engine_rules import parse_cores, rollouts, vllm_entries
from busrl.config.rules import Finding
from busrl.config.schema import ADAPTERS, FOLDERS, RESTARTS, TINY, Process, Topology
from busrl.errors import DiskFull, UserError

# -- tasks that are made on first use -----

MAKER = "busrl.quickstart"  # the module that makes what a name beginning with TINY stands for; imported for these alone


def maker() -> Any:
    """The module, loaded when the first such name is met: its RECIPES by name, `paths` of one, None if it is not made
    yet, and `ensure`, which makes one that is not there."""
    return importlib.import_module(MAKER)


def made(name: str) -> Any:
    """Paths of the model folder and the two prompt files of a task; None if it is not made yet, or unknown."""
    return maker().paths(name) if name in maker().RECIPES else None


def model_at(path: str) -> Path | None:
    """The folder of `model.path`; None for a task's that is not made yet."""
    if not path.startswith(TINY):
        return Path(path)
    there = made(path)
    return Path(there.model) if there else None


# -- a model folder, and the memory of this machine -----

Shapes = dict[str, tuple[int, ...]]
SHM = "/dev/shm"
SPECIAL = ("eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id")
EMBEDDINGS = (["embed_tokens"], ["wte"], ["embed_in"], ["word_embeddings"])
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
BYTES_OF = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class ModelFacts:
    """What a model folder says about itself; `parameters` is 0 where the weights are no safetensors."""

    kind: str
    hidden: int
    layers: int
    vocabulary: int
    context: int
    parameters: int


def shm_free() -> int:
    """Free bytes of /dev/shm, 0 where there is none."""
    try:
        return shutil.disk_usage(SHM).free
    except OSError:
        return 0


def cores() -> frozenset[int]:
    """Cores that this process may use."""
    return frozenset(os.sched_getaffinity(0))


def model_facts(folder: Path | None) -> ModelFacts:
    """Read config.json and the headers of the weights; nothing of a task's that is not made yet."""
    if folder is None:
        return ModelFacts("", 0, 0, 0, 0, 0)
    config = read_config(folder)
    text = _nested(config) or config
    kinds = config.get("architectures") or [config.get("model_type", "unknown")]
    hidden, layers = whole(text, "hidden_size", "n_embd", "d_model"), whole(text, *LAYERS)
    return ModelFacts(
        str(kinds[0]), hidden, layers, whole(text, "vocab_size"), context_of(config), count_of(tensor_shapes(folder))
    )


def _nested(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that describes the language model of several."""
    found = config.get("text_config")
    return found if isinstance(found, dict) else {}


def context_of(config: dict[str, Any]) -> int:
    """The longest sequence that a model takes, 0 if its config does not say."""
    names = ("max_position_embeddings", "n_positions", "max_sequence_length")
    values = (part.get(name) for part in (config, _nested(config)) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


def read_json(path: Path) -> Any:
    """What a JSON file holds; None where it cannot be read."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """A map in a model folder, empty where it cannot be read."""
    found = read_json(folder / name)
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class Vocabulary:
    """Token ids of a model: those that end a sequence, and those that mean text (no special ones)."""

    eos: int
    plain: tuple[int, ...]


def vocabulary(folder: Path) -> Vocabulary | None:
    """From config.json and generation_config.json; None where they do not say how many ids there are, and the end."""
    parts = _parts(folder)
    ends = [end for part in parts for end in _ids(part.get("eos_token_id"))]
    special = {i for part in parts for name in SPECIAL for i in _ids(part.get(name))}
    size = vocabulary_size(folder)
    plain = tuple(i for i in range(size) if i not in special)
    return Vocabulary(ends[0], plain) if ends and ends[0] < size and plain else None


def other_tokens(own: Path, other: Path) -> str | None:
    """The first token for which the tokenizers of two model folders have other ids; "" if there is none, None where one
    of them has no tokenizer.json to be compared."""
    ids, others = _token_ids(own), _token_ids(other)
    if not ids or not others:
        return None
    apart = [token for token in ids.keys() | others.keys() if ids.get(token) != others.get(token)]
    if not apart:
        return ""
    first = min(apart, key=lambda token: (min(ids.get(token, 1 << 40), others.get(token, 1 << 40)), token))
    told = [f"{found[first]}" if first in found else "no token" for found in (others, ids)]
    return f"its tokenizer has other ids for {len(apart)} tokens; {first!r} is {told[0]}, in model.path {told[1]}"


def _token_ids(folder: Path) -> dict[str, int]:
    data = read_config(folder, "tokenizer.json")
    model, added = data.get("model"), data.get("added_tokens")
    known = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(known, list):  # of a unigram model: [token, score]
        known = {str(row[0]): i for i, row in enumerate(known) if isinstance(row, list) and row}
    rows = [one for one in added if isinstance(one, dict)] if isinstance(added, list) else []
    return (known if isinstance(known, dict) else {}) | {str(one.get("content")): one.get("id", -1) for one in rows}


def end_ids(folder: Path) -> frozenset[int]:
    """Every id that config.json or generation_config.json says ends a sequence."""
    return frozenset(end for part in _parts(folder) for end in _ids(part.get("eos_token_id")))


def vocabulary_size(folder: Path) -> int:
    """How many token ids the model has by its config.json; 0 if it does not say."""
    return next((part["vocab_size"] for part in _parts(folder) if isinstance(part.get("vocab_size"), int)), 0)


def _parts(folder: Path) -> list[dict[str, Any]]:
    """The places of a model folder that name token ids."""
    config = read_config(folder)
    return [config, _nested(config), read_config(folder, "generation_config.json")]


def _ids(value: Any) -> list[int]:
    found = value if isinstance(value, list) else [value]
    return [i for i in found if isinstance(i, int) and i >= 0]


def whole(config: Any, *names: str) -> int:
    """The first of these keys that holds a whole number; 0 if none does."""
    return next((config[name] for name in names if isinstance(config.get(name), int)), 0)


def weight_fault(folder: Path) -> tuple[str, str, str] | None:
    """File, rule and remedy of weights that no model can be made of: cut files, parts that are not there, and others
    than config.json describes. Reads headers only; None for whole ones, and for what is no safetensors file."""
    for path in sorted(folder.glob("*.safetensors")):
        if fault := _cut(path):
            return str(path), fault, "the download or the copy did not finish: copy the file again"
    listed = read_config(folder, "model.safetensors.index.json").get("weight_map")
    names = set(map(str, listed.values())) if isinstance(listed, dict) else set()
    if gone := sorted(name for name in names if not (folder / name).is_file()):
        more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
        index = str(folder / "model.safetensors.index.json")
        return index, f"it names {gone[0]}{more}, which is not there", "copy the missing files too"
    config = read_config(folder)
    text = _nested(config) or config
    said = whole(text, "vocab_size"), whole(text, "embedding_size", "word_embed_proj_dim", "hidden_size", "n_embd")
    there = {name: one for name, one in tensor_shapes(folder).items() if name.split(".")[-2:-1] in EMBEDDINGS}
    if all(said) and there and said not in there.values():
        name, shape = max(there.items(), key=lambda one: math.prod(one[1]))
        rule = f"vocabulary and width are {_by(said)}, and those of the weights ({name}) {_by(shape)}"
        return str(folder / "config.json"), rule, "put the config.json of these weights there, or its own weights"
    return None


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _cut(path: Path) -> str:
    """What is wrong with the length of a safetensors file; "" if nothing is."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: Any = json.loads(file.read(length)) if length <= min(size, 100 << 20) else None
        ends = [int(one["data_offsets"][1]) for name, one in header.items() if name != "__metadata__"]
    except (OSError, ValueError, struct.error, LookupError, TypeError, AttributeError):
        return "not a whole safetensors file: its header cannot be read"
    whole_size = 8 + length + max(ends, default=0)
    return f"it has {size} bytes, and its header says {whole_size}" if size < whole_size else ""


def token_fault(folder: Path) -> str:
    """A rule that tokenizer and model break together: ids that the model has no row for. "" for none, and where it is
    not known. Added tokens are left out: many a tokenizer has some that no text contains."""
    size, section = vocabulary_size(folder), read_config(folder, "tokenizer.json").get("model")
    if section is None and (folder / "tokenizer.json").is_file():
        return "tokenizer.json is no JSON object with a model: it was cut, or is another file"
    known = section.get("vocab") if isinstance(section, dict) else None
    ids = list(known.values()) if isinstance(known, dict) else range(len(known)) if isinstance(known, list) else ()
    highest = max((one for one in ids if isinstance(one, int)), default=0)
    if not size or highest < size:
        return ""
    return f"tokenizer.json has ids up to {highest}, and by config.json the model has {size} (vocab_size)"


def tensor_shapes(folder: Path) -> Shapes:
    """Shape of every tensor in the safetensors of a folder, by name; empty where there are none to be read."""
    return {name: shape for path in sorted(folder.glob("*.safetensors")) for name, shape in _shapes(path)}


def _shapes(path: Path) -> list[tuple[str, tuple[int, ...]]]:
    """The header of a safetensors file is a length of 8 bytes and a JSON map."""
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length)) if length <= 100 << 20 else {}
    except (OSError, ValueError, struct.error):
        return []
    entries = header.items() if isinstance(header, dict) else ()
    return [(name, tuple(entry["shape"])) for name, entry in entries if isinstance(entry, dict) and "shape" in entry]


def count_of(shapes: Shapes) -> int:
    """How many numbers these tensors have."""
    return sum(map(math.prod, shapes.values()))


# -- cores -----


def cores_of(t: Topology, entry: Process, here: frozenset[int]) -> frozenset[int]:
    """The cores for processes of that entry, out of those that this machine gives us; empty: they are not bound."""
    if entry.cpus:
        return parse_cores(entry.cpus)
    return here - named if (named := _named_cores(t)) else named


def require_cores(t: Topology, here: frozenset[int]) -> None:
    """UserError if an entry names cores that are not there."""
    for index, entry in enumerate(t.process):
        if entry.cpus and (missing := sorted(parse_cores(entry.cpus) - here)):
            raise UserError(
                f'process.{index}.cpus = "{entry.cpus}": core {missing[0]} is not there, or not for this process, '
                f"which may use {sorted(here)}; name others, or remove cpus"
            )


def _named_cores(t: Topology) -> frozenset[int]:
    return frozenset().union(*(parse_cores(entry.cpus) for entry in t.process if entry.cpus))


# -- published versions -----

ADAPTER_BYTES = 4  # an adapter is float32 whatever the model is
UNBOUNDED = 8  # versions of an adapter that vLLM may be asked for where nothing bounds their age
SMALL_FILES = 16 << 10  # configuration and stamp of an adapter
HEADS = ("lm_head", "embed_out", "output", "score")


@dataclass(frozen=True)
class Cost:
    """Folders of versions: bytes of one, how many the learner keeps, and how many there may be at the same time."""

    version: int
    kept: int
    most: int

    @property
    def total(self) -> int:
        return self.version * self.most


def kept_versions(t: Topology) -> int:
    """Versions that stay in the place of publication. An adapter may be asked for as long as a sample of it counts."""
    if t.weights.transport == "lora_hotswap" and t.weights.mode == "batch-async":
        return max(2, t.weights.max_staleness + 1)
    return 2  # the newest, and the one that an engine may be reading


def adapter_slots(t: Topology) -> int:
    """Adapters that one vLLM holds at a time: those that its running answers may be of, and the newest."""
    if t.weights.mode == "sync" or t.weights.transport in RESTARTS:
        return 2
    return (t.weights.max_staleness if t.weights.mode == "batch-async" else UNBOUNDED) + 2


def held_versions(t: Topology) -> int:
    """Versions that one engine holds on to: those that its running sequences may be of."""
    if t.weights.transport in ADAPTERS and vllm_entries(t):
        return adapter_slots(t)  # it reads an adapter from its folder as long as it has a place for it
    return 1 if t.weights.transport in RESTARTS else kept_versions(t)


def weight_cost(t: Topology, model: Path | None) -> Cost | None:
    """None for a transport that publishes no folders."""
    if t.weights.transport not in FOLDERS:
        return None
    shapes = tensor_shapes(model) if model is not None else {}
    if t.weights.transport in ADAPTERS:
        parts = adapted(shapes, t.lora.targets)
        size = sum(ADAPTER_BYTES * t.lora.rank * (rows + columns) for rows, columns in parts) if parts else 0
        size += SMALL_FILES if size else 0
    else:
        size = count_of(shapes) * BYTES_OF[t.model.dtype]
    kept, engines = kept_versions(t), sum(entry.count for _, entry in rollouts(t))
    return Cost(size, kept, kept + 1 + engines * held_versions(t))


def broadcast_copies(t: Topology) -> list[tuple[str, float]]:
    """Who holds how many times the size of all values in a broadcast: the learner the version that it sends and the
    one that comes next (and frames of changes), an engine the version that it has and the one that arrives."""
    sparse = t.weights.sparse.enabled
    found = [("learner, two blocks" + (" and frames of changes" if sparse else ""), 2.5 if sparse else 2.0)]
    if any(entry.engine != "vllm" for _, entry in rollouts(t)):
        found.append(("each engine, front and back", 2.0))
    if vllm_entries(t):
        found.append(("each worker of vLLM, front, back and staging", 3.0))
    return found


def adapted(shapes: Shapes, targets: tuple[str, ...]) -> list[tuple[int, int]]:
    """Shapes of the weights that get an adapter, as far as names and shapes tell."""
    asked = (shape for layer, shape in _matrices(shapes) if (layer in targets if targets else not _outer(layer)))
    return [(rows, columns) for rows, columns in asked]


def weight_layers(shapes: Shapes) -> set[str]:
    """Last names of the layers that may get an adapter, as far as names and shapes tell: matrices, no embeddings."""
    return {layer for layer, _ in _matrices(shapes) if layer in HEADS or not _outer(layer)}


def _matrices(shapes: Shapes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Last name of the layer, and shape."""
    return ((n.split(".")[-2], shape) for n, shape in shapes.items() if len(shape) == 2 and n.endswith(".weight"))


def require_disk(t: Topology, model: Path | None, run_dir: Path) -> None:
    """DiskFull with the sum, if the versions that checkpoint_restart writes into the run directory do not fit."""
    found = weight_cost(t, model)
    if found is None or t.weights.transport in ADAPTERS:
        return
    place = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if found.total > free:
        raise DiskFull(
            f"{place} has {free >> 20} MiB free, {t.weights.transport} needs {found.most} versions of "
            f"{found.version >> 20} MiB = {found.total >> 20} MiB there; free some, choose another --run-dir, or "
            'weights.transport = "shm"'
        )


def _outer(layer: str) -> bool:
    """Embeddings and output heads, which get no adapter unless they are named."""
    return layer in HEADS or "embed" in layer or layer in ("wte", "wpe")


# -- learning rates -----

USUAL = ((1e6, 2e-4), (1e7, 5e-5), (1e8, 2e-5), (1e9, 3e-6), (1e10, 1e-6))  # fewer parameters than: middle, all weights
LARGEST = 5e-7
LORA = 10.0  # an adapter's middle is so many times that of all weights
FAR = 20.0
WARNED_FROM = 1e8  # parameters; smaller models are toys, whose owners know what they do
TINY_PARAMETERS = 100_000


def usual_rate(size: int, lora: bool) -> float:
    """A learning rate to begin with; a third of it and three times that are usual as well."""
    return next((rate for below, rate in USUAL if size < below), LARGEST) * (LORA if lora else 1)


def parameters(t: Topology) -> int:
    """How many the model has: from its weights, or else from the widths of config.json; 0 where neither says."""
    if t.model.path.startswith(TINY):
        return TINY_PARAMETERS
    folder = Path(t.model.path)  # its weights may be elsewhere, or only a part of them here
    return max(count_of(tensor_shapes(folder)), estimate(read_config(folder)))


def estimate(config: dict[str, Any]) -> int:
    """A decoder's parameters from its widths: embeddings, attention and a gated feed-forward of each layer."""
    text = _nested(config) or config
    width, layers = whole(text, "hidden_size", "n_embd", "d_model"), whole(text, *LAYERS)
    inner = whole(text, "intermediate_size", "n_inner", "d_ff") or 4 * width
    heads, shared = whole(text, "num_attention_heads", "n_head"), whole(text, "num_key_value_heads")
    queries = heads * whole(text, "head_dim") or width
    attention = 2 * width * queries * (1 + (shared / heads if heads and shared else 1))
    feed = (3 if "intermediate_size" in text else 2) * width * inner
    embeddings = whole(text, "vocab_size") * width * (1 if config.get("tie_word_embeddings", True) else 2)
    return int(embeddings + layers * (attention + feed))


def rate_advice(t: Topology) -> str:
    """What to set learner.lr to, in words."""
    size, what = parameters(t), "a LoRA adapter of" if t.lora.on else "all weights of"
    if not size:
        return "usual are 1e-06 for all weights of a model of some billion parameters, 1e-05 for a LoRA adapter"
    middle = usual_rate(size, t.lora.on)
    return f"for {what} {shown_size(size)} parameters {middle:.0e} is usual, from a third of it to three times that"


FRESH = 2  # steps of age that the usual learning rates bear (docs/losses.md)


def stale_rate_advice(t: Topology) -> Iterator[str]:
    """What old samples ask of learner.lr: a careful start divides it by the square root of the oldest age."""
    if t.weights.mode == "fully-async":
        yield "  samples of any age: watch k3 and ess; where k3 rises above 0.05, lower the rate or bound the age"
    elif t.weights.mode == "batch-async" and t.weights.max_staleness > FRESH and t.learner.lr is not None:
        age, careful = t.weights.max_staleness, t.learner.lr / math.sqrt(t.weights.max_staleness / FRESH)
        yield f"  with samples up to {age} steps old a careful start is {careful:.1e} (lr / sqrt({age} / {FRESH}))"


def shown_size(size: int) -> str:
    """A count of parameters as people write it."""
    return f"{size / 1e9:.1f} B" if size >= 1e9 else f"{size / 1e6:.0f} M" if size >= 1e7 else f"{size / 1e6:.1f} M"


def rate_findings(t: Topology) -> Iterator[Finding]:
    """A learning rate that destroys a model of this size within a few steps."""
    lr, size = t.learner.lr, parameters(t)
    if lr is None or size < WARNED_FROM:
        return
    middle = usual_rate(size, t.lora.on)
    if lr > FAR * middle:
        what = "a LoRA adapter" if t.lora.on else "all weights"
        rule = f"{lr / middle:.0f} times what is usual for {what} of {shown_size(size)} parameters"
        remedy = f"{rate_advice(t)}; a policy that has collapsed does not come back"
        yield Finding(("learner.lr",), rule, remedy, warning=True, depends=("model.path", "lora.rank"))
