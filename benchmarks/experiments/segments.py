"""Segments on real processes: seconds per step with answers in several pieces, with and without a barrier.

    python -m benchmarks segments
    python -m benchmarks segments --variants sync:1 sync:4 async:1 async:4 [--trace TRACE --limit TOKENS]

Scripted actors at a scaled-down pace, a real learner, the same trace for every variant MODE:SEGMENTS. Seconds per step
at the same number of groups per step are compared with those of the first variant, after the first steps, in which the
pool of unfinished answers fills. `sync` is synchronous rounds, `async` is batch-async with `--staleness`.
The defaults are a log-normal that `ulorl` fits to UloRL's step times for 1 and 2 segments (sigma 0.9, median 15,505
of 65,536 tokens, 0.001 of a decoding step per running answer), scaled down: 65,536 tokens to 512, and 1,024 answers to
128, each of which counts for 8. As in the fit all answers run in one engine, which has a row for each. The fit knows
generation alone, so the pace is slow enough for the real learner to be a small part of a step; `less_training` leaves
its time out. Prefill, which it does not know either, is set to what it misses UloRL's third figure by: a tenth of a
step with 4 segments.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import live
from busrl.data import trace

GROUP = 4


def stand_in(path: Path, prompts: int, options: argparse.Namespace, seed: int) -> None:
    """A lognormal cut at the limit, whose longest share is stated by `--median` and `--sigma`."""
    random = np.random.default_rng(seed)
    draws = np.exp(np.log(options.median) + options.sigma * random.standard_normal((prompts, GROUP)))
    lengths = np.clip(np.rint(draws), 1, options.limit).astype(int)
    trace.write(path, [trace.TracedPrompt(f"prompt {i}", tuple(row)) for i, row in enumerate(lengths.tolist())])


def settings_of(variant: str, path: Path, seed: int, options: argparse.Namespace) -> dict[str, object]:
    mode, segments = variant.split(":")[0], int(variant.split(":")[1])
    cut = -(-options.limit // segments)
    settings: dict[str, object] = {
        "data.train": path, "data.shuffle": False, "run.seed": seed, "run.max_steps": options.steps + options.fill,
        "groups.size": GROUP, "generation.max_new_tokens": options.limit, "generation.max_batch": options.rows,
        "process.rollout.count": options.actors,
        "mock.token_s": options.token_s, "mock.per_sequence_s": options.per_sequence_s, "mock.jitter": 0,
        "mock.prefill_s_per_token": options.prefill_s,
        "learner.trigger.n_min": options.groups, "learner.checkpoint_every": 0, "scheduler.ahead": 0,
        "weights.mode": "sync" if mode == "sync" else "batch-async", "weights.max_staleness": options.staleness,
        "learner.micro_batch_tokens": 16384,
    }
    if segments > 1:
        loss = "pois" if mode == "sync" else "behaviour"
        settings |= {"segments.length": cut, "segments.max_segments": segments, "segments.loss": loss}
        if mode == "sync":
            settings["segments.rounds"] = "segments"  # a step ends after a segment of each answer
    return settings


def measure(variant: str, seed: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    path = folder / f"trace-{variant.replace(':', '-')}-{seed}.jsonl"
    if options.trace:
        path = options.trace.resolve()
    elif not path.exists():
        stand_in(path, options.groups * (options.steps + options.fill + 8), options, seed)
    load = os.getloadavg()[0]
    settings = live.flat(settings_of(variant, path, seed, options))
    with live.runs.run(*settings, config=live.SCRIPTED) as run:
        live.watch(run, lambda: None)
        if run.wait():
            raise RuntimeError(run.tail())
        rows = live.rows_of(run)[options.fill :]
    return {
        "variant": variant, "seed": seed, "step_s": round(statistics.fmean(row["seconds"] for row in rows), 3),
        "tokens_per_step": round(statistics.fmean(row["tokens"] for row in rows)),
        "train_s": round(statistics.fmean(row["forward_s"] + row["backward_s"] + row["update_s"] for row in rows), 3),
        "age_mean": round(statistics.fmean(row["age_mean"] for row in rows), 2), "load_before": round(load, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=["sync:1", "sync:2", "sync:4"], metavar="MODE:SEGMENTS")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--trace", type=Path, help="a trace with the wanted distribution of lengths")
    parser.add_argument("--limit", type=int, default=512, help="tokens of an answer, all segments")
    parser.add_argument("--median", type=float, default=121.0)
    parser.add_argument("--sigma", type=float, default=0.9)
    parser.add_argument("--groups", type=int, default=32, help="groups of 4 per step")
    parser.add_argument("--actors", type=int, default=1)
    parser.add_argument("--rows", type=int, default=512, help="answers that an actor generates at once")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--fill", type=int, default=3, help="first steps that are left out")
    parser.add_argument("--token-s", type=float, default=0.02)
    parser.add_argument("--per-sequence-s", type=float, default=0.00016)
    parser.add_argument("--prefill-s", type=float, default=3e-5, help="per token of prompt and earlier segments")
    parser.add_argument("--at-once", type=int, default=2, help="runs; each needs a tenth of a core")
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--name", default="segments")
    options = parser.parse_args()
    cells = []
    with tempfile.TemporaryDirectory(prefix="busrl-segments-") as name:
        jobs = [(variant, seed) for place, seed in enumerate(options.seeds)
                for variant in options.variants[:: 1 if place % 2 == 0 else -1]]
        with ProcessPoolExecutor(options.at_once) as pool:
            for told in pool.map(measure, *zip(*jobs), repeat(Path(name)), repeat(options)):
                cells.append(told)
                print(json.dumps(told), flush=True)
    whole = {cell["seed"]: cell for cell in cells if cell["variant"] == options.variants[0]}
    table = []
    for variant in options.variants:
        mine = [(whole[cell["seed"]], cell) for cell in cells if cell["variant"] == variant]
        ratios = [round(first["step_s"] / cell["step_s"], 3) for first, cell in mine]
        alone = [(first["step_s"] - first["train_s"]) / (cell["step_s"] - cell["train_s"]) for first, cell in mine]
        table.append({"variant": variant, "faster": round(statistics.median(ratios), 3), "ratios": ratios,
                      "less_training": round(statistics.median(alone), 3)})
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    live.save(options.name, {"settings": settings, "table": table, "runs": cells})
    for row in table:
        print(row)
    return 0
