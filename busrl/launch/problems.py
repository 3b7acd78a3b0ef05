"""What went wrong in a run lately, from the tail of errors.jsonl, for `busrl status`.

Reads one file; knows nothing of who wrote the lines. Lines of one process that differ only in numbers count as one.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from busrl.errors import first_line
from busrl.launch.progress import duration
from busrl.ledger.files import TAIL_BYTES, tail

__all__ = ["SHOWN", "TAIL_BYTES", "problems", "tail"]

SHOWN = 5
TEXT = 240


@dataclass
class _Kind:
    severity: str
    process: str
    text: str
    at: float
    count: int


def problems(path: Path) -> Iterator[str]:
    """The newest kinds of problems, the newest first; nothing if there were none."""
    kinds = sorted(_kinds(path), key=lambda kind: -kind.at)
    if kinds:
        yield f"  problems (all of them: {path})"
    for kind in kinds[:SHOWN]:
        text = first_line(kind.text, TEXT)
        times = f"{kind.count} times, last " if kind.count > 1 else ""
        yield f"    {times}{duration(max(0.0, time.time() - kind.at))} ago  {kind.process} {kind.severity}: {text}"
    if len(kinds) > SHOWN:
        yield f"    and {len(kinds) - SHOWN} older kinds"


def _kinds(path: Path) -> list[_Kind]:
    found: dict[tuple[str, str], _Kind] = {}
    for line in tail(path):
        try:
            row = json.loads(line)
            process, severity, text = str(row["process"]), str(row["severity"]), str(row["text"])
            at = float(row["time"])
        except (ValueError, KeyError, TypeError):
            continue  # torn, or cut by the tail
        kind = found.setdefault((process, re.sub(r"[0-9]+", "#", text)), _Kind(severity, process, text, at, 0))
        kind.text, kind.at, kind.count = text, at, kind.count + 1
    return list(found.values())
