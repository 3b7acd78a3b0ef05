"""Starts every system of a comparison and takes its time to the goal.

The rivals print their own JSON. busrl is run as a user runs it (`busrl launch`) and watched from outside: its
ring says when generation begins, metrics.jsonl when the goal is reached, /proc what all of its processes used.

- One clock for all: from the begin of generation, with everything imported and loaded, to the end of the update whose
  mean reward over the last ten, all samples of flat groups included, is at the goal.
- busrl's clock starts at its first generated sequence even if another of its processes is not ready by then.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.common import sides

RIVALS = ROOT / "benchmarks" / "rivals"
POLL_S = 0.01
# The rivals draw 32 groups and train what is left of them; so does busrl here. Nobody validates or writes checkpoints.
TERMS = (
    "learner.trigger.count=ended",
    "validation.at_start=false",
    "validation.every=0",
    "validation.at_end=false",
    "learner.checkpoint_every=0",
)


class RunFailed(Exception):
    """A system ended without a result; the message holds the end of what it said."""


@dataclass(frozen=True)
class Terms:
    """Terms that all systems share."""

    goal: float
    lr: float
    max_updates: int
    limit_s: float
    config: Path
    trl_python: str


def environment(threads: int) -> dict[str, str]:
    quiet = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore"}
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), **quiet}


def run_loop(seed: int, terms: Terms, threads: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.rivals.loop", f"--threads={threads}"]
    return _printed([*command, *_shared(seed, terms)], terms, threads)


def run_trl(seed: int, terms: Terms) -> dict[str, Any]:
    from busrl.quickstart import ensure

    folder = ensure("tiny:sort").model.parent
    return _printed([*trl_command(terms.trl_python), f"--folder={folder}", *_shared(seed, terms)], terms, 1)


def trl_command(python: str) -> list[str]:
    """TRL's trainer on two ranks."""
    ranks = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    return [python, *ranks, str(RIVALS / "trl_grpo.py")]


def _shared(seed: int, terms: Terms) -> list[str]:
    return [f"--seed={seed}", f"--lr={terms.lr}", f"--goal={terms.goal}", f"--max-updates={terms.max_updates}"]


def _printed(command: Sequence[str], terms: Terms, threads: int) -> dict[str, Any]:
    """Run a rival; its result is the line of its output that is a JSON object with `system` in it."""
    try:
        ended = sides.ran(command, env=environment(threads), timeout_s=terms.limit_s)
    except subprocess.TimeoutExpired as expired:
        raise RunFailed(f"{command[1:3]} took over {terms.limit_s:g} s") from expired
    for line in ended.output.splitlines():
        if line.startswith('{"system"'):
            return {**json.loads(line), "cpu_seconds_with_start": round(ended.cpu_seconds, 3)}
    raise RunFailed(f"{' '.join(command)} ended with {ended.code}:\n{(ended.output + ended.errors)[-2000:]}")


def run_busrl(seed: int, terms: Terms, name: str, extra: Sequence[str]) -> dict[str, Any]:
    """Run `busrl launch` in a fresh run directory, stopped at the goal."""
    settings = [f"run.seed={seed}", f"run.max_steps={terms.max_updates}", f"learner.lr={terms.lr}", *TERMS, *extra]
    with tempfile.TemporaryDirectory(prefix="busrl-bench-") as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "busrl.cli", "launch", str(terms.config), f"--run-dir={run_dir}"]
        for setting in settings:
            command += ["--set", setting]
        with (Path(folder) / "said").open("w+") as said:
            child = sides.started(command, env=environment(1), stdout=said, stderr=subprocess.STDOUT, cwd=folder)
            try:
                told = Watch(child, run_dir, terms).until_goal()
            except RunFailed as failed:
                said.seek(0)
                raise RunFailed(f"{' '.join(command)}: {failed}\n{said.read()[-2000:]}") from failed
            finally:
                stop(child)
    return {"system": name, "seed": seed, "lr": terms.lr, "overrides": list(extra), **told}


