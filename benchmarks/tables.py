"""Puts kept figures into the tables of the documentation, so that no row is copied by hand.

    python -m benchmarks tables            # what would change
    python -m benchmarks tables --write
    python -m benchmarks tables --weights RESULT.json ... [--page docs/weights-measured.md] [--check]

Without `--weights`, reads the newest `operations_*.json` and `ring_*.json` of `results/`; rewrites the rows of
`docs/benchmarks.md` (single operations) and of `docs/performance.md` (the ring) that carry their names, and what is
said of them in the same breath (when, how large a log record is, whether the bars are met). Other text is a person's:
look whether it still holds.

With `--weights`, replaces what stands between the two marks of docs/weights-measured.md by the results of `weights`,
`weight-folders` and `vllm-updates`: objects with `machine`, `commit`, `date` and `rows`. A row has `mode`, `model_mb`,
`moved_mb`, seconds (`publish_s`, `take_s`, `apply_s`: what a transport does not tell apart is left out), `limit_s` and
`limit` in words, and `engine` where it is not the embedded one. `--check` changes nothing and ends with 1 if the page
is not what the results say.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, ROOT

DOCS = ROOT / "docs"
SIZES = (64, 256, 1024, 4096, 16384, 65536)
# Row of docs/performance.md: ours, and the rival or floor.
RING = {
    "hand-off, 48 bytes of the first cache line, one way": ("ring_line", "raw_line"),
    "the same, 48 bytes on both lines": ("ring_both_lines", "raw_line"),
    "hand-off with 4 KiB, one way": ("ring_4k", "raw_4k"),
    "blocking hand-off, one way": ("ring_blocking", "raw_futex"),
    "filling and handing over 1 MiB": ("ring_fill_1m", "memcpy_1m"),
    "round trip at 4 KiB, iceoryx2": ("4k:busrl", "4k:iceoryx2"),
    "round trip at 1 MiB unfilled, iceoryx2": ("1m:busrl", "1m:iceoryx2"),
    "1 MiB there and back, multiprocessing.Queue": ("array:busrl", "array:mp.Queue"),
    "the same, faster-fifo": ("array:busrl", "array:faster-fifo"),
    "the same, Ray put and get": ("array:busrl", "array:ray put+get"),
    "the same, TransferQueue, one sample": ("array:busrl", "array:TransferQueue"),
    "1 MiB there and back, busrl asleep, multiprocessing.Queue": ("array:busrl blocking", "array:mp.Queue"),
    "busrl asleep, faster-fifo": ("array:busrl blocking", "array:faster-fifo"),
    "busrl asleep, Ray put and get": ("array:busrl blocking", "array:ray put+get"),
    "its CPU time, busrl asleep, multiprocessing.Queue": ("array:busrl blocking cpu", "array:mp.Queue cpu"),
    "its CPU time, faster-fifo": ("array:busrl blocking cpu", "array:faster-fifo cpu"),
    "its CPU time, Ray put and get": ("array:busrl blocking cpu", "array:ray put+get cpu"),
    "256 samples of 4 KiB there and back, TransferQueue": ("batch:busrl", "batch:TransferQueue"),
}
FLAT = {"claim": "take", "commit": "commit", "dispatch": "dispatch", "full scan, ns a slot": "scan"}
Rows = dict[str, str]
BEGIN, END = "<!-- measured: python -m benchmarks tables -->", "<!-- end of measured -->"
PHASES = ("publish_s", "take_s", "apply_s")
HEAD = (
    "| mode | engine | model, MB | moved, MB | publish, ms | take | into the model | together | limit | limit is |",
    "|---|---|---|---|---|---|---|---|---|---|",
)


def newest(name: str) -> dict[str, Any]:
    """The newest result of a program."""
    paths = sorted(RESULTS.glob(f"{name}_*.json"), key=lambda path: path.name.rpartition("_")[2])
    if not paths:
        raise SystemExit(f"no {name}_*.json in {RESULTS}; run the benchmark first")
    result: dict[str, Any] = json.loads(paths[-1].read_text())
    return result


def digits(value: float) -> str:
    """Three digits, as people write them."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def shown(value: float, unit: str) -> str:
    """A time in the unit in which it has one to three digits before the point, anything else as it is."""
    if unit not in ("ns", "us"):
        return f"{digits(value)} {unit}"
    seconds = value * (1e-9 if unit == "ns" else 1e-6)
    for scale, name in ((1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")):
        if seconds >= scale * (0.1 if name == "us" else 1):  # parts of a microsecond read better than hundreds of ns
            return f"{digits(seconds / scale)} {name}"
    return f"{seconds / 1e-9:.2g} ns"


def cell(result: dict[str, Any], name: str) -> str:
    median = result["medians"][name]
    nanoseconds = median["unit"] == "ns" and median["value"] < 1000
    return f"{digits(median['value'])} ns" if nanoseconds else shown(median["value"], median["unit"])


def operation_rows(result: dict[str, Any]) -> Rows:
    medians = result["medians"].items()
    return {name: f"| {name} | {shown(median['value'], median['unit'])} |" for name, median in medians}


def ring_rows(result: dict[str, Any]) -> Rows:
    bars = {frozenset((bar["ours"], bar["rival"])): bar for bar in result["bars"]}
    rows = {label: bar_row(label, result, pair, bars[frozenset(pair)]) for label, pair in RING.items()
            if all(name in result["medians"] for name in pair)}
    for label, name in FLAT.items():
        values = [result["medians"].get(f"{name}_{n}", {}).get("value") for n in SIZES]
        if None not in values:
            rows[label] = f"| {label} | " + " | ".join(digits(value) for value in values) + " |"
    return rows


def bar_row(label: str, result: dict[str, Any], pair: Sequence[str], bar: dict[str, Any]) -> str:
    low, high = min(bar["ratios"]), max(bar["ratios"])
    limit = "" if bar["note"] else f"at {'most' if bar['at_most'] else 'least'} {bar['limit']:g}"
    met = "" if bar["note"] else "met" if bar["met"] else "**missed**"
    ratio = f"{digits(bar['ratio'])} ({digits(low)} to {digits(high)})"
    return f"| {label} | {cell(result, pair[0])} | {cell(result, pair[1])} | {ratio} | {limit} | {met} |"


def conditions(result: dict[str, Any]) -> str:
    """Date and conditions of a result, for the line above a table. The load is the machine's, if the result has it."""
    load = f"load {result['load']['median']:.1f}, " if result["load"]["max"] else ""
    return f"{result['date']} {result['time']}, {load}niceness {result['nice']}, {result['rounds']} rounds"


def ring_head(result: dict[str, Any]) -> str:
    worst = {kind: max(bar["ratio"] for bar in result["bars"] if bar["ours"].startswith(kind) and bar["ratio"])
             for kind in ("take_", "commit_", "scan_")}
    flat, scan = max(worst["take_"], worst["commit_"]), worst["scan_"]
    verdicts = ("met" if flat <= 1.2 else "**missed**", "met" if scan <= 10 else "**missed**")
    return (
        f"Bars: claim and commit within 20 % of those at 64 slots, largest ratio {digits(flat)}: {verdicts[0]}. A full "
        f"scan at most 10 ns a slot, largest {digits(scan)}: {verdicts[1]}."
    )


def updated(text: str, rows: Rows, lines: Sequence[tuple[str, Callable[[re.Match[str]], str]]]) -> str:
    """The page with the rows of that name, and the lines that match, as they are now."""
    out = []
    for line in text.split("\n"):
        name = line[2:].partition(" | ")[0] if line.startswith("| ") else ""
        out.append(rows.get(name, line))
    text = "\n".join(out)
    for pattern, replacement in lines:
        text, count = re.subn(pattern, replacement, text)
        if count != 1:
            raise SystemExit(f"the page has {count} places like {pattern!r}, it must have one: mend this program")
    return text


def weight_tables(results: list[dict[str, Any]]) -> list[str]:
    """The tables, one for each machine and date."""
    lines: list[str] = []
    for place in dict.fromkeys(map(place_of, results)):
        here = [result for result in results if place_of(result) == place]
        listed = (row for result in here for row in result["rows"])
        rows = sorted(listed, key=lambda row: (row["model_mb"], row["mode"]))

        commits = ", ".join(dict.fromkeys(result["commit"] for result in here))
        lines += [f"{place}, commits {commits}; medians.", "", *HEAD, *map(weight_row, rows), ""]
    return lines[:-1]


def place_of(result: dict[str, Any]) -> str:
    host = result["machine"]
    return f"{host['cpu']}, {host['cores']} cores, Linux {host['kernel']}, Python {host['python']}, {result['date']}"


def weight_row(row: dict[str, Any]) -> str:
    together = sum(row.get(phase, 0.0) for phase in PHASES)
    phases = [milliseconds(row[phase]) if row.get(phase) else "" for phase in PHASES]
    cells = [row["mode"], row.get("engine", "torch"), rounded(row["model_mb"]), rounded(row["moved_mb"]), *phases,
             milliseconds(together), milliseconds(row["limit_s"]), row["limit"]]
    return f"| {' | '.join(cells)} |"


def between_marks(page: str, lines: list[str]) -> str:
    """Put the lines between the marks of a page; ValueError if it has none."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {BEGIN} ... {END}")
    return "\n".join([before + begin, *lines, end + after])


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:.0f}"


def rounded(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def write_weights(results: Sequence[Path], page: Path, check: bool) -> int:
    """Put results into docs/weights-measured.md, or say whether they are there."""
    text = page.read_text()
    filled = between_marks(text, weight_tables([json.loads(path.read_text()) for path in results]))
    if check:
        return int(filled != text)
    page.write_text(filled)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="change the pages")
    parser.add_argument("--weights", type=Path, nargs="+", metavar="RESULT", help="fill the table of its page")
    parser.add_argument("--page", type=Path, default=DOCS / "weights-measured.md", help="with --weights: another page")
    parser.add_argument("--check", action="store_true", help="with --weights: only say whether the page is up to date")
    options = parser.parse_args()
    if options.weights:
        return write_weights(options.weights, options.page, options.check)
    return write_operations_and_ring(options.write)


def write_operations_and_ring(write: bool) -> int:
    """Show what the newest results change in benchmarks.md and performance.md, and change it if `write`."""
    operations, ring = newest("operations"), newest("ring")
    when = conditions(operations)
    pages = {
        "benchmarks.md": (operation_rows(operations), [
            (r"(`benchmarks/results/`;) \d{4}-\d\d-\d\d [^\n]*rounds,", lambda m: f"{m[1]} {when},"),
            (r"(A batch of 256 samples is) \d+ kB", lambda m: f"{m[1]} {operations['log_record_bytes'] / 1000:.0f} kB"),
        ]),
        "performance.md": (ring_rows(ring), [(r"Bars: claim and commit within[^\n]*", lambda m: ring_head(ring))]),
    }
    for name, (rows, lines) in pages.items():
        before = (DOCS / name).read_text()
        after = updated(before, rows, lines)
        missing = [row for row in rows.values() if row not in after]
        if missing:
            print(f"{name} has no row for:", *missing, sep="\n  ")
        sys.stdout.writelines(difflib.unified_diff(before.splitlines(True), after.splitlines(True), name, name, n=0))
        if write:
            (DOCS / name).write_text(after)
    print(f"the ring was measured {conditions(ring)}; its head in performance.md is for you to change")
    return 0
