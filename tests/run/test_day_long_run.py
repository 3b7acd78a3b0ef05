"""A day's worth of steps at a scripted pace: memory, descriptors and disk of every process stay where they were."""

from __future__ import annotations

import json
import os
import statistics
from collections import defaultdict
from pathlib import Path

import pytest
from checks import check_end
from harness import ROOT, Run, running

from busrl.system.files import parts

STEPS = int(os.environ.get("BUSRL_SOAK_STEPS", "2000"))
SAMPLES = 24
KEEP_MB = 0.2
GROWTH_KB, GROWTH_FDS = 6 << 10, 2
SETTINGS = [
    "process.rollout.count=2", "groups.size=2", "learner.trigger.n_min=1", "learner.checkpoint_every=25",
    "generation.max_new_tokens=16", "mock.token_s=0.0002", "mock.per_sequence_s=0.00001", "mock.prefill_s_per_token=0",
    f"log.keep_mb={KEEP_MB}", "log.samples=all", "scheduler.policy=sjf",
]


def family(pid: int) -> list[int]:
    """A process and what it has started."""
    try:
        files = Path(f"/proc/{pid}/task").glob("*/children")
        children = [int(pid) for file in files for pid in file.read_text().split()]
    except OSError:
        return [pid]
    return [pid, *(descendant for child in children for descendant in family(child))]


def taken(pids: list[int]) -> tuple[int, int]:
    """kB of memory of their own, and open descriptors."""
    memory = descriptors = 0
    for pid in pids:
        try:
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            memory += int(status["RssAnon"].split()[0])
            descriptors += len(os.listdir(f"/proc/{pid}/fd"))
        except (OSError, KeyError):
            continue  # it has just ended
    return memory, descriptors


def disk(run: Run) -> dict[str, int]:
    """Bytes of each bounded file with its earlier parts, and of what checkpoints and log hold."""
    paths = run.paths
    files = [paths.metrics, paths.samples, paths.groups, paths.errors, paths.scheduler_log, *paths.pace.glob("*.jsonl"),
             *paths.logs.glob("*.log")]
    sizes = {
        file.name: sum(p.stat().st_size for p in (file, *(q for _, q in parts(file))) if p.exists()) for file in files
    }
    kept = [path for folder in (paths.checkpoints, paths.wal) for path in folder.rglob("*")]
    return sizes | {"state": sum(path.stat().st_size for path in kept if path.is_file())}


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_memory_descriptors_and_disk_of_every_process_stay_where_they_were(quickstart: None, tmp_path: Path) -> None:
    """`BUSRL_SOAK_STEPS=100000` is a day and more of most runs."""
    trace = tmp_path / "trace.jsonl"
    rows = [{"prompt": f"{n}", "answer": f"{n}", "lengths": [7 + n % 5, 12], "rewards": [1, 0]} for n in range(64)]
    source = f"data.train={trace}"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = Run(tmp_path / "run", *SETTINGS, source, config=ROOT / "configs" / "scripted.toml", steps=STEPS)
    seen: dict[str, list[tuple[int, int]]] = defaultdict(list)
    state = []
    with running(run):
        for n in range(1, SAMPLES + 1):
            at = STEPS * n // (SAMPLES + 1)
            run.until(f"step {at}", lambda at=at: run.step() >= at, limit_s=600 + STEPS)
            assert run.child is not None
            others = {name: process.pid for name, process in run.processes().items()}
            for name, pid in others.items():
                seen[name].append(taken(family(pid) if name.startswith("reward") else [pid]))
            seen["launch"].append(taken([run.child.pid]))
            state.append(disk(run)["state"])
        check_end(run, run.wait(600 + STEPS))
    table = {}
    for name, samples in seen.items():
        middle, end = samples[len(samples) // 3 : len(samples) * 2 // 3], samples[len(samples) * 2 // 3 :]
        table[name] = [int(statistics.median(row[k] for row in part)) for k in (0, 1) for part in (middle, end)]
    print(json.dumps(table | {"state": state[:: SAMPLES // 4]}, indent=1))
    assert {"bus", "keeper", "scheduler", "learner", "rollout/0", "reward/0", "launch"} <= table.keys()
    for name, (memory, later_memory, descriptors, later_descriptors) in table.items():
        assert later_memory <= memory + GROWTH_KB, (name, table[name])
        assert later_descriptors <= descriptors + GROWTH_FDS, (name, table[name])
    sizes = disk(run)
    assert max(state[SAMPLES // 2 :]) <= 2 * max(state[: SAMPLES // 2])
    for name, size in sizes.items():
        assert name == "state" or name.endswith(".log") or size <= KEEP_MB * 1e6, (name, size)
    restarted = {name for name in seen if name in others and run.restarts(name)}
    assert not restarted  # or their memory would say nothing
