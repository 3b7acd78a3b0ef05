"""Comparison of a start with the run in its directory: is it the same run, what has changed, what is left to do.

Compares the topology and the files that it names with what earlier starts left, before anything is written and before
any child runs. Talks to the file system alone. Knows nothing of rings, locks or processes (`rundir`).

- The meaning of a uid (seed, prompts, order, group size) never changes in a run directory. Prompts are identified by
  their content, so an edited file is refused and a moved one is not.
- Everything else may change. Changes are printed, and recorded in starts.jsonl.
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
from busrl.status.reader import summary_of
from busrl.status.runfiles import RunFiles
from busrl.status.state import RunState
from busrl.system.files import LineFile, as_map, json_lines
from busrl.topology import Topology

IDENTITY = ("run.seed", "model.path", "model.seats", "data.train", "data.shuffle", "groups.size")
NOT_COMPARED = ("derived", "source", "overrides", "models")  # a model beside the lead is compared in its own directory
SHOWN = 12  # differences that are printed; starts.jsonl has all
BLOCK = 1 << 20
DATA = ("metrics.jsonl", "train.jsonl", "fates.bin", "samples.jsonl", "open.bin", "draws.log", "groups.jsonl")
OTHER_PROMPTS = "validation from here on is of other prompts than before"
MISSING = object()


@dataclass
class Start:
    """A start of a run: the step that it continues from, what differs from the start before, and notes for a person."""

    step: int = 0
    changes: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)  # by the key that names the file: digest of its content
    notes: list[str] = field(default_factory=list)

    def record(self, paths: RunPaths) -> None:
        """Append the start to starts.jsonl. With a full disk, one without changes is not recorded, and one with changes
        is refused: the audit judges samples by the values with which they were trained."""
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
    versions = {"python": platform.python_version()}
    for package in ("torch", "transformers", "numpy", "vllm"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def compare(
    paths: RunPaths, topology: Topology, before: dict[str, Any], resume: bool,
    prompt_files: Mapping[str, Path] | None = None,
) -> Start:
    """Compare this start with the run in the directory. `before` is its topology.json, empty if there is none;
    `prompt_files` has the present places of prompts that were made from others.

    UserError if it is another run, or has nothing to do; RunFinished if its goal was reached before.
    """
    start = Start(files=digests(topology, prompt_files))
    if not before:
        start.notes += _foreign_files(paths)
        start.notes += [f"prompts of {source.name}: {source.text}" for source in topology.derived.sources]
        start.notes += [f"validation prompts of {source.text}" for source in topology.derived.made]
        return start
    if not resume:
        raise UserError(
            f"{paths.root} holds a run already, and it is not to be resumed; choose another directory, or remove it"
        )
    starts = list(json_lines(paths.starts))
    # The newest digest of each file, as the last start may not have been able to read it.
    digests_before = {name: digest for row in starts for name, digest in as_map(row.get("files")).items()}
    now = json.loads(topology.to_json())
    start.changes = _changes(before, now)
    _check_models(paths, before, now)
    _check_identity(paths, before, now, start, digests_before)
    run = RunState()  # run.json need not be there
    RunFiles(paths).fold_into(run)
    start.step = run.at_step
    start.notes += [*_change_lines(start.changes), *_file_lines(start.files, digests_before, topology)]
    if len(topology.tags) == 1 and not topology.beside:
        check_goal(paths, topology, {topology.tag: run.at_step})
    if run.at_step:
        first, last = run.first_reward, run.steps.recent(lambda step: step.reward)
        reward = f", reward {first:.3f} → {last:.3f}" if first is not None and last is not None else ""
        start.notes.append(f"continues after step {run.at_step} of {topology.run.max_steps}{reward}")
    return start


def _check_models(paths: RunPaths, before: dict[str, Any], now: dict[str, Any]) -> None:
    """UserError if models or seats are others than before, or in another order: groups are numbered by them."""
    old, new = _models(before), _models(now)
    if old != new:
        raise UserError(
            f"{paths.root} holds a run of {old}, the topology says {new}; models, their seats and the order of both "
            "say what a sample of the run is, so they cannot change: choose another run directory"
        )


def _models(topology: dict[str, Any]) -> str:
    """The models of a topology and their seats as a text."""
    rows = [as_map(row) for row in topology.get("models") or []]
    each = [(row.get("tag"), row.get("seats"), "" if row.get("trained") else ", frozen") for row in rows]
    shown = (f"{tag} with seats {', '.join(map(str, seats or ['its own']))}{how}" for tag, seats, how in each)
    return "; ".join(shown) or "one model"


def _check_identity(
    paths: RunPaths, before: dict[str, Any], now: dict[str, Any], start: Start, digests_before: dict[str, Any]
) -> None:
    """UserError if a uid of the run in this directory would mean another sample, or if its model has another shape."""
    same = bool(digests_before.get("data.train")) and digests_before["data.train"] == start.files.get("data.train")
    for key in IDENTITY:
        section, _, name = key.partition(".")
        if not isinstance(before.get(section), dict):
            raise UserError(f"{paths.topology}: no section {section!r}; was it edited? Restore it")
        old, new = before[section].get(name), now[section].get(name)  # seats: left out where there is one
        if old != new and not (key == "data.train" and same):
            raise UserError(
                f"{paths.root} holds a run with {key} = {old!r}, the topology says {new!r}; this key says what a "
                "sample of the run is, so it cannot change: choose another run directory"
            )
    shapes = (_shape(checkpoint / "model") for checkpoint in checkpoints_of(paths.checkpoints))
    trained = next(filter(None, shapes), "")
    if trained and (shape := _shape(Path(now["model"]["path"]))) and shape != trained:
        raise UserError(
            f"model.path = {now['model']['path']!r} has {shape}, and the checkpoints in {paths.root} are of {trained}: "
            "another model lies there now; put back the one that the run began with, or choose another run directory"
        )
    if (old := _mixture(before)) != (new := _mixture(now)):
        raise UserError(
            f"{paths.root} holds a run whose draws come from {old or 'one file'}, the topology says "
            f"{new or 'one file'} (lines and draws in 1000 of each [[data.source]]); this says what a sample of the "
            "run is, so it cannot change: choose another run directory"
        )
    if digests_before.get("data.train") and start.files.get("data.train") and not same:
        what = "the prompts made of [[data.source]]" if new else now["data"]["train"]
        raise UserError(
            f"{what}: its content is not what it was when the run in {paths.root} was started last; "
            "the samples of a run are known by their place in this file, so it cannot change: put it back as it was, "
            "or start a new run with it in another directory, from a checkpoint if you like "
            f'(learner.start_from = "{paths.checkpoints}/global_step_N")'
        )


def _shape(folder: Path) -> str:
    """Sizes of the model in a folder as a text; "" if its config does not say them."""
    facts = model_facts(folder)
    sizes = {"layers": facts.layers, "channels": facts.hidden, "token ids": facts.vocabulary}
    return ", ".join(f"{size} {name}" for name, size in sizes.items()) if all(sizes.values()) else ""


def _mixture(topology: dict[str, Any]) -> str:
    """The shares of several sources in the draws as a text; empty for one file."""
    rows = as_map(topology.get("derived")).get("sources") or []
    return ", ".join(f"{row['name']} ({row['count']}, {row['share']})" for row in rows) if len(rows) > 1 else ""


def check_goal(paths: RunPaths, topology: Topology, done: Mapping[str, int]) -> None:
    """UserError or RunFinished if the goal was reached before, by each trained model of the run; `done`: steps of each.
    Only the learner counts towards a goal of groups."""
    goals, summary = {tag: topology.of(tag).run.max_steps for tag in topology.trained_tags}, summary_of(paths)
    if topology.run.max_groups or any(done.get(tag, 0) < goal for tag, goal in goals.items()):
        return
    for tag, goal in goals.items():
        key, steps = f"model.{tag}.max_steps" if tag != topology.tag else "run.max_steps", done.get(tag, 0)
        remedy = (
            f"to go on set {key} above {steps} (--set {key}={2 * steps}), to measure what it "
            f"learned `busrl evaluate {paths.root}`, to begin again choose another run directory"
        )
        if steps > goal:
            raise UserError(f"{key} = {goal}: the run in {paths.root} has done {steps} steps; {remedy}")
        if summary.get("outcome") == "finished" and not paths.ring_file.exists():
            raise RunFinished(f"the run in {paths.root} is finished: {steps} of {goal} steps are done; {remedy}")


def _changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    old, new = (dict(_flat(_by_role(topology))) for topology in (before, now))
    keys = [*new, *(key for key in old if key not in new)]
    return {
        key: (old.get(key, "not there"), new.get(key, "not there"))
        for key in keys
        if old.get(key, MISSING) != new.get(key, MISSING) and key.partition(".")[0] not in NOT_COMPARED
    }


def _by_role(topology: dict[str, Any]) -> dict[str, Any]:
    """The topology with its processes sorted by role, so that the order of entries is no change."""
    entries = topology.get("process", [])
    return {**topology, "process": sorted(entries, key=lambda entry: str(as_map(entry).get("role")))}


def _flat(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested maps and lists with its dotted key. An empty map or list is a value, and so is a list
    without maps or lists in it."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not inside or (isinstance(value, list) and not any(isinstance(item, (dict, list)) for item in value)):
        yield at, value
        return
    for key, inner in inside:
        yield from _flat(inner, f"{at}.{key}" if at else str(key))


def _change_lines(changes: dict[str, tuple[Any, Any]]) -> Iterator[str]:
    texts = [f"{key} {was!r} → {now!r}" for key, (was, now) in changes.items()]
    if texts:
        more = f"; and {len(texts) - SHOWN} more, see starts.jsonl" if len(texts) > SHOWN else ""
        yield f"changed since the last start: {'; '.join(texts[:SHOWN])}{more}"


def _file_lines(now: dict[str, str], before: dict[str, Any], topology: Topology) -> Iterator[str]:
    """A line for each file that may change and has changed, with what its change means."""
    for key, file in _named_files(topology).items():
        if key in now and before.get(key, now[key]) != now[key] and key != "data.train":
            yield f"{file.path} is not what it was: {file.means}"


def digests(topology: Topology, prompt_files: Mapping[str, Path] | None = None) -> dict[str, str]:
    """SHA-256, by key, of each readable file that gives a run its meaning. `prompt_files` has the prompts that were
    made from others."""
    files = _named_files(topology)
    by_key = {key: _digest_of_model(file.path) if file.model else _digest(file.path) for key, file in files.items()}
    if (tiny := task_prompts(topology.data.train)) is not None:
        by_key["data.train"] = _digest(tiny)
    by_key |= {key: _digest(path) for key, path in (prompt_files or {}).items()}
    return {key: digest for key, digest in by_key.items() if digest}


class NamedFile(NamedTuple):
    """A file that the topology names, and what a change of it means."""

    path: Path
    means: str
    model: bool = False  # it is the folder of a model that the run does not train


def _named_files(topology: Topology) -> dict[str, NamedFile]:
    """Prompts, the user's functions and models, by the key that names them."""
    learner, model, parts = topology.learner, topology.model, topology.reward.part
    data = {"data.train": topology.data.train, "validation.data": topology.validation.data}
    data |= {f"validation.set {asked_set.name}": asked_set.data for asked_set in topology.validation.set}
    functions = {
        "reward.function": (topology.reward.function, "rewards"), "learner.loss": (learner.loss, "losses"),
        "learner.advantage": (learner.advantage, "advantages"), "learner.optimizer": (learner.optimizer, "updates"),
        "agents.tools": (topology.agents.tools, "calls of tools"),
        **{f"reward.part.{n}.function": (part.function, "rewards") for n, part in enumerate(parts)},
        **{f"learner.metrics.{n}": (path, "metrics") for n, path in enumerate(learner.metrics)},
        **{f"process.{n}.function": (entry.function, "episodes") for n, entry in enumerate(topology.process)},
    }
    models = {f"reward.part.{n}.path": (part.path, "rewards") for n, part in enumerate(parts)}
    models |= {"model.reference": (model.reference, "KL terms"), "model.teacher": (model.teacher, "its targets")}
    models |= {f"learner.teacher.{n}.path": (row.path, "its targets") for n, row in enumerate(learner.teacher)}
    rows = {key: (path, OTHER_PROMPTS, False) for key, path in data.items() if not path.startswith(TINY)}
    for key, (function, what) in functions.items():
        if (file := function.rpartition(":")[0]).endswith(".py"):
            rows[key] = (file, f"{what} from here on are those of the new code", False)
    for key, (folder, what) in models.items():
        rows[key] = (folder, f"{what} from here on are those of the new model", True)
    return {key: NamedFile(Path(path), means, is_model) for key, (path, means, is_model) in rows.items() if path}


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with suppress(OSError), open(path, "rb") as file:  # the process that needs the file reports it
        while block := file.read(BLOCK):
            digest.update(block)
        return digest.hexdigest()
    return ""


