"""Dispatch policies and predictors on real processes: an open stream of prompts, and synchronous rounds.

    python -m benchmarks order stream
    python -m benchmarks order round [--policies fifo ljf:rules ...]

16 scripted actors and a real learner (configs/scripted.toml); the same trace for every policy, policies in turn, one
run per seed. `stream`: prompts arrive at random at `--load` times what the actors can generate; what counts is the time
from a prompt's arrival until all of its answers are there. `round`: mode = sync; what counts is the time from the
first to the last moment of a round's generation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import live

ACTORS, ROWS, GROUP, LIMIT, TOKEN_S = 16, 4, 4, 512, 0.010
MEDIAN = 60.0
TOKENS_PER_S = ACTORS * ROWS / TOKEN_S
COMMON: dict[str, object] = {
    "groups.size": GROUP, "generation.max_new_tokens": LIMIT, "generation.max_batch": ROWS, "mock.token_s": TOKEN_S,
    "mock.per_sequence_s": 0, "mock.jitter": 0.05, "learner.checkpoint_every": 0, "run.max_steps": 100000,
}


def policy_settings(name: str, seed: int) -> dict[str, object]:
    """`policy` or `policy:predictor`."""
    policy, _, predictor = name.partition(":")
    settings: dict[str, object] = {"scheduler.policy": policy, "run.seed": seed}
    return settings | ({"scheduler.predictor": predictor} if predictor else {})


# -- an open stream -------------------------------------------------------------------------------------------------


def stream_run(name: str, seed: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Make a run of the stream. Mean completion in seconds, and what it did to the order of training."""
    path = folder / f"stream-{seed}.jsonl"
    known = live.make_trace(path, options.prompts, seed, group_size=GROUP, median=MEDIAN, limit=LIMIT)
    rate = options.load * TOKENS_PER_S / (GROUP * live.mean_tokens(known, LIMIT))
    tasks = live.arriving(path, known, rate, seed)
    # fully-async: no bound on age stands in the way; the window holds what ends during the longest answer
    settings = {
        **COMMON, **policy_settings(name, seed), "data.train": path, "data.arrivals": True,
        "weights.mode": "fully-async",
        "learner.trigger.n_min": 64, "scheduler.ahead": options.ahead, "scheduler.horizon": options.horizon,
    }
    load = os.getloadavg()[0]
    with live.runs.run(*live.flat(settings), config=live.SCRIPTED) as run:
        seen = live.Groups(run, GROUP)
        live.watch(run, seen.look, done=lambda: sum(draw < len(tasks) for draw in seen.ended) == len(tasks))
        rows = live.rows_of(run)
    start = seen.began - (tasks[0].arrival_s or 0.0)
    took = [seen.ended[d] - start - (task.arrival_s or 0.0) for d, task in enumerate(tasks)]
    waited = [seen.started[d] - start - (task.arrival_s or 0.0) for d, task in enumerate(tasks)]
    passed = seen.overtaken(len(tasks))
    return {
        "completion_s": live.quantiles(took), "wait_s": live.quantiles(waited), "overtaken": live.quantiles(passed),
        "overtaken_bound": options.horizon - 1, "skew": skew(rows, live.mean_tokens(tasks, LIMIT)),
        "trained_steps": len(rows), "load_before": round(load, 2),
    }


def skew(rows: list[dict[str, Any]], drawn: float) -> float | None:
    """Mean length of what the first half of the steps trained, over the mean length drawn; 1 is no skew."""
    half = rows[: max(1, len(rows) // 2)]
    samples = sum(row["samples"] for row in half)
    if not samples:
        return None
    return round(sum(row["length_mean"] * row["samples"] for row in half) / samples / drawn, 3)


# -- synchronous rounds ---------------------------------------------------------------------------------------------


def round_run(name: str, seed: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """`--rounds` rounds; the median time that generation of a round took."""
    path = folder / f"round-{seed}.jsonl"
    live.make_trace(
        path, options.groups * (options.rounds + 1), seed, group_size=GROUP, median=MEDIAN, limit=LIMIT
    )
    settings = {
        **COMMON, **policy_settings(name, seed), "data.train": path, "weights.mode": "sync", "scheduler.ahead": 0,
        "learner.trigger.n_min": options.groups, "run.max_steps": options.rounds, "weights.max_staleness": 0,
        "scheduler.horizon": options.groups,
    }
    load = os.getloadavg()[0]
    with live.runs.run(*live.flat(settings), config=live.SCRIPTED) as run:
        seen = live.Groups(run, GROUP)
        live.watch(run, seen.look)
        rows = live.rows_of(run)
    spans = []
    for number in range(options.rounds):
        mine = [draw for draw, index in seen.opened.items() if index // options.groups == number]
        spans.append(max(seen.ended[d] for d in mine) - min(seen.started[d] for d in mine))
    return {
        "makespan_s": live.quantiles(spans), "spans": [round(span, 3) for span in spans],
        "step_s": live.quantiles([row["seconds"] for row in rows]), "load_before": round(load, 2),
    }


POLICIES = {
    "stream": ["fifo", "sjf:rules", "sjf:blend", "sjf:oracle"],
    "round": ["fifo", "ljf:oracle", "adaptive:blend", "adaptive:oracle", "ljf:blend"],
}
RUNS = {"stream": (stream_run, "completion_s"), "round": (round_run, "makespan_s")}


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Every policy with every seed, in turn; means, and the ratio to the first policy seed by seed."""
    runner, key = RUNS[options.what]
    cells: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="busrl-dispatch-") as name:
        for place, seed in enumerate(options.seeds):
            for policy in options.policies[:: 1 if place % 2 == 0 else -1]:
                figures = runner(policy, seed, Path(name), options)
                cells.append({"policy": policy, "seed": seed, **figures})
                print(json.dumps(cells[-1]), flush=True)
    table = []
    for policy in options.policies:
        mine = {cell["seed"]: cell[key]["mean"] for cell in cells if cell["policy"] == policy}
        first = {cell["seed"]: cell[key]["mean"] for cell in cells if cell["policy"] == options.policies[0]}
        ratios = [round(mine[seed] / first[seed], 3) for seed in options.seeds]
        table.append({
            "policy": policy, key: round(statistics.fmean(mine.values()), 3),
            f"over_{options.policies[0]}": round(statistics.median(ratios), 3), "ratios": ratios,
        })
    return {"settings": vars(options), "table": table, "runs": cells}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=sorted(RUNS))
    parser.add_argument("--policies", nargs="+", help="default: those of the published table")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--prompts", type=int, default=1000, help="stream: prompts that are waited for")
    parser.add_argument("--load", type=float, default=1.2, help="stream: arriving over generated tokens")
    parser.add_argument("--ahead", type=int, default=8, help="stream: samples that may wait for an engine")
    parser.add_argument("--horizon", type=int, default=1024, help="stream: groups among which a policy reorders")
    parser.add_argument("--groups", type=int, default=32, help="round: groups of 4 in a round")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--name", default="")
    options = parser.parse_args()
    options.policies = options.policies or POLICIES[options.what]
    result = compare(options)
    live.save(options.name or f"dispatch_{options.what}", result)
    for row in result["table"]:
        print(row)
    return 0
