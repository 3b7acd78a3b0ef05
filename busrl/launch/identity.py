"""Comparison of a start with the run in its directory: is it the same run, what has changed, what is left to do.

Compares the topology and the files it names with what earlier starts left, before anything is written and before any
child runs. Talks to the file system alone. Knows nothing of rings, locks or processes (`rundir`).

- What a uid means (seed, prompts, order, group size) never changes in a run directory. The prompts are known by their
  content, so an edited file is refused and a moved one is not.
- Everything else may change; what did is printed, and kept in starts.jsonl.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import busrl
from busrl.data.pretrained import model_facts, task_prompts
from busrl.errors import MachineError, RunFinished, UserError
from busrl.ledger.trained import checkpoints_of
from busrl.paths import RunPaths
from busrl.states import TINY
from busrl.status.runfiles import RunFiles
from busrl.status.state import RunState
from busrl.system.files import LineFile, as_map, json_lines, read_map
from busrl.topology import Topology

IDENTITY = ("run.seed", "model.path", "data.train", "data.shuffle", "groups.size")
NOT_COMPARED = ("derived", "source", "overrides")
SHOWN = 12  # differences that are printed; starts.jsonl has all
BLOCK = 1 << 20
DATA = ("metrics.jsonl", "train.jsonl", "fates.bin", "samples.jsonl", "open.bin", "draws.log", "groups.jsonl")
OTHER_PROMPTS = "validation from here on is of other prompts than before"
MISSING = object()


@dataclass
class Start:
    """A start of a run: what it continues from, what differs from the one before, and what a person should read."""

    step: int = 0
    changes: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)  # which file -> digest of its content
    notes: list[str] = field(default_factory=list)

    def record(self, paths: RunPaths) -> None:
        """Append it to starts.jsonl. A full disk costs a line without changes, and refuses a start with some: the audit
        judges what was trained before by the values of then."""
        row = {
            "time": time.time(), "pid": os.getpid(), "busrl": busrl.__version__, "step": self.step,
            "versions": _versions(), "files": self.files,
            "changes": {key: {"was": was, "now": now} for key, (was, now) in self.changes.items()},
        }
        lossy = () if self.changes else (MachineError, OSError)
        with suppress(*lossy), closing(LineFile(paths.starts, sync=True)) as lines:
            lines.append(json.dumps(row, ensure_ascii=False, default=str).encode())


def _versions() -> dict[str, str]:
    """The versions of packages that launch runs with; a [[process]] with a Python of its own may have others."""
    found = {"python": platform.python_version()}
    for package in ("torch", "transformers", "numpy", "vllm"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def compare(
    paths: RunPaths, topology: Topology, before: dict[str, Any], resume: bool, made: Mapping[str, Path] | None = None
) -> Start:
    """Compare this start with the run in the directory; `before`: its topology.json, empty if there is none; `made`:
    the prompts that were made of others, where they lie now.

    UserError if it is another run, or has nothing to do; RunFinished if its goal was reached before.
    """
    start = Start(files=digests(topology, made))
    if not before:
        start.notes += _foreign_files(paths)
        start.notes += [f"prompts of {one.name}: {one.text}" for one in topology.derived.sources]
        start.notes += [f"validation prompts of {one.text}" for one in topology.derived.made]
        return start
    if not resume:
        raise UserError(
            f"{paths.root} holds a run already, and it is not to be resumed; choose another directory, or remove it"
        )
    starts = list(json_lines(paths.starts))
    # Of each file the newest digest: one that could not be read at some start is the same file all the same.
    known = {name: found for row in starts for name, found in as_map(row.get("files")).items()}
    now = json.loads(topology.to_json())
    start.changes = _changes(before, now)
    _check_identity(paths, before, now, start, known)
    run = RunState()  # run.json need not be there
    RunFiles(paths).fold_into(run)
    start.step = run.at_step
    start.notes += [*_change_lines(start.changes), *_file_lines(start.files, known, topology)]
    _check_goal(paths, topology, run.at_step)
    if run.at_step:
        first, last = run.first_reward, run.steps.recent(lambda one: one.reward)
        reward = f", reward {first:.3f} → {last:.3f}" if first is not None and last is not None else ""
        start.notes.append(f"continues after step {run.at_step} of {topology.run.max_steps}{reward}")
    return start


def _check_identity(
    paths: RunPaths, before: dict[str, Any], now: dict[str, Any], start: Start, known: dict[str, Any]
) -> None:
    same = bool(known.get("data.train")) and known["data.train"] == start.files.get("data.train")
    for key in IDENTITY:
        section, _, name = key.partition(".")
        if not isinstance(before.get(section), dict):
            raise UserError(f"{paths.topology}: no section {section!r}; was it edited? Restore it")
        old, new = before[section].get(name), now[section][name]
        if old != new and not (key == "data.train" and same):
            raise UserError(
                f"{paths.root} holds a run with {key} = {old!r}, the topology says {new!r}; this key says what a "
                "sample of the run is, so it cannot change: choose another run directory"
            )
    trained = next((shape for one in checkpoints_of(paths.checkpoints) if (shape := _shape(one / "model"))), "")
    if trained and (given := _shape(Path(now["model"]["path"]))) and given != trained:
        raise UserError(
            f"model.path = {now['model']['path']!r} has {given}, and the checkpoints in {paths.root} are of {trained}: "
            "another model lies there now; put back the one that the run began with, or choose another run directory"
        )
    if (old := _mixture(before)) != (new := _mixture(now)):
        raise UserError(
            f"{paths.root} holds a run whose draws come from {old or 'one file'}, the topology says "
            f"{new or 'one file'} (lines and draws in 1000 of each [[data.source]]); this says what a sample of the "
            "run is, so it cannot change: choose another run directory"
        )
    if known.get("data.train") and start.files.get("data.train") and not same:
        what = "the prompts made of [[data.source]]" if new else now["data"]["train"]
        raise UserError(
            f"{what}: its content is not what it was when the run in {paths.root} was started last; "
            "the samples of a run are known by their place in this file, so it cannot change: put it back as it was, "
            "or start a new run with it in another directory, from a checkpoint if you like "
            f'(learner.start_from = "{paths.checkpoints}/global_step_N")'
        )


def _shape(folder: Path) -> str:
    """Sizes of the model in a folder, in words; "" where they are not known."""
    facts = model_facts(folder)
    sizes = {"layers": facts.layers, "channels": facts.hidden, "token ids": facts.vocabulary}
    return ", ".join(f"{size} {name}" for name, size in sizes.items()) if all(sizes.values()) else ""


def _mixture(topology: dict[str, Any]) -> str:
    """The shares of several sources in the draws, in words; empty for one file."""
    rows = as_map(topology.get("derived")).get("sources") or []
    return ", ".join(f"{one['name']} ({one['count']}, {one['share']})" for one in rows) if len(rows) > 1 else ""


def _check_goal(paths: RunPaths, topology: Topology, done: int) -> None:
    """Nothing is started for a goal that is behind us. Where groups are counted, only the learner knows."""
    goal, summary = topology.run.max_steps, read_map(paths.summary)
    if topology.run.max_groups or done < goal:
        return
    remedy = (
        f"to go on set run.max_steps above {done} (--set run.max_steps={2 * done}), to measure what it "
        f"learned `busrl evaluate {paths.root}`, to begin again choose another run directory"
    )
    if done > goal:
        raise UserError(f"run.max_steps = {goal}: the run in {paths.root} has done {done} steps; {remedy}")
    if summary.get("outcome") == "finished" and not paths.ring_file.exists():
        raise RunFinished(f"the run in {paths.root} is finished: {done} of {goal} steps are done; {remedy}")


def _changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    old, new = (dict(_flat(_by_role(one))) for one in (before, now))
    keys = [*new, *(key for key in old if key not in new)]
    return {
        key: (old.get(key, "not there"), new.get(key, "not there"))
        for key in keys
        if old.get(key, MISSING) != new.get(key, MISSING) and key.partition(".")[0] not in NOT_COMPARED
    }


def _by_role(topology: dict[str, Any]) -> dict[str, Any]:
    """With the processes in an order that their entries do not make."""
    entries = topology.get("process", [])
    return {**topology, "process": sorted(entries, key=lambda one: str(as_map(one).get("role")))}


def _flat(found: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested maps and lists under its dotted key; an empty map or list is a value."""
    inside = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    if not inside or (isinstance(found, list) and not any(isinstance(one, (dict, list)) for one in found)):
        yield at, found
        return
    for key, value in inside:
        yield from _flat(value, f"{at}.{key}" if at else str(key))


