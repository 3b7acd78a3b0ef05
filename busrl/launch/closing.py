"""The end of a run with all its roles stopped: `open.bin`, nothing left in shared memory, and the audit.

Talks to the ring, the ledger's files and the audit. Knows nothing of processes; it must be called when none is left.

- The order is: reclaim what the dead held, write and sync open.bin and the fates, then unlink the ring. Killed in
  between, the next start adopts the ring and forgets open.bin.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from busrl.errors import BusrlError
from busrl.launch.rundir import OpenRun, remove_runtime_dir, unlink_segments
from busrl.ledger.audit import AuditReport, audit
from busrl.ledger.openbin import OpenSlot, write_open
from busrl.ring import UID_NONE, Fates, State
from busrl.topology import TINY, Topology


def close_run(run: OpenRun) -> int:
    """Write what is open, unlink everything, let go of the directory. Returns how many samples are open."""
    if run.displaced:
        run.release()
        return 0
    if run.moved() or run.read_only():
        return _abandon(run)
    # Mapped anew: a table that somebody cut short must not be read as long as it was.
    run.fates = Fates(str(run.paths.fates), create=True)
    run.validate_fates = Fates(str(run.paths.validate_fates), create=True)
    run.ring.bind_fates(run.fates, run.validate_fates)
    run.ring.reap()
    run.ring.finish_drops()
    lines = run.ring.lines()
    held = np.flatnonzero((lines["state"] != State.FREE) & (lines["uid"] != UID_NONE))
    still_open = [OpenSlot(int(lines["uid"][slot]), int(lines["state"][slot]), int(slot)) for slot in held]
    run.fates.sync()
    run.validate_fates.sync()
    write_open(run.paths.open_bin, still_open)
    unlink_segments(run.paths.ring_name)
    shutil.rmtree(run.paths.published, ignore_errors=True)
    remove_runtime_dir(run.paths)
    run.release()
    return len(still_open)


def _abandon(run: OpenRun) -> int:
    """The run directory is not where it was, or can not be written: nothing is written in its place. Without a ring and
    an open.bin the next start, wherever it is, generates again what was open."""
    unlink_segments(run.paths.ring_name)
    remove_runtime_dir(run.paths)
    held = sum(count for state, count in run.ring.stats().occupancy.items() if state != "FREE")
    run.release()
    return held


def audit_run(root: Path, topology: Topology) -> AuditReport | str:
    """The audit of a run that has ended, or why there is none; finds the prompt file of a tiny task where it was made.

    Whatever happened to the run's files, a run has a summary.
    """
    prompts: Path | None = None
    if topology.data.train.startswith(TINY):
        from busrl.quickstart import paths

        made = paths(topology.data.train)
        prompts = made.train if made else None
    try:
        return audit(root, prompts=prompts)
    except (OSError, BusrlError) as problem:
        return str(problem)
