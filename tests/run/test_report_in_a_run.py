"""A real run with a death in it, whose waste, page and timeline are made while it goes on and after it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checks import check_end
from harness import ROOT, Run, running

from busrl.cli.command import main
from busrl.observe.report.files import read
from busrl.observe.report.timeline import overlap, slices_of
from busrl.observe.report.waste import waste_of

SETTINGS = [
    "process.rollout.count=2", "learner.trigger.n_min=8", "mock.token_s=0.0005", "mock.per_sequence_s=0.00005",
    "generation.max_new_tokens=128", "mock.learner_s_per_token=0.00005",
]


@pytest.mark.long
def test_the_waste_page_and_timeline_cover_ongoing_and_ended_runs(
    tmp_path: Path, quickstart: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path / "run", *SETTINGS, config=ROOT / "configs" / "scripted.toml", steps=12)
    html, timeline = tmp_path / "report.html", tmp_path / "trace.json"
    with running(run):
        run.until_step(4)
        run.kill("rollout/1")
        assert main(["report", str(run.directory), "-o", str(html)]) == 0
        assert "running" in html.read_text()
        assert main(["trace", str(run.directory), "-o", str(timeline)]) == 0
        check_end(run, run.wait())
    assert main(["report", str(run.directory), str(run.directory), "-o", str(html)]) == 0
    assert "the learner has reached the goal" in html.read_text()
    capsys.readouterr()
    assert main(["trace", str(run.directory), "-o", str(timeline)]) == 0
    assert "% of the decoding time falls into training" in capsys.readouterr().out
    names = {event["name"] for event in json.loads(timeline.read_text())["traceEvents"]}
    assert {"step 12", "training", "decoding", "waits"} <= names
    assert 0 < (overlap(slices_of(read(run.directory))) or 0) < 1
    assert main(["audit", str(run.directory), "--waste", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["clean"] and told["waste"]["faults"] == []


@pytest.mark.long
def test_the_account_of_a_run_matches_its_ring_and_audit(tmp_path: Path, quickstart: None) -> None:
    run = Run(tmp_path / "run", *SETTINGS, config=ROOT / "configs" / "scripted.toml", steps=8)
    with running(run):
        check_end(run, run.wait())
    waste, summary, audit = waste_of(read(run.directory)), run.summary(), run.audit()
    by_name = {part.name: part for part in waste.parts}
    generated = summary["generated_tokens"]
    assert waste.sampled is not None and 0.9 * generated <= waste.sampled <= generated
    assert by_name["trained"].samples == audit.counts.trained
    assert by_name["trained"].tokens == sum(row["tokens"] for row in run.metrics())
    assert by_name["flat group"].samples == audit.histogram["flat group"]
    assert all(row["waits"] == sorted(row["waits"]) and row["time"] > 1.7e9 for row in run.metrics())