def _change_lines(changes: dict[str, tuple[Any, Any]]) -> Iterator[str]:
    said = [f"{key} {was!r} → {now!r}" for key, (was, now) in changes.items()]
    if said:
        more = f"; and {len(said) - SHOWN} more, see starts.jsonl" if len(said) > SHOWN else ""
        yield f"changed since the last start: {'; '.join(said[:SHOWN])}{more}"


def _file_lines(now: dict[str, str], known: dict[str, Any], topology: Topology) -> Iterator[str]:
    """Files that may change, and what their change means."""
    for key, file in _named_files(topology).items():
        if key in now and known.get(key, now[key]) != now[key] and key != "data.train":
            yield f"{file.path} is not what it was: {file.means}"


def digests(topology: Topology, made: Mapping[str, Path] | None = None) -> dict[str, str]:
    """SHA-256 of each file that a run's meaning is in, as far as they are files that can be read; `made`: the prompts
    that were made of others."""
    named = _named_files(topology)
    found = {key: _digest_of_model(file.path) if file.model else _digest(file.path) for key, file in named.items()}
    if (tiny := task_prompts(topology.data.train)) is not None:
        found["data.train"] = _digest(tiny)
    found |= {key: _digest(path) for key, path in (made or {}).items()}
    return {key: digest for key, digest in found.items() if digest}


