"""Common parts of the programs of this folder: arguments, a child that answers, a clock, one JSON line.

A program makes `--count` round trips of `--size` bytes and prints the median of one, in microseconds, with the version
of what it measured. It imports nothing of the others, so that a rival that is not installed stops only itself.
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

SPAWN = multiprocessing.get_context("spawn")
WARM = 0.1  # this share of the round trips is not counted


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=1 << 20, help="bytes of the array")
    parser.add_argument("--count", type=int, default=200, help="round trips")
    parser.add_argument("--fill", action="store_true", help="copy a private array into every message")
    parser.add_argument("--own", action="store_true", help="answer with an array of one's own, not with the same one")
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


def timed(once: Callable[[], Any], count: int) -> float:
    """Median seconds of `once`, the first calls left out."""
    spent = []
    for _ in range(count):
        start = time.perf_counter()
        once()
        spent.append(time.perf_counter() - start)
    return statistics.median(spent[int(count * WARM) :])


def say(name: str, module: Any, seconds: float, **more: Any) -> None:
    version = getattr(module, "__version__", None) or _installed(getattr(module, "__name__", ""))
    print(json.dumps({"name": name, "version": version, "us": seconds * 1e6, **more}), flush=True)


def _installed(package: str) -> str:
    from importlib import metadata

    for name in (package, package.replace("_", "-"), package.replace("_", "")):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"