def _digest_of_model(folder: Path) -> str:
    """SHA-256 over names, sizes, first and last blocks of a model's files: to read all weights would take minutes."""
    digest = hashlib.sha256()
    with suppress(OSError):
        for path in sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".bin")):
            with open(path, "rb") as file:
                digest.update(f"{path.name} {path.stat().st_size} ".encode())
                digest.update(file.read(BLOCK))
                file.seek(max(0, path.stat().st_size - BLOCK))
                digest.update(file.read(BLOCK))
        return digest.hexdigest()
    return ""


def _foreign_files(paths: RunPaths) -> list[str]:
    """Notes about other files in a directory without a run; UserError if parts of a run lie there."""
    if paths.run_json.exists():
        return []
    names = sorted(path.name for path in paths.root.iterdir())
    parts = [name for name in names if name in DATA and (paths.root / name).stat().st_size]
    parts += ["checkpoints"] if any(paths.checkpoints.glob("*")) else []
    if parts:
        raise UserError(
            f"--run-dir {paths.root}: it holds {', '.join(parts)}, but neither topology.json nor run.json, so it is "
            "not known what run these are of; choose another directory, or move them away"
        )
    of_run = RunPaths.names()
    others = [name for name in names if name not in of_run and not name.endswith(".lock") and not name.startswith(".")]
    if not others:
        return []
    more = f" and {len(others) - 5} more" if len(others) > 5 else ""
    return [f"{paths.root} holds files that are no part of a run ({', '.join(others[:5])}{more}); they are left alone"]
