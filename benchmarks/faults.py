"""Cost of lost messages on the quickstart, and slots taken because a doorbell came while none is lost.

    python -m benchmarks faults [--steps 60] [--rounds 3] [--out benchmarks/results]

Cost: the quickstart with 0, 30 and 100 % of its messages lost, in turns; seconds from the first step to the last.
Doorbells: one run without loss whose rollout and reward worker note why they looked when they took slots
(`measured_role.py`): because a doorbell had come, or because their timer ended.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, ROOT
from benchmarks.common import report
from benchmarks.common.runs import BenchRun, quantiles, run
from busrl.ledger.trained import step_lines

SHARES = (0.0, 0.3, 1.0)
MEASURED = ROOT / "benchmarks" / "common" / "measured_role.py"


def seconds(share: float, steps: int, seed: int) -> float:
    """From the first step to the last, as metrics.jsonl has it."""
    settings = [f"run.max_steps={steps}", f"faults.seed={seed}"]
    settings += [f"faults.bus=[{{drop={share}}}]"] if share else []
    with run(*settings) as lossy:
        finish(lossy)
        times = [row["time_s"] for row in step_lines(lossy.paths.metrics)]
    return float(times[-1] - times[0])


def finish(finished: BenchRun) -> None:
    code, summary = finished.wait(), finished.summary()
    if code or not summary["audit"]["clean"]:
        raise RuntimeError(f"the run ended with {code}: {finished.tail()}")


def cost(steps: int, rounds: int) -> dict[str, Any]:
    """Seconds per share, and the ratios to the run without loss of the same round."""
    took: dict[float, list[float]] = {share: [] for share in SHARES}
    for seed in range(rounds):
        for share in SHARES:
            took[share].append(round(seconds(share, steps, seed), 3))
    base = took[0.0]
    return {
        f"{share:.0%}": {
            "seconds": took[share],
            "median_s": statistics.median(took[share]),
            "ratio": round(statistics.median(mine / other for mine, other in zip(took[share], base)), 3),
        }
        for share in SHARES
    }


def doorbells(steps: int) -> dict[str, Any]:
    """Why slots were taken."""
    command = json.dumps([sys.executable, str(MEASURED)])
    with run(
        f"run.max_steps={steps}", f"process.rollout.command={command}", f"process.reward.command={command}"
    ) as measured:
        finish(measured)
        reports = {
            role: json.loads((measured.directory / f"measured-{role}.json").read_text())
            for role in ("rollout", "reward")
        }
    return {role: doorbells_of(role, report) for role, report in reports.items()}


def doorbells_of(role: str, report: dict[str, Any]) -> dict[str, Any]:
    slots = Counter(report["slots"])
    # A rollout hears the ring's futex word; its messages (NEW_TASK) only say the same again, later.
    message = {"doorbell_sent_to_claim": quantiles(report["bell_ms"])} if role == "reward" else {}
    return {
        "slots": slots,
        "looks": report["looks"],
        # What was taken when room came free had its doorbell earlier; the question is what a timer had to find.
        "share_after_a_doorbell": round(slots["bell"] / max(1, slots["bell"] + slots["timer"]), 4),
        **message,
        "at_rest_to_claim_of_a_waiting_worker": quantiles(report["rest_ms"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=["doorbells", "cost"], default=["doorbells", "cost"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    result: dict[str, Any] = {
        "machine": report.machine(), "date": time.strftime("%Y-%m-%d"), "load_before": os.getloadavg(),
        "what": __doc__.split("\n")[0], "steps": options.steps,
    }
    if "doorbells" in options.parts:
        result["doorbells"] = doorbells(options.steps)
        print(json.dumps(result["doorbells"], indent=2), flush=True)
    if "cost" in options.parts:
        result["cost"] = cost(options.steps, options.rounds)
        print(json.dumps(result["cost"], indent=2), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"faults_{result['machine']['cores']}cores_{result['date']}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(path)
