"""Common parts of the programs of this folder: arguments, a child that answers, a clock, one JSON line.

A program makes `--count` round trips of `--size` bytes and prints the median of one, in microseconds, with the version
of what it measured, and the CPU time of one in all its processes (`NAME cpu`). It imports nothing of the others, so
that a rival that is not installed stops only itself.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.common.sides import CpuOfTree

SPAWN = multiprocessing.get_context("spawn")
WARM = 0.1  # this share of the round trips is not counted


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=1 << 20, help="bytes of the array")
    parser.add_argument("--count", type=int, default=200, help="round trips")
    parser.add_argument("--fill", action="store_true", help="copy a private array into every message")
    parser.add_argument("--own", action="store_true", help="answer with an array of one's own, not with the same one")
    parser.add_argument("--blocking", action="store_true", help="busrl: wait asleep, on any core, as its processes do")
    parser.add_argument("--batch", type=int, default=1, help="samples per call, where a system has batches")
    return parser.parse_args()


def pin(place: int) -> None:
    """Two processes that wait by looking need a core each; one behind the other they would measure the scheduler."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[place % len(cores)]})


@contextmanager
def child(target: Callable[..., None], *args: Any) -> Iterator[None]:
    """A second process that runs `target(up, *args)`; the body begins when it has set `up`."""
    up = SPAWN.Event()
    process = SPAWN.Process(target=target, args=(up, *args), daemon=True)
    process.start()
    try:
        if not up.wait(30.0):
            raise SystemExit("the answering process did not start within 30 s")
        yield
        process.join(30.0)
    finally:
        process.kill()
        process.join()


class Trips:
    """Seconds of each round trip, and the CPU seconds of this process and its descendants; the first are left out.

    CPU time is that from trip to trip, so it holds what a program does between two, outside its clock.
    """

    def __init__(self, count: int) -> None:
        self.warm, self.seconds = max(1, int(count * WARM)), []  # type: tuple[int, list[float]]
        self._tree, self._begun, self._ended = CpuOfTree(os.getpid()), 0.0, 0.0

    def add(self, seconds: float) -> None:
        self.seconds.append(seconds)
        if len(self.seconds) == self.warm:
            self._begun = self._tree.now()

    def end(self) -> None:
        """To be called after the last one, while the other side is still there."""
        self._ended = self._tree.now(look=False)

    def median_us(self) -> float:
        return 1e6 * statistics.median(self.seconds[self.warm :])

    def cpu_us(self) -> float:
        return 1e6 * (self._ended - self._begun) / (len(self.seconds) - self.warm)


def timed(once: Callable[[], Any], count: int) -> Trips:
    trips = Trips(count)
    for _ in range(count):
        start = time.perf_counter()
        once()
        trips.add(time.perf_counter() - start)
    trips.end()
    return trips


def say(name: str, module: Any, trips: Trips, **more: Any) -> None:
    version = getattr(module, "__version__", None) or _installed(getattr(module, "__name__", ""))
    print(json.dumps({"name": name, "version": version, "us": trips.median_us(), **more}))
    print(json.dumps({"name": f"{name} cpu", "us": trips.cpu_us()}), flush=True)


def _installed(package: str) -> str:
    from importlib import metadata

    for name in (package, package.replace("_", "-"), package.replace("_", "")):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"
