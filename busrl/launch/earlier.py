"""What earlier starts left in a run directory, beside what is asked for now: the same run or not, and what differs.

Reads topology.json, starts.jsonl, metrics.jsonl and the prompt files; appends one line to starts.jsonl per start.
Knows nothing of rings or processes.

- What a uid means (seed, prompts, order, group size) never changes in a run directory: the prompts are known by their
  content, so an edited file is refused before anything starts, and a moved one is not.
- Everything else may change; what did is said, and kept in starts.jsonl.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import busrl
from busrl.errors import MachineError, RunFinished, UserError
from busrl.launch.state import as_map, read_map
from busrl.launch.story import Story, tail_rows
from busrl.ledger.files import LineFile
from busrl.paths import RunPaths
from busrl.topology import TINY, Topology

IDENTITY = ("run.seed", "model.path", "data.train", "data.shuffle", "groups.size")
NOT_COMPARED = ("derived", "source", "overrides")
SHOWN = 12  # differences that are printed; starts.jsonl has all
BLOCK = 1 << 20
DATA = ("metrics.jsonl", "train.jsonl", "fates.bin", "samples.jsonl", "open.bin", "draws.log", "groups.jsonl")
OURS = {
    *DATA, "logs", "checkpoints", "wal", "pace", "published", "topology.json", "topology.toml", "run.json",
    "starts.jsonl", "errors.jsonl", "supervisor.json", "gateway.json", "summary.json", "fates.validate.bin",
    "validation.jsonl", "validation.log", "evaluated", "decisions.jsonl", "scheduler.jsonl", "predictor.npz",
}  # fmt: skip
MISSING = object()


@dataclass
class Start:
    """One start of a run: what it goes on from, what differs from the one before, and what a person should read."""

    step: int = 0
    changes: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)  # which file -> digest of its content
    notes: list[str] = field(default_factory=list)

    def record(self, paths: RunPaths) -> None:
        """Append it to starts.jsonl; a full disk costs the line, not the run."""
        row = {
            "time": time.time(), "pid": os.getpid(), "busrl": busrl.__version__, "step": self.step,
            "files": self.files,
            "changes": {key: {"was": was, "now": now} for key, (was, now) in self.changes.items()},
        }  # fmt: skip
        with suppress(MachineError, OSError):
            lines = LineFile(paths.starts)
            try:
                lines.append(json.dumps(row, ensure_ascii=False, default=str).encode())
            finally:
                lines.close()


def compare(paths: RunPaths, topology: Topology, before: dict[str, Any], resume: bool) -> Start:
    """What this start is to the run in the directory; `before`: its topology.json, empty if there is none.

    UserError if it is another run, or has nothing to do; RunFinished if its goal was reached before.
    """
    start = Start(files=digests(topology))
    if not before:
        start.notes += _strangers(paths)
        return start
    if not resume:
        raise UserError(
            f"{paths.root} holds a run already, and it is not to be resumed; choose another directory, or remove it"
        )
    starts = tail_rows(paths.starts)
    # Of each file the newest digest: one that could not be read at some start is the same file all the same.
    known = {name: found for row in starts for name, found in as_map(row.get("files")).items()}
    start.changes = _changes(before, json.loads(topology.to_json()))
    _check_identity(paths, topology, before, start, known)
    story = Story.of(paths)
    start.step = story.step
    start.notes += [*_told(start.changes), *_files_told(start.files, known, topology)]
    _check_goal(paths, topology, story)
    if story.step:
        first, last = story.first_reward, story.recent("reward")
        reward = f", reward {first:.3f} → {last:.3f}" if first is not None and last is not None else ""
        start.notes.append(f"goes on after step {story.step} of {topology.run.max_steps}{reward}")
    return start


def _check_identity(
    paths: RunPaths, topology: Topology, before: dict[str, Any], start: Start, known: dict[str, Any]
) -> None:
    same = bool(known.get("data.train")) and known["data.train"] == start.files.get("data.train")
    now = json.loads(topology.to_json())
    for key in IDENTITY:
        section, _, name = key.partition(".")
        if not isinstance(before.get(section), dict):
            raise UserError(f"{paths.topology}: no section {section!r}; was it edited? Restore it")
        old, new = before[section].get(name), now[section][name]
        if old != new and not (key == "data.train" and same):
            raise UserError(
                f"{paths.root} holds a run with {key} = {old!r}, the topology says {new!r}; this key says what a "
                "sample of the run is, so it can not change: choose another run directory"
            )
    if known.get("data.train") and start.files.get("data.train") and not same:
        raise UserError(
            f"{topology.data.train}: its content is not what it was when the run in {paths.root} was started last; "
            "the samples of a run are known by their place in this file, so it can not change: put it back as it was, "
            f"or start a new run with it in another directory, from a checkpoint if you like ({_newest(paths)})"
        )


def _check_goal(paths: RunPaths, topology: Topology, story: Story) -> None:
    """Nothing is started for a goal that is behind us. Where groups are counted, only the learner knows."""
    goal, summary = topology.run.max_steps, read_map(paths.summary)
    if topology.run.max_groups or story.step < goal:
        return
    remedy = (
        f"to go on set run.max_steps above {story.step} (--set run.max_steps={2 * story.step}), to measure what it "
        f"learned `busrl evaluate {paths.root}`, to begin anew choose another run directory"
    )
    if story.step > goal:
        raise UserError(f"run.max_steps = {goal}: the run in {paths.root} has done {story.step} steps; {remedy}")
    if summary.get("outcome") == "finished" and not paths.ring_file.exists():
        raise RunFinished(f"the run in {paths.root} is finished: {story.step} of {goal} steps are done; {remedy}")


def _newest(paths: RunPaths) -> str:
    """How a new run begins with what this one has learned."""
    return f'model.path = "{paths.checkpoints}/global_step_N"'


def _changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    old, new = dict(_flat(before)), dict(_flat(now))
    keys = [*new, *(key for key in old if key not in new)]
    return {
        key: (old.get(key, "not there"), new.get(key, "not there"))
        for key in keys
        if old.get(key, MISSING) != new.get(key, MISSING) and key.partition(".")[0] not in NOT_COMPARED
    }


def _flat(found: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested maps and lists under its dotted key; an empty map or list is a value."""
    inside = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    if not inside or (isinstance(found, list) and not any(isinstance(one, (dict, list)) for one in found)):
        yield at, found
        return
    for key, value in inside:
        yield from _flat(value, f"{at}.{key}" if at else str(key))


