"""Files of a release: the sdist and, built from it, a wheel for each CPython that is found here; checked and tested.

    python -m tools.wheels build     # dist/: each wheel gets its manylinux tag, is checked, and tried without torch
    python -m tools.wheels test      # all tests that need no torch, with each wheel of dist/

Runs where the packages of tools/wheels.txt are (`make wheels`). Talks to interpreters through their command lines.
Knows nothing of the code of busrl.

- A wheel is tested in an environment of its own, by tests of the sdist, with no package of a clone beside them.
- What is built of an incomplete sdist fails, as at a user's: nothing of the clone takes part in a wheel.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST = (3, 10)
MOST_BYTES = 4_000_000  # of a wheel
STEP_S = 1800.0
PROBE = """
import json, platform, sys, sysconfig
free = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
print(json.dumps([platform.python_implementation(), list(sys.version_info[:3]), free]))
"""
# Folders whose tests work without torch, but for the files that name it or a model that torch makes, or import one that
# does.
QUICK = ("ring", "protocol")
FOLDERS = (
    "agents", "bus", "data", "faults", "ledger", "protocol", "rewards", "ring", "scheduling", "security", "topology",
)
NEEDS_TORCH = re.compile(
    r"\b(?:torch|transformers|safetensors|tiny:sort|quickstart|chat_folder|bpe_folder)\b", re.IGNORECASE)
IMPORTED = re.compile(r"^\s*(?:from|import) (\w+)", re.MULTILINE)
# What only a clone has: a path, and a link of Markdown (the README) with no address.
LOCAL = re.compile(r"(?<![\w/.~-])(?:\.\./|(?:docs|examples|tests|tools|benchmarks)/)[\w./-]+")
LINK = re.compile(r"\]\((?!https?://|#)([^)\s]+)")
TOPOLOGY = re.compile(r"(?<![\w/.~-])configs/([\w.-]+\.toml)")
HERE = Path(sys.executable).parent


class Failed(Exception):
    """A step of the build or a test that failed; the message has the command and the end of what it printed."""


@dataclass(frozen=True, order=True)
class Interpreter:
    """A CPython that is installed here."""

    version: tuple[int, int, int]
    path: Path

    @property
    def tag(self) -> str:
        return f"cp{self.version[0]}{self.version[1]}"


def candidates() -> Iterator[Path]:
    """Programs that may be a Python: this one, those of the search path, those of pyenv."""
    yield Path(sys.executable)
    for minor in range(OLDEST[1], 30):
        if program := shutil.which(f"python3.{minor}"):
            yield Path(program)
    yield from Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/*/bin/python3")


def interpreters(programs: Iterable[Path]) -> list[Interpreter]:
    """The newest CPython of each minor version from 3.10 on, without free-threaded ones, for which pybind11's modules
    would need a mark of their own."""
    newest: dict[tuple[int, int], Interpreter] = {}
    for program in programs:
        try:
            done = subprocess.run([program, "-c", PROBE], capture_output=True, text=True, timeout=60, check=True)
            implementation, (major, minor, micro), free_threaded = json.loads(done.stdout)
        except (OSError, subprocess.SubprocessError, ValueError):
            continue  # a shim of a version that is not installed
        known = Interpreter((major, minor, micro), program)
        if implementation == "CPython" and not free_threaded and (major, minor) >= OLDEST:
            newest[major, minor] = max(known, newest.get((major, minor), known))
    return sorted(newest.values())


def run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Run a program to its end; what it printed. Failed if it fails or takes too long."""
    shown = " ".join(map(str, command))
    paths = {"PATH": f"{HERE}{os.pathsep}{os.environ['PATH']}"}  # auditwheel starts patchelf by name
    try:
        done = subprocess.run(
            [str(part) for part in command], cwd=cwd, env={**os.environ, **paths, **(env or {})}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=STEP_S,
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"{shown}: not done after {STEP_S:g} s") from None
    if done.returncode:
        raise Failed(f"{shown}: exit code {done.returncode}\n" + "\n".join(done.stdout.splitlines()[-40:]))
    return done.stdout


