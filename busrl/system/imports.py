"""Imports: of user code by the path that a topology names (`package.module:function` or `path/to/file.py:function`), of
modules of busrl by name or by another Python, and of libraries without the collector of cycles.

`load` is the one way to user code, for every role, `busrl check` and `busrl evaluate`: rewards, losses, advantage
estimators, metrics, optimisers, filters, episodes, parsers of tools and sinks. Talks to the import system only; knows
nothing of the purpose of a function.

- A function that cannot be imported is an error with the key, the import path, the cause and its place.
- A file is run once per process: the functions of a file share their state.
- A process of busrl does not look for modules where it was started: a user's random.py or types.py may lie there.
- Code finds modules beside its own file and beside the topology before installed packages of that name, but never in
  place of a module of the standard library (docs/extend-functions.md).
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from busrl.errors import UserError, cause


def load(key: str, target: str, failure: type[UserError], base_dir: str | Path) -> Callable[..., Any]:
    """The function that `key` names; raises `failure` if it cannot be imported. `base_dir`: the folder of the topology,
    to which files are relative."""
    setting = f"{key} = {target!r}"
    where, separator, name = target.rpartition(":")
    if not separator or not where or not name:
        raise failure(f"{setting}: must be package.module:function or file.py:function; write both parts")
    base = Path(base_dir).resolve()
    file = Path(base, where) if where.endswith(".py") else None
    if file is not None and not file.is_file():
        raise failure(f"{setting}: there is no file {file}")
    search_beside(*([file.resolve().parent] if file else []), base)
    try:
        module = importlib.import_module(where) if file is None else _run_file(file)
    except BaseException as problem:
        raise failure(f"{setting}: importing it raised {cause(problem)}") from problem
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            names = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
            raise failure(f"{setting}: {where} has no {name!r}; it has {', '.join(names)}{_advice(where, base)}")
        value = getattr(value, part)
    if not callable(value):
        raise failure(f"{setting}: {name} is a {type(value).__name__}, not a function{_advice(where, base)}")
    function: Callable[..., Any] = value
    return function


def of_busrl(path: str) -> Any:
    """The object that "module:name" names, the module below busrl."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"busrl.{module}"), name)


def _advice(where: str, base: Path) -> str:
    """Advice where a module beside the topology has the name of one of the standard library; else ""."""
    file = Path(base, *where.split(".")).with_suffix(".py")
    if where.partition(".")[0] not in sys.stdlib_module_names or not file.is_file():
        return ""
    return f"; a module of the standard library has that name: write {file.relative_to(base)}:NAME"


def search_beside(*folders: Path) -> None:
    """Look for modules in these folders right after the standard library, then in those of earlier calls."""
    _beside[:] = dict.fromkeys([*map(str, folders), *_beside])
    library = [folder for folder in sys.path if _is_standard(folder)]
    sys.path[:] = dict.fromkeys([*library, *_beside, *sys.path])


_beside: list[str] = []  # folders of the user's code
STANDARD = os.path.dirname(os.__file__)
ARCHIVE = f"python{sys.version_info[0]}{sys.version_info[1]}.zip"


def _is_standard(folder: str) -> bool:
    """Check whether a folder is of the standard library: its own, that of its compiled modules, its archive."""
    return folder == STANDARD or os.path.basename(folder) in ("lib-dynload", ARCHIVE)


# -- processes ----------------------------------------------------------------

PACKAGES = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # where busrl is
# The first lines of `python -c`, which looks for modules in the current directory before anything else; `-P` and
# PYTHONSAFEPATH came with Python 3.11.
APART = "import sys\nif sys.path[:1] == ['']: del sys.path[0]\n"
RUN = APART + "import runpy\nrunpy._run_module_as_main(sys.argv.pop(1))\n"
# This busrl, and the packages beside it that the Python lacks.
OURS = APART + f"sys.path.insert(0, {PACKAGES!r})\nimport busrl\ndel sys.path[0]\n" + (
    f"if {PACKAGES!r} not in sys.path: sys.path.append({PACKAGES!r})\n" + RUN)
SAFE = ["-P"] if sys.version_info >= (3, 11) else []  # multiprocessing hands it on to the processes that it starts


