"""`busrl launch`: from a checked topology to a running one: its directory, its tiny model, the supervisor.

Decides where the run lives and what --resume means, then hands over to `busrl.launch`. Knows nothing of children.

- The same run directory is the same run: starting there again goes on, unless --resume never forbids it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from busrl.errors import UserError
from busrl.launch import launch
from busrl.paths import RunPaths
from busrl.topology import Topology, materialise
from busrl.topology.check import require_cores, require_disk, require_memory, warnings


def start(topology: Topology, run_dir: Path | None, resume: str) -> int:
    """The exit code of the run."""
    directory = directory_of(topology, run_dir, resume)
    topology = materialise(topology)
    if not RunPaths.of(directory).ring_file.exists():  # an adopted ring has its memory already
        require_memory(topology)
    for text in warnings(topology):
        print(f"warning: {text}", file=sys.stderr)
    require_cores(topology)
    require_disk(topology, directory)
    return int(launch(topology, directory, resume=resume != "never"))


def directory_of(topology: Topology, run_dir: Path | None, resume: str) -> Path:
    """Where the run lives: --run-dir, the directory of --resume, or a new one named after the run and the time."""
    if resume in ("auto", "never"):
        return run_dir or Path("runs") / f"{topology.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    directory = Path(resume)
    if run_dir is not None and run_dir.resolve() != directory.resolve():
        raise UserError(f"--run-dir {run_dir} and --resume {resume}: two different run directories; give one of them")
    if not RunPaths.of(directory).topology.is_file():
        raise UserError(
            f"--resume {resume}: expected auto, never, or a run directory (one that holds topology.json); a run goes "
            "on from the newest of its checkpoints and its log by itself"
        )
    return directory
