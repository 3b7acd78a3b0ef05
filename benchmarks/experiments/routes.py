"""A mixture of experts in bfloat16 with the engine's routes replayed and with the learner's own: runs side by side.

    python -m benchmarks routes [--model FOLDER] [--seeds 0 1 2] [--steps 200] [--engine torch] [--out FOLDER]

FOLDER is what examples/experts/make_experts.py makes. Written after each run; runs that are in the file are not made
again. Reward, mismatch and shares of changed routes do not depend on the machine's load; seconds do.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks import EXPERIMENT_RESULTS, ROOT
from benchmarks.common import report, sides
from busrl.ledger.trained import step_lines

WAYS = ("replay", "own")
KEPT = ("reward", "mismatch", "mismatch_begun", "entropy", "seconds", "forward_s", "backward_s", "age_mean")
TOPOLOGY = ROOT / "examples" / "experts" / "experts.toml"


def run(options: argparse.Namespace, way: str, seed: int) -> dict[str, Any]:
    """The numbers of each step of one run; raises if it did not end well."""
    directory = Path(tempfile.mkdtemp(prefix="busrl-routes-"))
    settings: dict[str, object] = {
        "run.seed": seed, "run.max_steps": options.steps, "learner.routes": way,
        "model.path": options.model / "model", "data.train": options.model / "train.jsonl",
        "process.rollout.engine": options.engine, "validation.data": options.model / "validation.jsonl",
        "validation.at_start": "false", **dict(setting.split("=", 1) for setting in options.set),
    }
    command = [sys.executable, "-m", "busrl.cli", "launch", str(TOPOLOGY), "--run-dir", str(directory / "run")]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    try:
        begun = time.monotonic()
        ended = sides.ran(command, cwd=ROOT, timeout_s=3600)
        if ended.code:
            raise RuntimeError(f"{way}, seed {seed}: exit code {ended.code}\n{ended.output[-2000:]}")
        rows = step_lines(directory / "run" / "metrics.jsonl")
        rounds = (directory / "run" / "validation.jsonl").read_text().splitlines()
        curves = {name: [row.get(name) for row in rows] for name in KEPT}
        curves |= {name: [row["routes"][name] for row in rows] for name in rows[0].get("routes", {})}
        return {"way": way, "seed": seed, "took_s": time.monotonic() - begun, "curves": curves,
                "validation": json.loads(rounds[-1])["val/reward"]}
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def over(runs: list[dict[str, Any]], name: str, part: slice) -> str:
    """Median over seeds of the mean of a number over some steps."""
    rows = [[value for value in run["curves"].get(name, [])[part] if value is not None] for run in runs]
    means: list[float] = [mean(values) for values in rows if values]
    return f"{median(means):.3f}" if means else "-"


def table(runs: list[dict[str, Any]], steps: int) -> list[str]:
    """Markdown: rows of a quarter of the steps each, both ways side by side."""
    lines = [
        "| steps | changed, rows with any | mismatch: replay | own | reward: replay | own |",
        "|---|---|---|---|---|---|",
    ]
    by_way = {way: [run for run in runs if run["way"] == way] for way in WAYS}
    quarter = max(1, steps // 4)
    for begin in range(0, steps, quarter):
        part, replay, own = slice(begin, begin + quarter), by_way["replay"], by_way["own"]
        changed = f"{over(replay, 'changed', part)}, {over(replay, 'rows', part)}"
        cells = [over(side, name, part) for name in ("mismatch", "reward") for side in (replay, own)]
        lines.append(f"| {begin + 1} to {min(steps, begin + quarter)} | {changed} | {' | '.join(cells)} |")
    costs = [median(mean(pair) for pair in zip(*(
        [left + right for left, right in zip(run["curves"]["forward_s"], run["curves"]["backward_s"], strict=True)]
        for run in by_way[way]), strict=True)) for way in WAYS if by_way[way]]
    ends = ["/".join(f"{run['validation']:.2f}" for run in by_way[way]) for way in WAYS]
    took = ", ".join(f"{cost:.3f}" for cost in costs)
    return [*lines, "", f"Validation at the end, each seed: replay {ends[0]}, own {ends[1]}. Seconds of forward and "
            f"backward of a step, median: {took} (the machine had other work)."]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "examples" / "experts" / "made")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--engine", default="torch", choices=("torch", "vllm"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of every run")
    parser.add_argument("--out", type=Path, default=EXPERIMENT_RESULTS)
    options = parser.parse_args()
    options.model, file = options.model.resolve(), options.out / f"routes-{options.engine}"
    options.out.mkdir(parents=True, exist_ok=True)
    saved = json.loads(file.with_suffix(".json").read_text()) if file.with_suffix(".json").exists() else {"runs": []}
    runs: list[dict[str, Any]] = [one for one in saved["runs"] if len(one["curves"]["reward"]) == options.steps]
    for seed in options.seeds:
        for way in options.ways:
            if any((one["way"], one["seed"]) == (way, seed) for one in runs):
                continue
            runs.append(run(options, way, seed))
            data = {"machine": report.machine(), "commit": report.commit(ROOT), "steps": options.steps,
                    "engine": options.engine, "set": options.set, "runs": runs}
            file.with_suffix(".json").write_text(json.dumps(data) + "\n")
            print(f"{way} seed {seed}: {runs[-1]['took_s']:.0f} s", flush=True)
    lines = table(sorted(runs, key=lambda one: int(one["seed"])), options.steps)
    file.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 0
