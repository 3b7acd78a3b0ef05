"""`busrl launch --dry-run` prints for each process how it is started, and every table of the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from busrl.cli import main
from busrl.preflight.explain import dry_run
from busrl.preflight.load import load
from busrl.topology.reader import SECTIONS

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.toml"


def test_every_process_is_printed_with_every_table_of_the_run() -> None:
    topology = load(QUICKSTART)
    lines = [json.loads(line) for line in dry_run(topology).splitlines() if line.startswith('{"process"')]
    assert [line["process"] for line in lines] == [process.name for process in topology.processes()]
    for line in lines:
        assert set(line["settings"]) == set(SECTIONS) - {"simulate", "faults"} | {"derived"}
        assert line["settings"]["derived"]["slots"] == topology.derived.slots
    assert "explain" not in lines[0]["settings"]["derived"]


def test_faults_are_printed_where_there_are_any() -> None:
    topology = load(QUICKSTART, ["faults.seed=7"])
    lines = [json.loads(line) for line in dry_run(topology).splitlines() if line.startswith('{"process"')]
    assert all(line["settings"]["faults"]["seed"] == 7 for line in lines)


def test_a_directory_that_no_run_has_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", str(QUICKSTART), "--dry-run", "--resume", "nowhere"]) == 2
    assert "--resume nowhere: expected auto, never, or a run directory" in capsys.readouterr().err
