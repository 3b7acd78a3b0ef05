"""What a rollout process writes of its pace: thinned as the file grows, and what a fit needs stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from busrl.roles import rollout
from busrl.roles.rollout import MIB_EACH, Pace, one_in

MIB = 1 << 20


def lines_of(directory: Path, intervals: int) -> list[dict[str, float]]:
    """The lines that so many intervals add to the file of a process that starts."""
    path = directory / "pace" / "rollout-0.jsonl"
    before = path.stat().st_size if path.exists() else 0
    counted = Pace(directory / "pace", "rollout-0", lambda: None)
    for _ in range(intervals):
        counted.row.joined += 1
        counted.stepped(active=4, sampled=8, seconds=1e-6)
    counted.close()
    return [json.loads(line) for line in path.read_bytes()[before:].splitlines()]


def test_a_pace_file_is_thinned_as_it_grows_and_after_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "PACE_EVERY_S", 0.0)  # each step ends an interval
    assert len(lines_of(tmp_path, 16)) == 16
    with open(tmp_path / "pace" / "rollout-0.jsonl", "ab") as file:
        file.write(b"\n" * (2 * MIB_EACH * MIB))
    rows = lines_of(tmp_path, 16)
    assert len(rows) == 4
    # Each line is of one interval, not of those that were left out before it.
    assert all((row["steps"], row["tokens"], row["joined"]) == (2, 8, 1) for row in rows)


def test_a_week_of_pace_stays_small_without_minutes_of_gaps() -> None:
    nbytes, line, left = 0, 300, int(7 * 86400 / rollout.PACE_EVERY_S)
    while left > 0:
        nbytes, left = nbytes + line, left - one_in(nbytes)
    assert nbytes < 20 * MIB
    assert one_in(1 << 50) * rollout.PACE_EVERY_S <= 64


def test_the_last_interval_of_an_orderly_process_is_written_too(tmp_path: Path) -> None:
    (row,) = lines_of(tmp_path, 3)
    assert (row["steps"], row["joined"]) == (6, 3) and row["time"] > 1.7e9
