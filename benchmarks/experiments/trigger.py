"""Static against adaptive trigger, by real runs of `busrl launch`: seconds, samples and CPU to a mean reward.

    python -m benchmarks trigger [--seeds 16] [--minutes 4.5] [--workloads quickstart ...] [--arms static32 ...]
    python -m benchmarks trigger --report

Every run is one JSON line in results/trigger.jsonl; what is there is not run again, so the program can be stopped and
started at will. All arms of a workload and seed are run after each other, so that seeds are paired.

- Goal: the mean reward over the samples of the newest 320 ended groups, flat ones included, is at `--goal`. Groups, not
  steps: ten steps of 16 groups are not the evidence that ten of 64 are.
- Workloads: `quickstart`; `harder`, whose prompts get longer after 1,920 groups; `slower`, whose engine runs half of
  the time after 1,920 groups (stopped and continued by signals). In the last two the goal must be reached on groups
  that ended wholly after the change.
- Seconds depend on what else the machine does, so the load is in every line; samples do not, CPU seconds hardly.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import EXPERIMENT_RESULTS, ROOT
from busrl.errors import RingError
from busrl.launch.summary import cpu_of
from busrl.ledger.trained import step_lines
from busrl.paths import SHM, RunPaths
from busrl.ring import Ring

RESULTS = EXPERIMENT_RESULTS / "trigger.jsonl"
EVIDENCE = 320  # groups that the mean is taken over
CHANGE = 1920  # groups after which a workload changes
LONGEST_GROUPS = 12_000
LIMIT_S = 240.0
CONTROL = "learner.controller."
RANGE = (f"{CONTROL}mode=act", f"{CONTROL}n_lo=16", f"{CONTROL}n_hi=64")
ARMS: dict[str, tuple[str, ...]] = {
    "static16": ("learner.trigger.n_min=16", "learner.lr=1.4142e-4", f"{CONTROL}mode=off"),
    "static32": (f"{CONTROL}mode=off",),
    "static64": ("learner.trigger.n_min=64", "learner.lr=2.8284e-4", f"{CONTROL}mode=off"),
    "entropy": RANGE,
}  # the learning rates of the static arms are what the coupling gives an adaptive one at their size
ADAPTIVE = ("entropy", "full")  # "full": rules that are gone; their results stay in the file
WORKLOADS = ("quickstart", "harder", "slower")
ALWAYS = (
    "weights.max_staleness=4", "validation.data=",
    "run.max_steps=100000", f"run.max_groups={LONGEST_GROUPS}",
)


def prompts(path: Path, seed: int) -> None:
    """Sums of work that begin easy: three digits first, then the longest that the quickstart has."""
    chance = random.Random(f"harder {seed}")
    with path.open("w") as file:
        for draw in range(LONGEST_GROUPS + 2000):
            digits = "".join(chance.choice("0123456789") for _ in range(3 if draw < CHANGE else 8))
            file.write(json.dumps({"prompt": f"{digits}=", "answer": "".join(sorted(digits))}) + "\n")


class OneRun:
    """One launch in a directory of its own, watched through metrics.jsonl until the goal."""

    def __init__(self, workload: str, arm: str, seed: int, goal: float) -> None:
        self.workload, self.arm, self.seed, self.goal = workload, arm, seed, goal
        self.folder = Path(tempfile.mkdtemp(prefix="busrl-trigger-"))
        self.paths = RunPaths.of(self.folder / "run")
        self.rows: list[dict[str, Any]] = []

    def command(self) -> list[str]:
        settings = [*ALWAYS, f"run.seed={self.seed}", *ARMS[self.arm]]
        if self.workload == "harder":
            prompts(self.folder / "train.jsonl", self.seed)
            settings += [f"data.train={self.folder / 'train.jsonl'}", "data.shuffle=false"]
        launch = [sys.executable, "-m", "busrl.cli", "launch", str(ROOT / "configs" / "quickstart.toml")]
        return [*launch, "--run-dir", str(self.paths.root), *(part for one in settings for part in ("--set", one))]

    def result(self) -> dict[str, Any]:
        """The line of this run."""
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        with open(self.folder / "out", "wb") as out:
            streams: dict[str, Any] = {"stdout": out, "stderr": out, "stdin": subprocess.DEVNULL}
            child = subprocess.Popen(self.command(), cwd=ROOT, env=env, **streams)
        brake = Brake(self.paths) if self.workload == "slower" else None
        try:
            told = self._until_goal(child, brake)
        finally:
            if brake is not None:
                brake.end()
            self._stop(child)
        return {
            "workload": self.workload, "arm": self.arm, "seed": self.seed, "goal": self.goal, **told,
            "load": round(os.getloadavg()[0], 2), "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        }

    def _until_goal(self, child: subprocess.Popen[bytes], brake: Brake | None) -> dict[str, Any]:
        begun, cpu = time.monotonic(), 0.0
        while True:
            self._read()
            if self.rows and brake is not None and self.rows[-1]["groups_total"] >= CHANGE:
                brake.start()
            cpu = max(cpu, cpu_of(child.pid))
            if self._reached():
                return {"reached": True, **self._figures(), "cpu_s": round(cpu, 2)}
            if child.poll() is not None or time.monotonic() - begun > LIMIT_S:
                if not self.rows:
                    raise RuntimeError((self.folder / "out").read_text(errors="replace")[-3000:])
                return {"reached": False, **self._figures(), "cpu_s": round(cpu, 2)}
            time.sleep(0.05)

    def _read(self) -> None:
        self.rows = step_lines(self.paths.metrics)

    def _reached(self) -> bool:
        groups, total, samples = 0, 0.0, 0
        first = 0 if self.workload == "quickstart" else CHANGE
        for row in reversed(self.rows):
            if row["groups_total"] - row["groups"] < first:
                break
            groups += row["groups_ended"]
            samples += row["samples_ended"]
            total += row["reward"] * row["samples_ended"]
            if groups >= EVIDENCE:
                return total / samples >= self.goal
        return False

    def _figures(self) -> dict[str, Any]:
        last = self.rows[-1]
        return {
            "seconds": last["time_s"], "steps": last["step"], "groups": last["groups_total"],
            "samples": sum(row["samples_ended"] for row in self.rows),
            "trained": sum(row["samples"] for row in self.rows),
            "train_s": round(sum(r["forward_s"] + r["backward_s"] + r["update_s"] for r in self.rows), 2),
            "n_min": sorted({row["n_min"] for row in self.rows}), "moves": int(last.get("control_moves", 0)),
            "ratio": last.get("entropy_ratio"), "age_mean": float(np.mean([row["age_mean"] for row in self.rows])),
        }

    def _stop(self, child: subprocess.Popen[bytes]) -> None:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(40)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        for path in SHM.glob(f"{self.paths.ring_name.removesuffix('.ring')}.*"):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)


class Brake:
    """From `start` on the rollout processes run half of the time: 50 ms stopped, 50 ms going."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths, self._over = paths, threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._brake, daemon=True)
            self._thread.start()

    def _brake(self) -> None:
        try:
            ring = Ring.attach(self.paths.ring_name, read_only=True)
        except (RingError, OSError):
            return
        pids = [one.pid for one in ring.processes() if one.role == "rollout" and not ring.is_dead(one.index)]
        ring.close()
        while not self._over.wait(0.05):
            self._signal(pids, signal.SIGSTOP)
            self._over.wait(0.05)
            self._signal(pids, signal.SIGCONT)

    @staticmethod
    def _signal(pids: Sequence[int], what: signal.Signals) -> None:
        for pid in pids:
            try:
                os.kill(pid, what)
            except ProcessLookupError:
                return

    def end(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()


# ------------------------------------------------------------------------------------------------------------- report


def known() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    drawn = np.random.default_rng(0).choice(np.array(values), (10_000, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(low), float(high)


def report(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown: medians per arm, and each adaptive arm against the best static one, seed by seed."""
    out = []
    for workload in WORKLOADS:
        here = [row for row in rows if row["workload"] == workload]
        if not here:
            continue
        out += [f"### {workload}", "", "| arm | runs | reached | seconds | samples | CPU s | steps | moves | load |",
                "|---|---|---|---|---|---|---|---|---|"]
        for arm in ARMS:
            runs = [row for row in here if row["arm"] == arm]
            if runs:
                out.append(_line(arm, runs))
        out += ["", *_paired(here), ""]
    return out


def _line(arm: str, runs: list[dict[str, Any]]) -> str:
    done = [row for row in runs if row["reached"]] or runs
    cells = [f"{median(row[name] for row in done):.{digits}f}" for name, digits in
             (("seconds", 1), ("samples", 0), ("cpu_s", 1), ("steps", 0), ("moves", 0), ("load", 1))]
    return f"| {arm} | {len(runs)} | {sum(row['reached'] for row in runs)} | " + " | ".join(cells) + " |"


def _paired(rows: list[dict[str, Any]]) -> list[str]:
    """Ratios of an adaptive arm to the static arm with the lowest median, over seeds that both have."""
    found = []
    for name in ("seconds", "samples", "cpu_s"):
        by = {arm: {row["seed"]: row[name] for row in rows if row["arm"] == arm and row["reached"]} for arm in ARMS}
        static = {arm: median(values.values()) for arm, values in by.items() if arm not in ADAPTIVE and values}
        if not static:
            continue
        best = min(static, key=static.__getitem__)
        for arm in ADAPTIVE:
            seeds = sorted(set(by[arm]) & set(by[best]))
            ratios = [by[arm][seed] / by[best][seed] for seed in seeds]
            if ratios:
                low, high = interval(ratios)
                found.append(f"- {name}: {arm} / {best} = {median(ratios):.2f} [{low:.2f}, {high:.2f}] over "
                             f"{len(ratios)} seeds")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--goal", type=float, default=0.85)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after so many minutes")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--report", action="store_true", help="print the tables of what is known, run nothing")
    options = parser.parse_args()
    begun = time.monotonic()
    if not options.report:
        RESULTS.parent.mkdir(exist_ok=True)
        jobs = [(w, a, s) for s in range(options.seeds) for w in options.workloads for a in options.arms]
        for workload, arm, seed in jobs:
            if time.monotonic() - begun > 60 * options.minutes:
                break
            if any((r["workload"], r["arm"], r["seed"]) == (workload, arm, seed) for r in known()):
                continue
            line = json.dumps(OneRun(workload, arm, seed, options.goal).result())
            print(line, flush=True)
            with RESULTS.open("a") as file:
                file.write(line + "\n")
    print("\n".join(report(known())))
    return 0
