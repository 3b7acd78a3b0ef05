"""The C ABI of the ring: `busrl_ring.h` and `libbusrl_ring.so`, for programs in other languages.

Both are built with the package and lie in this folder. Talks to the file system only; what the calls do stands in the
header and in `docs/c-abi.md`. `python -m busrl.ring.capi --flags` gives a compiler what it needs.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from busrl.errors import MachineError

FOLDER = Path(__file__).resolve().parent
HEADER = FOLDER / "busrl_ring.h"
LIBRARY = FOLDER / "libbusrl_ring.so"


def include_dir() -> Path:
    """The folder that holds busrl_ring.h; MachineError if the package was not built."""
    return _built(HEADER).parent


def library() -> Path:
    """The shared library, for a linker or for dlopen; MachineError if the package was not built."""
    return _built(LIBRARY)


def flags() -> str:
    """Compiler and linker flags on one line, quoted for a shell; the program finds the library without help."""
    folder = str(library().parent)
    return shlex.join([f"-I{include_dir()}", f"-L{folder}", "-lbusrl_ring", f"-Wl,-rpath,{folder}"])


def _built(path: Path) -> Path:
    if not path.is_file():
        raise MachineError(f"{path} is missing: install busrl again (in a clone: `pip install -e .`)")
    return path
