"""Which checkpoint a command means, and `busrl export`: its model as a folder that stands alone.

Resolves a run directory with a step, the folder of a checkpoint, or any model folder, and makes a model of a checkpoint
in shards. Talks to `training.checkpoint`, which loads torch, where that is needed. Runs nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from busrl.config import Topology, load, model_folder, recorded
from busrl.config.schema import TINY
from busrl.errors import UserError
from busrl.ledger.trained import checkpoints_of, is_checkpoint, step_of
from busrl.paths import RunPaths


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
