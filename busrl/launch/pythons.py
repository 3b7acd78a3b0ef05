"""Entries of [[process]] that run in a Python of their own (`python`): what each has, and whether that will do.

Runs each interpreter once, before anything of a run starts. Knows nothing of how processes are started (`children`).

- Such a process imports the busrl of its environment, which must be of this version, with this layout of the ring: both
  map the same slots.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import busrl
from busrl.config import Topology
from busrl.config.engine_rules import PACKAGES, vllm_objection
from busrl.config.schema import AGENT, Process
from busrl.errors import UserError
from busrl.ring import LAYOUT

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
NEEDED = {"learner": MODEL, "torch": MODEL, "vllm": MODEL, "openai": ("aiohttp",)}  # by role; of a rollout by engine


def pythons(t: Topology) -> dict[int, dict[str, str]]:
    """Of each entry that runs in a Python of its own: versions of that Python, of its busrl, of the layout of its ring,
    and of the packages that its role needs ("": not there). Runs each once; UserError for one that cannot be run."""
    own = [i for i, one in enumerate(t.process) if one.python and one.role != AGENT and not one.command and one.count]
    return {index: _probed(index, t.process[index]) for index in own}


def _probed(index: int, entry: Process) -> dict[str, str]:
    what = entry.engine if entry.role == "rollout" else entry.role
    names = ("busrl", "msgspec", "numpy", "pyzmq", *NEEDED.get(what, ()), *(PACKAGES if what == "vllm" else ()))
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


def require(t: Topology, asked: dict[int, dict[str, str]] | None = None) -> None:
    """UserError if the Python of an entry has another busrl or ring than this one, or lacks a package of its role.
    `asked`: what `pythons` has found already."""
    ring = "{}.{}".format(*LAYOUT)
    for index, found in (pythons(t) if asked is None else asked).items():
        entry = t.process[index]
        at = f"process.{index}.python = {entry.python!r}"
        remedy = f"{entry.python} -m pip install {Path(busrl.__file__).parents[1]}"
        if found["busrl"] != busrl.__version__ or found.get("ring") != ring:
            theirs = f"busrl {found['busrl']} with ring {found.get('ring')}" if found["busrl"] else found["problem"]
            raise UserError(f"{at}: {theirs}; this is busrl {busrl.__version__} with ring {ring}: {remedy}")
        if missing := [name for name, version in found.items() if not version and name not in PACKAGES]:
            raise UserError(f"{at}: it has no {', '.join(missing)}, which a {entry.role} needs: install it there")
        if entry.role == "rollout" and entry.engine == "vllm":
            package = next((name for name in PACKAGES if found[name]), "")
            why, what = vllm_objection(package, found.get(package, ""))
            if why:
                raise UserError(f"{at}: {why}; {what}")


def lines(t: Topology, asked: dict[int, dict[str, str]]) -> list[str]:
    """What a check says of what `pythons` has found."""
    said = []
    for index, found in asked.items():
        text = ", ".join(f"{name} {version}" for name, version in found.items() if version)
        said.append(f"process.{index}.python = {t.process[index].python}: {text}")
    return said