def _told(changes: dict[str, tuple[Any, Any]]) -> Iterator[str]:
    told = [f"{key} {was!r} → {now!r}" for key, (was, now) in changes.items()]
    if told:
        more = f"; and {len(told) - SHOWN} more, see starts.jsonl" if len(told) > SHOWN else ""
        yield f"changed since the last start: {'; '.join(told[:SHOWN])}{more}"


def _files_told(now: dict[str, str], known: dict[str, Any], topology: Topology) -> Iterator[str]:
    """Files that may change, and what their change means."""
    def differs(name: str) -> bool:
        return known.get(name, now.get(name)) != now.get(name) and name in now

    if differs("validation.data"):
        yield f"{topology.validation.data} is not what it was: validation from here on is of other prompts than before"
    if differs("reward.function"):
        yield f"{_function_file(topology)} is not what it was: rewards from here on are those of the new code"


def digests(topology: Topology) -> dict[str, str]:
    """SHA-256 of each file that a run's meaning is in, as far as they are files that can be read."""
    named = {"data.train": _prompts(topology), "validation.data": _path(topology.validation.data)}
    named["reward.function"] = _function_file(topology)
    return {name: found for name, path in named.items() if path is not None and (found := _digest(path))}


def _prompts(topology: Topology) -> Path | None:
    """The prompt file; that of a tiny task where it was made."""
    if not topology.data.train.startswith(TINY):
        return _path(topology.data.train)
    from busrl.quickstart import paths

    made = paths(topology.data.train)
    return made.train if made else None


def _function_file(topology: Topology) -> Path | None:
    file = topology.reward.function.rpartition(":")[0]
    return _path(file) if file.endswith(".py") else None


def _path(text: str) -> Path | None:
    return Path(text) if text and not text.startswith(TINY) else None


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(BLOCK):
                found.update(block)
    except OSError:  # whoever needs it says so
        return ""
    return found.hexdigest()


def _strangers(paths: RunPaths) -> list[str]:
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
    others = [name for name in there if name not in OURS and not name.endswith(".lock") and not name.startswith(".")]
    if not others:
        return []
    more = f" and {len(others) - 5} more" if len(others) > 5 else ""
    return [f"{paths.root} holds files that are no part of a run ({', '.join(others[:5])}{more}); they are left alone"]
