"""A controller in a real run: it moves the trigger, its log explains every step, and a kill changes no decision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checks import check_end
from harness import Run, read_lines, running

from busrl.predict.controller import Controller, Inputs
from busrl.predict.observer import controller_settings
from busrl.predict.observer import read_lines as valid_lines
from busrl.topology import Topology

HERE, RULES = "learner.controller.", "experiments.controller."
JUMPY = [  # thresholds so near to 1 that a few steps of learning cross them
    f"{HERE}mode=act", f"{RULES}reference_steps=6", f"{RULES}high=1.03", f"{RULES}low=0.97", f"{RULES}hysteresis=0.005",
    f"{RULES}ema=0", f"{RULES}probe_every=1", f"{HERE}every=2", f"{HERE}cooldown=4", "weights.max_staleness=4",
]


def decided_again(run: Run) -> list[dict[str, Any] | None]:
    """What a fresh controller decides when it is given the inputs that the run wrote down."""
    settings = controller_settings(Topology.from_json(run.paths.topology.read_text()))
    assert settings is not None
    controller = Controller(settings)
    lines = []
    for line in valid_lines(run.paths.decisions).values():
        decision = controller.observe(Inputs.from_dict(line))
        lines.append(decision.to_dict() if decision else None)
    return lines


def check_decisions(run: Run) -> list[dict[str, Any]]:
    """Every step has its line, and the lines follow from each other. Returns the decisions that were carried out."""
    lines = valid_lines(run.paths.decisions)
    assert list(lines) == list(range(1, run.steps + 1))
    written = [line["decision"] for line in lines.values()]
    assert decided_again(run) == written
    return [decision for decision in written if decision and decision["applied"]]


@pytest.mark.slow
def test_a_killed_learner_goes_on_deciding_as_if_nothing_had_happened(tmp_path: Path, quickstart: None) -> None:
    run = Run(tmp_path / "run", *JUMPY, steps=26)
    with running(run):
        run.until("a decision", lambda: any((line["decision"] or {}).get("applied") for line in lines_of(run)))
        run.kill("learner")
        code = run.wait()
    check_end(run, code)
    applied = check_decisions(run)
    assert applied and run.restarts("learner") == 1
    rows = {row["step"]: row for row in run.metrics() if not row.get("replayed")}
    for decision in applied:
        after = rows.get(decision["step"] + 1)
        if after is not None:
            assert after["n_min"] == decision["new"]["n_min"] and after["groups"] >= after["n_min"]
    assert {4, 8, 16} >= {row["n_min"] for row in rows.values()} != {8}
    assert max(row["age_max"] for row in rows.values()) <= 4


def lines_of(run: Run) -> list[dict[str, Any]]:
    return read_lines(run.paths.decisions)


@pytest.mark.slow
@pytest.mark.parametrize("wal", ["async", "off"])
def test_many_deaths_and_lost_steps_leave_a_log_that_explains_itself(
    wal: str, tmp_path: Path, quickstart: None
) -> None:
    run = Run(tmp_path / "run", *JUMPY, f"learner.wal={wal}", "learner.checkpoint_every=4", steps=40)
    with running(run):
        run.kill_at_random_steps(["learner", "scheduler"], 3, seed=5)
        code = run.wait()
    check_end(run, code)
    if wal == "async":
        assert check_decisions(run)
    else:  # a step that was rolled back has a new line, and what the lost ones knew is gone with them
        assert list(valid_lines(run.paths.decisions)) == list(range(1, run.steps + 1))


@pytest.mark.slow
def test_budgets_count_groups_where_the_batch_varies(tmp_path: Path, quickstart: None) -> None:
    run = Run(tmp_path / "run", *JUMPY, "run.max_groups=150", "validation.every=5", "learner.checkpoint_every=5",
              steps=1000)
    with running(run):
        assert run.wait() == 0, run.tail()
    rows = run.metrics()
    assert rows[-1]["groups_total"] >= 150 > rows[-2]["groups_total"]
    assert rows[-1]["groups_total"] == sum(row["groups"] for row in rows)
    rounds = read_lines(run.paths.validation)
    assert rounds[0]["round"] == 0 and rounds[-1]["round"] == rows[-1]["step"]
    between = [row["groups"] // 40 for row in rounds[1:-1]]
    assert between and between == sorted(set(between)) and between[-1] <= 3
    saved = [row for row in rows if row["checkpoint_s"] > 0]
    assert len(saved) == rows[-2]["groups_total"] // 40
    assert not run.audit().errors


@pytest.mark.slow
def test_without_a_controller_nothing_is_written_and_advice_changes_nothing(tmp_path: Path, quickstart: None) -> None:
    off = Run(tmp_path / "off", f"{HERE}mode=off", steps=8)
    with running(off):
        check_end(off, off.wait())
    assert not off.paths.decisions.exists()
    told = Run(tmp_path / "advise", *JUMPY, f"{HERE}mode=advise", steps=20)
    with running(told):
        check_end(told, told.wait())
    assert check_decisions(told) == [] and {row["n_min"] for row in told.metrics()} == {8}
    assert any(row["control_n_min"] != 8 for row in told.metrics())
