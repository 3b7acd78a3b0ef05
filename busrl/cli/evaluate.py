"""`busrl evaluate`: the mean reward of a model folder or a checkpoint on held-out prompts, without a run; `busrl
export`: the model of a checkpoint as a folder that stands alone.

Finds out what is meant (a topology or a run directory, a step or a folder), hands it to `busrl.evaluate` and prints the
figures. Changes nothing but the file of rows that it writes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from busrl.cli.command import progress
from busrl.config import Topology, load, materialise, model_folder, recorded
from busrl.config.schema import TINY
from busrl.errors import UserError
from busrl.paths import RunPaths

if TYPE_CHECKING:
    from busrl.evaluate import Evaluation, Found, Row

PATIENCE_S = 5.0
STEP = re.compile(r"global_step_([0-9]+)")
SHOWN = 3  # kinds of failures that are printed


def evaluate(options: argparse.Namespace) -> int:
    """Measure and print; 1 if no sample got a reward."""
    from busrl.evaluate import Asked, Evaluation, write_rows

    named, step, folder, out = find(options.target, options.checkpoint, options.overrides)
    topology = materialise(_with_model(named, folder))
    config = topology.validation
    temperature = config.temperature if options.temperature is None else options.temperature
    asked = Asked(_prompts(topology, options.data), options.samples or config.samples, temperature, step)
    out = options.out or out
    with _writing(out):  # before anything is computed; rows of an earlier time stay until there are new ones
        out.parent.mkdir(parents=True, exist_ok=True)
        open(out, "ab").close()
    begun, evaluation = time.monotonic(), Evaluation(topology, asked)
    rows = evaluation.run(progress(_progress, PATIENCE_S))
    with _writing(out):
        write_rows(out, rows)
    found = evaluation.found()
    if options.json:
        print(json.dumps({"model": topology.model.path, **dataclasses.asdict(found), "rows": str(out)}))
    else:
        print("\n".join(_lines(topology, asked.prompts, found, rows, time.monotonic() - begun, out)))
    return 0 if found.samples else 1


def export(options: argparse.Namespace) -> int:
    """Write the model folder and say what it holds; UserError where there is no such checkpoint, or a damaged one."""
    from busrl.training.checkpoint import MODEL, copy_model, fault_of

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
    copy_model(Path(folder) / MODEL, out, options.dtype or "")
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"{out}: the model of step {step}, {size / 1e6:.1f} MB")
    return 0


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise UserError(f"{out}: the rows cannot be written there ({problem.strerror}); give --out FILE") from problem


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
    return topology, step, folder, paths.root / "evaluated" / f"step_{step}.jsonl"


def _of_run(
    paths: RunPaths, topology: Topology, checkpoint: str, option: str = "--checkpoint"
) -> tuple[int, str]:
    """Step and model folder: 0 is what the run began with, nothing the newest checkpoint."""
    if checkpoint == "0":
        return 0, topology.model.path
    if checkpoint and not (checkpoint.isascii() and checkpoint.isdigit()):
        return _folder(checkpoint)
    steps = sorted(int(found[1]) for one in paths.checkpoints.glob("*") if (found := STEP.fullmatch(one.name)))
    wanted = int(checkpoint) if checkpoint else steps[-1] if steps else 0
    if wanted not in (*steps, 0):
        known = f"it has those of steps {', '.join(map(str, [0, *steps]))} (0 is the model that it began with)"
        raise UserError(f"{option} {checkpoint}: {paths.checkpoints} has no such step; {known}")
    return (wanted, str(paths.checkpoints / f"global_step_{wanted}")) if wanted else (0, topology.model.path)


def _folder(checkpoint: str) -> tuple[int, str]:
    """A model folder, or a checkpoint of any run, whose step its name tells."""
    found = STEP.fullmatch(Path(checkpoint).resolve().name)
    return int(found[1]) if found else 0, str(Path(checkpoint).resolve())


def _with_model(topology: Topology, folder: str) -> Topology:
    folder = model_folder(folder)
    if not folder.startswith(TINY) and not (Path(folder) / "config.json").is_file():
        raise UserError(
            f"{folder}: no config.json in it; --checkpoint takes a step of the run, the folder of a checkpoint "
            "(global_step_N), or any Hugging Face model folder"
        )
    return dataclasses.replace(topology, model=dataclasses.replace(topology.model, path=folder))


def _prompts(topology: Topology, given: Path | None) -> str:
    if given is not None:
        return str(given)
    if not topology.validation.data:
        print("busrl: no validation.data in the topology: prompts of data.train are asked", file=sys.stderr)
    return topology.validation.data or topology.data.train


def _lines(topology: Topology, prompts: str, found: Found, rows: list[Row], seconds: float, out: Path) -> list[str]:
    error = f" ± {found.standard_error:.4f}" if found.standard_error is not None else ""
    lines = [
        f"{topology.model.path}",
        f"  mean reward {found.mean:.4f}{error} (standard error over {found.prompts} prompts), {found.samples} samples "
        f"of {prompts}",
        f"  {found.length:.1f} tokens per answer, {found.cut_share:.0%} cut at {topology.generation.max_new_tokens}; "
        f"{seconds:.1f} s",
    ]
    if kinds := Counter(row.error.split("\n", 1)[0] for row in rows if row.error):
        lines.append(f"  {found.failed} samples without a reward are not in the mean:")
        lines += [f"    {count}× {kind[:300]}" for kind, count in kinds.most_common(SHOWN)]
    return [*lines, f"  rows: {out}"]


def _progress(evaluation: Evaluation) -> str:
    return f"{len(evaluation.rewards)} of {evaluation.asked.samples} samples, mean {evaluation.found().mean:.3f}"
