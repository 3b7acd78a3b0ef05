"""The tokenizer that transformers makes of a model folder, which is the engines' one, in processes without torch.

Asks a process of its own, which imports transformers: that takes seconds, so the answer is kept in
`${XDG_CACHE_HOME:-~/.cache}/busrl/tokenizers/`. Knows nothing of prompts, templates or ids.

- A kept answer is of the very files, bytes and packages that would be asked: their hash is its name.
- A cache that cannot be read or written costs time and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from busrl.errors import UserError
from busrl.system import files

# Runs in a process of its own, from which torch is hidden: importing torch takes longer than everything else.
ASK_LIBRARY = """
import importlib.util, sys
known = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name.partition(".")[0] == "torch" else known(name, *more)
from transformers import AutoTokenizer
made = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True)
sys.stdout.buffer.write(made.backend_tokenizer.to_str().encode())
"""
ASK_S = 120.0
FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")  # a folder with none has no tokenizer
WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".onnx", ".msgpack"})
KEPT_BYTES = 256 << 20  # of all kept answers; the oldest make room


def library_tokenizer(folder: Path) -> str:
    """The tokenizer that transformers makes of a folder, as the text of a tokenizer.json; "" without transformers, and
    for a tokenizer that has no such form."""
    if not any((folder / name).is_file() for name in FILES):
        return ""
    try:
        there = [path for path in sorted(folder.iterdir()) if path.suffix not in WEIGHTS and path.is_file()]
        return _library_tokenizer(folder.resolve(), tuple((path.name, path.stat().st_mtime_ns) for path in there))
    except OSError:  # a file went meanwhile: then the caller falls back to tokenizer.json
        return ""


@lru_cache(maxsize=4)
def _library_tokenizer(folder: Path, there: tuple[tuple[str, int], ...]) -> str:
    if (library := sys.modules.get("transformers")) is not None:
        try:
            tokenizer = library.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
            return str(tokenizer.backend_tokenizer.to_str())
        except Exception:  # then the caller falls back to tokenizer.json
            return ""
    if (spec := importlib.util.find_spec("transformers")) is None:
        return ""
    kept = _place(spec.origin or "", [folder / name for name, _ in there])
    with contextlib.suppress(OSError, UnicodeError):
        if kept is not None:
            return kept.read_text(encoding="utf-8")
    text = _asked(folder)
    if text and kept is not None:
        with contextlib.suppress(OSError):
            _keep(kept, text.encode())
    return text


def _asked(folder: Path) -> str:
    """The answer of a process that imports transformers."""
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run([sys.executable, "-c", ASK_LIBRARY, str(folder)], stdin=subprocess.DEVNULL, cwd="/",
                              capture_output=True, timeout=ASK_S, env={**os.environ, **quiet}, check=True)
        return done.stdout.decode()
    except (OSError, subprocess.SubprocessError, UnicodeError):  # then the caller falls back to tokenizer.json
        return ""


# -- kept answers -----


def _place(origin: str, paths: Sequence[Path]) -> Path | None:
    """The file of the answer for these files and the packages that are installed; None where no answer is kept."""
    try:
        asked = [ASK_LIBRARY, origin, *(version(name) for name in ("transformers", "tokenizers"))]
        asked += [f"{path.name}={hashlib.sha256(path.read_bytes()).hexdigest()}" for path in paths]
        name = hashlib.sha256("\0".join(asked).encode()).hexdigest()
        return files.user_folder("XDG_CACHE_HOME", ".cache") / "busrl" / "tokenizers" / f"{name}.json"
    except (OSError, PackageNotFoundError, UserError):
        return None


def _keep(kept: Path, data: bytes) -> None:
    """Write an answer, and remove the oldest ones over KEPT_BYTES."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(kept) as fd:
        files.write_all(fd, [data], 0)
    left = KEPT_BYTES
    for path in sorted(kept.parent.glob("*.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True):
        left -= path.stat().st_size
        if left < 0 and path != kept:
            path.unlink(missing_ok=True)
