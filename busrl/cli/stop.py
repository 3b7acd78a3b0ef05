"""`busrl stop`: ask the `launch` of a run to end it in order, and wait until it has.

Finds the process through `run.json` and proves by the run's lock that it is that process before signalling. Knows
nothing of what an orderly end is.

- A pid alone is no proof: it is signalled through a pidfd, and only if the run's lock names the same pid as its holder.
"""

from __future__ import annotations

import json
import os
import select
import signal
from pathlib import Path

from busrl.errors import NoSuchRun, PeerTimeout, UserError
from busrl.launch.rundir import belongs_to_another
from busrl.paths import RunPaths
from busrl.ring import OfdLock


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
