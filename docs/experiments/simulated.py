"""Schedules on 8, 64, 1,024 and 10,000 simulated actors: which pays, and when.

    python docs/experiments/simulated.py [--only dispatch segments trigger window] [--actors 8 64 ...] [--seeds N]

The workload is a long-tailed trace (median 400 tokens, at most 8,192, groups of 8) on actors of 8 rows (1 row for 1,024
and more), with so many groups in flight that there are 1.2 slots per row, and a learner that could train 1.25 times
what the actors can make: generation is the bottleneck, as in most real runs.

dispatch  policies x predictors: trained samples/s in a closed loop; mean and p99 time to the reward and p99 wait in an
          open stream at 0.9 of what fifo manages in a closed loop (fully-async); seconds of a synchronous round of
          four answers per row
segments  answers cut into 1, 2, 4 and 8 segments at most
trigger   fixed thresholds, a time limit, and the controller where this busrl has one
window    the anchored window against taking whatever is ready first

A figure is the median over the seeds. Policies, predictors and controllers that this busrl does not have are left out.
Writes results/simulated_NAME.md and .json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from busrl.data.tracemaker import Shape, generate
from busrl.simulate import Figures, Times, TraceAnswers, World
from busrl.topology import Topology, load
from busrl.topology.schema import Scheduler

ROOT = Path(__file__).resolve().parents[2]
OUT = Path(__file__).resolve().parent / "results"
GROUP, LIMIT, PROMPTS = 8, 8192, 4096
SCALES = (8, 64, 1024, 10_000)
STEPS, ROUNDS = {8: 40, 64: 40, 1024: 20, 10_000: 10}, 4
SLOTS_PER_ROW, LEARNER_REACH, OPEN_LOAD, SYNC_PER_ROW = 1.2, 1.25, 0.9, 4
B_PER_N_MIN = 2.35  # batch-async with max_staleness = 2
LENGTH_MEAN = 640.0  # of the trace, for the time limit
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One workload: a scale and a seed."""

    actors: int
    seed: int

    @property
    def rows(self) -> int:
        return 8 if self.actors < 1000 else 1

    @property
    def n_min(self) -> int:
        return max(2, round(self.actors * self.rows * SLOTS_PER_ROW / GROUP / B_PER_N_MIN))

    @property
    def times(self) -> Times:
        step_s, row_s = 0.02, 0.0005
        capacity = self.actors * self.rows / (step_s + row_s * self.rows)
        return Times(
            step_s=step_s, row_s=row_s, sequence_s=0.002, prefill_token_s=2e-5, weights_s=0.5, reward_s=0.1,
            learner_step_s=0.5, learner_token_s=1 / (LEARNER_REACH * capacity), learner_group_s=1e-5, publish_s=0.1,
            checkpoint_s=0.0,
        )  # fmt: skip

    def topology(self, *more: str) -> Topology:
        return load(ROOT / "configs" / "quickstart.toml", [
            f"learner.trigger.n_min={self.n_min}", f"generation.max_batch={self.rows}", f"groups.size={GROUP}",
            f"generation.max_new_tokens={LIMIT}", "learner.checkpoint_every=0", *more,
        ])  # fmt: skip

    def answers(self, arrivals_per_s: float = 0.0, prompts: int = PROMPTS) -> TraceAnswers:
        shape = Shape(group_size=GROUP, limit=LIMIT, arrivals_per_s=arrivals_per_s)
        tasks = generate(prompts, shape, self.seed)
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
        )  # fmt: skip
        if change is not None:
            change(world)
        return world.run()


def schedules() -> list[tuple[str, str]]:
    """Every policy with every predictor of this busrl; `oracle` is always there."""
    rules = {name: Scheduler.__dataclass_fields__[name].metadata["rule"].choices for name in ("policy", "predictor")}
    predictors = list(dict.fromkeys([*rules["predictor"], "oracle"]))
    return [("fifo", ""), *((p, q) for p in rules["policy"] if p != "fifo" for q in predictors)]


