"""Segments on real processes: seconds per synchronous step with answers in 1, 2, 4 and 8 pieces.

    python docs/experiments/segments.py --trace TRACE --limit TOKENS
    python docs/experiments/segments.py                      (a lognormal stands in for a fitted distribution)

Scripted actors at a scaled-down pace, a real learner, the same trace for every cut. Seconds per step at the same number
of groups per step are compared with those of the first entry of `--segments`, after the first steps, in which the pool
of unfinished answers fills. Without segments the mode is `sync`; `--with-segments` sets what the other runs have.
A log-normal that fits published step times is found by `ulorl.py`: scale its median and its limit down alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import live
import numpy as np

from busrl.data import trace

ACTORS, GROUP = 16, 4


def stand_in(path: Path, prompts: int, options: argparse.Namespace, seed: int) -> None:
    """A lognormal cut at the limit, whose longest share is stated by `--median` and `--sigma`."""
    random = np.random.default_rng(seed)
    draws = np.exp(np.log(options.median) + options.sigma * random.standard_normal((prompts, GROUP)))
    lengths = np.clip(np.rint(draws), 1, options.limit).astype(int)
    trace.write(path, [trace.Task(f"prompt {i}", tuple(row)) for i, row in enumerate(lengths.tolist())])


def settings_of(segments: int, path: Path, seed: int, options: argparse.Namespace) -> dict[str, object]:
    cut = -(-options.limit // segments)
    found: dict[str, object] = {
        "data.train": path, "data.shuffle": False, "run.seed": seed, "run.max_steps": options.steps + options.fill,
        "groups.size": GROUP, "generation.max_new_tokens": options.limit, "generation.max_batch": options.rows,
        "mock.token_s": options.token_s, "mock.per_sequence_s": options.per_sequence_s, "mock.jitter": 0,
        "learner.trigger.n_min": options.groups, "learner.checkpoint_every": 0, "scheduler.ahead": 0,
        "weights.mode": "sync", "weights.max_staleness": 0, "learner.micro_batch_tokens": 16384,
    }  # fmt: skip
    if segments > 1:
        found |= {"segments.length": cut, "segments.max_segments": segments, "segments.loss": options.loss}
        found |= json.loads(options.with_segments)
    return found


def measure(segments: int, seed: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    path = folder / f"trace-{seed}.jsonl"
    if options.trace:
        path = options.trace.resolve()
    elif not path.exists():
        stand_in(path, options.groups * (options.steps + options.fill + 8), options, seed)
    load = os.getloadavg()[0]
    settings = live.flat(settings_of(segments, path, seed, options))
    with live.runs.run(*settings, config=live.SCRIPTED) as run:
        live.watch(run, lambda: None)
        if run.wait():
            raise RuntimeError(run.tail())
        rows = live.rows_of(run)[options.fill :]
    return {
        "segments": segments, "seed": seed, "step_s": round(statistics.fmean(row["seconds"] for row in rows), 3),
        "tokens_per_step": round(statistics.fmean(row["tokens"] for row in rows)),
        "train_s": round(statistics.fmean(row["forward_s"] + row["backward_s"] + row["update_s"] for row in rows), 3),
        "age_mean": round(statistics.fmean(row["age_mean"] for row in rows), 2), "load_before": round(load, 2),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--segments", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--trace", type=Path, help="a trace with the wanted distribution of lengths")
    parser.add_argument("--limit", type=int, default=512, help="tokens of an answer, all segments")
    parser.add_argument("--median", type=float, default=100.0)
    parser.add_argument("--sigma", type=float, default=0.9)
    parser.add_argument("--groups", type=int, default=32, help="groups of 4 per step")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--fill", type=int, default=4, help="first steps that are left out")
    parser.add_argument("--token-s", type=float, default=0.01)
    parser.add_argument("--per-sequence-s", type=float, default=0.0)
    parser.add_argument("--loss", default="pois")
    parser.add_argument("--with-segments", default="{}", help="more settings of the runs with segments, as JSON")
    parser.add_argument("--name", default="segments")
    options = parser.parse_args()
    cells = []
    with tempfile.TemporaryDirectory(prefix="busrl-segments-") as name:
        for place, seed in enumerate(options.seeds):
            for segments in options.segments[:: 1 if place % 2 == 0 else -1]:
                cells.append(measure(segments, seed, Path(name), options))
                print(json.dumps(cells[-1]), flush=True)
    whole = {cell["seed"]: cell["step_s"] for cell in cells if cell["segments"] == options.segments[0]}
    table = []
    for segments in options.segments:
        ratios = [round(whole[c["seed"]] / c["step_s"], 3) for c in cells if c["segments"] == segments]
        table.append({"segments": segments, "faster": round(statistics.median(ratios), 3), "ratios": ratios})
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    live.save(options.name, {"settings": settings, "table": table, "runs": cells})
    for row in table:
        print(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
