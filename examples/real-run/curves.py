"""Curves of runs as one SVG, from metrics.jsonl and validation.jsonl: `python curves.py RUN_DIR ... [-o FILE]`.

Writes RUN_DIR/curves.svg, or FILE, and prints the results of validation. Uses those files alone, and no library.

- A line of metrics.jsonl is a step. After a resume a step may have two lines: the last one counts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

Points = list[tuple[float, float]]
WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 150, 34, 24, 46
COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#7d4e9e")
SMOOTH = 5  # a point of a curve is the mean of so many steps


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def of_steps(run: Path, number: str) -> Points:
    """A number of each step, as means over a few steps; `reward_parts/right` is one within a map."""
    by_step: dict[int, float] = {}
    for row in lines(run / "metrics.jsonl"):
        value: Any = row if "kind" not in row else None
        for part in number.split("/"):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            by_step[int(row["step"])] = float(value)
    steps = sorted(by_step)
    return [(at, mean(by_step[step] for step in steps if at - SMOOTH < step <= at)) for at in steps]


def of_rounds(run: Path, name: str) -> Points:
    """pass@1 of a set, by the step of its rounds."""
    by_round = {row["round"]: row for row in lines(run / "validation.jsonl") if row.get("set", "") == name}
    return [(at, right(by_round[at])) for at in sorted(by_round)]


def right(row: dict[str, Any]) -> float:
    return float(row["val/pass@1"])


def sets(run: Path) -> list[str]:
    return list(dict.fromkeys(row.get("set", "") for row in lines(run / "validation.jsonl")))


def panel(at: int, title: str, curves: dict[str, Points], top: float = 1.0) -> Iterator[str]:
    """Axes with a title and a legend, and the curves; y from 0 to `top`."""
    left = LEFT + at * (WIDTH + GAP)
    last = max((x for points in curves.values() for x, _ in points), default=1.0) or 1.0
    yield f'<text x="{left}" y="14" font-weight="bold">{title}</text>'
    for share in (0.0, 0.5, 1.0):
        y = TOP + HEIGHT * (1 - share)
        yield f'<line x1="{left}" x2="{left + WIDTH}" y1="{y:.0f}" y2="{y:.0f}" stroke="#ddd"/>'
        yield f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end">{share * top:g}</text>'
    yield f'<text x="{left + WIDTH}" y="{TOP + HEIGHT + 14}" text-anchor="end">step {last:g}</text>'
    names = list(dict.fromkeys(name.partition("#")[0] for name in curves))
    for name, points in curves.items():
        colour = COLOURS[names.index(name.partition("#")[0]) % len(COLOURS)]
        path = " ".join(f"{left + WIDTH * x / last:.1f},{TOP + HEIGHT * (1 - min(y / top, 1)):.1f}" for x, y in points)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
    for number, name in enumerate(names):
        x = left + number * (WIDTH // max(1, len(names)))
        yield f'<text x="{x}" y="{TOP + HEIGHT + 30}" fill="{COLOURS[number % len(COLOURS)]}">{name}</text>'


def svg(runs: list[Path]) -> str:
    """Three panels: validation, parts of the reward, entropy. A colour is a number, each run a line of that colour."""
    several = [(str(at), run) for at, run in enumerate(runs)]
    rounds = {f"{name}#{at}": of_rounds(run, name) for at, run in several for name in sets(run)}
    parts = {
        f"{name}#{at}": of_steps(run, f"reward_parts/{name}") for name in ("right", "form") for at, run in several
    }
    entropy = {f"nats per token#{at}": of_steps(run, "entropy") for at, run in several}
    highest = max((y for points in entropy.values() for _, y in points), default=1.0)
    body = [
        *panel(0, "validation, pass@1 on held-out questions", rounds),
        *panel(1, "reward parts while training", parts),
        *panel(2, "entropy", entropy, round(highest + 0.05, 1)),
    ]
    size = f'width="{LEFT + 3 * (WIDTH + GAP)}" height="{TOP + HEIGHT + 40}"'
    style = 'font-family="sans-serif" font-size="11" style="background:white"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', *body, "</svg>", ""])


def table(runs: list[Path]) -> Iterator[str]:
    """Markdown: a row for each run and set."""
    yield "| run | set | pass@1 of version 0 | pass@1 at the end | rise |"
    yield "|---|---|---|---|---|"
    for run in runs:
        for name in sets(run):
            points = of_rounds(run, name)
            first, last = points[0][1], points[-1][1]
            yield f"| {run.name} | {name} | {first:.3f} | {last:.3f} (step {points[-1][0]:g}) | {last - first:+.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("-o", "--out", type=Path)
    options = parser.parse_args()
    out = options.out or options.runs[0] / "curves.svg"
    out.write_text(svg(options.runs), encoding="utf-8")
    print("\n".join(table(options.runs)))
    print(f"curves: {out}")


if __name__ == "__main__":
    main()
