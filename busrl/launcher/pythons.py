"""Interpreters of a run's processes, this one or one of their own (`python`): what each has installed, and whether that
is enough.

Runs each other interpreter once, before anything of a run starts. Knows nothing of how processes are started
(`children`).

- A process with an interpreter of its own imports the busrl of that environment. It must have this version and this
  layout of the ring, as both map the same slots.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable

import busrl
from busrl.engines.vllm_versions import PACKAGES, numbers_of, version_of, vllm_objection
from busrl.errors import UserError
from busrl.pages import IS_CLONE, PACKAGE
from busrl.ring import LAYOUT
from busrl.system import device
from busrl.system.imports import is_installed, remedy_for
from busrl.topology import ProcessName, Topology
from busrl.topology.schema import AGENT, Process, has_model

PROBE = """
import importlib.util, json, sys
from importlib.metadata import PackageNotFoundError, version
found = {"Python": "%d.%d.%d" % sys.version_info[:3]}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        found[name] = "of its own" if name != "busrl" and importlib.util.find_spec(name.replace("-", "_")) else ""
try:
    import busrl, busrl.ring
    found["busrl"], found["ring"] = busrl.__version__, "%d.%d" % busrl.ring.LAYOUT
except ImportError as problem:
    found["busrl"], found["problem"] = "", str(problem)
