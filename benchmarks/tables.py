"""Puts kept figures into the tables of the documentation, so that no row is copied by hand.

    python -m benchmarks tables            # what would change
    python -m benchmarks tables --write

Reads the newest `operations_*.json` and `ring_*.json` of `results/`; rewrites the rows of `docs/benchmarks.md` (single
operations) and of `docs/performance.md` (the ring) that carry their names, and what is said of them in the same breath
(when, how large a log record is, whether the bars are met). Other text is a person's: look whether it still holds.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable, Sequence
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
    "256 samples of 4 KiB there and back, TransferQueue": ("batch:busrl", "batch:TransferQueue"),
}
FLAT = {"claim": "take", "commit": "commit", "dispatch": "dispatch", "full scan, ns a slot": "scan"}
Rows = dict[str, str]


def newest(name: str) -> dict[str, Any]:
    """The newest result of a program."""
    found = sorted(RESULTS.glob(f"{name}_*.json"), key=lambda path: path.name.rpartition("_")[2])
    if not found:
        raise SystemExit(f"no {name}_*.json in {RESULTS}; run the benchmark first")
    told: dict[str, Any] = json.loads(found[-1].read_text())
    return told


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
    one = result["medians"][name]
    nanoseconds = one["unit"] == "ns" and one["value"] < 1000
    return f"{digits(one['value'])} ns" if nanoseconds else shown(one["value"], one["unit"])


def operation_rows(result: dict[str, Any]) -> Rows:
    return {name: f"| {name} | {shown(one['value'], one['unit'])} |" for name, one in result["medians"].items()}


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
    limit = f"at {'most' if bar['at_most'] else 'least'} {bar['limit']:g}"
    met = "met" if bar["met"] else "**missed**"
    ratio = f"{digits(bar['ratio'])} ({digits(low)} to {digits(high)})"
    return f"| {label} | {cell(result, pair[0])} | {cell(result, pair[1])} | {ratio} | {limit} | {met} |"


def conditions(result: dict[str, Any]) -> str:
    """When and under what, as the line above a table says it. The load is the machine's, if the program noted it."""
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="change the pages")
    options = parser.parse_args()
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
        if options.write:
            (DOCS / name).write_text(after)
    print(f"the ring was measured {conditions(ring)}; its head in performance.md is for you to change")
    return 0
