"""Puts measured weight updates into the table of docs/weights.md.

    python -m benchmarks weights-table RESULT.json ... [--page docs/weights.md] [--check]

Each result is an object with `machine`, `commit`, `date` and `rows`; a row has `mode`, `model_mb`, `moved_mb`, seconds
(`publish_s`, `take_s`, `apply_s`: what a transport does not tell apart is left out), `limit_s` and `limit` in words,
and `engine` where it is not the embedded one. What stands between the two marks of the page is replaced. `--check`
changes nothing and ends with 1 if the page is not what the results say.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks import ROOT

PAGE = ROOT / "docs" / "weights.md"
BEGIN, END = "<!-- measured: benchmarks/weights_table.py -->", "<!-- end of measured -->"
PHASES = ("publish_s", "take_s", "apply_s")
HEAD = (
    "| mode | engine | model, MB | moved, MB | publish, ms | take | into the model | together | limit | limit is |",
    "|---|---|---|---|---|---|---|---|---|---|",
)


def tables(results: list[dict[str, Any]]) -> list[str]:
    """The tables, one for each machine and date."""
    lines: list[str] = []
    for place in dict.fromkeys(map(place_of, results)):
        here = [told for told in results if place_of(told) == place]
        rows = sorted((row for told in here for row in told["rows"]), key=lambda row: (row["model_mb"], row["mode"]))
        commits = ", ".join(dict.fromkeys(told["commit"] for told in here))
        lines += [f"{place}, commits {commits}; medians.", "", *HEAD, *map(line, rows), ""]
    return lines[:-1]


def place_of(told: dict[str, Any]) -> str:
    host = told["machine"]
    return f"{host['cpu']}, {host['cores']} cores, Linux {host['kernel']}, Python {host['python']}, {told['date']}"


def line(row: dict[str, Any]) -> str:
    together = sum(row.get(phase, 0.0) for phase in PHASES)
    phases = [_ms(row[phase]) if row.get(phase) else "" for phase in PHASES]
    cells = [row["mode"], row.get("engine", "torch"), _short(row["model_mb"]), _short(row["moved_mb"]), *phases,
             _ms(together), _ms(row["limit_s"]), row["limit"]]
    return f"| {' | '.join(cells)} |"


def filled(page: str, lines: list[str]) -> str:
    """The page with the lines between its marks; ValueError if it has none."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {BEGIN} ... {END}")
    return "\n".join([before + begin, *lines, end + after])


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:.0f}"


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    page = options.page.read_text()
    made = filled(page, tables([json.loads(path.read_text()) for path in options.results]))
    if options.check:
        return int(made != page)
    options.page.write_text(made)
    return 0