def interpreter(python: str = "", with_busrl: bool = False) -> list[str]:
    """The command that runs a module of busrl, whose name and arguments follow, by this Python or the one at `python`.
    `with_busrl`: that one has a busrl of its own, which runs instead of this."""
    if not python or python == sys.executable:
        return [sys.executable, *SAFE, "-c", OURS]
    return [python, "-c", RUN if with_busrl else OURS]


IMPORTING = -2  # key of the lines with which the child of a reward reports the begin and the end of an import


class ImportClock:
    """Counts the time that this process spends on imports, for calls with a time limit: an import inside a function
    delays its first call only, and may take longer than all others together. Calls `report(True)` when an outermost
    import of the main thread begins, and `report(False)` when it has ended.

    Every way to import passes one function of importlib, unless the module is loaded already.
    """

    def __init__(self, report: Callable[[bool], None]) -> None:
        self._report, self._spent_s, self._begun = report, 0.0, 0.0
        self._deep, self._main, self._pid = 0, threading.get_ident(), os.getpid()
        bootstrap: Any = importlib._bootstrap
        self._load, bootstrap._find_and_load = bootstrap._find_and_load, self._loading

    @property
    def spent_s(self) -> float:
        """The time of all imports, the present one included."""
        return self._spent_s + (time.monotonic() - self._begun if self._deep else 0.0)

    def now(self) -> float:
        """The time by a clock that stands still during imports."""
        return time.monotonic() - self.spent_s

    def _loading(self, *arguments: Any) -> Any:
        if self._deep or threading.get_ident() != self._main or os.getpid() != self._pid:
            return self._load(*arguments)
        self._deep, self._begun = 1, time.monotonic()
        self._report(True)
        try:
            return self._load(*arguments)
        finally:
            self._spent_s, self._deep = self.spent_s, 0
            self._report(False)


EXTRAS = {  # package -> the extra of busrl that brings it
    "torch": "train", "transformers": "train", "safetensors": "train", "peft": "lora", "bitsandbytes": "adam8",
    "aiohttp": "agents", "math_verify": "rewards", "reasoning_gym": "rewards", "pyarrow": "data", "vllm": "vllm",
    "openai": "agents", "tensorboard": "sinks", "wandb": "sinks", "prometheus_client": "sinks", "torch_npu": "npu",
}


def is_installed(package: str) -> bool:
    """Check whether a package is installed, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


def remedy_for(*packages: str) -> str:
    """The command that installs these packages; "" for those that no extra of busrl brings."""
    extras = sorted({EXTRAS[package] for package in packages if package in EXTRAS})
    return f"pip install 'busrl[{','.join(extras)}]'" if extras else ""


def main(arguments: Sequence[str]) -> int:
    """Load functions for `busrl check`. Arguments: the folder of the topology, then pairs of key and import path.
    Prints a line of JSON: for each pair why the function cannot be imported, "" if it can."""
    answers = os.dup(1)
    os.dup2(2, 1)  # output of user code is no answer
    base_dir, *pairs = arguments
    faults = []
    for key, target in zip(pairs[::2], pairs[1::2], strict=True):
        try:
            load(key, target, UserError, base_dir)
            faults.append("")
        except UserError as problem:
            faults.append(str(problem))
    os.write(answers, json.dumps(faults).encode())
    return 0


@contextmanager
def uncollected() -> Iterator[None]:
    """Stop the collector of cycles in this block, for imports and nothing else, as garbage stays. Modules are no
    garbage, but Python searches them for cycles again and again while they load, which costs a tenth of the CPU of a
    learner's imports."""
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
        with _own_neighbours(path.resolve().parent):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _own_neighbours(folder: Path) -> Iterator[None]:
    """Let a file import the modules of its own folder, also where a file of another folder has imported modules of the
    same names before."""
    def is_other(name: str) -> bool:
        home = _home(sys.modules[name]) if (folder / f"{name}.py").exists() or (folder / name).is_dir() else ""
        return home in _beside and home != str(folder)

    names = {name for name in list(sys.modules) if "." not in name and is_other(name)}
    others = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in names}
    try:
        yield
    finally:
        sys.modules.update(others)


def _home(module: ModuleType) -> str:
    """The folder that holds a module's file, or a package's folder."""
    place = next(iter(getattr(module, "__path__", ())), "") or getattr(module, "__file__", "")
    return os.path.dirname(str(place or ""))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
