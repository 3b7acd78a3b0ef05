"""What `busrl check` can tell about this machine and about files in depth: shared memory, cores, weights, tokens.

Reads file headers and asks the operating system; loads neither torch nor a model. Token counts need the `tokenizers`
package and are left out without it. Knows nothing of how a report looks.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHM = "/dev/shm"
SPECIAL = ("eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id")
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


def model_facts(folder: Path, context: int) -> ModelFacts:
    """Read config.json and the headers of the weights."""
    config = read_config(folder)
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    kinds = config.get("architectures") or [config.get("model_type", "unknown")]
    return ModelFacts(
        kind=str(kinds[0]),
        hidden=whole(text, "hidden_size", "n_embd", "d_model"),
        layers=whole(text, *LAYERS),
        vocabulary=whole(text, "vocab_size"),
        context=context,
        parameters=sum(elements(shape) for shape in tensor_shapes(folder).values()),
    )


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder, empty where it can not be read."""
    return _read(folder / "config.json")


def read_list(path: Path) -> list[Any]:
    """A JSON list, empty where it can not be read."""
    found = _json(path)
    return found if isinstance(found, list) else []


def _read(path: Path) -> dict[str, Any]:
    found = _json(path)
    return found if isinstance(found, dict) else {}


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


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


def end_ids(folder: Path) -> frozenset[int]:
    """Every id that config.json or generation_config.json says ends a sequence."""
    return frozenset(end for part in _parts(folder) for end in _ids(part.get("eos_token_id")))


def vocabulary_size(folder: Path) -> int:
    """How many token ids the model has by its config.json; 0 if it does not say."""
    return next((part["vocab_size"] for part in _parts(folder) if isinstance(part.get("vocab_size"), int)), 0)


def _parts(folder: Path) -> list[dict[str, Any]]:
    """The places of a model folder that name token ids."""
    config = read_config(folder)
    nested = config.get("text_config")
    return [config, nested if isinstance(nested, dict) else {}, _read(folder / "generation_config.json")]


def _ids(value: Any) -> list[int]:
    found = value if isinstance(value, list) else [value]
    return [i for i in found if isinstance(i, int) and i >= 0]


def whole(config: Any, *names: str) -> int:
    """The first of these keys that holds a whole number; 0 if none does."""
    return next((config[name] for name in names if isinstance(config.get(name), int)), 0)


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
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


def elements(shape: tuple[int, ...]) -> int:
    """How many numbers a tensor of that shape has."""
    total = 1
    for size in shape:
        total *= size
    return total
