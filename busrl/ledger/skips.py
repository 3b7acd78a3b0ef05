"""`skips.jsonl`: which prompts the scheduler left out by their pass rates, and on how many ended groups it decided.

The scheduler writes a line before it stores the fates that the line is about; a successor stores them again. Knows
nothing of the rule by which a prompt is left out.

- `draws` of all lines together are every draw that was left out. The decision stands on the first `told` groups of
  groups.jsonl, so it can be made again from both files.
- The other numbers are totals up to the line, by source.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from busrl.system.files import json_lines

TAIL_BYTES = 1 << 18


class SkipLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Draws left out in one pass of the scheduler; `given_up`: the first draw after an epoch that left nothing out."""

    time: float
    told: int
    draws: list[int] = []
    given_up: int = 0
    left_out: dict[str, int] = {}  # by source, since the run began
    resting: dict[str, int] = {}  # prompts that rest now
    prompts: dict[str, int] = {}


def skip_lines(path: Path, tail: int = 0) -> Iterator[SkipLine]:
    """The lines, in order; none where there is no file. `tail`: only of its last bytes."""
    for row in json_lines(path, tail):
        with suppress(msgspec.ValidationError):
            yield msgspec.convert(row, SkipLine)


def newest_skips(path: Path) -> SkipLine | None:
    lines = list(skip_lines(path, TAIL_BYTES))
    return lines[-1] if lines else None
