"""Losses and recipes at forced ages, on the quickstart: curves for docs/losses.md, by real runs.

    python -m benchmarks forced-age [--ages 0 1 2 4] [--seeds 0 1 2] [--steps 120] [--out FOLDER]
    python -m benchmarks forced-age --recipes none grpo dr_grpo gspo cispo rloo --ages 0 2   # docs/losses.md
    python -m benchmarks forced-age --topology examples/real-run/real.toml --recipes ...     # after its make_model.py

A run with `experiments.forced_age = k` publishes the weights k steps late, in mode sync: every batch is trained exactly
k versions after the weights that made it. Rewards do not depend on the machine's load; seconds are not reported.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import mean, median

from benchmarks import EXPERIMENT_RESULTS, ROOT
from benchmarks.common import sides
from busrl.ledger.trained import step_lines

LOSSES = ("ppo_clip", "decoupled")
RECIPES = ("none", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "scalerl", "rloo", "reinforce_pp", "sapo", "gmpo",
           "two_sided", "dppo", "opsm", "m2po", "clip_cov", "kl_cov")
RISES = 0.1  # a reward that is so much higher in the last ten steps than in the first five
BARS = "▁▂▃▄▅▆▇█"


def run(topology: str, chosen: dict[str, str], age: int, seed: int, steps: int) -> list[float]:
    """Reward per step of one run with settings of its own; raises if it did not end well."""
    directory = Path(tempfile.mkdtemp(prefix="busrl-age-"))
    settings = {
        "run.seed": seed, "run.max_steps": steps, "weights.mode": "sync", "experiments.forced_age": age,
        "validation.at_start": "false", "validation.at_end": "false", **chosen,
    }
    command = [sys.executable, "-m", "busrl.cli", "launch", topology, "--run-dir", str(directory)]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    try:
        ended = sides.ran(command, cwd=ROOT, timeout_s=3600)
        if ended.code:
            end = f"exit code {ended.code}\n{ended.output[-2000:]}"
            raise RuntimeError(f"{chosen} at age {age}, seed {seed}: {end}")
        rows = step_lines(directory / "metrics.jsonl")
        ages = {row["age_max"] for row in rows[age + 1 :]}
        if ages != {age}:
            raise RuntimeError(f"{chosen} at age {age}, seed {seed}: batches of age {sorted(ages)} were trained")
        return [row["reward"] for row in rows]
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def spark(curve: list[float], width: int = 24) -> str:
    """A curve from 0 to 1 as blocks."""
    size = max(1, len(curve) // width)
    means = [mean(curve[i : i + size]) for i in range(0, len(curve), size)]
    return "".join(BARS[min(7, max(0, int(value * 8)))] for value in means)


def table(results: list[dict[str, object]], ages: list[int], steps: int) -> list[str]:
    """Markdown: for each loss and age the median over seeds, and one curve each."""
    lines = [
        f"| loss | age | first 10 | updates 51 to 60 | last 10 of {steps} | each seed's last 10 | curve (0 to 1) |",
        "|---|---|---|---|---|---|---|",
    ]
    for loss in LOSSES:
        for age in ages:
            curves = [r["curve"] for r in results if r["loss"] == loss and r["age"] == age]
            if not curves:
                continue
            first, middle, last = (
                [mean(curve[part]) for curve in curves]  # type: ignore[index]
                for part in (slice(0, 10), slice(50, 60), slice(-10, None))
            )
            each = ", ".join(f"{value:.2f}" for value in last)
            lines.append(
                f"| {loss} | {age} | {median(first):.2f} | {median(middle):.2f} | **{median(last):.2f}** | {each} | "
                f"`{spark(curves[0])}` |"  # type: ignore[arg-type]
            )
    return lines


def verdicts(results: list[dict[str, object]]) -> list[str]:
    """Markdown: a row for each recipe; for each age the first five and last ten steps, and whether all seeds rose."""
    ages = sorted({int(str(result["age"])) for result in results})
    heads = [f"age {age}: first 5, last 10 | rises | curve (0 to 1)" for age in ages]
    lines = [f"| recipe | {' | '.join(heads)} |", "|---" * (1 + 3 * len(ages)) + "|"]
    for name in dict.fromkeys(str(result["loss"]) for result in results):
        cells = []
        for age in ages:
            of_both = [result for result in results if (result["loss"], result["age"]) == (name, age)]
            curves: list[list[float]] = [result["curve"] for result in of_both]  # type: ignore[misc]
            ends = [(mean(curve[:5]), mean(curve[-10:])) for curve in curves]
            rose = sum(last - first >= RISES for first, last in ends)
            rises = "yes" if rose == len(ends) else f"{rose} of {len(ends)} seeds" if rose else "**no**"
            before, after = (median(end[at] for end in ends) for at in (0, 1))
            cells.append(f"{before:.2f}, {after:.2f} | {rises} | `{spark(curves[0])}`")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="configs/quickstart.toml")
    parser.add_argument("--ages", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--losses", nargs="+", default=list(LOSSES), choices=LOSSES)
    parser.add_argument("--recipes", nargs="+", default=[], choices=RECIPES, help="instead of losses")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of every run")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=Path, default=EXPERIMENT_RESULTS)
    options = parser.parse_args()
    if options.steps < 60 and not options.recipes:
        parser.error(f"--steps {options.steps}: the table shows updates 51 to 60 too; give 60 or more")
    key = "learner.recipe" if options.recipes else "learner.loss"
    every = dict(setting.split("=", 1) for setting in options.set)
    results: list[dict[str, object]] = []
    for seed in options.seeds:
        for age in options.ages:
            for name in options.recipes or options.losses:
                chosen = every | {key: "" if name == "none" else name}
                curve = run(options.topology, chosen, age, seed, options.steps)
                results.append({"loss": name, "age": age, "seed": seed, "curve": curve})
                text = f"{mean(curve[:10]):.3f} -> {mean(curve[-10:]):.3f} {spark(curve)}"
                print(f"{name} age {age} seed {seed}: {text}", flush=True)
    lines = verdicts(results) if options.recipes else table(results, options.ages, options.steps)
    file = options.out / ("recipes" if options.recipes else "forced_age")
    options.out.mkdir(parents=True, exist_ok=True)
    data = {"machine": f"{platform.machine()}, {platform.system()} {platform.release()}", "set": every, "runs": results}
    file.with_suffix(".json").write_text(json.dumps(data) + "\n")
    file.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 0
