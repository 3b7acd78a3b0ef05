"""`busrl launch`: from a checked topology to a running one: its directory, its tiny model, the supervisor.

Decides where the run lives and what --resume means, then hands over to `busrl.launch`. Knows nothing of children.

- The same run directory is the same run: starting there again goes on, unless --resume never forbids it.

`busrl stop`: ask the `launch` of a run to end it in order, and wait until it has.

Finds the process through `run.json` and proves by the run's lock that it is that process before signalling. Knows
nothing of what an orderly end is.

- A pid alone is no proof: it is signalled through a pidfd, and only if the run's lock names the same pid as its holder.

`busrl audit`: print what `busrl.ledger.audit` finds. Knows only where a tiny task keeps its prompts.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from pathlib import Path

from busrl import quickstart
from busrl.config import Topology, materialise
from busrl.config.explain import require_cores, require_disk, require_memory, warnings
from busrl.errors import NoSuchRun, PeerTimeout, UserError
from busrl.launch import launch
from busrl.launch.rundir import belongs_to_another
from busrl.ledger.audit import audit as look
from busrl.ledger.audit import render
from busrl.monitor.text import printable
from busrl.paths import RunPaths
from busrl.ring import OfdLock

# -- `busrl launch`: from a checked topology to a running one: its directory, its tiny model, the supervisor ----------


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


# -- `busrl stop`: ask the `launch` of a run to end it in order, and wait until it has --------------------------------


def stop(run_dir: Path, wait_s: float) -> int:
    """0 when the run has ended; NoSuchRun if there is nothing to stop, PeerTimeout if it does not end."""
    paths = RunPaths.of(run_dir)
    pid = launch_pid(paths)
    if pid is None:
        print(f"{paths.root}: no process runs it; nothing to stop")
        return 0
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        print(f"{paths.root}: it has just ended")
        return 0
    try:
        if launch_pid(paths) != pid:
            print(f"{paths.root}: it has just ended")
            return 0
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        except PermissionError:
            whose = belongs_to_another(paths.root) or "it belongs to another user"
            raise UserError(f"{paths.root}: {whose}, and only they (or root) can stop process {pid}") from None
        print(f"{paths.root}: asked process {pid} to stop", flush=True)
        _await(descriptor, pid, paths, wait_s)
    finally:
        os.close(descriptor)
    print(f"{paths.root}: ended")
    return 0


def launch_pid(paths: RunPaths) -> int | None:
    """The pid of the living `launch`, None if the run is not running."""
    try:
        run = json.loads(paths.run_json.read_bytes())
    except (OSError, ValueError):
        raise NoSuchRun(f"{paths.root}: no readable run.json, so this is no run directory; see `ls runs/`") from None
    if not paths.lock("run").is_file():
        return None
    holder = OfdLock(str(paths.lock("run"))).holder()  # looks, without taking the lock
    if holder is None:
        return None
    pid = run.get("launch_pid") if isinstance(run, dict) else None
    if not isinstance(pid, int) or holder not in (pid, -1) or not _alive(pid):
        raise PeerTimeout(
            f"{paths.root}: its launch (pid {pid}) is gone, but a child still holds the run's lock; children end with "
            "their parent: try again in a moment"
        )
    return pid


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _await(descriptor: int, pid: int, paths: RunPaths, wait_s: float) -> None:
    poller = select.poll()  # a pidfd is readable when its process has ended
    poller.register(descriptor, select.POLLIN)
    if not poller.poll(wait_s * 1000):
        raise PeerTimeout(
            f"{paths.root}: process {pid} has not ended {wait_s:g} s after it was asked; see {paths.logs}, wait longer "
            f"(--wait), or end it with: kill -9 {pid} (the next launch continues from the ledger)"
        )


# -- `busrl audit`: print what `busrl.ledger.audit` finds. Knows only where a tiny task keeps its prompts -------------


def audit(run_dir: Path, as_json: bool) -> int:
    """Print the report; 1 if a promise is broken."""
    report = look(run_dir, prompts=_tiny_prompts(run_dir))
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        print("\n".join(map(printable, render(report).split("\n"))))
    return report.exit_code


def _tiny_prompts(run_dir: Path) -> Path | None:
    """The prompt file of a run whose topology names a tiny task instead of one."""
    try:
        train = str(json.loads(RunPaths.of(run_dir).topology.read_bytes())["data"]["train"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # the audit itself says what is missing
    made = quickstart.paths(train) if quickstart.known(train) else None
    return made.train if made else None