print(json.dumps(found))
"""
PROBE_S = 60.0
MODEL = ("torch", "transformers")
OLDEST_TORCH, NEXT_TORCH = (2, 6), (3, 0)  # as in pyproject.toml
# By role; of a rollout by engine.
NEEDED = {"learner": MODEL, "rank": MODEL, "torch": MODEL, "vllm": MODEL, "openai": ("aiohttp",)}


def _needs(process: Process, role: str) -> tuple[str, ...]:
    """Packages without which a process can do nothing."""
    return NEEDED.get(process.engine if role == "rollout" else role, ())


def require_runnable(t: Topology, versions: dict[int, dict[str, str]] | None = None) -> None:
    """UserError if a process of a topology would start in vain: it lacks a package, a fitting busrl or a device."""
    require_here(t.processes())
    require(t, versions)
    require_devices(t)


def require_here(processes: Iterable[ProcessName]) -> None:
    """UserError if this Python lacks a package without which one of these processes would start in vain."""
    here = [process for process in processes if not (process.spec.python or process.spec.command)]
    lacking = [
        (process, package) for process in here for package in _needs(process.spec, process.role)
        if not is_installed(package)
    ]
    if lacking:
        names = list(dict.fromkeys(process.name for process, _ in lacking))
        packages = dict.fromkeys(package for _, package in lacking)
        scripted = " (with scripted engines too it trains a real model)" if names == ["learner"] else ""
        raise UserError(
            f"{sys.executable} lacks {', '.join(packages)}, which {' and '.join(names[:2])} cannot run "
            f"without{scripted}: {remedy_for(*packages)}"
        )
    _require_torch(here)


def _require_torch(processes: Iterable[ProcessName]) -> None:
    """UserError if torch of this Python is older or newer than busrl was made for."""
    version = version_of("torch")
    names = [process.name for process in processes if "torch" in _needs(process.spec, process.role)]
    if names and version and not OLDEST_TORCH <= numbers_of(version) < NEXT_TORCH:
        raise UserError(
            f"{sys.executable} has torch {version}, and {names[0]} needs 2.6 or newer, below 3: "
            f"{sys.executable} -m pip install 'torch>=2.6,<3'"
        )


def versions_of(t: Topology) -> dict[int, dict[str, str]]:
    """Versions, for each entry with a Python of its own: of that Python, of its busrl, of the layout of its ring,
    and of the packages that its role needs ("": not there). Runs each once; UserError for one that cannot be run."""
    return {
        index: _probed(index, entry) for index, entry in enumerate(t.process)
        if entry.python and entry.role != AGENT and not entry.command and entry.count
    }


def _probed(index: int, entry: Process) -> dict[str, str]:
    """Run the interpreter of an entry; the versions that it prints."""
    more = PACKAGES if entry.role == "rollout" and entry.engine == "vllm" else ()
    names = ("busrl", "msgspec", "numpy", "pyzmq", *_needs(entry, entry.role), *more)
    try:
        done = subprocess.run(
            [entry.python, "-c", PROBE, *names], capture_output=True, timeout=PROBE_S, env={**os.environ, **entry.env},
            stdin=subprocess.DEVNULL, cwd="/", check=True,
        )
        return {name: str(value) for name, value in json.loads(done.stdout.splitlines()[-1]).items()}
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as problem:
        at = f"process.{index}.python = {entry.python!r}"
        remedy = "give a Python or a virtual environment"
        raise UserError(f"{at}: cannot be asked for its busrl: {problem}; {remedy}") from None


def require(t: Topology, versions: dict[int, dict[str, str]] | None = None) -> None:
    """UserError if the Python of an entry has another busrl or ring than this one, or lacks a package of its role.
    `versions`: the result of `versions_of`, where it was called before."""
    ring = "{}.{}".format(*LAYOUT)
    for index, of_entry in (versions_of(t) if versions is None else versions).items():
        entry = t.process[index]
        at = f"process.{index}.python = {entry.python!r}"
        source = str(PACKAGE.parent) if IS_CLONE else f"busrl=={busrl.__version__}"
        remedy = f"{entry.python} -m pip install {source}"
        if of_entry["busrl"] != busrl.__version__ or of_entry.get("ring") != ring:
            theirs = of_entry.get("problem", "")
            if of_entry["busrl"]:
                theirs = f"busrl {of_entry['busrl']} with ring {of_entry.get('ring')}"
            raise UserError(f"{at}: {theirs}; this is busrl {busrl.__version__} with ring {ring}: {remedy}")
        if missing := [name for name, version in of_entry.items() if not version and name not in PACKAGES]:
            brings = remedy_for(*missing)
            how = f"{entry.python} -m {brings}" if brings else "install it there"
            raise UserError(f"{at}: it has no {', '.join(missing)}, which a {entry.role} needs: {how}")
        if entry.role == "rollout" and entry.engine == "vllm":
            package = next((name for name in PACKAGES if of_entry[name]), "")
            why, what = vllm_objection(package, of_entry.get(package, ""))
            if why:
                raise UserError(f"{at}: {why}; {what}")


def require_devices(t: Topology) -> None:
    """UserError for a process of this host whose Python does not find its device: its start would end there. A device
    that is likely by the drivers and torch's build is not looked for."""
    for process in t.processes():
        kind = t.device_of(process.name) if has_model(process.spec) else "cpu"
        if kind in ("auto", "cpu") or (device.likely(kind) and not process.spec.python):
            continue
        if why := _device_missing(kind, process.spec):
            key = f"{process.role}'s device" if process.spec.device else "model.device"
            raise UserError(f'{key} = "{kind}": {why}; set it to "cpu", or to "auto" for the best one')


def _device_missing(kind: str, entry: Process) -> str:
    """The reason why the Python of an entry does not find such a device; empty too if it cannot be run, as a start
    reports that better."""
    code = f"from busrl.system.device import missing; print(missing({kind!r}))"
    seen = {**os.environ, **entry.env, **device.visible(kind, ",".join(entry.devices))}
    command = [entry.python or sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, env=seen, check=True, cwd="/")
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def lines(t: Topology, versions: dict[int, dict[str, str]]) -> list[str]:
    """The lines of a check about the result of `versions_of`."""
    texts = []
    for index, of_entry in versions.items():
        text = ", ".join(f"{name} {version}" for name, version in of_entry.items() if version)
        texts.append(f"process.{index}.python = {t.process[index].python}: {text}")
    return texts
