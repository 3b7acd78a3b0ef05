"""Speed of the simulator: a million answers on ten thousand actors, on one core.

    python -m benchmarks simulator-speed [--tasks N] [--actors N] [--rounds R]

One row per actor, groups of 8, lengths of a long-tailed trace, so many groups in flight that every actor can have work,
and a learner that keeps up. Writes the median of the rounds, wall and CPU seconds, with the machine named, to
benchmarks/results/simulator_speed.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import time
from typing import Any

from benchmarks import RESULTS, ROOT
from busrl.data.trace import Shape, make_trace
from busrl.preflight.load import load
from busrl.simulate.actors import Times
from busrl.simulate.answers import TraceAnswers
from busrl.simulate.figures import Figures
from busrl.simulate.world import World

GROUP, PROMPTS, LIMIT = 8, 4096, 4096
TIMES = Times(learner_token_s=1e-7, learner_step_s=0.05)
BAR_S = 60.0


def simulated(actors: int, tasks: int) -> tuple[Figures, float, float]:
    """Figures, wall and CPU seconds of one run; making the trace is not counted."""
    n_min = max(1, round(actors / GROUP / 1.95))  # B = 2.3 n_min groups for max_staleness 2: 1.2 slots per row
    topology = load(ROOT / "configs" / "quickstart.toml", [
        f"learner.trigger.n_min={n_min}", "generation.max_batch=1", f"generation.max_new_tokens={LIMIT}",
    ])
    answers = TraceAnswers(make_trace(PROMPTS, Shape(limit=LIMIT)), GROUP, LIMIT, flat_share=0.1)
    steps = -(-tasks // (n_min * GROUP))
    wall, cpu = time.perf_counter(), time.process_time()
    figures = World(topology, TIMES, answers, actors=actors, steps=steps).run()
    return figures, time.perf_counter() - wall, time.process_time() - cpu


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--tasks", type=int, default=1_000_000)
    arguments.add_argument("--actors", type=int, default=10_000)
    arguments.add_argument("--rounds", type=int, default=3)
    options = arguments.parse_args()
    rounds: list[dict[str, Any]] = []
    for _ in range(options.rounds):
        figures, wall, cpu = simulated(options.actors, options.tasks)
        rounds.append({"wall_s": round(wall, 2), "cpu_s": round(cpu, 2), "tasks": figures.tasks, "steps": figures.steps,
                       "virtual_s": round(figures.seconds, 1), "load": os.getloadavg()[0]})
        print(rounds[-1], flush=True)
    result = {
        "what": f"{options.tasks} answers on {options.actors} actors",
        "wall_s": statistics.median(row["wall_s"] for row in rounds),
        "cpu_s": statistics.median(row["cpu_s"] for row in rounds),
        "bar_s": BAR_S,
        "memory_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "machine": {"system": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count()},
        "rounds": rounds,
    }
    path = RESULTS / "simulator_speed.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{result['what']}: {result['wall_s']} s wall, {result['cpu_s']} s CPU (bar {BAR_S:g} s); {path}")
    return 0
