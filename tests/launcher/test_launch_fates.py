"""A fate table that somebody else shortens, removes or blanks under a living run ends it by name: no hang."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable

import pytest

from busrl.paths import RunPaths
from busrl.status.view import status

pytestmark = pytest.mark.long  # whole starts of `busrl launch`

MODES = {"keeper": "well", "rollout/0": "well", "learner": "learner"}
REMEDY = "what checkpoint and log hold counts as trained, all other samples are generated again"


def blank(paths: RunPaths) -> None:
    with open(paths.fates, "r+b") as file:
        file.write(bytes(64))


def swap(paths: RunPaths) -> None:
    copy = paths.fates.with_name("copy")
    copy.write_bytes(paths.fates.read_bytes())
    copy.rename(paths.fates)


# What launch notices first: the length, or that samples which it has just seen are not in the table.
CUT = r"was made shorter by another program, from 65536 to \d bytes|2 samples in slots have no fate \(3, 4\)"
DAMAGE: dict[str, tuple[Callable[[RunPaths], object], str]] = {
    "cut to nothing": (lambda paths: os.truncate(paths.fates, 0), CUT),
    "cut within a page": (lambda paths: os.truncate(paths.fates, 2), CUT),
    "removed": (lambda paths: paths.fates.unlink(), "cannot be found any more"),
    "replaced": (swap, "is another file than at the start"),
    "blanked": (blank, r"2 samples in slots have no fate \(3, 4\)"),
}


SLOW = ("cut within a page", "removed")  # as the others, and a start takes its time


@pytest.mark.parametrize("how", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in DAMAGE])
def test_a_run_with_lost_fates_ends_and_names_file_and_remedy(scripted, how: str) -> None:
    damage, said = DAMAGE[how]
    scripted.start(MODES)
    scripted.ready("keeper")
    scripted.dispatch_one(uid=3)
    scripted.dispatch_one(uid=4)
    damage(scripted.paths)
    assert scripted.wait() == 1, scripted.output
    summary = scripted.summary()
    assert summary["outcome"] == "failed" and summary["open_samples"] == 2, summary
    assert str(scripted.paths.fates) in summary["why"] and re.search(said, summary["why"]) and REMEDY in summary["why"]
    [line] = [json.loads(line) for line in scripted.paths.errors.read_text().splitlines()]
    assert (line["process"], line["severity"], line["text"]) == ("launch", "critical", summary["why"])
    assert re.search(said, status(scripted.root)) and scripted.leftovers() == []
    scripted.start(MODES)
    scripted.ready("learner", 2)
    scripted.finish()
    assert scripted.wait() == 0, scripted.output


def test_a_ring_whose_samples_lost_their_fates_is_not_adopted(scripted) -> None:
    scripted.start(MODES)
    scripted.ready("keeper")
    scripted.dispatch_one(uid=3)
    scripted.kill_launch(MODES)
    os.truncate(scripted.paths.fates, 0)
    scripted.start(MODES)
    scripted.ready("learner", 2)
    scripted.finish()
    assert scripted.wait() == 0, scripted.output
    assert "an earlier launch left is not used" in scripted.output and "adopted" not in scripted.output
    assert "1 samples in slots have no fate (3)" in scripted.output and scripted.summary()["open_samples"] == 0


def test_a_line_that_contradicts_itself_is_not_taken_for_a_damaged_table(scripted) -> None:
    """Its uid was written over in the mapping: that costs a slot, never the run."""
    scripted.start(MODES)
    scripted.ready("keeper")
    scripted.dispatch_one(uid=3)
    with open(scripted.paths.ring_file, "r+b") as file:
        data = file.read()
        lines = int.from_bytes(data[0x50:0x58], "little")
        at = next(at for at in range(lines + 8, len(data), 128) if data[at : at + 8] == (3).to_bytes(8, "little"))
        file.seek(at)
        file.write((1 << 61).to_bytes(8, "little"))
    os.kill(scripted.lives("keeper")[0], 9)
    scripted.ready("keeper", 2)
    scripted.finish()
    scripted.wait()
    summary = scripted.summary()
    assert summary["why"] == "the goal was reached, but the audit found errors" and summary["steps"] == 10, summary
    assert summary["audit"]["counts"]["lost"] == 1


def test_vanished_topology_and_run_json_are_rewritten_for_child_and_summary(scripted) -> None:
    scripted.start(MODES)
    pid = scripted.ready("keeper")
    before = {path: path.read_bytes() for path in (scripted.paths.topology, scripted.paths.run_json)}
    scripted.paths.topology.unlink()
    scripted.paths.run_json.write_text("{}")
    os.kill(pid, 9)
    scripted.ready("keeper", 2)
    assert {path: path.read_bytes() for path in before} == before
    scripted.paths.topology.unlink()
    scripted.finish()
    assert scripted.wait() == 0, scripted.output
    assert scripted.output.count("it is written again as it was") == 3
    assert scripted.summary()["outcome"] == "finished" and scripted.summary()["audit"]["counts"]["lost"] == 0
