"""The tokenizer that transformers makes of a model folder, which is the engines' one, in processes without torch.

Asks a process of its own, which imports transformers: that takes seconds, so the answer is kept in
`${XDG_CACHE_HOME:-~/.cache}/busrl/tokenizers/`. Knows nothing of prompts, templates or ids.

- A kept answer is of the very files, bytes and packages that would be asked: their hash is its name.
- Only files that a tokenizer may be made of are read, a piece at a time, and of a folder with too many bytes of them
  nothing is kept: a model folder may hold weights under any name.
- A cache that cannot be read or written, or is damaged, costs time and nothing else: an answer has its digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import platform
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution, version
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
READ = frozenset(  # what names of files end with that tokenizers are made of
    {".json", ".model", ".txt", ".jinja", ".tiktoken", ".py", ".vocab", ".bpe", ".codes", ".spm", ".tokenizer"})
READ_BYTES, PIECE_BYTES = 256 << 20, 1 << 20  # of a folder with more in such files no answer is kept
NEEDED, BESIDE = ("transformers", "tokenizers"), ("sentencepiece", "tiktoken", "protobuf", "mistral-common")
KEPT_BYTES = 256 << 20  # of all kept answers; those that were used longest ago make room
DRAFT, DRAFT_S = ".new", 3600.0  # an older draft is of a writer that was killed


def library_tokenizer(folder: Path) -> str:
    """The tokenizer that transformers makes of a folder, as the text of a tokenizer.json; "" without transformers, and
    for a tokenizer that has no such form."""
    if not any((folder / name).is_file() for name in FILES):
        return ""
    try:
        there = [path for path in sorted(folder.iterdir()) if path.suffix in READ and path.is_file()]
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
    if kept is None:
        return _asked(folder)
    if not (text := _read(kept)) and (text := _asked(folder)):
        with contextlib.suppress(OSError):
            _keep(kept, text)
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
        if sum(path.stat().st_size for path in paths) > READ_BYTES:
            return None
        asked = [ASK_LIBRARY, origin, *_installed(origin), *(f"{path.name}={_digest(path)}" for path in paths)]
        name = hashlib.sha256("\0".join(asked).encode()).hexdigest()
        return files.user_folder("XDG_CACHE_HOME", ".cache") / "busrl" / "tokenizers" / f"{name}.kept"
    except (OSError, PackageNotFoundError, UserError):
        return None


def _installed(origin: str) -> list[str]:
    """The versions that an answer depends on. Where transformers was installed from a folder or a commit (PEP 610), its
    files change under one version, so their times are given too."""
    found = [platform.python_version(), *map(version, NEEDED), *map(_version_or_none, BESIDE)]
    if source := distribution("transformers").read_text("direct_url.json"):
        paths = sorted(Path(origin).parent.rglob("*tokeniz*.py"))
        found += [source, *(f"{path}={path.stat().st_mtime_ns}" for path in paths)]
    return found


def _version_or_none(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # transformers makes another tokenizer without it, or none
        return ""


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _read(kept: Path) -> str:
    """A kept answer, which is used now; "" where there is none, or a damaged one."""
    try:
        digest, _, data = kept.read_bytes().partition(b"\n")
    except OSError:
        return ""
    if not data or hashlib.sha256(data).hexdigest().encode() != digest:
        return ""
    with contextlib.suppress(OSError):  # a cache that may only be read
        os.utime(kept)
    return data.decode()


def _keep(kept: Path, text: str) -> None:
    """Write an answer behind its digest, and make room. The draft's name is random: processes of several containers
    with one home may have the same id."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    draft, data = kept.with_name(f"{kept.name}.{secrets.token_hex(8)}{DRAFT}"), text.encode()
    try:
        with draft.open("xb") as file:
            file.write(hashlib.sha256(data).hexdigest().encode() + b"\n" + data)
        os.replace(draft, kept)
    finally:
        draft.unlink(missing_ok=True)
    _make_room(kept)


def _make_room(kept: Path) -> None:
    """Remove drafts of killed writers, and the answers over KEPT_BYTES that were used longest ago."""
    left, begun = KEPT_BYTES, time.time() - DRAFT_S
    for path in sorted(kept.parent.iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True):
        about = path.stat()
        left -= about.st_size
        abandoned = path.suffix == DRAFT and about.st_mtime < begun
        if (left < 0 or abandoned) and path != kept:
            path.unlink(missing_ok=True)
