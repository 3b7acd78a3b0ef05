"""A directory with a run.json that leads actors to a replay, for as long as that goes on.

Talks to the file system only. Knows nothing of what is replayed, and never touches a directory that holds a run.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from busrl.errors import UserError
from busrl.launch.state import read_map
from busrl.monitor.recording import Recording
from busrl.monitor.replayer import refuse_if_served
from busrl.paths import RunPaths


@contextmanager
def stage(directory: Path, recording: Recording, frontend: str, backend: str) -> Iterator[None]:
    """Make the directory if it is not there, write its run.json, and take both away afterwards."""
    path = RunPaths.of(directory).run_json
    _refuse_if_used(path)
    made = not path.parent.exists()
    facts = recording.header.facts
    info = {
        "run_id": facts.run_id, "uuid": facts.uuid, "frontend": frontend, "backend": backend, "launch_pid": os.getpid(),
        "started": time.time(), "replay": str(recording.path.resolve()),
    }  # fmt: skip
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"run.json.{os.getpid()}")
        new.write_text(json.dumps(info, indent=2) + "\n")
        new.replace(path)  # whole or not there: an actor may look already
    except OSError as error:
        raise UserError(f"{path} can not be written: {error.strerror}; choose another --run-dir") from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        if made:
            with suppress(OSError):  # an actor may have written there
                path.parent.rmdir()


def _refuse_if_used(path: Path) -> None:
    if not path.exists():
        return
    before = read_map(path)
    if not before.get("replay"):
        raise UserError(f"{path.parent} holds a run; a replay needs a directory of its own: --run-dir NEW")
    for key in ("frontend", "backend"):  # of a replay that was killed, or goes on
        if endpoint := before.get(key):
            refuse_if_served(str(endpoint))
