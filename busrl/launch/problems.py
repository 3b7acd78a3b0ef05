"""What went wrong in a run lately, from the tail of errors.jsonl, for `busrl status`.

Reads one file; knows nothing of who wrote the lines. Lines of one process that differ only in numbers count as one.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from busrl.errors import first_line
from busrl.launch.progress import duration
from busrl.ledger.files import TAIL_BYTES, tail

__all__ = ["SHOWN", "TAIL_BYTES", "kinds", "lines", "tail"]

SHOWN = 5
TEXT = 240


def kinds(path: Path) -> list[dict[str, Any]]:
    """Every kind of problem in the end of the file, the newest first: severity, process, text, time, count."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for line in tail(path):
        try:
            row = json.loads(line)
            process, severity, text = str(row["process"]), str(row["severity"]), first_line(str(row["text"]), TEXT)
            at = float(row["time"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue  # torn, or cut by the tail
        if not math.isfinite(at):
            continue
        told = {"severity": severity, "process": process, "text": text, "time": at, "count": 0}
        kind = found.setdefault((process, re.sub(r"[0-9]+", "#", text)), told)
        kind.update(text=text, time=at, count=kind["count"] + 1)
    return sorted(found.values(), key=lambda kind: -kind["time"])


def lines(found: list[dict[str, Any]], path: Path) -> Iterator[str]:
    """The newest kinds in words; nothing if there were none."""
    if found:
        yield f"  problems (all of them: {path})"
    for kind in found[:SHOWN]:
        times = f"{kind['count']} times, last " if kind["count"] > 1 else ""
        ago = duration(max(0.0, time.time() - kind["time"]))
        yield f"    {times}{ago} ago  {kind['process']} {kind['severity']}: {kind['text']}"
    if len(found) > SHOWN:
        yield f"    and {len(found) - SHOWN} older kinds"
