"""Every shipped loss at forced ages, on the quickstart: real runs of `busrl launch`, curves into docs/losses.md.

    python tools/bench/forced_age.py [--ages 0 1 2 4] [--seeds 0 1 2] [--steps 120] [--out tools/bench/results]

A run with `experiments.forced_age = k` publishes the weights k steps late, in mode sync: every batch is trained exactly
k versions after the weights that made it. Rewards do not depend on the machine's load; seconds are not reported.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median

from busrl.ledger.trainlog import step_lines

ROOT = Path(__file__).resolve().parents[2]
LOSSES = ("ppo_clip", "decoupled")
BARS = "▁▂▃▄▅▆▇█"


def run(loss: str, age: int, seed: int, steps: int) -> list[float]:
    """Reward per step of one run; raises if it did not end well."""
    directory = Path(tempfile.mkdtemp(prefix="busrl-age-"))
    settings = {
        "run.seed": seed, "run.max_steps": steps, "weights.mode": "sync", "learner.loss": loss,
        "experiments.forced_age": age, "validation.at_start": "false", "validation.at_end": "false",
    }
    command = [sys.executable, "-m", "busrl.cli", "launch", "configs/quickstart.toml", "--run-dir", str(directory)]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
        if done.returncode:
            raise RuntimeError(f"{loss} at age {age}, seed {seed}: exit code {done.returncode}\n{done.stdout[-2000:]}")
        rows = step_lines(directory / "metrics.jsonl")
        ages = {row["age_max"] for row in rows[age + 1 :]}
        if ages != {age}:
            raise RuntimeError(f"{loss} at age {age}, seed {seed}: batches of age {sorted(ages)} were trained")
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ages", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--losses", nargs="+", default=list(LOSSES), choices=LOSSES)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=Path, default=ROOT / "tools" / "bench" / "results")
    options = parser.parse_args()
    if options.steps < 60:
        parser.error(f"--steps {options.steps}: the table shows updates 51 to 60 too; give 60 or more")
    results: list[dict[str, object]] = []
    for seed in options.seeds:
        for age in options.ages:
            for loss in options.losses:
                curve = run(loss, age, seed, options.steps)
                results.append({"loss": loss, "age": age, "seed": seed, "curve": curve})
                told = f"{mean(curve[:10]):.3f} -> {mean(curve[-10:]):.3f} {spark(curve)}"
                print(f"{loss} age {age} seed {seed}: {told}", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    data = {"machine": f"{platform.machine()}, {platform.system()} {platform.release()}", "runs": results}
    (options.out / "forced_age.json").write_text(json.dumps(data) + "\n")
    (options.out / "forced_age.md").write_text("\n".join(table(results, options.ages, options.steps)) + "\n")
    print("\n".join(table(results, options.ages, options.steps)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
