"""Memory of every process of a long run: does a role grow with its steps?

    python -m benchmarks growth [--minutes 60] [--every 10] [--out benchmarks/results]

A scripted run (configs/scripted.toml: a real learner, bus, ring and log; answers whose lengths are written) goes on for
the given time. Every few seconds the anonymous memory of each process is read (of smaps_rollup; pages that it shares
with the template which it was forked from count whole, so writing to them is no growth), with the step. A role's growth
is the median slope between all pairs of points (Theil and Sen) of the last two thirds, in KiB for 1,000 steps: the
first third fills caches and queues.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, ROOT
from benchmarks.common import report
from benchmarks.common.runs import BenchRun, run

SCRIPTED = ROOT / "configs" / "scripted.toml"
SETTINGS = ("run.max_steps=100000000", "process.rollout.count=4", "learner.trigger.n_min=4")
WARM_UP = 1 / 3
Point = tuple[int, float, int]  # step, seconds since the start, KiB


def anonymous_kib(pid: int) -> int:
    """Memory of a process that is no file's, in KiB; 0 if it has ended."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in rollup if line.startswith("Anonymous:"))


def processes(bench: BenchRun) -> dict[str, int]:
    """Process number of launch and of each living process of the run, by name."""
    ring = bench.attach()
    living = [process for process in ring.processes() if process.state == "ready" and not ring.is_dead(process.index)]
    return {"launch": bench.child.pid, **{process.label: process.pid for process in living}}


def watched(bench: BenchRun, minutes: float, every_s: float) -> dict[str, list[Point]]:
    """Points of every process, until the time is over."""
    bench.until_step(5)
    points, begun = defaultdict[str, list[Point]](list), time.monotonic()
    while (passed_s := time.monotonic() - begun) < 60 * minutes:
        step = bench.attach().header("step")
        for name, pid in processes(bench).items():
            if kib := anonymous_kib(pid):
                points[name].append((step, round(passed_s, 1), kib))
        if bench.child.poll() is not None:
            raise SystemExit(f"the run ended: {bench.tail()}")
        time.sleep(every_s)
    return points


def slope(points: Sequence[Point]) -> float:
    """KiB for 1,000 steps: the median over all pairs of the later points."""
    later = points[int(len(points) * WARM_UP):]
    thinned = later[:: max(1, len(later) // 120)]
    slopes = [(b[2] - a[2]) / (b[0] - a[0]) for a, b in combinations(thinned, 2) if b[0] > a[0]]
    return 1000 * statistics.median(slopes) if slopes else 0.0


def row(points: Sequence[Point]) -> dict[str, Any]:
    later = points[int(len(points) * WARM_UP):]
    return {
        "first_mib": round(later[0][2] / 1024, 2), "last_mib": round(later[-1][2] / 1024, 2),
        "most_mib": round(max(kib for _, _, kib in points) / 1024, 2), "kib_per_1000_steps": round(slope(points), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two looks")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    begun_at = os.getloadavg()[0]
    with run(*SETTINGS, config=SCRIPTED) as bench:
        points = watched(bench, options.minutes, options.every)
        steps = bench.attach().header("step")
    rows = {name: row(points[name]) for name in sorted(points)}
    for name, figures in rows.items():
        print(f"{name:14} {figures['first_mib']:8.1f} -> {figures['last_mib']:8.1f} MiB  "
              f"{figures['kib_per_1000_steps']:+9.1f} KiB for 1,000 steps")
    result = {"machine": report.machine(), "commit": report.commit(ROOT), "load": [begun_at, os.getloadavg()[0]],
              "minutes": options.minutes, "steps": steps, "roles": rows, "points": points}
    path = options.out / f"growth_{report.machine()['cores']}cores_{time.strftime('%Y-%m-%d')}.json"
    path.write_text(json.dumps(result) + "\n")
    print(f"{steps} steps; written to {path}")
