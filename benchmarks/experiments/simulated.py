"""Schedules on 8, 64, 1,024 and 10,000 simulated actors: which pays, and when.

    python -m benchmarks simulated [--only dispatch segments trigger window] [--actors 8 64 ...] [--seeds N]

The workload is a long-tailed trace (median 400 tokens, at most 8,192, groups of 8) on actors of 8 rows (1 row for 1,024
and more), with so many groups in flight that there are 1.2 slots per row, and a learner that could train 1.25 times
what the actors can make: generation is the bottleneck, as in most real runs.

dispatch  policies x predictors: trained samples/s in a closed loop; mean and p99 time to the reward in an open stream
          at 1.2 times what the actors can make (fully-async, late dispatch, a horizon that covers the queue);
          seconds of a synchronous round of four answers per row
segments  answers cut into 1, 2, 4 and 8 segments at most, and where the length follows the answers; batch-async, and
          synchronous rounds made of segments
trigger   fixed thresholds, bounds on age and a time limit; with a slow learner: it trains a tenth of what the actors
          can make
window    the anchored window against taking whatever is ready first
capacity  how busy the learner is when generation is 0.8 to 1.3 times as fast as it needs, with S = 4, 8 and 16;
          answers of at most 2,560 tokens

A figure is the median over the seeds.
Writes results/simulated_NAME.md and .json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from benchmarks import EXPERIMENT_RESULTS, ROOT
from busrl.data.trace import Shape, make_trace
from busrl.preflight.load import load
from busrl.simulate.actors import Times
from busrl.simulate.answers import TraceAnswers
from busrl.simulate.figures import Figures
from busrl.simulate.world import World
from busrl.topology import Topology

GROUP, LIMIT, PROMPTS = 8, 8192, 4096
SCALES = (8, 64, 1024, 10_000)
STEPS, ROUNDS = {8: 40, 64: 40, 1024: 20, 10_000: 10}, 4
WAVES = 16  # steps where rounds are made of segments: the first ones fill the pool of the unfinished
STREAM_PER_ROW = 24  # answers of the open stream for each row
TRIGGER_STEPS = 60
SLOTS_PER_ROW, LEARNER_REACH, SLOW_LEARNER, OPEN_LOAD, SYNC_PER_ROW = 1.2, 1.25, 0.1, 1.2, 4
B_PER_N_MIN = 2.35  # batch-async with max_staleness = 2
SHORT = 2560  # 6.4 times the median, as in `capacity`
LENGTH_MEAN = 640.0  # of the trace, for the time limit
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Workload: a scale and a seed, and what the learner can train in units of what the actors can make."""

    actors: int
    seed: int
    reach: float = LEARNER_REACH

    @property
    def rows(self) -> int:
        return 8 if self.actors < 1000 else 1

    @property
    def n_min(self) -> int:
        return max(2, round(self.actors * self.rows * SLOTS_PER_ROW / GROUP / B_PER_N_MIN))

    @property
    def times(self) -> Times:
        step_s, row_s = 0.02, 0.0005
        return Times(
            step_s=step_s, row_s=row_s, sequence_s=0.002, prefill_token_s=2e-5, weights_s=0.5, reward_s=0.1,
            learner_step_s=0.5, learner_token_s=1 / (self.reach * self.capacity), learner_group_s=1e-5,
            publish_s=0.1, checkpoint_s=0.0,
        )

    @property
    def capacity(self) -> float:
        """Tokens per second with all rows in use."""
        return self.actors * self.rows / (0.02 + 0.0005 * self.rows)

    def topology(self, *more: str) -> Topology:
        return load(ROOT / "configs" / "quickstart.toml", [
            f"learner.trigger.n_min={self.n_min}", f"generation.max_batch={self.rows}", f"groups.size={GROUP}",
            f"generation.max_new_tokens={LIMIT}", "learner.checkpoint_every=0", *more,
        ])

    def answers(self, arrivals_per_s: float = 0.0, prompts: int = PROMPTS, limit: int = LIMIT) -> TraceAnswers:
        shape = Shape(group_size=GROUP, limit=limit, arrivals_per_s=arrivals_per_s)
        tasks = make_trace(prompts, shape, self.seed)
        return TraceAnswers(tasks, GROUP, LIMIT, flat_share=0.2, seed=self.seed, endless=not arrivals_per_s)

    def play(
        self,
        topology: Topology,
        answers: TraceAnswers,
        *,
        steps: int = 0,
        change: Callable[[World], None] | None = None,
        **more: Any,
    ) -> Figures:
        world = World(
            topology, self.times, answers, actors=self.actors, steps=steps or STEPS.get(self.actors, 20),
            seed=self.seed, **more,
        )
        if change is not None:
            change(world)
        return world.run()


