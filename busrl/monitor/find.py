"""Which run is meant: a run directory, an endpoint, or the only run of this user that lives.

Looks into /dev/shm and /proc, for reading. Knows nothing of what is done with the run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from busrl.errors import BadEndpoint, NoSuchRun, RingError, UserError
from busrl.launch.state import read_map
from busrl.paths import SHM, RunPaths
from busrl.ring import OfdLock, Process, Ring

LOCK = "run.lock"  # launch holds it, and every child inherits it


@dataclass(frozen=True)
class Target:
    """What to attach to: a run directory, or an endpoint alone."""

    paths: RunPaths | None = None
    endpoint: str = ""


def find(named: str | None) -> Target:
    """The target that an argument means; without one the only living run of this user."""
    if named is None:
        return Target(paths=RunPaths.of(only_living_run()))
    if "://" in named:
        return Target(endpoint=require_ipc(named))
    paths = RunPaths.of(named)
    run = read_map(paths.run_json)
    if run.get("replay"):  # a directory that leads actors to a replay
        return Target(endpoint=require_ipc(str(run.get("backend"))))
    if not paths.run_json.is_file():
        raise NoSuchRun(f"{paths.root}: no run.json there; name the directory that `busrl launch` printed")
    return Target(paths=paths)


def require_ipc(endpoint: str) -> str:
    """The endpoint, if a watcher or a replay can use it. They have no keys, so they stay on the run's own host."""
    if not endpoint.startswith("ipc://"):
        raise BadEndpoint(
            f"{endpoint}: monitor, record and replay work over ipc:// alone, on the host of the run, also where the "
            "bus is reachable over tcp; log in there (`ssh HOST busrl monitor RUN_DIR`), or bring a recording here "
            "and replay it"
        )
    return endpoint


def only_living_run() -> Path:
    """The run directory of the one run that lives; the error lists them if there are several."""
    found = list(living_runs())
    if not found:
        raise NoSuchRun(
            f"no run of user {os.getuid()} lives on this host; name a run directory to see how its run ended"
        )
    if len(found) > 1:
        listed = "\n".join(f"  {directory}" for directory in found)
        raise UserError(f"{len(found)} runs live on this host; name the run directory of one:\n{listed}")
    return found[0]


def living_runs() -> Iterator[Path]:
    """Run directories of this user's rings that a living process is registered in."""
    for path in sorted(SHM.glob(f"busrl.{os.getuid()}.*.ring")):
        directory = run_dir_of(path.name)
        if directory is not None:
            yield directory


def run_dir_of(ring_name: str) -> Path | None:
    """The directory of the run that uses this ring, told by one of its living processes."""
    for process in living(ring_name):
        with suppress(OSError):
            # Not from its environment: setting the title of a process overwrites that.
            for link in Path(f"/proc/{process.pid}/fd").iterdir():
                opened = Path(os.readlink(link))
                if opened.name == LOCK and RunPaths.of(opened.parent).ring_name == ring_name:
                    return opened.parent
    return None


def launched(paths: RunPaths) -> bool:
    """Whether a launch, or what it left running, holds the run directory; looks, and takes nothing."""
    lock = paths.lock("run")
    try:
        return lock.is_file() and OfdLock(str(lock)).holder() is not None
    except (OSError, RingError):  # of another user, say
        return False


def living(ring_name: str) -> list[Process]:
    """Registered processes of a ring that are not proven dead; none if it can not be read."""
    try:
        ring = Ring.attach(ring_name, read_only=True)
    except RingError:
        return []
    try:
        return [process for process in ring.processes() if not process.remote and not ring.is_dead(process.index)]
    finally:
        ring.close()
