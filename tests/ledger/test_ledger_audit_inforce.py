"""Values that changed during a run: each record is judged by what was in force while its groups were in flight."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from busrl.ledger.audit import render
from busrl.ledger.wal import Terms, Wal

ASYNC = {"mode": "batch-async", "max_staleness": 4, "over_age": "drop"}
SYNC = {**ASYNC, "mode": "sync"}


def topology(run, weights: dict[str, Any], **tables: dict[str, Any]) -> None:
    """What topology.json says by now."""
    path = run.root / "topology.json"
    content = json.loads(path.read_text())
    for name, keys in {"weights": weights, **tables}.items():
        content[name] = {**content.get(name, {}), **keys}
    path.write_text(json.dumps(content))


def start(run, step: int, **changes: tuple[Any, Any]) -> None:
    """A start at that step, and the keys (`section__name`) that it found changed."""
    told = {key.replace("__", "."): {"was": was, "now": now} for key, (was, now) in changes.items()}
    with open(run.root / "starts.jsonl", "a") as file:
        file.write(json.dumps({"time": 100.0 * step, "pid": 1, "step": step, "changes": told}) + "\n")


def asked(run, step: int, key: str, old: str, new: str, ok: bool = True) -> None:
    """A `busrl set` at that step."""
    row = {"id": f"{key}{step}", "verb": "set", "ok": ok, "key": key, "old": old, "new": new, "step": step}
    with open(run.root / "control.jsonl", "a") as file:
        file.write(json.dumps({**row, "who": "me", "time": 100.0 * step}) + "\n")


def trained(run, *ages: int, bounds: tuple[int | None, ...] = ()) -> None:
    """A step for each age, of one group that has it; `bounds`: what each record says that it was made by."""
    for at, age in enumerate(ages):
        step, draw = at + 1, at
        version = step - 1 - age
        lie = {"version": version, "step": version, "versions": np.full(3, version, "<u4").tobytes()}
        record = run.record(step, run.group(draw), dict.fromkeys(run.group(draw), lie))
        terms = Terms(bounds[at]) if bounds else None
        with Wal(run.root / "wal", sync=False) as wal:
            wal.append(msgspec.structs.replace(record, terms=terms))
        run.fates.update(dict.fromkeys(run.group(draw), "T"))
    run.open()


def too_old(run) -> tuple[int | str, ...]:
    """The groups that are above the bound; no other error is there."""
    report = run.audit()
    assert report.kinds <= {"too_old"}, render(report)
    return report.errors[0].examples if report.errors else ()


# What the topology says now, what a start at step 3 changed, ages of the steps, and the groups that were too old.
CHANGED = {
    "to sync": (SYNC, {"weights__mode": ("batch-async", "sync")}, (0, 1, 2, 0, 0), ()),
    "a smaller bound": ({**ASYNC, "max_staleness": 1}, {"weights__max_staleness": (3, 1)}, (0, 1, 2, 1, 1), ()),
    "a larger bound": ({**ASYNC, "max_staleness": 3}, {"weights__max_staleness": (1, 3)}, (0, 1, 1, 3, 3), ()),
    "a bound after none": (
        {**ASYNC, "max_staleness": 1}, {"weights__mode": ("fully-async", "batch-async")}, (0, 1, 2, 3, 1), (),
    ),
    "in flight at the change": (SYNC, {"weights__mode": ("batch-async", "sync")}, (0, 1, 2, 2, 3), ()),
    "admitted just before it, and after it": (
        {**ASYNC, "max_staleness": 1}, {"weights__max_staleness": (4, 1)}, (0, 0, 0, 0, 0, 0, 3, 2), (7,),
    ),
    "before a larger bound": ({**ASYNC, "max_staleness": 4}, {"weights__max_staleness": (1, 4)}, (0, 1, 2, 0), (2,)),
    "of a key that says nothing of ages": ({**ASYNC, "max_staleness": 1}, {"learner__lr": (1, 2)}, (0, 1, 2), (2,)),
    "of segments": (
        {**SYNC}, {"segments__rounds": ("segments", "groups"), "segments__length": (8, 0)}, (0, 1, 2, 0), (),
    ),
}


@pytest.mark.parametrize("case", CHANGED)
def test_a_group_is_judged_by_the_bound_that_was_in_force_then(run, case: str) -> None:
    now, changes, ages, wrong = CHANGED[case]
    topology(run, now, segments={"max_segments": 3})
    start(run, 0)
    start(run, 3, **changes)
    trained(run, *ages)
    assert too_old(run) == wrong


@pytest.mark.parametrize(("ok", "wrong"), [(True, ()), (False, (2,))])
def test_a_bound_that_was_set_in_flight_counts_from_its_line_on(run, ok: bool, wrong: tuple[int, ...]) -> None:
    topology(run, {**ASYNC, "max_staleness": 1})
    asked(run, 3, "weights.max_staleness", "4", "1", ok)
    trained(run, 0, 1, 2, 1)
    assert too_old(run) == wrong


def test_starts_and_people_are_folded_in_the_order_of_their_times(run) -> None:
    topology(run, {**ASYNC, "max_staleness": 1})
    start(run, 2, weights__max_staleness=(0, 3))
    asked(run, 4, "weights.max_staleness", "3", "1")
    trained(run, 0, 1, 2, 3, 1)
    assert too_old(run) == (1,), "before the start nothing but 0 was allowed"


def test_a_value_taken_up_late_is_the_one_of_the_record(run) -> None:
    """Asked at step 1, in force from step 5 on: groups of in between keep the bound that they were admitted under."""
    topology(run, {**ASYNC, "max_staleness": 1})
    asked(run, 1, "weights.max_staleness", "4", "1")
    trained(run, 0, 0, 0, 0, 2, 3, 1, bounds=(4, 4, 4, 4, 4, 1, 1))
    report = run.audit()
    assert not report.errors, render(report)
    assert [(finding.kind, finding.examples) for finding in report.findings] == [("bound_of_before", (5,))]


def test_a_record_above_the_bound_that_it_names_itself_is_too_old(run) -> None:
    topology(run, {**ASYNC, "max_staleness": 4})
    start(run, 1, weights__max_staleness=(1, 4))
    trained(run, 0, 1, 2, bounds=(1, 1, 1))
    assert not run.audit().errors, "admitted when the next start allowed 4 already"
    topology(run, {**ASYNC, "max_staleness": 1})
    (run.root / "starts.jsonl").unlink()
    assert too_old(run) == (2,)


def test_a_record_that_names_a_bound_which_nobody_gave_is_found(run) -> None:
    topology(run, {**ASYNC, "max_staleness": 1})
    trained(run, 0, 1, 2, bounds=(1, 1, 9))
    report = run.audit()
    assert report.kinds == {"unknown_bound"} and report.errors[0].examples == (3,)


@pytest.mark.parametrize(
    "line", ["", "{", '{"time": 1}', '{"time": 1, "step": 2, "changes": {"weights.mode": {}}}', "[]"]
)
def test_damaged_lines_of_starts_tell_of_no_change(run, line: str) -> None:
    topology(run, {**ASYNC, "max_staleness": 1})
    (run.root / "starts.jsonl").write_text(line + "\n")
    trained(run, 0, 1, 2)
    assert too_old(run) == (2,)


@pytest.mark.parametrize("was", ["soon", None, [1], {"a": 2}, 2.5, True])
def test_a_value_that_is_no_number_promises_nothing(run, was: object) -> None:
    topology(run, {**ASYNC, "max_staleness": 1})
    start(run, 3, weights__max_staleness=(was, 1), segments__max_segments=(was, 3))
    trained(run, 0, 1, 2, 3, 1)
    assert too_old(run) == ()


# -- the log itself: kept now, and not before, or the other way round -----


def test_what_was_rolled_back_before_a_log_was_kept_is_no_loss(run) -> None:
    run.step(1, run.group(0), log=False)
    run.checkpoint(1)
    run.step(2, run.group(1), log=False)  # its learner died: without a log it is gone
    run.history = run.group(0)
    start(run, 2, learner__wal=("off", "sync"))
    run.open()
    report = run.audit()
    assert not report.errors, render(report)
    assert [(finding.kind, finding.count) for finding in report.findings] == [("rolled_back", 4)]


def test_a_loss_after_a_log_was_kept_is_one_still(run) -> None:
    run.step(1, run.group(0), log=False)
    run.checkpoint(1)
    start(run, 1, learner__wal=("off", "sync"))
    run.step(2, run.group(1))
    run.step(3, run.group(2), log=False)
    run.open()
    report = run.audit()
    assert "trained_unlogged" in report.kinds
    assert next(error for error in report.errors if error.kind == "trained_unlogged").examples == (*run.group(2),)