PREDICTORS = ("rules", "learned", "history", "blend", "oracle")
SCHEDULES = (("fifo", ""), *((policy, name) for policy in ("sjf", "ljf", "adaptive") for name in PREDICTORS))


def dispatch(case: Case) -> list[Row]:
    """Policies x predictors in three situations."""
    rows = []
    lengths = [length for task in make_trace(PROMPTS, Shape(group_size=GROUP, limit=LIMIT), case.seed)
               for length in task.lengths]
    arrivals = OPEN_LOAD * case.capacity / GROUP / statistics.mean(lengths)
    count = STREAM_PER_ROW * case.actors * case.rows // GROUP
    free = ["weights.mode=fully-async", f"learner.trigger.n_min={2 * case.actors * case.rows // GROUP}",
            f"scheduler.ahead={GROUP}", f"scheduler.horizon={count}"]
    round_groups = case.actors * case.rows * SYNC_PER_ROW // GROUP
    # A horizon of one round: every policy has the same prompts in each, but for its edges.
    big = [f"learner.trigger.n_min={round_groups}", "weights.mode=sync", f"scheduler.horizon={round_groups}"]
    for policy, predictor in SCHEDULES:
        chosen = [f"scheduler.policy={policy}"]
        chosen += [f"scheduler.predictor={predictor}"] if predictor not in ("", "oracle") else []
        named = {"oracle": predictor == "oracle"}
        closed = case.play(case.topology(*chosen), case.answers(), **named)
        stream = case.play(case.topology(*chosen, *free), case.answers(arrivals, prompts=count), steps=10**6, **named)
        rounds = case.play(case.topology(*chosen, *big), case.answers(), steps=ROUNDS, **named)
        rows.append({
            "policy": policy, "predictor": predictor or "-", "tau": closed.told.get("predictor_tau", 0.0),
            "samples/s": closed.samples_per_s, "skew": closed.skew, "stream: answered s": stream.completion_mean_s,
            "stream: p99 s": stream.completion_p99_s, "sync: round s": rounds.seconds / ROUNDS,
        })
    return rows


