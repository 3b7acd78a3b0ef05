"""Starts real runs for tests: `busrl launch` as a child, watched through the files and the ring that any user has."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from busrl.ledger.audit import AuditReport, audit
from busrl.paths import RunPaths
from busrl.ring import Process, Ring, RingError

ROOT = Path(__file__).resolve().parents[2]
QUICK = [
    "learner.trigger.n_min=8",
    "learner.warmup_groups=0",
    "learner.checkpoint_every=10",
    "validation.samples=32",
    "generation.max_batch=64",
]
LIMIT_S = 150.0


def wait_for(what: str, condition: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    """Poll until `condition` gives something true; on time-out say what was waited for."""
    end = time.monotonic() + limit_s
    pause = time.sleep  # a poll of another process's files has no event to wait for
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        pause(0.02)
    raise AssertionError(f"waited {limit_s:.0f} s for {what}")


class Run:
    """One `busrl launch` and the run directory that it writes."""

    def __init__(self, directory: Path, *settings: str, config: Path | None = None, steps: int = 20) -> None:
        self.directory, self.paths = directory, RunPaths.of(directory)
        self.config = config or ROOT / "configs" / "quickstart.toml"
        self.settings = [*QUICK, f"run.max_steps={steps}", *settings]
        self.steps = steps
        self.child: subprocess.Popen[bytes] | None = None

    def start(self, *arguments: str) -> Run:
        command = [sys.executable, "-m", "busrl.cli", "launch", str(self.config), "--run-dir", str(self.directory)]
        for setting in self.settings:
            command += ["--set", setting]
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        self.output = self.directory.parent / f"{self.directory.name}.out"
        with open(self.output, "ab") as file:
            self.child = subprocess.Popen(
                [*command, *arguments], stdout=file, stderr=file, stdin=subprocess.DEVNULL, cwd=ROOT
            )
        return self

    def wait(self, limit_s: float = LIMIT_S) -> int:
        assert self.child is not None
        try:
            return self.child.wait(limit_s)
        except subprocess.TimeoutExpired:
            text = self.tail()
            self.child.send_signal(signal.SIGTERM)
            raise AssertionError(f"the run did not end within {limit_s:.0f} s\n{text}") from None

    def tail(self) -> str:
        logs = "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in self.paths.logs.glob("*.log")
        )
        return f"{self.output.read_text(errors='replace')[-3000:]}\n{logs}"

    # -- what one sees ------------------------------------------------------------------------------------------

    def processes(self) -> dict[str, Process]:
        try:
            ring = Ring.attach(self.paths.ring_name, read_only=True)
        except (RingError, OSError):
            return {}
        try:
            return {process.label: process for process in ring.processes()}
        finally:
            ring.close()

    def pid(self, name: str) -> int:
        """Pid of a living process of the run, 0 if there is none."""
        process = self.processes().get(name)
        return process.pid if process and Path(f"/proc/{process.pid}").exists() else 0

    def metrics(self) -> list[dict[str, Any]]:
        return read_lines(self.paths.metrics)

    def step(self) -> int:
        rows = self.metrics()
        return int(rows[-1]["step"]) if rows else 0

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.paths.summary.read_text())
        return found

    def audit(self) -> AuditReport:
        return audit(self.directory)

    # -- faults -------------------------------------------------------------------------------------------------

    def kill(self, name: str, limit_s: float = LIMIT_S) -> int:
        """SIGKILL the process of that name, once it is there."""
        pid = wait_for(f"{name} to be alive", lambda: self.pid(name), limit_s)
        os.kill(pid, signal.SIGKILL)
        return int(pid)

    def kill_at_random_steps(self, name: str, times: int, seed: int) -> list[int]:
        """Kill `name` when the run has reached each of `times` seeded steps. Returns the pids."""
        chance = random.Random(seed)
        moments = sorted(chance.randint(1, self.steps - 4) for _ in range(times))
        killed = []
        for moment in moments:
            wait_for(f"step {moment}", lambda moment=moment: self.step() >= moment)
            killed.append(self.kill(name))
        return killed

    def leftovers(self) -> list[str]:
        """Processes and shared memory that are still there after the end."""
        found = [str(path) for path in (self.paths.ring_file, self.paths.weights_file) if path.exists()]
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    command = (entry / "cmdline").read_bytes()
                    environment = (entry / "environ").read_bytes()
                except OSError:
                    continue
                if str(self.directory).encode() in environment + command and int(entry.name) != os.getpid():
                    found.append(f"pid {entry.name}: {command.decode(errors='replace')}")
        return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A JSONL file that somebody may be writing: a torn last line is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1] if line]


@contextmanager
def running(run: Run) -> Iterator[Run]:
    """Start a run; whatever happens, end it and all that it started."""
    run.start()
    try:
        yield run
    finally:
        if run.child is not None and run.child.poll() is None:
            run.child.send_signal(signal.SIGTERM)
            try:
                run.child.wait(40)
            except subprocess.TimeoutExpired:
                run.child.kill()
        Ring.unlink(run.paths.ring_name)
