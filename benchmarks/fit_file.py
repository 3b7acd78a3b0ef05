"""Fit file of the quickstart for `busrl simulate` (configs/quickstart.fit.jsonl), from a finished run of it.

    python -m benchmarks fit-file RUN_DIR

Lengths and rewards are those of the run: PER_STEP typical groups of every STRIDEth step (evenly spaced in the order of
being flat and of mean length). Times are not those of the run, whose machine may have had other work, but those below,
from published figures of a quiet 2-core machine:

- benchmarks/experiments/results/simulator_accuracy.json (60 steps): 37k tokens a second with 256 rows, 29k with 64; the
  learner busy for 101 ms of a step of 32 groups, for 57 ms of one of 16.
- 150 steps of an earlier model of the quickstart: 50 s, learner busy for 41 %, rollout for 88 %.
How a step of decoding is shared out between rows and joining sequences is that of RUN_DIR, scaled.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
import numpy as np

from benchmarks import ROOT
from busrl.data.prompts import plain_text, training_stream
from busrl.paths import RunPaths
from busrl.topology import Topology

FILE = ROOT / "configs" / "quickstart.fit.jsonl"
PER_STEP, STRIDE = 8, 2
SOURCE = "measured, quickstart on two cores"
TIMES = {
    "step_s": 0.00085, "row_s": 8.2e-6, "sequence_s": 8.6e-5, "prefill_token_s": 0.0, "weights_s": 0.001,
    "speed_spread": 0.0, "step_spread": 0.0, "reward_s": 0.03, "reward_call_s": 0.0, "learner_step_s": 0.016,
    "learner_token_s": 2.2e-5,
    "learner_group_s": 0.00037, "publish_s": 0.0012, "learner_spread": 0.0, "checkpoint_s": 0.05, "busy_share": 0.97,
}


def groups_of(run: Path) -> list[tuple[int, str, list[int], str]]:
    """Step, prompt, lengths and rewards of the groups that are kept."""
    paths = RunPaths.of(run)
    topology = Topology.from_json(paths.topology.read_text())
    stream = training_stream(topology)
    by_step: dict[int, list[tuple[int, str, list[int], str]]] = {}
    for line in paths.groups.read_bytes().splitlines():
        row = msgspec.json.decode(line)
        for draw, step, lengths, rewards in zip(row["draws"], row["born"], row["lengths"], row["rewards"]):
            text = "".join("1" if reward >= 0.5 else "0" for reward in rewards)
            prompt = plain_text(stream.record(stream.item(draw))[stream.prompt_key])
            by_step.setdefault(step, []).append((step, prompt, lengths, text))
    return [group for step in sorted(by_step) if step % STRIDE == 0 for group in typical(by_step[step])]


def typical(groups: list[tuple[int, str, list[int], str]]) -> list[tuple[int, str, list[int], str]]:
    """PER_STEP of them, evenly spaced in the order of being flat and of length."""
    ordered = sorted(groups, key=lambda group: (len(set(group[3])) == 1, float(np.mean(group[2]))))
    places = np.linspace(0, len(ordered), min(PER_STEP, len(ordered)), endpoint=False) + len(ordered) / PER_STEP / 2
    return [ordered[min(int(place), len(ordered) - 1)] for place in places]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    options = parser.parse_args()
    head = {"source": SOURCE, "model": "tiny:sort", "data": "tiny:sort", "times": TIMES}
    rows = [head, *groups_of(options.run)]
    lines = [msgspec.json.encode(row) for row in rows]
    FILE.write_bytes(b"\n".join(lines) + b"\n")
    print(f"{FILE}: {len(lines) - 1} groups, {FILE.stat().st_size} bytes")
