"""Cost of a box for code: CPU and time of an empty program in one, in turns with Python's own start.

    python -m benchmarks box [--runs 60] [--rounds 2]

CPU is that of the children, in milliseconds a run, the mean of a round; times are medians. On a machine that others use
the CPU is the better figure.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from collections.abc import Callable

from benchmarks.common import sides
from busrl.rewards.box import PYTHON, run


def children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(name: str, act: Callable[[], object], runs: int) -> None:
    act()
    took, before = [], children_s()
    for _ in range(runs):
        begun = time.monotonic()
        act()
        took.append(time.monotonic() - begun)
    cpu = (children_s() - before) / runs
    print(f"{name:<14} {1e3 * cpu:5.1f} ms of CPU, {1e3 * statistics.median(took):5.1f} ms by the clock")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--runs", type=int, default=60)
    arguments.add_argument("--rounds", type=int, default=2)
    options = arguments.parse_args()
    for _ in range(options.rounds):
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        measure("box", lambda: run("pass"), options.runs)
        measure("python -I -S", lambda: sides.ran([PYTHON, "-I", "-S", "-c", "pass"], check=True), options.runs)