def say(text: str, begun: float) -> None:
    print(f"{text} ({time.monotonic() - begun:.0f} s)", flush=True)


# -- building -----


def build(out: Path, chosen: Sequence[Interpreter], work: Path) -> list[Path]:
    """Write the sdist and a wheel for each interpreter into a folder that holds nothing else of busrl; the wheels."""
    for old in (*out.glob("busrl-*.whl"), *out.glob("busrl-*.tar.gz")):
        old.unlink()
    begun = time.monotonic()
    run(sys.executable, "-m", "build", "--installer", "pip", "--sdist", "--outdir", out, ROOT)
    (source,) = out.glob("busrl-*.tar.gz")
    say(f"{source.name}: {source.stat().st_size / 1e6:.2f} MB", begun)
    wheels = [wheel(interpreter, source, out, work) for interpreter in chosen]
    run(sys.executable, "-m", "twine", "check", "--strict", source, *wheels)
    run(HERE / "check-wheel-contents", *wheels)
    if names := [name for made in wheels[:1] for name in unreachable(made)]:
        raise Failed("the wheels name files that they have not: " + "; ".join(names))
    return wheels


def wheel(interpreter: Interpreter, source: Path, out: Path, work: Path) -> Path:
    """Build the wheel of an interpreter from the sdist, and repair it: auditwheel finds the oldest manylinux tag that
    its symbols allow. Failed if it is too large."""
    begun = time.monotonic()
    raw, python = work / f"raw-{interpreter.tag}", environment(interpreter, work / f"build-{interpreter.tag}")
    run(python, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", raw, source)
    run(HERE / "auditwheel", "repair", "--wheel-dir", out, *raw.glob("*.whl"))
    (made,) = out.glob(f"busrl-*-{interpreter.tag}-*.whl")
    size = made.stat().st_size
    if size > MOST_BYTES:
        raise Failed(f"{made.name} has {size} bytes, more than {MOST_BYTES}: see what went into it")
    say(f"{made.name}: {size / 1e6:.2f} MB", begun)
    return made


def unreachable(made: Path) -> list[str]:
    """Files that the texts of a wheel name and an installation has not, as "FILE: NAME". Without modules, whose strings
    become addresses when they are printed."""
    names = []
    with zipfile.ZipFile(made) as archive:
        there = archive.namelist()
        for path in there:
            if path.endswith((".py", ".pyi", ".so", ".so.1", "RECORD")):
                continue
            text = archive.read(path).decode(errors="replace")
            named = (LINK if path.endswith("METADATA") else LOCAL).findall(text)
            topologies = [f"configs/{name}" for name in TOPOLOGY.findall(text) if f"busrl/configs/{name}" not in there]
            names += [f"{path}: {name}" for name in (*named, *topologies)]
    return names


def environment(interpreter: Interpreter, folder: Path, *packages: str) -> Path:
    """Make a virtual environment with these packages; its Python. The versions of constraints.txt are those of the main
    Python; every other one gets the newest that the package accepts and that it can run."""
    run(interpreter.path, "-m", "venv", folder)
    python = folder / "bin" / "python"
    if packages:
        pinned = ["-c", ROOT / "constraints.txt"] if interpreter.version[:2] == sys.version_info[:2] else []
        run(python, "-m", "pip", "install", "-q", *pinned, *packages)
    return python


# -- testing -----


def tests(source: Path, work: Path) -> Path:
    """Unpack the sdist without its package, so that its tests import what is installed; the folder."""
    with tarfile.open(source) as archive:
        archive.extractall(work, filter="data")
    folder = work / source.name.removesuffix(".tar.gz")
    shutil.rmtree(folder / "busrl")
    return folder


def without_torch(folder: Path, names: Sequence[str]) -> list[str]:
    """The files of tests in these folders that need no torch, relative to the sdist."""
    needing: dict[Path, bool] = {}

    def needs(path: Path) -> bool:
        if path not in needing:
            text, needing[path] = path.read_text(), False  # modules may import each other
            places = product((path.parent, folder / "tests"), IMPORTED.findall(text))
            helpers = filter(Path.is_file, (place / f"{module}.py" for place, module in places))
            needing[path] = bool(NEEDS_TORCH.search(text)) or any(map(needs, helpers))
        return needing[path]

    files = [path for name in names for path in sorted((folder / "tests" / name).glob("test_*.py"))]
    return [str(path.relative_to(folder)) for path in files if not needs(path)]


def try_wheel(interpreter: Interpreter, made: Path, source: Path, names: Sequence[str], work: Path) -> None:
    """Test a wheel in an environment without torch: its commands in an empty folder, and the tests of these folders."""
    begun = time.monotonic()
    python = environment(interpreter, work / f"test-{interpreter.tag}", f"busrl[test] @ {made.resolve().as_uri()}")
    empty = work / f"empty-{interpreter.tag}"
    empty.mkdir()
    busrl = python.parent / "busrl"
    topology = run(python, "-c", "from busrl.pages import CONFIGS; print(CONFIGS / 'scripted.toml')", cwd=empty).strip()
    run(busrl, "doctor", cwd=empty)
    run(busrl, "quickstart", "--copy", "mine", cwd=empty)
    run(busrl, "simulate", topology, cwd=empty)
    folder = tests(source, work / f"source-{interpreter.tag}")
    files = without_torch(folder, names)
    marked = "not long and not slow and not soak and not vllm"
    done = run(python, "-m", "pytest", "-q", "-m", marked, "-n", "2", *files, cwd=folder)
    say(f"{made.name}: {done.splitlines()[-1]}", begun)


def try_quickstart(interpreter: Interpreter, made: Path, work: Path) -> None:
    """Train the quickstart from nothing, in an empty folder with an empty cache, in an environment with torch."""
    begun = time.monotonic()
    packages = ["torch==2.13.0", f"busrl[train] @ {made.resolve().as_uri()}"]
    python = environment(interpreter, work / "train", *packages)
    say("installed busrl[train]", begun)
    empty, begun = work / "empty-train", time.monotonic()
    empty.mkdir()
    done = run(python.parent / "busrl", "quickstart", cwd=empty, env={"XDG_CACHE_HOME": str(empty / "cache")})
    if "0 lost, 0 trained twice" not in done:
        raise Failed(f"busrl quickstart ended with\n{done}")
    say("busrl quickstart: finished", begun)


# -- the command -----


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.wheels", description="Build and test what is published.")
    parser.add_argument("verb", choices=("build", "test"))
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the files (default: dist/)")
    parser.add_argument("--only", metavar="TAG", nargs="*", help="of these Pythons alone, as cp312")
    parser.add_argument("--no-quickstart", action="store_true", help="do not train with the wheel of this Python")
    options = parser.parse_args(arguments)
    chosen = [one for one in interpreters(candidates()) if not options.only or one.tag in options.only]
    if not chosen:
        parser.error(f"no CPython {OLDEST[0]}.{OLDEST[1]} or newer is here that --only names")
    print("for", ", ".join(f"{'.'.join(map(str, one.version))} ({one.path})" for one in chosen), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="busrl-wheels-") as folder:
            _perform(options, chosen, Path(folder))
    except Failed as problem:
        print(f"wheels: {problem}", file=sys.stderr)
        return 1
    return 0


def _perform(options: argparse.Namespace, chosen: Sequence[Interpreter], work: Path) -> None:
    is_build = options.verb == "build"
    if is_build:
        build(options.out, chosen, work)
    source = next(iter(options.out.glob("busrl-*.tar.gz")), None)
    for interpreter in chosen:
        made = next(iter(options.out.glob(f"busrl-*-{interpreter.tag}-*.whl")), None)
        if made is None or source is None:
            raise Failed(f"{options.out} has no sdist and wheel for {interpreter.tag}: `make wheels` builds it")
        try_wheel(interpreter, made, source, QUICK if is_build else FOLDERS, work)
        if is_build and not options.no_quickstart and interpreter.version[:2] == sys.version_info[:2]:
            try_quickstart(interpreter, made, work)


if __name__ == "__main__":
    sys.exit(main())
