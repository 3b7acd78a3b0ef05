"""`errors.jsonl`: one line for each event that a person should see, written by any process of the run.

Talks to one file. Knows nothing of the bus or of logs. Imports next to nothing: the broker needs it too.

- Many processes append: each line is one write to a file opened for appending, so lines of two never mix.
- `uids` names the samples that a line is about, where it is about samples.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import msgspec

from busrl.paths import RunPaths


def record_error(
    paths: RunPaths, process: str, severity: str, where: str, text: str, trace: str = "", uids: Sequence[int] = ()
) -> None:
    """Append one line; a full disk must not turn a warning into a death."""
    row = {"time": time.time(), "process": process, "severity": severity, "where": where, "text": text, "trace": trace}
    line = msgspec.json.encode({**row, "uids": list(uids)} if uids else row)
    with contextlib.suppress(OSError), open(paths.errors, "ab", buffering=0) as file:
        file.write(line + b"\n")
