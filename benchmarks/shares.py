"""What the processes that do no tensor work cost: their share of one core during the quickstart.

    python -m benchmarks shares --runs 3 --steps 150

Each run is the shipped quickstart on another seed; the shares are `cpu_share` of its summary.json, which `busrl launch`
measures from the first to the last step. Prints medians and writes benchmarks/results/shares.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, ROOT
from benchmarks.common import report
from busrl.ledger.trained import step_lines

LIGHT = ("launch", "bus", "keeper", "scheduler", "reward/0")
BAR = 0.10


def run(seed: int, steps: int) -> dict[str, float]:
    """Shares by process of one quickstart, and its samples per second."""
    quickstart = str(ROOT / "configs" / "quickstart.toml")
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [
            sys.executable, "-m", "busrl.cli", "launch", quickstart, "--run-dir", str(run_dir),
            "--set", f"run.max_steps={steps}", "--set", f"run.seed={seed}",
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=600, cwd=ROOT)
        rows = step_lines(run_dir / "metrics.jsonl")
        found: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())["processes"]
    samples = sum(row["samples_ended"] for row in rows[1:]) / (rows[-1]["time_s"] - rows[0]["time_s"])
    return {**{name: found[name]["cpu_share"] for name in LIGHT}, "samples_per_s": samples}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    chosen = parser.parse_args()
    load = os.getloadavg()[0]
    runs = [run(seed, chosen.steps) for seed in range(chosen.runs)]
    row = {name: round(statistics.median(one[name] for one in runs), 4) for name in (*LIGHT, "samples_per_s")}
    row["sum"] = round(statistics.median(sum(one[name] for name in LIGHT) for one in runs), 4)
    result = {
        "machine": report.machine(),
        "commit": report.commit(ROOT),
        "load_before": load,
        "median": row,
        "runs": runs,
    }
    (RESULTS / "shares.json").write_text(json.dumps(result, indent=1) + "\n")
    for name in LIGHT:
        print(f"{name:10} {row[name]:6.1%} of a core")
    print(f"{'together':10} {row['sum']:6.1%} (bar {BAR:.0%}) at {row['samples_per_s']:,.0f} samples/s")
