"""`busrl evaluate`: the figures of a model folder or a checkpoint on held-out prompts, without a run; `busrl validate`:
a round of a run that is running; `busrl export`: the model of a checkpoint as a folder that stands alone.

Resolves a run directory with a step, the folder of a checkpoint, or any model folder, and hands that to
`busrl.evaluate` or `training.checkpoint`, which load torch; asks the validator by a file in the run directory. Changes
nothing but the file of rows, that request, and the folder that is asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import select
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from busrl.cli.command import progress
from busrl.cli.run import launch_pid
from busrl.config import Topology, load, materialise, model_folder, recorded
from busrl.config.prompts import AskedSet
from busrl.config.schema import TINY
from busrl.data import JsonlStream
from busrl.errors import PeerTimeout, UserError
from busrl.files import json_lines
from busrl.ledger.trained import checkpoints_of, is_checkpoint, step_of
from busrl.paths import RunPaths
from busrl.roles.validator import Request

if TYPE_CHECKING:
    from busrl.evaluate import Evaluation, EvaluationFigures, Row

PATIENCE_S = 5.0
LOOK_S = 0.2
SHOWN = 3  # kinds of failures that are printed


def evaluate(options: argparse.Namespace) -> int:
    """Measure and print; 1 if no sample got a reward."""
    from busrl.evaluate import Evaluation, MeasuredRound, write_rows

    named, step, folder, out = find(options.target, options.checkpoint, options.overrides)
    if named.reward.of_episodes:
        raise UserError(
            f"{options.target}: its rewards are what episodes return, and `busrl evaluate` draws single answers; "
            "`busrl validate RUN_DIR` has the agents of a running run play the validation prompts"
        )
    topology = materialise(with_model(named, folder))
    of = _asked(topology, options)
    others = sum(one.answers for one in topology.sets if one.name != of.name)
    asked = MeasuredRound(of, others + of.answers, step)
    out = options.out or out
    with _writing(out):  # before anything is computed; rows of an earlier time stay until there are new ones
        out.parent.mkdir(parents=True, exist_ok=True)
        open(out, "ab").close()
    begun = time.monotonic()
    with as_a_model(folder, out.parent) as model:
        evaluation = Evaluation(with_model(topology, model) if model != folder else topology, asked)
        rows = evaluation.run(progress(_progress, PATIENCE_S))
    with _writing(out):
        write_rows(out, rows)
    found = evaluation.found()
    if options.json:
        print(json.dumps({"model": topology.model.path, **dataclasses.asdict(found), "rows": str(out)}))
    else:
        print("\n".join(_lines(topology, of, found, rows, time.monotonic() - begun, out)))
    return 0 if found.samples else 1


def validate(options: argparse.Namespace) -> int:
    """Ask the run's validator for a round, wait for it and print its figures."""
    paths = RunPaths.of(options.run_dir)
    pid = launch_pid(paths)
    if pid is None:
        remedy = f"`busrl evaluate {paths.root}` measures its newest checkpoint"
        raise UserError(f"{paths.root}: no process runs it, so nobody can validate; {remedy}")
    topology = recorded(paths.topology)
    known = {one.title: one.name for one in topology.sets}
    if not known:
        raise UserError(f"{paths.root}: this run has no [validation] with prompts; use busrl evaluate --data FILE")
    if unknown := [name for name in options.names if name not in known]:
        raise UserError(f"{unknown[0]}: no set of this run; it has {', '.join(known)}")
    before = Request.read(paths)
    if before is not None and before.open:
        raise UserError(f"{paths.root}: a round was asked for and is not done yet ({before.state}); wait for it")
    request = Request(uuid.uuid4().hex, [known[name] for name in options.names or known], options.free)
    request.write(paths)
    answer = _await_round(paths, request, pid, options.wait)
    if answer.state == "refused":
        raise UserError(f"{paths.root}: {answer.text}")
    rows = [row for row in json_lines(paths.validation) if row.get("round") == answer.round]
    for row in (row for row in rows if row.get("set", "") in answer.sets):
        print(json.dumps(row) if options.json else _told(row))
    return 0


