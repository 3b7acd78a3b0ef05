"""A sweep as a picture: small charts in one SVG, readable in any browser, made without a plotting library.

Pure: figures in, text out. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from busrl.simulate.figures import Figures

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 380, 250, 64, 16, 34, 58
ACROSS = 2
COLOURS = ("#1f6feb", "#d1690e", "#2da44e", "#8250df")
Series = tuple[str, Callable[[Figures], float]]
CHARTS: tuple[tuple[str, tuple[Series, ...]], ...] = (
    ("samples trained per second", (("samples/s", lambda f: f.samples_per_s),)),
    ("busy share", (("learner", lambda f: f.learner_busy), ("rollout", lambda f: f.actors_busy))),
    ("age in steps", (("mean", lambda f: f.age_mean), ("max", lambda f: float(f.age_max)))),
    ("seconds until", (("reward, mean", lambda f: f.completion_mean_s), ("begun, p99", lambda f: f.queued_p99_s))),
)


def svg(title: str, points: Sequence[tuple[Sequence[str], Figures]]) -> str:
    """One chart per figure, a position per point of the sweep in its order; a label is the values joined by spaces."""
    labels = [" ".join(values) for values, _ in points]
    found = [figures for _, figures in points]
    rows = -(-len(CHARTS) // ACROSS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{ACROSS * WIDTH}" height="{rows * HEIGHT + 30}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="12" y="20" font-size="14">{escape(title)}</text>',
    ]
    for index, (name, series) in enumerate(CHARTS):
        x, y = index % ACROSS * WIDTH, index // ACROSS * HEIGHT + 30
        parts.append(f'<g transform="translate({x},{y})">{_chart(name, series, labels, found)}</g>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _chart(name: str, series: Sequence[Series], labels: Sequence[str], found: Sequence[Figures]) -> str:
    top = max((value(one) for _, value in series for one in found), default=0.0) or 1.0
    parts = [f'<text x="{LEFT}" y="16" font-weight="bold">{escape(name)}</text>', _axes(top), _names(labels)]
    for number, (label, value) in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        spots = [(_x(i, len(found)), _y(value(one), top)) for i, one in enumerate(found)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in spots]
        if len(series) > 1:
            x = WIDTH - RIGHT - 90 * (len(series) - number)
            parts.append(f'<text x="{x}" y="28" fill="{colour}">{escape(label)}</text>')
    return "".join(parts)


def _axes(top: float) -> str:
    lines = []
    for part in (0.0, 0.5, 1.0):
        y = _y(part * top, top)
        lines.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{part * top:.3g}</text>')
    return "".join(lines)


def _names(labels: Sequence[str]) -> str:
    """Labels below the axis; slanted, and only some of many."""
    every, y = max(1, len(labels) // 16), HEIGHT - BOTTOM + 14
    return "".join(
        f'<text transform="translate({_x(i, len(labels)):.1f},{y}) rotate(-30)" text-anchor="end">'
        f"{escape(label)}</text>"
        for i, label in enumerate(labels)
        if i % every == 0
    )


def _x(index: int, count: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (index + 0.5) / max(1, count)


def _y(value: float, top: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top)
