"""Starts of a run of two models after its launch was killed and rings were lost: each model mends what it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest
from checks import check_end
from harness import read_lines, running
from test_sides_in_a_run import three_models

from busrl.several.audit import audit
from busrl.topology import Topology

STEPS = 12


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lost", ["", "lead", "judge", "both"])
def test_a_start_without_some_rings_plays_what_they_held_again(lost: str, tmp_path: Path, quickstart: None) -> None:
    run = three_models(tmp_path, steps=STEPS)
    judge = run.paths.of_tag("judge")
    rings = {"lead": [run.paths], "judge": [judge], "both": [run.paths, judge]}.get(lost, [])
    with running(run):
        run.until_step(5)
        run.kill_launch()
        for paths in rings:
            paths.ring_file.unlink()
        run.start()
        code = run.wait()
    check_end(run, code)
    assert read_lines(judge.metrics)[-1]["step"] == STEPS
    audited = audit(run.paths.root)
    assert audited is not None and not audited.errors
    slots = Topology.from_json(run.paths.topology.read_text()).derived.limits.train_slots
    assert sum(audited.unpaired.values()) <= 2 * slots, "what was in flight, and what a finished model left out"
    assert set(audited.unpaired) <= {"alone", "finished"}
