"""Dispatch policies, windows and segments on the quickstart: seconds, updates and samples to a goal.

    python -m benchmarks quickstart-policies [--policies fifo sjf:rules fifo,weights.max_staleness=3 ...]

A policy is its name, a predictor after a colon, and further settings after commas; the goal is a mean reward of 0.85.

Real training, all as in `compare` (the clock, the goal, 32 drawn groups per update), policies in turn,
at least three seeds. On two cores the rollout process is what the learner waits for.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from typing import Any

from benchmarks import ROOT
from benchmarks.common import live, systems

POLICIES = (
    "fifo", "sjf:rules", "sjf:blend", "ljf:rules",
    *(f"fifo,segments.length={64 // most},segments.max_segments={most}" for most in (2, 4, 8)),
    "fifo,weights.mode=fully-async", "fifo,weights.mode=fully-async,weights.window=127",
)


def settings_of(text: str) -> list[str]:
    name, *more = text.split(",")
    policy, _, predictor = name.partition(":")
    return [f"scheduler.policy={policy}", *([f"scheduler.predictor={predictor}"] if predictor else []), *more]


def row_of(policy: str, runs: list[dict[str, Any]], first: str) -> dict[str, Any]:
    """Medians of one policy, and its seconds over those of the first, seed by seed."""
    mine = {run["seed"]: run for run in runs if run["policy"] == policy}
    base = {run["seed"]: run for run in runs if run["policy"] == first}
    both = [seed for seed in mine if seed in base]
    return {
        "policy": policy, "reached": f"{sum(run['reached'] for run in mine.values())}/{len(mine)}",
        **{key: round(statistics.median(run[key] for run in mine.values()), 2)
           for key in ("seconds", "cpu_seconds", "updates", "samples")},
        f"over_{first}": [round(mine[seed]["seconds"] / base[seed]["seconds"], 3) for seed in both],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--goal", type=float, default=0.85)
    parser.add_argument("--max-updates", type=int, default=200)
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--name", default="quickstart_policies")
    options = parser.parse_args()
    terms = systems.Terms(
        options.goal, 2e-4, options.max_updates, 600.0, ROOT / "configs" / "quickstart.toml", ""
    )
    runs: list[dict[str, Any]] = []
    for place, seed in enumerate(options.seeds):
        for policy in options.policies[:: 1 if place % 2 == 0 else -1]:
            load = os.getloadavg()[0]
            told = systems.run_busrl(seed, terms, policy, [*settings_of(policy), *options.overrides])
            kept = {key: told[key] for key in ("seconds", "cpu_seconds", "updates", "samples", "reached")}
            runs.append({"policy": policy, "seed": seed, **kept, "load_before": round(load, 2)})
            print(json.dumps(runs[-1]), flush=True)
    table = [row_of(policy, runs, options.policies[0]) for policy in options.policies]
    live.save(options.name, {"settings": vars(options), "table": table, "runs": runs})
    for row in table:
        print(row)
    return 0