def segments(case: Case) -> list[Row]:
    """Answers in at most 1, 2, 4 and 8 segments, in both modes; the last row of each chooses the length itself."""
    rows = []
    for mode, rounds in (("batch-async", "answers"), ("sync", "segments")):
        for most, length in ((1, "0"), *((most, str(-(-LIMIT // most))) for most in (2, 4, 8)), (8, "auto")):
            cut = [f"segments.length={length}", f"segments.max_segments={most}", f"segments.rounds={rounds}"]
            topology = case.topology(f"weights.mode={mode}", *(cut if most > 1 else []))
            figures = case.play(topology, case.answers(), steps=WAVES if mode == "sync" else 0)
            rows.append({
                "mode": mode, "segments": "auto" if length == "auto" else str(most), "samples/s": figures.samples_per_s,
                "tokens/s": figures.tokens_per_s, "s/step": figures.step_s, "rollout busy": figures.actors_busy,
                "skew": figures.skew, "age": figures.age_mean, "age max": figures.age_max,
            })
    return rows


def trigger(case: Case) -> list[Row]:
    """Fixed thresholds around n_min with the same groups in flight, and a time limit."""
    n, limit_ms = case.n_min, 1000 * LENGTH_MEAN * (case.times.step_s + case.times.row_s * case.rows)
    settings = {
        "n_min / 2, S = 5": [f"learner.trigger.n_min={max(1, n // 2)}", "weights.max_staleness=5"],
        "n_min, S = 2": [],
        "2 n_min, S = 1": [f"learner.trigger.n_min={2 * n}", "weights.max_staleness=1"],
        "n_min, t_max": [f"learner.trigger.t_max_s={limit_ms / 1000:g}"],
        "n_min, S = 5": ["weights.max_staleness=5"],
    }
    rows = []
    bounds = {f"n_min, S = {bound}": [f"weights.max_staleness={bound}"] for bound in (2, 3, 4, 5)}
    slow = {f"slow learner, {name}": chosen for name, chosen in bounds.items()}
    for name, chosen in (settings | slow).items():
        who = replace(case, reach=SLOW_LEARNER) if name in slow else case
        figures = who.play(who.topology(*chosen), who.answers(), steps=TRIGGER_STEPS if case.actors < 1000 else 30)
        rows.append({
            "trigger": name, "samples/s": figures.samples_per_s, "s/step": figures.step_s, "age": figures.age_mean,
            "age max": figures.age_max, "rollout busy": figures.actors_busy, "stalled": figures.actors_stalled,
            "learner busy": figures.learner_busy, "by time": figures.causes.get("time", 0) / max(1, figures.steps),
        })
    return rows


def window(case: Case) -> list[Row]:
    """The window against greedy (any ready group may be trained), both under the bound on age, and without it."""
    rows = []
    for mode, greedy in (("batch-async", False), ("batch-async", True), ("fully-async", False), ("fully-async", True)):
        figures = case.play(case.topology(f"weights.mode={mode}"), case.answers(), change=_greedy if greedy else None)
        rows.append({
            "mode": mode, "order": "greedy" if greedy else "window", "samples/s": figures.samples_per_s,
            "tokens/s": figures.tokens_per_s, "skew": figures.skew, "age": figures.age_mean, "age max": figures.age_max,
            "rollout busy": figures.actors_busy, "waits for window": figures.learner_waited.get("window", 0.0),
        })
    return rows


def capacity(case: Case) -> list[Row]:
    """The learner's share of time in training, at several speeds of generation in units of what it needs."""
    rows = []
    for bound, over in product((4, 8, 16), (0.8, 1.0, 1.1, 1.3)):
        who = replace(case, reach=1 / over)
        topology = who.topology(f"weights.max_staleness={bound}", f"learner.trigger.n_min={max(8, who.n_min)}")
        figures = who.play(topology, who.answers(limit=SHORT), steps=TRIGGER_STEPS if case.actors < 1000 else 20)
        rows.append({
            "S": f"{bound}", "generation over need": f"{over:g}", "learner busy": figures.learner_busy,
            "rollout busy": figures.actors_busy, "s/step": figures.step_s, "age": figures.age_mean,
            "waits for window": figures.learner_waited.get("window", 0.0),
        })
    return rows


def _greedy(world: World) -> None:
    plan = world.learner.plan
    plan.limits = replace(plan.limits, W=1 << 40)


EXPERIMENTS: dict[str, Callable[[Case], list[Row]]] = {
    "dispatch": dispatch, "segments": segments, "trigger": trigger, "window": window, "capacity": capacity,
}


def median(runs: Sequence[list[Row]]) -> list[Row]:
    """Row by row over the seeds; text stays."""
    return [
        {key: value if isinstance(value, str) else statistics.median(run[i][key] for run in runs)
         for key, value in row.items()}
        for i, row in enumerate(runs[0])
    ]


def table(rows: list[Row]) -> str:
    keys = list(rows[0])
    lines = ["| " + " | ".join(keys) + " |", "|---" * len(keys) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(_cell(row[key]) for key in keys) + " |" for row in rows)]) + "\n"


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", nargs="*", default=list(EXPERIMENTS), choices=list(EXPERIMENTS))
    arguments.add_argument("--actors", nargs="*", type=int, default=list(SCALES))
    arguments.add_argument("--seeds", type=int, default=3)
    options = arguments.parse_args()
    EXPERIMENT_RESULTS.mkdir(exist_ok=True)
    for name in options.only:
        for actors in options.actors:
            begun = time.process_time()
            runs = [EXPERIMENTS[name](Case(actors, seed)) for seed in range(options.seeds)]
            rows = [{"actors": actors, "seeds": options.seeds, **row} for row in median(runs)]
            print(f"{name}, {actors} actors: {time.process_time() - begun:.1f} s of CPU\n{table(rows)}", flush=True)
            keep(name, actors, rows)
    return 0


def keep(name: str, actors: int, rows: list[Row]) -> None:
    """Put the rows of one scale among those of the others."""
    for row in rows:
        row.update({key: "-" for key in ("tau", "bound at the end") if row.get(key) == 0})
    path = EXPERIMENT_RESULTS / f"simulated_{name}.json"
    others = json.loads(path.read_text()) if path.exists() else []
    merged = sorted([row for row in others if row["actors"] != actors] + rows, key=lambda row: row["actors"])
    path.write_text(json.dumps(merged, indent=1) + "\n")
    path.with_suffix(".md").write_text(table(merged))
