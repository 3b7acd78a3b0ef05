"""What a run records for a simulation: pace of decoding, time in each state, groups; and that a fit can use it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from harness import Run, running

from busrl.engines.base import Statistics
from busrl.launcher.summary import ResidenceTimes
from busrl.quickstart import ensure
from busrl.roles import rollout
from busrl.simulate.fit import fit
from busrl.simulate.settings import make
from busrl.simulate.world import World


def test_stays_follow_littles_law() -> None:
    stays = ResidenceTimes()
    for i in range(9):
        # 10 slots are in it, 4 come in per second: each stays 2.5 s. Before the first step nothing counts.
        stays.look({"GENERATED": 10, "FREE": 3}, {"GENERATED": 4 * i, "FREE": 0}, step=min(1, i), now=float(i))
    summary = stays.summary()
    assert summary["generated"] == {"mean": 10.0, "per_s": 4.0, "stay_s": 2.5}
    assert summary["free"]["stay_s"] == 0.0
    assert ResidenceTimes().summary() == {}


def test_pace_writes_intervals_whose_parts_do_not_exceed_the_wall_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "PACE_EVERY_S", 0.0)
    counted = rollout.Pace(tmp_path / "pace", "rollout-0", lambda: None)
    begun = time.monotonic()
    counted.row.joined += 3
    counted.row.updates += 1
    counted.stepped(4, 12, (time.monotonic() - begun) / 2)
    counted.write_when_due()
    counted.close()
    first, last = (json.loads(line) for line in (tmp_path / "pace" / "rollout-0.jsonl").read_text().splitlines())
    assert (first["steps"], first["tokens"], first["joined"], first["updates"]) == (3, 12, 3, 1)
    assert first["step_s"] + first["idle_s"] <= first["wall_s"]
    assert (last["steps"], last["tokens"], last["joined"]) == (0, 0, 0)


def test_each_pace_line_ends_with_the_report_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "PACE_EVERY_S", 0.0)
    reports = iter([Statistics(4, 0, False, 0), Statistics(4, 1, False, 7, errors=2)])
    counted = rollout.Pace(tmp_path / "pace", "rollout-0", lambda: next(reports))
    counted.stepped(4, 4, 1e-9)
    counted.write_when_due()
    counted.close()
    lines = (tmp_path / "pace" / "rollout-0.jsonl").read_text().splitlines()
    first, last = (json.loads(line)["engine"] for line in lines)

    assert (first["errors"], last["errors"], last["waiting"], last["version"]) == (0, 2, 1, 7)


@pytest.mark.long
def test_a_real_run_can_be_fitted_and_simulated(tmp_path: Path) -> None:
    ensure("tiny:sort")
    with running(Run(tmp_path / "run", "process.validator.count=0", steps=24)) as run:
        assert run.wait() == 0, run.tail()
    last = json.loads((run.directory / "pace" / "rollout-0.jsonl").read_text().splitlines()[-1])
    assert last["engine"]["tokens"] > 0 and last["engine"]["updates"] > 0 and last["engine"]["errors"] == 0
    fitted = fit(run.directory)
    rows = run.metrics()
    trained = sum(len(group.lengths) for group in fitted.groups)
    assert trained == sum(row["samples_ended"] for row in rows)
    assert sum(map(sum, (group.lengths for group in fitted.groups))) > 0
    assert 0 < fitted.times.step_s + fitted.times.row_s < 1
    assert 0 < fitted.times.reward_s < 5
    setting = make(fitted.topology, fitted)
    figures = World(fitted.topology, setting.times, setting.answers, actors=1, steps=12).run()
    # No figure of speed is compared here: the machine is busy with other tests. Lengths must be those of the run.
    measured = sum(row["length_ended"] * row["samples_ended"] for row in rows) / trained
    assert figures.steps == 12
    assert figures.length_drawn == pytest.approx(measured, rel=0.25)
