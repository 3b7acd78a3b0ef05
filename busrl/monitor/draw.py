"""Small drawings in text: charts of several rows, gauges, stacked bars; and text made safe to print.

Pure, and knows nothing of colours or of what is drawn. Every result has the size that was asked for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final

from busrl.launch.printable import safe as safe

EIGHTHS: Final = " ▁▂▃▄▅▆▇█"


def buckets(values: Sequence[float], width: int) -> list[float]:
    """At most `width` means of neighbouring values, in order; the newest bucket ends with the newest value.

    Values that are no numbers are left out of a mean; a bucket of nothing else is nan.
    """
    if len(values) <= width:
        return list(values)
    cuts = [round(i * len(values) / width) for i in range(width + 1)]
    return [_mean([value for value in values[a:b] if math.isfinite(value)]) for a, b in itertools.pairwise(cuts)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def chart(values: Sequence[float], width: int, height: int) -> list[str]:
    """`height` lines of `width` characters: the course of a number from its lowest to its highest, newest at the right.

    A flat course is drawn at half height; its lowest value still shows as one eighth, what is no number not at all.
    """
    means = buckets(values, width)
    finite = [mean for mean in means if math.isfinite(mean)]
    if not finite or width < 1:
        return [" " * max(0, width)] * height
    levels = [_level(mean, min(finite), max(finite), height * 8) if math.isfinite(mean) else 0 for mean in means]
    rows = []
    for row in reversed(range(height)):
        cells = "".join(EIGHTHS[max(0, min(8, level - row * 8))] for level in levels)
        rows.append(cells.ljust(width))
    return rows


def _level(value: float, low: float, high: float, top: int) -> int:
    """How many of `top` eighths a value between low and high fills, at least one."""
    span = high - low
    return 1 + round((value - low) / span * (top - 1)) if 0 < span < math.inf else top // 2


def gauge(share: float, width: int) -> tuple[str, str]:
    """The filled and the empty part of a bar of `width` characters."""
    full = round(max(0.0, min(1.0, share)) * width)
    return "━" * full, "─" * (width - full)


def portions(counts: Sequence[int], width: int) -> list[int]:
    """How many of `width` cells each count gets: in proportion, at least one where it is not 0, `width` in all."""
    total = sum(counts)
    if total <= 0 or width <= 0:
        return [0] * len(counts)
    cells = [max(1, round(count * width / total)) if count else 0 for count in counts]
    while sum(cells) != width:
        over = sum(cells) > width
        at = max(range(len(cells)), key=lambda i: (cells[i], counts[i]))
        if over and cells[at] <= 1:  # more kinds than cells: the last ones are left out
            at = max(i for i, cell in enumerate(cells) if cell)
        cells[at] += -1 if over else 1
    return cells