def _await_round(paths: RunPaths, request: Request, pid: int, wait_s: float) -> Request:
    """The request once it is done; PeerTimeout with its state if it is not in time, or if the run ends before."""
    end = time.monotonic() + wait_s
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        raise PeerTimeout(f"{paths.root}: the run has just ended; its next start does what was asked") from None
    try:
        while True:
            ended = bool(select.select([descriptor], [], [], LOOK_S)[0])
            found = Request.read(paths)
            if found is not None and found.id == request.id and not found.open:
                return found
            if ended:
                raise PeerTimeout(f"{paths.root}: the run ended before the round; its next start does what was asked")
            if time.monotonic() > end:
                state = "no validator has begun it" if found is None or found.state == "asked" else "it goes on"
                raise PeerTimeout(f"{paths.root}: the round is not done after {wait_s:g} s; {state}: see busrl monitor")
    finally:
        os.close(descriptor)


def _told(row: dict[str, Any]) -> str:
    versions = f"versions {row['versions'][0]} to {row['versions'][-1]}, mixed" if row["mixed"] else (
        f"version {row['version']}"
    )
    intervals = row.get("intervals", {})
    figures = {"reward": row["val/reward"], **{key[4:]: value for key, value in row.items() if "@" in key}}
    lines = [f"{row.get('set') or 'validation'}, round {row['round']} of {versions}: {row['samples']} answers"]
    for name, value in figures.items():
        low, high = intervals.get(name, (value, value))
        lines.append(f"  {name} {value:.4f} (95 %: {low:.4f} to {high:.4f})")
    return "\n".join(lines)


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise UserError(f"{out}: the rows cannot be written there ({problem.strerror}); give --out FILE") from problem


def _asked(topology: Topology, options: argparse.Namespace) -> AskedSet:
    own, name = topology.validation, options.validation
    of = next((one for one in topology.sets if one.name == (topology.sets[0].name if name is None else name)), None)
    if name is not None and of is None:
        known = ", ".join(one.name or '""' for one in topology.sets) or "none"
        raise UserError(f"--validation {name}: no set of this name; there are {known}")
    if of is None:
        data = own.data or topology.data.train
        if not own.data and options.data is None:
            print("busrl: no validation.data in the topology: prompts of data.train are asked", file=sys.stderr)
        limit = own.max_new_tokens or topology.generation.max_new_tokens
        samples = own.samples if isinstance(own.samples, int) else 0
        of = AskedSet("", data, 0, samples, own.k, own.temperature, own.top_p, limit, 0, 0)
    if options.data is not None:
        of = dataclasses.replace(of, data=str(options.data))
    given = {"prompts": options.samples, "k": options.k, "temperature": options.temperature}
    of = dataclasses.replace(of, **{key: value for key, value in given.items() if value is not None})
    if of.prompts:
        return of
    with JsonlStream(of.data, 0, False, topology.data.prompt_key) as stream:
        return dataclasses.replace(of, prompts=len(stream))


def _lines(
    topology: Topology, of: AskedSet, found: EvaluationFigures, rows: list[Row], seconds: float, out: Path
) -> list[str]:
    error = f" ± {found.standard_error:.4f}" if found.standard_error is not None else ""
    lines = [
        f"{topology.model.path}",
        f"  mean reward {found.mean:.4f}{error} (standard error over {found.prompts} prompts), {found.samples} samples "
        f"of {of.data}",
        *(
            f"  {name} {one.value:.4f} (95 %: {one.low:.4f} to {one.high:.4f}, over {one.prompts} prompts)"
            for name, one in found.figures.items()
        ),
        *(f"  {tag}: reward {one['val/reward']:.4f} over {one['prompts']} prompts" for tag, one in found.by.items()),
        f"  {found.length:.1f} tokens per answer, {found.cut_share:.0%} cut at {of.max_new_tokens}; {seconds:.1f} s",
    ]
    if kinds := Counter(row.error.split("\n", 1)[0] for row in rows if row.error):
        lines.append(f"  {found.failed} samples without a reward are not in the mean:")
        lines += [f"    {count}× {kind[:300]}" for kind, count in kinds.most_common(SHOWN)]
    return [*lines, f"  rows: {out}"]


def _progress(evaluation: Evaluation) -> str:
    return f"{len(evaluation.rewards)} of {evaluation.asked.of.answers} samples, mean {evaluation.mean():.3f}"


# -- which checkpoint is meant, and its model -----


