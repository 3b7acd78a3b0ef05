"""The user's functions that a topology names by import path: `package.module:function` or `path/to/file.py:function`;
and imports of whole libraries, without the collector of cycles.

Used for rewards, losses, advantage estimators, metrics, optimisers, filters, episodes, parsers of tools and sinks.
Talks to the import system only; knows nothing of what a function is for.

- A function that cannot be imported is an error that holds the key, the import path, the cause and its place.
- A file is run once per process: functions of one file share its state.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from busrl.errors import UserError, cause


def load(key: str, target: str, failure: type[UserError], base_dir: str | Path = ".") -> Callable[..., Any]:
    """The function that `key` names; `failure` if it cannot be had. Files are relative to `base_dir`."""
    named = f"{key} = {target!r}"
    where, separator, name = target.rpartition(":")
    if not separator or not where or not name:
        raise failure(f"{named}: must be package.module:function or file.py:function; write both parts")
    base = str(Path(base_dir).resolve())
    if base not in sys.path:
        sys.path.insert(0, base)  # so that a module beside the topology, and what it imports, are found
    file = Path(base, where) if where.endswith(".py") else None
    if file is not None and not file.is_file():
        raise failure(f"{named}: there is no file {file}")
    try:
        module = importlib.import_module(where) if file is None else _run_file(file)
    except BaseException as problem:
        raise failure(f"{named}: importing it raised {cause(problem)}") from problem
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            names = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
            raise failure(f"{named}: {where} has no {name!r}; it has {', '.join(names)}")
        found = getattr(found, part)
    if not callable(found):
        raise failure(f"{named}: {name} is a {type(found).__name__}, not a function")
    function: Callable[..., Any] = found
    return function


@contextmanager
def uncollected() -> Iterator[None]:
    """Import libraries meanwhile, and do nothing else, as garbage stays. Modules are none, but Python looks through all
    of them again and again for cycles while they are made (tools/bench/starts.py)."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


def _run_file(path: Path) -> ModuleType:
    name = f"busrl_user_{path.stem}_{zlib.crc32(os.fsencode(path.resolve())):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # it ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
