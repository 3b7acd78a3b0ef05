"""How near to an oracle can a predictor come that knows a prompt's text and nothing else?

    python -m benchmarks stream-bound [--seeds N] [--prompts N] [--load X]

The stream of `order` (16 actors of 4 rows, groups of 4, arrivals at 1.2 times what they can generate) on the
simulator, shortest first with: the predictors that exist; `text`, which knows by how much
the words of a prompt lengthen its answers (the generator's own figure: nobody who has not seen an answer can know
more); `prompt`, which knows the typical length of a prompt's own answers as well; the oracle, which knows each
answer. Mean seconds from a prompt's arrival until all of its answers are there. Writes results/stream_bound.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import EXPERIMENT_RESULTS, ROOT
from busrl.data.trace import Shape, Spread, make_trace
from busrl.preflight.load import load
from busrl.simulate.actors import Times
from busrl.simulate.answers import TraceAnswers
from busrl.simulate.roles import Feed
from busrl.simulate.world import World

ACTORS, ROWS, GROUP, LIMIT, MEDIAN, TOKEN_S = 16, 4, 4, 512, 60.0, 0.01
TIMES = Times(
    step_s=TOKEN_S, row_s=0.0, sequence_s=0.0, prefill_token_s=0.0, weights_s=0.001, reward_s=0.005,
    learner_step_s=0.05, learner_token_s=1 / 60000, learner_group_s=1e-5, publish_s=0.005, checkpoint_s=0.0,
)
KNOWN = {"text": Spread(prompt=0, member=0, tail_share=0), "prompt": Spread(member=0, tail_share=0)}
ARMS = (
    "fifo", "sjf:rules", "sjf:learned", "sjf:history", "sjf:blend", "sjf:text", "sjf:prompt", "sjf:oracle",
)


class TellingFeed(Feed):
    """A feed whose oracle tells `lengths[draw]` instead of what will come out."""

    lengths: Sequence[Sequence[int]] = ()

    def _lengths_of(self, draw: int) -> Sequence[int]:
        return self.lengths[draw % len(self.lengths)]


def shape(spread: Spread | None = None, arrivals_per_s: float = 0.0) -> Shape:
    return Shape(GROUP, MEDIAN, LIMIT, spread or Spread(), arrivals_per_s)


def settings(policy: str, predictor: str, seed: int) -> list[str]:
    named = [f"scheduler.predictor={predictor}"] if predictor and predictor not in (*KNOWN, "oracle") else []
    return [
        f"run.seed={seed}", f"scheduler.policy={policy}", *named, "learner.trigger.n_min=64",
        f"generation.max_batch={ROWS}", f"groups.size={GROUP}", f"generation.max_new_tokens={LIMIT}",
        "learner.checkpoint_every=0", "weights.mode=fully-async", "scheduler.ahead=16", "scheduler.horizon=1024",
    ]


def play(arm: str, seed: int, options: argparse.Namespace) -> float:
    policy, _, predictor = arm.partition(":")
    mean = statistics.fmean(n for task in make_trace(options.prompts, shape(), seed) for n in task.lengths)
    rate = options.load * ACTORS * ROWS / TOKEN_S / (GROUP * mean)
    tasks = make_trace(options.prompts, shape(arrivals_per_s=rate), seed)
    topology = load(ROOT / "configs" / "quickstart.toml", settings(policy, predictor, seed))
    answers = TraceAnswers(tasks, GROUP, LIMIT, flat_share=0.2, seed=seed, endless=False)
    world = World(
        topology, TIMES, answers, actors=ACTORS, steps=10**6, seed=seed, oracle=predictor in (*KNOWN, "oracle")
    )
    if predictor in KNOWN:
        told = make_trace(options.prompts, shape(KNOWN[predictor], rate), seed)  # the same draws, with less spread
        TellingFeed.lengths = [task.lengths for task in told]
        world.scheduler.feed = TellingFeed(topology, answers, oracle=True)
    return float(world.run().completion_mean_s)


def table(options: argparse.Namespace, run: Callable[..., float] = play) -> list[dict[str, Any]]:
    means = {arm: statistics.fmean(run(arm, seed, options) for seed in range(options.seeds)) for arm in ARMS}
    return [
        {"arm": arm, "completion_s": round(mean, 3), "over_fifo": round(mean / means["fifo"], 3),
         "over_oracle": round(mean / means["sjf:oracle"], 3)}
        for arm, mean in means.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--load", type=float, default=1.2)
    options = parser.parse_args()
    rows = table(options)
    told = {"settings": vars(options), "table": rows}
    (EXPERIMENT_RESULTS / "stream_bound.json").write_text(json.dumps(told, indent=1) + "\n")
    for row in rows:
        print(row)
    return 0
