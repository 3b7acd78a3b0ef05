"""`errors.jsonl`: one line for each event that a person should see, written by any process of the run.

Talks to one file. Knows nothing of the bus or of logs. Imports next to nothing: the broker needs it too.
"""

from __future__ import annotations

import contextlib
import time

import msgspec

from busrl.paths import RunPaths


def record_error(paths: RunPaths, process: str, severity: str, where: str, text: str, trace: str = "") -> None:
    """Append one line; a full disk must not turn a warning into a death."""
    line = msgspec.json.encode(
        {"time": time.time(), "process": process, "severity": severity, "where": where, "text": text, "trace": trace}
    )
    with contextlib.suppress(OSError), open(paths.errors, "ab") as file:
        file.write(line + b"\n")
