"""Start, end and audit in a run directory that is 100,000 steps old, without waiting until it is.

    python -m benchmarks longrun [--steps 100000] [--samples 0] [--out benchmarks/results]

A short real run of the quickstart is stopped with a checkpoint; its directory is then made as old as asked: the
checkpoint's step, trained set and counts, fates, and every file of lines with a line per step, with the right uids and
prompt checksums, so that the audit is clean. `--samples N` lets the table of fates tell of N samples, all beyond the
steps' own in flat groups: `--steps 1000 --samples 67108864` shows what a large table costs by itself. The directory is
then audited and started again as a user does, for a few more steps. Peaks are VmHWM, the most memory of a life;
`rss_pss_mib` is the most that learner and scheduler had during the steps, and their own share of it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ROOT
from benchmarks.common import report, sides
from benchmarks.common.runs import BenchRun
from busrl.data import JsonlStream
from busrl.ledger.trained import TrainedSet
from busrl.paths import RunPaths
from busrl.topology.sizes import MOST_SAMPLES

YOUNG, MORE, GROUPS = 20, 10, 8
SETTINGS = [
    f"learner.trigger.n_min={GROUPS}", "learner.checkpoint_every=10", "validation.every=0", "generation.max_batch=64",
]
FLAT_EVERY = 5  # of the draws, one was flat
LOOK_S = 0.05
WATCHED = ("learner", "scheduler")
ROOM = 4096  # draws that a table has left at least for the steps to come


@dataclass
class Aged:
    """Contents of an old directory."""

    steps: int
    trained: int  # samples,
    samples: int  # and all that the table of fates tells of
    nbytes: dict[str, int]


def age(paths: RunPaths, steps: int, samples: int) -> Aged:
    """Turn a stopped run of `YOUNG` steps into one of `steps`, with at least `samples` in its table of fates."""
    topology = json.loads(paths.topology.read_text())
    size, prompts = topology["groups"]["size"], Path(json.loads(paths.topology.read_text())["data"]["train"])
    stream = JsonlStream(prompts, topology["run"]["seed"], topology["data"]["shuffle"])
    draws = np.arange(steps * GROUPS * FLAT_EVERY // (FLAT_EVERY - 1) + 1)
    trained = draws[draws % FLAT_EVERY != 0][: steps * GROUPS]
    count = max(int(trained[-1]) + 1, -(-samples // size))
    if (most := MOST_SAMPLES // (2 * size) - ROOM) < count:
        raise SystemExit(f"longrun: a table of fates has room for {most * size:,} samples of groups of {size}")
    fates = np.zeros((count, 2 * size), np.uint8)
    fates[:, :size] = ord("f")
    fates[trained, :size] = ord("T")
    fates.tofile(paths.fates)
    members = np.arange(size)
    uids = (trained[:, None] * (2 * size) + members).reshape(steps, -1)
    crcs = np.array([stream.item(int(draw)).crc for draw in trained]).repeat(size).reshape(steps, -1)
    with open(paths.train_log, "wb") as file:
        for step, (some, theirs) in enumerate(zip(uids, crcs), 1):
            named = [[uid, 0, crc] for uid, crc in zip(some.tolist(), theirs.tolist())]
            line = {"step": step, "version": step, "cause": "n_min", "samples": named}
            file.write(json.dumps(line).encode() + b"\n")
    for path in (paths.metrics, paths.samples, paths.groups, paths.decisions, paths.scheduler_log):
        repeat_lines(path, steps)
    age_checkpoint(paths, steps, uids.reshape(-1))
    for path in paths.wal.glob("*.wal"):
        path.unlink()
    nbytes = {path.name: path.stat().st_size for path in paths.root.iterdir() if path.is_file()}
    return Aged(steps, int(uids.size), count * size, {name: n for name, n in nbytes.items() if n > 1 << 20})


def repeat_lines(path: Path, steps: int) -> None:
    """Write a line for each step, made of the last one."""
    if not path.exists() or not path.stat().st_size:
        return
    row = json.loads(path.read_bytes().splitlines()[-1])
    before, mark, after = json.dumps({**row, "step": "@"}).partition('"@"')
    with open(path, "w") as file:
        file.writelines(f"{before}{step}{after}\n" for step in range(1, steps + 1) if mark)


def age_checkpoint(paths: RunPaths, steps: int, uids: np.ndarray) -> None:
    newest = max(paths.checkpoints.iterdir(), key=lambda path: int(path.name.rpartition("_")[2]))
    for other in paths.checkpoints.iterdir():
        if other != newest:
            shutil.rmtree(other)
    folder = newest.rename(paths.checkpoints / f"global_step_{steps}")
    TrainedSet(uids.tolist()).save(folder / "trained.bin")
    meta = json.loads((folder / "meta.json").read_text())
    meta.update(step=steps, samples=int(uids.size), groups=steps * GROUPS, version=max(steps, meta["version"]))
    (folder / "meta.json").write_text(json.dumps(meta))
    listed = json.loads((folder / "files.json").read_text())
    for name in ("trained.bin", "meta.json"):
        data = (folder / name).read_bytes()
        listed[name] = [len(data), zlib.crc32(data)]
    (folder / "files.json").write_text(json.dumps(listed))


def peak_mib(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
    except (OSError, IndexError):
        return 0.0


def rss_pss_mib(pid: int) -> list[float]:
    """Resident memory, and the process's share of it where others map the same pages."""
    try:
        lines = dict(line.split(":") for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
        return [int(lines[name].split()[0]) / 1024 for name in ("Rss", "Pss")]
    except (OSError, ValueError, KeyError):
        return [0.0, 0.0]


def measured_audit(root: Path) -> dict[str, Any]:
    """Seconds and peak of `busrl audit` in a process of its own."""
    begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    child = sides.started([sys.executable, "-m", "busrl.cli", "audit", str(root)], cwd=ROOT, stdout=subprocess.PIPE)
    most = 0.0
    while child.poll() is None:
        most = max(most, peak_mib(child.pid))
        time.sleep(LOOK_S)
    said = child.communicate()[0].decode().splitlines()[-1]
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    took = round(time.monotonic() - begun, 2)
    return {"seconds": took, "cpu_s": round(used, 2), "peak_mib": round(most), "said": said}


def measured_start(root: Path, steps: int) -> dict[str, Any]:
    """From exec to the first new step, and from the last one to the end; the peaks of all processes meanwhile."""
    begun, first, last, most = time.monotonic(), 0.0, 0.0, {}
    shares = {label: [0.0, 0.0] for label in WATCHED}
    started = BenchRun(root, [*SETTINGS, f"run.max_steps={steps + MORE}"])
    try:
        ring = started.attach()
        while started.child.poll() is None:
            pids = {process.label: process.pid for process in ring.processes()} | {"launch": started.child.pid}
            for label, pid in pids.items():
                most[label] = max(most.get(label, 0.0), peak_mib(pid))
            step = ring.header("step")
            for label in WATCHED if first and not last else ():
                shares[label] = list(map(max, shares[label], rss_pss_mib(pids.get(label, 0))))
            first = first or (time.monotonic() if step > steps else 0.0)
            last = last or (time.monotonic() if step >= steps + MORE else 0.0)
            time.sleep(LOOK_S)
        end = time.monotonic()
        if started.child.returncode:
            raise RuntimeError(f"exit {started.child.returncode}: {started.tail()}")
    finally:
        started.stop()
    return {
        "to_first_step_s": round(first - begun, 2), "steps_s": round(last - first, 2), "end_s": round(end - last, 2),
        "peak_mib": {label: round(mib) for label, mib in sorted(most.items())},
        "rss_pss_mib": {label: [round(mib) for mib in share] for label, share in shares.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--samples", type=int, default=0, help="that the table of fates tells of, at least")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="busrl-bench-"))
    try:
        young = BenchRun(folder / "run", [*SETTINGS, f"run.max_steps={YOUNG}"])
        if young.wait():
            raise RuntimeError(young.tail())
        young.stop()
        result: dict[str, Any] = {"machine": report.machine(), "commit": report.commit(ROOT)}
        result["load"] = [os.getloadavg()[0]]
        result["young"] = {"audit": measured_audit(folder / "run"), "start": measured_start(folder / "run", YOUNG)}
        aged = age(young.paths, options.steps, options.samples)
        result["aged"] = {**vars(aged), "audit": measured_audit(folder / "run")}
        result["aged"]["start"] = measured_start(folder / "run", options.steps)
        result["aged"]["audit_after"] = measured_audit(folder / "run")
        result["load"].append(os.getloadavg()[0])
        print(json.dumps(result, indent=1))
        if options.out:
            kind, day = "longrun-table" if options.samples else "longrun", time.strftime("%Y-%m-%d")
            path = options.out / f"{kind}_{result['machine']['cores']}cores_{day}.json"
            path.write_text(json.dumps(result, indent=1) + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