class NamedFile(NamedTuple):
    """A file that the topology names, and what it means that it is another one by now."""

    path: Path
    means: str
    model: bool = False  # the folder of one that a run only asks


def _named_files(topology: Topology) -> dict[str, NamedFile]:
    """Prompts, the user's functions and models, by the key that names them."""
    learner, own, parts = topology.learner, topology.model, topology.reward.part
    data = {"data.train": topology.data.train, "validation.data": topology.validation.data}
    data |= {f"validation.set {one.name}": one.data for one in topology.validation.set}
    functions = {
        "reward.function": (topology.reward.function, "rewards"), "learner.loss": (learner.loss, "losses"),
        "learner.advantage": (learner.advantage, "advantages"), "learner.optimizer": (learner.optimizer, "updates"),
        "agents.tools": (topology.agents.tools, "calls of tools"),
        **{f"reward.part.{n}.function": (part.function, "rewards") for n, part in enumerate(parts)},
        **{f"learner.metrics.{n}": (path, "metrics") for n, path in enumerate(learner.metrics)},
        **{f"process.{n}.function": (entry.function, "episodes") for n, entry in enumerate(topology.process)},
    }
    models = {f"reward.part.{n}.path": (part.path, "rewards") for n, part in enumerate(parts)}
    models |= {"model.reference": (own.reference, "KL terms"), "model.teacher": (own.teacher, "its targets")}
    named = {key: (path, OTHER_PROMPTS, False) for key, path in data.items() if not path.startswith(TINY)}
    for key, (function, made) in functions.items():
        if (file := function.rpartition(":")[0]).endswith(".py"):
            named[key] = (file, f"{made} from here on are those of the new code", False)
    for key, (folder, made) in models.items():
        named[key] = (folder, f"{made} from here on are those of the new model", True)
    return {key: NamedFile(Path(path), means, model) for key, (path, means, model) in named.items() if path}


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    with suppress(OSError), open(path, "rb") as file:  # the process that needs it says so
        while block := file.read(BLOCK):
            found.update(block)
        return found.hexdigest()
    return ""


def _digest_of_model(folder: Path) -> str:
    """SHA-256 over the names, sizes and ends of the files of a model: reading all of its weights would take minutes."""
    found = hashlib.sha256()
    with suppress(OSError):
        for path in sorted(one for one in folder.iterdir() if one.suffix in (".json", ".safetensors", ".bin")):
            with open(path, "rb") as file:
                found.update(f"{path.name} {path.stat().st_size} ".encode())
                found.update(file.read(BLOCK))
                file.seek(max(0, path.stat().st_size - BLOCK))
                found.update(file.read(BLOCK))
        return found.hexdigest()
    return ""


def _foreign_files(paths: RunPaths) -> list[str]:
    """A directory without a run: refused if it looks like half of one, what else lies there is named."""
    if paths.run_json.exists():
        return []
    there = sorted(one.name for one in paths.root.iterdir())
    parts = [name for name in there if name in DATA and (paths.root / name).stat().st_size]
    parts += ["checkpoints"] if any(paths.checkpoints.glob("*")) else []
    if parts:
        raise UserError(
            f"--run-dir {paths.root}: it holds {', '.join(parts)}, but neither topology.json nor run.json, so it is "
            "not known what run these are of; choose another directory, or move them away"
        )
    known = RunPaths.names()
    others = [name for name in there if name not in known and not name.endswith(".lock") and not name.startswith(".")]
    if not others:
        return []
    more = f" and {len(others) - 5} more" if len(others) > 5 else ""
    return [f"{paths.root} holds files that are no part of a run ({', '.join(others[:5])}{more}); they are left alone"]
