"""Runs of several programs in turn, medians and ratios of what they said, bars met or missed, one JSON file.

Used by `ring`, `bus`, `operations`, `engines` and `trainers`. A program prints one JSON object a line with `name` and a
number; one that fails is kept with its last words, never left out.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.common import report, sides


@dataclass(frozen=True)
class Program:
    """Command to run: `argv`, and a prefix for the names that it says."""

    label: str
    argv: Sequence[str]
    cwd: Path = ROOT
    timeout_s: float = 180.0
    settle_s: float = 0.0  # what it started goes on ending after it, at the next one's cost


@dataclass(frozen=True)
class Bar:
    """`ratio` = median of `ours` over median of `rival`, taken round by round; met if at most (or at least) `limit`."""

    what: str
    ours: str
    rival: str
    limit: float
    at_most: bool = True
    note: str = ""


class Log:
    """Figures so far, by name: one value a round. `failures` are programs that did not answer."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}
        self.units: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        self.failures: dict[str, str] = {}
        self.loads: list[float] = []
        self.used: dict[str, list[dict[str, float]]] = {}  # of whole programs, with their start

    def say(self, name: str, value: float, unit: str) -> None:
        self.values.setdefault(name, []).append(value)
        self.units[name] = unit

    def run(self, program: Program) -> None:
        """Run a program; its lines become values named `label` or `label.name`."""
        self.loads.append(os.getloadavg()[0])
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        try:
            ended = sides.ran(program.argv, cwd=program.cwd, env=env, timeout_s=program.timeout_s)
            text, error = ended.output, ended.errors or f"exit code {ended.code}" if ended.code else ""
            self.used.setdefault(program.label or "core", []).append(
                {"seconds": round(ended.seconds, 3), "cpu_seconds": round(ended.cpu_seconds, 3)})
        except subprocess.TimeoutExpired:
            text, error = "", f"no end within {program.timeout_s:g} s"
        lines = [json.loads(line) for line in text.splitlines() if line.startswith('{"name"')]
        if error or not lines:
            self.failures[program.label] = (error.strip().splitlines() or ["it said nothing"])[-1]
        for line in lines:
            name = line["name"] if program.label == "" else f"{program.label}:{line['name']}"
            self.say(name, line.get("value", line.get("us")), line.get("unit", "us"))
            if line.get("version"):
                self.versions[line["name"]] = line["version"]
        time.sleep(program.settle_s)
        shown = " ".join(f"{line['name']}={line.get('value', line.get('us')):.4g}" for line in lines[:8])
        print(f"  {program.label or program.argv[0]}: {shown or self.failures[program.label]}", flush=True)

    def judge(self, bar: Bar) -> dict[str, Any]:
        ours, rival = self.values.get(bar.ours), self.values.get(bar.rival)
        row: dict[str, Any] = {"what": bar.what, "ours": bar.ours, "rival": bar.rival, "note": bar.note}
        row |= {"limit": bar.limit, "at_most": bar.at_most}
        if not ours or not rival:
            return row | {"ratio": None, "met": None}
        ratios = [a / b for a, b in zip(ours, rival)]
        ratio = statistics.median(ratios)
        met = ratio <= bar.limit if bar.at_most else ratio >= bar.limit
        return row | {"ratio": round(ratio, 3), "ratios": [round(r, 3) for r in ratios], "met": met}


def in_rounds(
    log: Log, rounds: int, measure: Callable[[int], None], bars: Sequence[Bar], name: str, out: Path, **more: Any
) -> dict[str, Any]:
    """Call `measure` with the number of each round, and write after each: a run that is stopped keeps its rounds."""
    result: dict[str, Any] = {}
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", flush=True)
        measure(number)
        result = written(log, bars, name, out, rounds=number + 1, rounds_asked=rounds, **more)
    return result


def written(log: Log, bars: Sequence[Bar], name: str, out: Path, **more: Any) -> dict[str, Any]:
    """Judge all bars, print them, and keep everything as `out`/`name`_<cores>cores_<date>.json."""
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "time": time.strftime("%H:%M"),
        "commit": report.commit(ROOT),
        "machine": report.machine(),
        "load": {"median": statistics.median(log.loads or [0.0]), "max": max(log.loads or [0.0])},
        "nice": os.nice(0),
        "versions": log.versions,
        **more,
        "bars": [log.judge(bar) for bar in bars],
        "failures": log.failures,
        "programs": log.used,
        "medians": {k: {"value": statistics.median(v), "unit": log.units[k]} for k, v in log.values.items()},
        "values": log.values,
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}_{result['machine']['cores']}cores_{result['date']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["bars"]:
        sign = "<=" if row["at_most"] else ">="
        verdict = {True: "met", False: "MISSED", None: "not measured"}[row["met"]]
        print(f"{verdict:12} {row['ratio']} {sign} {row['limit']}  {row['what']}")
    for label, why in log.failures.items():
        print(f"FAILED       {label}: {why}")
    print(f"written to {path}")
    return result