def export(options: argparse.Namespace) -> int:
    """Write the model folder and say what it holds; UserError where there is no such checkpoint, or a damaged one."""
    from busrl.training.checkpoint import export_checkpoint, fault_of

    paths, out = RunPaths.of(options.run_dir), options.out.absolute()
    if not paths.topology.is_file():
        raise UserError(f"{options.run_dir}: no topology.json in it; give the directory of a run")
    step, folder = _of_run(paths, recorded(paths.topology), str(options.step or ""), "--step")
    if not step:
        raise UserError(f"{paths.checkpoints}: no checkpoint yet; learner.checkpoint_every says when there is one")
    if fault := fault_of(Path(folder)):
        raise UserError(f"{folder}: the checkpoint is damaged ({fault}); name another one with --step")
    if os.path.lexists(out):
        raise UserError(f"--out {options.out}: it is there, and nothing is overwritten; name a new folder")
    if not os.access(out.parent, os.W_OK):
        raise UserError(f"--out {options.out}: {out.parent} is no folder that can be written; make it, or name another")
    export_checkpoint(Path(folder), out, options.dtype or "")
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"{out}: the model of step {step}, {size / 1e6:.1f} MB")
    return 0


def find(named: Path, checkpoint: str, overrides: list[str]) -> tuple[Topology, int, str, Path]:
    """What the command line means: the topology, the step and the folder of the weights to measure, and where the rows
    go; UserError if there is no such checkpoint."""
    paths = RunPaths.of(named)
    if not named.is_dir():
        topology = load(named, overrides)
        step, folder = _folder(checkpoint) if checkpoint else (0, topology.model.path)
        out = Path("evaluated") / f"{topology.run.name}{f'-{Path(checkpoint).name}' if checkpoint else ''}.jsonl"
        return topology, step, folder, out
    if not paths.topology.is_file():
        raise UserError(f"{named}: no topology.json in it; give a topology file, or the directory of a run")
    if overrides:
        raise UserError(f"--set changes a topology file, and {named} is a run with its own; give a file instead")
    topology = recorded(paths.topology)
    step, folder = _of_run(paths, topology, checkpoint)
    return topology, step, folder, paths.evaluated / f"step_{step}.jsonl"


def _of_run(
    paths: RunPaths, topology: Topology, checkpoint: str, option: str = "--checkpoint"
) -> tuple[int, str]:
    """Step and model folder: 0 is what the run began with, nothing the newest checkpoint."""
    if checkpoint == "0":
        return 0, topology.model.path
    if checkpoint and not (checkpoint.isascii() and checkpoint.isdigit()):
        return _folder(checkpoint)
    folders = {step_of(one): one for one in reversed(checkpoints_of(paths.checkpoints))}
    wanted = int(checkpoint) if checkpoint else max(folders, default=0)
    if wanted not in (*folders, 0):
        known = f"it has those of steps {', '.join(map(str, [0, *folders]))} (0 is the model that it began with)"
        raise UserError(f"{option} {checkpoint}: {paths.checkpoints} has no such step; {known}")
    return (wanted, str(folders[wanted])) if wanted else (0, topology.model.path)


def _folder(checkpoint: str) -> tuple[int, str]:
    """A model folder, or a checkpoint of any run, whose step its name tells."""
    folder = Path(checkpoint).resolve()
    return step_of(folder) if is_checkpoint(folder) else 0, str(folder)


@contextlib.contextmanager
def as_a_model(folder: str, near: Path) -> Iterator[str]:
    """The folder, or, of a checkpoint in shards, a model folder that is there for this time alone."""
    if not (Path(folder) / "shards").is_dir():
        yield folder
        return
    from busrl.training.checkpoint import export_checkpoint, fault_of

    if fault := fault_of(Path(folder)):
        raise UserError(f"{folder}: the checkpoint is damaged ({fault}); name another one with --checkpoint")
    with tempfile.TemporaryDirectory(prefix=".model-", dir=near) as made:
        export_checkpoint(Path(folder), Path(made) / "model")
        yield str(Path(made) / "model")


def with_model(topology: Topology, folder: str) -> Topology:
    """With these weights; UserError if the folder holds no model."""
    folder = model_folder(folder)
    if not folder.startswith(TINY) and not (Path(folder) / "config.json").is_file():
        raise UserError(
            f"{folder}: no config.json in it; --checkpoint takes a step of the run, the folder of a checkpoint "
            "(global_step_N), or any Hugging Face model folder"
        )
    return dataclasses.replace(topology, model=dataclasses.replace(topology.model, path=folder))
