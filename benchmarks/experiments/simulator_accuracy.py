"""Accuracy of the simulator: fitted on one run, it predicts other runs, which are then measured.

    python -m benchmarks simulator-accuracy [--rounds R] [--steps S] [--only quickstart scripted]

In each round every case is run for real, one after the other. The first case is fitted; from that fit alone the others
are simulated, and the first one again with another seed of the simulation. The figures are trained samples per second,
generated tokens per second and the busy shares of learner and rollout, as ratios predicted / measured; the median over
the rounds is judged against the bar of 10 %. A machine that does other work changes its speed between two runs: look at
the spread of the rounds, and at the load in the result. Writes results/simulator_accuracy.json and .md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks import EXPERIMENT_RESULTS, ROOT
from benchmarks.common.runs import run
from busrl.ledger.trained import step_lines
from busrl.simulate.fit import Fitted, fit
from busrl.simulate.settings import make
from busrl.simulate.world import World
from busrl.topology import Topology
from busrl.topology.schema import Process

BAR = 0.10
FIGURES = ("samples_per_s", "generated_per_s", "learner_busy", "rollout_busy")
QUICKSTART = ROOT / "configs" / "quickstart.toml"
SCRIPTED = ROOT / "configs" / "scripted.toml"
PLAIN = ["process.validator.count=0"]
CASES: dict[str, tuple[Path, dict[str, list[str]]]] = {
    "quickstart": (QUICKSTART, {
        "as it is": PLAIN,
        "seed 1": [*PLAIN, "run.seed=1"],
        "n_min 16": [*PLAIN, "learner.trigger.n_min=16"],
        "max_batch 64": [*PLAIN, "generation.max_batch=64"],
    }),
    "scripted": (SCRIPTED, {
        "as it is": [],
        "n_min 8": ["learner.trigger.n_min=8"],
        "max_batch 4": ["generation.max_batch=4"],
        "8 actors": ["process.rollout.count=8"],
    }),
}


def available(name: str) -> bool:
    """Tell whether this busrl has what the case needs: the scripted engine came later than the simulator."""
    engines = Process.__dataclass_fields__["engine"].metadata["rule"].choices
    return CASES[name][0].exists() and (name != "scripted" or "mock" in engines)


def measured(folder: Path) -> dict[str, float]:
    """Figures of a finished run, between its first and its last step."""
    rows = step_lines(folder / "metrics.jsonl")
    span = rows[-1]["time_s"] - rows[0]["time_s"]
    waited = sum(sum(row["wait_s"].values()) for row in rows[1:])
    intervals = []
    for file in (folder / "pace").glob("*.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        worked = [i for i, line in enumerate(lines) if line["steps"]]
        intervals += lines[worked[0] + 1 : worked[-1]] if worked else []
    wall = sum(line["wall_s"] for line in intervals)
    actors = len(list((folder / "pace").glob("*.jsonl")))
    return {
        "samples_per_s": sum(row["samples"] for row in rows[1:]) / span,
        "generated_per_s": actors * sum(line["tokens"] for line in intervals) / wall,
        "learner_busy": 1 - waited / span,
        "rollout_busy": sum(line["step_s"] for line in intervals) / wall,
    }


def foretold(fitted: Fitted, topology: Topology, seed: int) -> dict[str, float]:
    """Figures of a simulated run."""
    setting = make(topology, fitted, steps=topology.run.max_steps, seed=seed)
    figures = World(
        topology, setting.times, setting.answers, actors=setting.actors, steps=setting.steps, seed=seed
    ).run()
    span = figures.rows[-1].time_s - figures.rows[0].time_s
    return {
        "samples_per_s": sum(row.samples for row in figures.rows[1:]) / span,
        "generated_per_s": figures.generated_tokens_per_s,
        "learner_busy": figures.learner_busy,
        "rollout_busy": figures.actors_busy * setting.times.busy_share,
    }


def one_round(name: str, steps: int, number: int) -> list[dict[str, Any]]:
    """Every case, run and foretold."""
    config, cases = CASES[name]
    rows, fitted = [], None
    for case, settings in cases.items():
        load = os.getloadavg()[0]
        with run(*settings, f"run.max_steps={steps}", config=config) as real_run:
            if real_run.wait() != 0:
                raise RuntimeError(f"{name}, {case}: the run failed: {real_run.tail()}")
            fitted = fitted or fit(real_run.directory)
            topology = Topology.from_json(real_run.paths.topology.read_text())
            real = measured(real_run.directory)
            predicted = foretold(fitted, topology, seed=number + 1)
        ratios = {figure: predicted[figure] / real[figure] for figure in FIGURES}
        rows.append({"experiment": name, "case": case, "round": number, "load": load, "measured": real,
                     "foretold": predicted, "ratio": ratios})
        shown = ", ".join(f"{figure} {real[figure]:.3g} / {predicted[figure]:.3g}" for figure in FIGURES)
        print(f"{name}, {case}: {shown}", flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Medians of the ratios over the rounds, and their range."""
    lines = ["| run | case | " + " | ".join(FIGURES) + " | within 10 % |", "|---" * (len(FIGURES) + 3) + "|"]
    for name, case in dict.fromkeys((row["experiment"], row["case"]) for row in rows):
        mine = [row["ratio"] for row in rows if (row["experiment"], row["case"]) == (name, case)]
        medians = {figure: statistics.median(ratio[figure] for ratio in mine) for figure in FIGURES}
        texts = [
            f"{medians[f]:.3f} ({min(r[f] for r in mine):.2f} to {max(r[f] for r in mine):.2f})" for f in FIGURES
        ]
        met = "yes" if all(abs(value - 1) <= BAR for value in medians.values()) else "no"
        lines.append(f"| {name} | {case} | " + " | ".join(texts) + f" | {met} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=60)
    arguments.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    options = arguments.parse_args()
    rows: list[dict[str, Any]] = []
    for number in range(options.rounds):
        for name in options.only:
            if available(name):
                rows += one_round(name, options.steps, number)
            else:
                print(f"{name}: not in this busrl (no {CASES[name][0].name}, or no scripted engine); left out")
    EXPERIMENT_RESULTS.mkdir(exist_ok=True)
    result = {"when": time.strftime("%Y-%m-%d %H:%M"), "cores": os.cpu_count(), "steps": options.steps, "rows": rows}
    (EXPERIMENT_RESULTS / "simulator_accuracy.json").write_text(json.dumps(result, indent=1) + "\n")
    (EXPERIMENT_RESULTS / "simulator_accuracy.md").write_text(table(rows))
    print(table(rows))
    return 0
