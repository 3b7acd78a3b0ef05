"""Common parts of the experiments with real processes: scripted runs watched from outside, traces, results as JSON.

A run is `busrl launch` of configs/scripted.toml with settings; it is watched through the files and the ring that any
user has. Knows nothing of what an experiment wants to show.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import EXPERIMENT_RESULTS, ROOT
from benchmarks.common import report, runs
from busrl.data import trace
from busrl.ledger.trained import step_lines
from busrl.ring import State

SCRIPTED = ROOT / "configs" / "scripted.toml"
LOOK_S = 0.02
LIMIT_S = 420.0
NEVER_S = 1e7

Settings = Mapping[str, object]


def make_trace(path: Path, prompts: int, seed: int, **shape: Any) -> list[trace.TracedPrompt]:
    """Write a long-tailed trace; `shape` as in tracemaker.Shape."""
    tasks = trace.make_trace(prompts, trace.Shape(**shape), seed)
    trace.write(path, tasks)
    return tasks


def arriving(path: Path, tasks: Sequence[trace.TracedPrompt], per_s: float, seed: int) -> list[trace.TracedPrompt]:
    """Write the same tasks again as an open stream: independent arrivals at that mean rate, and then no more."""
    times = np.cumsum(np.random.default_rng(seed).exponential(1 / per_s, len(tasks))).round(6).tolist()
    stream = [dataclasses.replace(task, arrival_s=time) for task, time in zip(tasks, times)]
    trace.write(path, [*stream, dataclasses.replace(tasks[0], arrival_s=NEVER_S)])
    return stream


def mean_tokens(tasks: Iterable[trace.TracedPrompt], limit: int) -> float:
    """Mean length of the answers of a trace, cut at `limit`."""
    return statistics.fmean(min(n, limit) for task in tasks for n in task.lengths)


def keep_log(run: runs.BenchRun, to: Path) -> bool:
    """Link the segments of the write-ahead log, so that they stay when a checkpoint lets them go."""
    to.mkdir(exist_ok=True)
    for segment in run.paths.wal.glob("*.wal"):
        if not (to / segment.name).exists():
            os.link(segment, to / segment.name)
    return False


def rows_of(run: runs.BenchRun) -> list[dict[str, Any]]:
    """The lines of steps in metrics.jsonl so far."""
    return step_lines(run.paths.metrics)


def watch(run: runs.BenchRun, look: Callable[[], None], *, done: Callable[[], bool] = lambda: False) -> None:
    """Call `look` every 20 ms until the run ends, or `done` (asked once a second)."""
    end, ask = time.monotonic() + LIMIT_S, 0.0
    while run.child.poll() is None:
        now = time.monotonic()
        if now > end:
            raise RuntimeError(f"no end within {LIMIT_S:g} s: {run.tail()}")
        look()
        if now >= ask:
            ask = now + 1.0
            if done():
                return
        time.sleep(LOOK_S)


def flat(settings: Settings) -> list[str]:
    """As arguments of --set; a truth value as TOML writes it."""
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in settings.items()]


class Groups:
    """The moments of every group, seen in the ring by looking at it every 20 ms."""

    def __init__(self, run: runs.BenchRun, group_size: int) -> None:
        self.run, self.size = run, group_size
        self.began = 0.0  # the first group was opened
        self.opened: dict[int, int] = {}  # draw -> admission index
        self.started: dict[int, float] = {}  # draw -> an engine holds a member
        self.ended: dict[int, float] = {}  # draw -> all members are answered

    def look(self) -> None:
        lines, now = self.run.attach().lines(), time.monotonic()
        training = lines[(lines["state"] > State.RESERVED) & (lines["cls"] == 0)]
        if len(training):
            self.began = self.began or now
        groups, answered = training["group"].astype(np.int64), training["state"] >= State.GENERATED
        self.opened.update(zip(groups.tolist(), training["admission"].tolist()))
        for draw in np.unique(groups[answered | (training["state"] == State.GENERATING)]).tolist():
            self.started.setdefault(draw, now)
        draws, counts = np.unique(groups[answered], return_counts=True)
        here = set(groups.tolist())
        gone = [draw for draw in self.started if draw not in self.ended and draw not in here]
        for draw in [*draws[counts == self.size].tolist(), *gone]:  # gone: trained or set aside between two looks
            self.ended.setdefault(draw, now)

    def overtaken(self, draws: int) -> list[int]:
        """For each of the first `draws`: how many later ones were opened before it."""
        by_draw = [self.opened[draw] for draw in sorted(self.opened)]
        later = np.array(by_draw)
        return [int(np.count_nonzero(later[i + 1 :] < index)) for i, index in enumerate(by_draw[:draws])]


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Mean, median, p95, p99 and maximum."""
    array = np.asarray(values, np.float64)
    percentiles = {f"p{q}": float(np.percentile(array, q)) for q in (50, 95, 99)}
    figures = {"mean": float(array.mean()), **percentiles, "max": float(array.max())}
    return {key: round(value, 3) for key, value in figures.items()}


def save(name: str, result: dict[str, Any]) -> Path:
    """Write a result beside this file, with the machine, the commit and the load."""
    path = EXPERIMENT_RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    head = {"date": time.strftime("%Y-%m-%d"), "commit": report.commit(ROOT), "machine": report.machine()}
    head["command"] = " ".join(sys.argv)
    path.write_text(json.dumps({**head, "load_after": os.getloadavg()[0], **result}, indent=1) + "\n")
    print(f"written to {path}")
    return path
