"""What a model folder is known by, so that an adapter is never added to another model than the one it was trained on.

Read by the learner and by every receiver of adapters. Talks to the file system only; imports no torch.

- Same folder, or a copy of it: same text. Another architecture, another dtype on disk, other weights: another text.
- Weights are sampled, not read whole: their names, shapes and sizes, and 32 blocks of 64 KiB spread over each file. A
  model that differs from another in less than that is not told apart.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from busrl.errors import UserError

BLOCKS, BLOCK = 32, 64 << 10
HEADER_AT_MOST = 100 << 20
# Written by the library that saved the folder; they change with its version, not with the model.
VOLATILE = ("transformers_version", "_name_or_path", "use_cache", "torch_dtype", "dtype")


def fingerprint(folder: Path) -> str:
    """Hexadecimal SHA-256; UserError for a folder without configuration or weights."""
    digest = hashlib.sha256()
    try:
        digest.update(_config(folder))
        files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
        if not files:
            raise UserError(f"{folder}: no weights in it, so adapters can not be told to belong to it; see model.path")
        for path in files:
            _add(digest, path)
    except (OSError, ValueError) as problem:
        raise UserError(f"{folder}: not a model folder that can be read: {problem}; see model.path") from problem
    return digest.hexdigest()


def _config(folder: Path) -> bytes:
    config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    return json.dumps({k: v for k, v in config.items() if k not in VOLATILE}, sort_keys=True).encode()


def _add(digest: Any, path: Path) -> None:
    """Name, size, the header of a safetensors file whole, and blocks of the rest."""
    size = path.stat().st_size
    digest.update(f"{path.name} {size}".encode())
    with open(path, "rb") as file:
        begin = 0
        if path.suffix == ".safetensors" and size > 8:
            (length,) = struct.unpack("<Q", file.read(8))
            begin = 8 + min(length, HEADER_AT_MOST)
            digest.update(file.read(begin - 8))
        step = max(BLOCK, (size - begin) // BLOCKS)
        for offset in range(begin, size, step):
            file.seek(offset)
            digest.update(file.read(BLOCK))