def dispatch(case: Case) -> list[Row]:
    """Policies x predictors in three situations."""
    rows, free = [], "weights.mode=fully-async"
    usual = case.play(case.topology(free), case.answers())
    arrivals = OPEN_LOAD * usual.tasks / GROUP / usual.seconds
    big = [f"learner.trigger.n_min={case.actors * case.rows * SYNC_PER_ROW // GROUP}", "weights.mode=sync"]
    for policy, predictor in schedules():
        chosen = [f"scheduler.policy={policy}"]
        chosen += [f"scheduler.predictor={predictor}"] if predictor not in ("", "oracle") else []
        named = {"oracle": predictor == "oracle"}
        closed = case.play(case.topology(*chosen), case.answers(), **named)
        prompts = case.answers(arrivals, prompts=max(200, 12 * case.n_min))
        stream = case.play(case.topology(*chosen, free), prompts, steps=10**6, **named)
        rounds = case.play(case.topology(*chosen, *big), case.answers(), steps=ROUNDS, **named)
        rows.append({
            "policy": policy, "predictor": predictor or "-", "samples/s": closed.samples_per_s,
            "tokens/s": closed.tokens_per_s, "skew": closed.skew, "age": closed.age_mean,
            "stream: answered s": stream.completion_mean_s, "stream: answered p99 s": stream.completion_p99_s,
            "stream: begun p99 s": stream.queued_p99_s, "sync: round s": rounds.step_s,
        })  # fmt: skip
    return rows


def segments(case: Case) -> list[Row]:
    """Answers in at most 1, 2, 4 and 8 segments; without them and in both modes."""
    rows = []
    for mode in ("batch-async", "sync"):
        for most in (1, 2, 4, 8):
            length = 0 if most == 1 else -(-LIMIT // most)
            found = case.play(case.topology(f"weights.mode={mode}"), case.answers(), segment_length=length)
            rows.append({
                "mode": mode, "segments": most, "samples/s": found.samples_per_s, "tokens/s": found.tokens_per_s,
                "rollout busy": found.actors_busy, "group p99 s": found.group_p99_s, "skew": found.skew,
                "age": found.age_mean,
            })  # fmt: skip
    return rows


def trigger(case: Case) -> list[Row]:
    """Fixed thresholds around n_min with the same groups in flight, a time limit, and the controller."""
    n, limit_ms = case.n_min, 1000 * LENGTH_MEAN * (case.times.step_s + case.times.row_s * case.rows)
    settings = {
        "n_min / 2, S = 5": [f"learner.trigger.n_min={max(1, n // 2)}", "weights.max_staleness=5"],
        "n_min, S = 2": [],
        "2 n_min, S = 1": [f"learner.trigger.n_min={2 * n}", "weights.max_staleness=1"],
        "n_min, t_max": [f"learner.trigger.t_max={limit_ms:.0f}"],
    }
    rows = []
    for name, chosen in settings.items():
        found = case.play(case.topology(*chosen), case.answers())
        rows.append({
            "trigger": name, "samples/s": found.samples_per_s, "s/step": found.step_s, "age": found.age_mean,
            "age max": found.age_max, "rollout busy": found.actors_busy, "stalled": found.actors_stalled,
            "learner busy": found.learner_busy, "by time": found.causes.get("time", 0) / max(1, found.steps),
        })  # fmt: skip
    return rows


def window(case: Case) -> list[Row]:
    """The window against greedy (any ready group may be trained), both under the bound on age, and without it."""
    rows = []
    for mode, greedy in (("batch-async", False), ("batch-async", True), ("fully-async", False), ("fully-async", True)):
        found = case.play(case.topology(f"weights.mode={mode}"), case.answers(), change=_greedy if greedy else None)
        rows.append({
            "mode": mode, "order": "greedy" if greedy else "window", "samples/s": found.samples_per_s,
            "tokens/s": found.tokens_per_s, "skew": found.skew, "age": found.age_mean, "age max": found.age_max,
            "rollout busy": found.actors_busy, "waits for window": found.learner_waited.get("window", 0.0),
        })  # fmt: skip
    return rows


def _greedy(world: World) -> None:
    plan = world.learner.plan
    plan.limits = replace(plan.limits, W=1 << 40)


EXPERIMENTS: dict[str, Callable[[Case], list[Row]]] = {
    "dispatch": dispatch, "segments": segments, "trigger": trigger, "window": window,
}  # fmt: skip


def median(runs: Sequence[list[Row]]) -> list[Row]:
    """Row by row over the seeds; text stays."""
    return [
        {key: value if isinstance(value, str) else statistics.median(run[i][key] for run in runs)
         for key, value in row.items()}
        for i, row in enumerate(runs[0])
    ]  # fmt: skip


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
    OUT.mkdir(exist_ok=True)
    for name in options.only:
        rows: list[Row] = []
        for actors in options.actors:
            begun = time.process_time()
            runs = [EXPERIMENTS[name](Case(actors, seed)) for seed in range(options.seeds)]
            rows += [{"actors": actors, **row} for row in median(runs)]
            print(f"{name}, {actors} actors: {time.process_time() - begun:.1f} s of CPU", flush=True)
        (OUT / f"simulated_{name}.md").write_text(table(rows))
        (OUT / f"simulated_{name}.json").write_text(json.dumps(rows, indent=1) + "\n")
        print(table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
