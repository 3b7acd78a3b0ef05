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
TOKENISED_AT_MOST = 5000  # prompts; the longest by bytes are looked at first
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


@dataclass(frozen=True)
class TooLong:
    """Prompts above generation.max_prompt_tokens: how many, and the longest with its line."""

    count: int
    line: int
    tokens: int


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


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class Vocabulary:
    """Token ids of a model: those that end a sequence, and those that mean text (no special ones)."""

    eos: int
    plain: tuple[int, ...]


def vocabulary(folder: Path) -> Vocabulary | None:
    """From config.json and generation_config.json; None where they do not say how many ids there are, and the end."""
    config = read_config(folder)
    nested = config.get("text_config")
    parts = [config, nested if isinstance(nested, dict) else {}, _read(folder / "generation_config.json")]
    ends = [end for part in parts for end in _ids(part.get("eos_token_id"))]
    special = {i for part in parts for name in SPECIAL for i in _ids(part.get(name))}
    size = next((part["vocab_size"] for part in parts if isinstance(part.get("vocab_size"), int)), 0)
    plain = tuple(i for i in range(size) if i not in special)
    return Vocabulary(ends[0], plain) if ends and ends[0] < size and plain else None


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


def too_long(prompts: Path, key: str, folder: Path, limit: int) -> TooLong | None:
    """Prompts with more than `limit` tokens, None if it can not be told. A prompt of n bytes has at most n tokens."""
    tokenizer = _tokenizer(folder)
    if tokenizer is None:
        return None
    texts = []
    with open(prompts, "rb") as file:
        for number, line in enumerate(file, 1):
            text = str(json.loads(line)[key])
            if len(text.encode()) > limit:
                texts.append((len(text), number, text))
    texts.sort(reverse=True)
    texts = texts[:TOKENISED_AT_MOST]
    counts = [len(encoding.ids) for encoding in tokenizer.encode_batch([text for _, _, text in texts])] if texts else []
    longest, where = max(((n, number) for n, (_, number, _) in zip(counts, texts)), default=(0, 0))
    return TooLong(sum(n > limit for n in counts), where, longest)


def _tokenizer(folder: Path) -> Any:
    try:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # no such package, or a tokenizer of another kind: then nothing is counted
        return None
