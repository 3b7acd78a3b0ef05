"""A run leaves out the prompts that it answers too well, and a killed scheduler changes none of its decisions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checks import check_end
from harness import ROOT, Run, read_lines, running

from busrl.data import trace, training_stream
from busrl.data.trace import TracedPrompt
from busrl.ledger.skips import SkipLine, skip_lines
from busrl.scheduling.pass_rates import Band, PassRates, PromptFilter
from busrl.states import Fate
from busrl.status.view import status
from busrl.topology import Topology

PROMPTS, SOLVED, SIZE = 24, 8, 4
SETTINGS = [
    "process.rollout.count=1", f"groups.size={SIZE}", "learner.trigger.n_min=4", "mock.token_s=0.0005",
    "generation.max_new_tokens=32", "data.skip.max_pass_rate=0.9", "data.skip.rest=2", "scheduler.policy=sjf",
]


def prompts(path: Path) -> Path:
    """Of every three prompts one that is always answered right."""
    tasks = [
        TracedPrompt(f"prompt {n}", (9, 5, 7, 12), "a", "", (1, 1, 1, 1) if n % 3 == 0 else (1, 0, 1, 0))
        for n in range(PROMPTS)
    ]
    trace.write(path, tasks)
    return path


@pytest.mark.long
def test_well_answered_prompts_are_left_out_despite_a_killed_scheduler(
    tmp_path: Path, quickstart: None
) -> None:
    train = prompts(tmp_path / "p.jsonl")
    run = Run(
        tmp_path / "run", *SETTINGS, f"data.train={train}", config=ROOT / "configs" / "scripted.toml", steps=24)
    with running(run):
        for step in (8, 14):
            run.until_step(step)
            run.kill("scheduler")
        check_end(run, run.wait())
    topology = Topology.from_json(run.paths.topology.read_text())
    lines = list(skip_lines(run.paths.skips))
    out = [draw for line in lines for draw in line.draws]
    assert len(out) >= 8 and len(set(out)) == len(out)
    shown = json.loads(status(run.directory, as_json=True))
    assert shown["left_out"]["p"]["draws"] == len(out) and run.metrics()[-1]["left_out"]["p"] <= len(out)
    fates = run.paths.fates.read_bytes()
    marked = [uid for uid, code in enumerate(fates) if code == Fate.SKIPPED]
    assert marked == [draw * 2 * SIZE for draw in sorted(out)]
    assert all(not any(fates[uid + 1 : uid + 2 * SIZE]) for uid in marked), "nothing of them was ever dispatched"
    again(topology, run, lines)


def again(topology: Topology, run: Run, lines: list[SkipLine]) -> None:
    """Every decision follows from the groups that the line says were known."""
    groups = [pair for row in read_lines(run.paths.groups) for pair in zip(row["draws"], row["rewards"])]
    skip = topology.data.skip
    with training_stream(topology) as stream:
        for line in lines:
            rates = PassRates(Band(0.0, skip.max_pass_rate, skip.after, skip.rest), [PROMPTS])
            for draw, rewards in groups[: line.told]:
                rates.ended(draw, stream.place(draw), sum(map(bool, rewards)), len(rewards))
            prompts = PromptFilter(rates, stream.place, stream.epochs)
            assert all(map(prompts.leaves_out, line.draws)) and rates.resting([line.draws[-1] // PROMPTS])[0] <= SOLVED
            assert all(stream.place(draw).line % 3 == 0 for draw in line.draws)