def rounded(parts: dict[str, float]) -> dict[str, float]:
    """CPU seconds by part of a system, largest first, without what nobody would see."""
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return {name.removeprefix("busrl:"): round(cpu_s, 3) for name, cpu_s in ordered if cpu_s >= 0.01}


def stop(child: subprocess.Popen[Any]) -> None:
    """End a side as a user would, and with all of its session if it does not end."""
    for number, patience in ((signal.SIGINT, 60.0), (signal.SIGTERM, 20.0)):
        if child.poll() is not None:
            return
        child.send_signal(number)
        try:
            child.wait(patience)
        except subprocess.TimeoutExpired:
            continue
    sides.end_session(child)


class Watch:
    """Follows one run of busrl from outside."""

    def __init__(self, child: subprocess.Popen[Any], run_dir: Path, terms: Terms) -> None:
        self.child, self.run_dir, self.terms = child, run_dir, terms
        self.used = sides.CpuOfTree(child.pid)
        self.first_claim = float("inf")  # on our clock: rows count seconds since then
        self.rows: list[dict[str, Any]] = []
        self.tail = b""
        self.read = 0

    def until_goal(self) -> dict[str, Any]:
        began = self._await_generation()
        cpu, by_part = self.used.now(), self.used.by_name()
        while True:
            self._new_rows()
            last = [row["reward"] for row in self.rows[-10:]]
            reached = len(last) == 10 and sum(last) / 10 >= self.terms.goal
            if reached or len(self.rows) >= self.terms.max_updates:
                used = self.used.now() - cpu
                parts = {name: cpu_s - by_part.get(name, 0.0) for name, cpu_s in self.used.by_name().items()}
                return self._told(began, used, reached) | {"cpu_by_part": rounded(parts)}
            self._still_going("the goal")
            time.sleep(POLL_S)

    def _await_generation(self) -> float:
        """Moment at which the first sequence was begun, as the ring's own counter shows."""
        from busrl.errors import BusrlError
        from busrl.paths import RunPaths
        from busrl.ring import Ring, State

        ring, self.deadline = None, time.monotonic() + self.terms.limit_s
        while True:
            if ring is None:
                try:
                    ring = Ring.attach(RunPaths.of(self.run_dir).ring_name, read_only=True)
                except (BusrlError, OSError):
                    ring = None
            elif ring.transitions(State.GENERATING) > 0:
                return time.monotonic()
            self._still_going("generation to begin")
            time.sleep(POLL_S / 2)

    def _still_going(self, what: str) -> None:
        if self.child.poll() is not None:
            raise RunFailed(f"ended with {self.child.returncode} before {what}")
        if time.monotonic() > self.deadline:
            raise RunFailed(f"waited over {self.terms.limit_s:g} s for {what}")

    def _new_rows(self) -> None:
        from busrl.ledger.trained import of_step

        path = self.run_dir / "metrics.jsonl"
        if not path.is_file():
            return
        with path.open("rb") as file:
            file.seek(self.read)
            fresh = file.read()
        self.read += len(fresh)
        *lines, self.tail = (self.tail + fresh).split(b"\n")
        for line in lines:
            row = json.loads(line)
            if not of_step(row):
                continue
            self.rows.append(row)
            # Seen at once, a row tells when the first claim was; seen late, it would put it later than it was.
            self.first_claim = min(self.first_claim, time.monotonic() - row["time_s"])

    def _told(self, began: float, cpu_seconds: float, reached: bool) -> dict[str, Any]:
        before = self.first_claim - began
        rows = self.rows
        ages = [row["age_mean"] for row in rows]
        return {
            "reached": reached,
            "updates": len(rows),
            "seconds": round(rows[-1]["time_s"] + before, 3),
            "before_first_claim_s": round(before, 3),
            "cpu_seconds": round(cpu_seconds, 3),
            "samples": int(sum(row.get("samples_ended", row["samples"]) for row in rows)),
            "age_mean": round(sum(ages) / len(ages), 3),
            "curve": [[round(row["time_s"] + before, 3), round(row["reward"], 4)] for row in rows],
        }
