"""Real runs for benchmarks: started as a user starts them, watched through the ring, killed from outside."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.common import sides
from busrl.errors import RingError
from busrl.paths import RunPaths
from busrl.ring import Process, Ring, State, owner_of

QUICKSTART = ROOT / "configs" / "quickstart.toml"
LIMIT_S = 180.0
NEVER_ENDS = "run.max_steps=100000"


class BenchRun:
    """A `busrl launch` in a directory of its own."""

    def __init__(self, directory: Path, settings: Sequence[str], config: Path = QUICKSTART) -> None:
        self.directory, self.paths = directory, RunPaths.of(directory)
        command = [sys.executable, "-m", "busrl.cli", "launch", str(config), "--run-dir", str(directory)]
        for setting in settings:
            command += ["--set", setting]
        self.output = open(f"{directory}.out", "wb")  # noqa: SIM115
        self.child = sides.started(
            command, stdin=subprocess.DEVNULL, stdout=self.output, stderr=self.output, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.ring: Ring | None = None

    def attach(self) -> Ring:
        """The run's ring, read-only; waits until there is one."""
        self.ring = self.ring or self.until("the ring", self._attach)
        return self.ring

    def _attach(self) -> Ring | None:
        try:
            return Ring.attach(self.paths.ring_name, read_only=True)
        except (RingError, OSError):
            return None

    def until(self, what: str, condition: Callable[[], Any], pause_s: float = 0.005) -> Any:
        """Wait for what `condition` gives once it is true."""
        end = time.monotonic() + LIMIT_S
        while not (value := condition()):
            if self.child.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the run ended, or {LIMIT_S:g} s passed, before {what}: {self.tail()}")
            time.sleep(pause_s)
        return value

    def until_step(self, step: int) -> None:
        self.until(f"step {step}", lambda: self.attach().header("step") >= step)

    def process(self, name: str) -> Process | None:
        """The living process of that name, once it is ready."""
        ring = self.attach()
        here = [process for process in ring.processes() if process.label == name and process.state == "ready"]
        return next((process for process in here if not ring.is_dead(process.index)), None)

    def held(self, index: int) -> dict[int, int]:
        """slot -> word of what a process owns now."""
        words = self.attach().words()
        busy = {int(slot): int(words[slot]) for slot in (words >> 58).nonzero()[0]}
        return {slot: word for slot, word in busy.items() if owner_of(word) == index and State(word >> 58)}

    def wait(self) -> int:
        return self.child.wait(LIMIT_S)

    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads(self.paths.summary.read_text())
        return summary

    def tail(self) -> str:
        return Path(f"{self.directory}.out").read_text(errors="replace")[-2000:]

    def stop(self) -> None:
        """End it, whatever it is doing."""
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)
            try:
                self.child.wait(40)
            except subprocess.TimeoutExpired:
                self.child.kill()
                self.child.wait()
        if self.ring is not None:
            self.ring.close()
        self.output.close()


@contextmanager
def run(*settings: str, config: Path = QUICKSTART) -> Iterator[BenchRun]:
    """A run in a temporary directory; ended and removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="busrl-bench-"))
    started = BenchRun(folder / "run", settings, config)
    try:
        yield started
    finally:
        started.stop()
        Ring.unlink(started.paths.ring_name)
        started.paths.weights_file.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def kill(pid: int) -> float:
    """SIGKILL; the moment just before it (time.monotonic). Does not wait for the end."""
    begun = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return begun


def gone(pidfd: int, timeout_s: float = 30.0) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def quantiles(milliseconds: Sequence[float]) -> dict[str, float]:
    """Median, p99 and maximum; with fewer than 100 values p99 is the maximum."""
    ordered = sorted(milliseconds)
    if not ordered:
        return {"n": 0}
    at = min(len(ordered) - 1, int(0.99 * len(ordered)))
    return {
        "n": len(ordered), "p50_ms": round(ordered[len(ordered) // 2], 3), "p99_ms": round(ordered[at], 3),
        "max_ms": round(ordered[-1], 3),
    }
