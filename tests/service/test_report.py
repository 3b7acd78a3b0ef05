"""The chapter that `busrl report` has of a service, from files made by hand, and the page that shows it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from busrl.cli.command import main
from busrl.service.figures import ModelLine
from busrl.service.folders import ServiceFolders
from busrl.service.report import chapter
from busrl.service.requests import Answer, LogWriter, Request, segment_path

BEGAN = 1_800_000_000.0
SESSIONS = {"0123456789": "ann", "9876543210": "<b>bob</b>"}
ADAPTER = {"rank": 4, "seed": 0, "attn": True, "mlp": True, "unembed": False}


def logged(log: LogWriter, at: float, request: Request) -> None:
    request.at = BEGAN + at
    log.write(request)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two clients: a model each that is trained for two steps and sampled from, a step that failed, a sample that is
    open, and an engine that was killed."""
    where = ServiceFolders(tmp_path)
    where.root.mkdir()
    requests, answers, samples = (LogWriter(path) for path in (where.requests, where.answers, where.samples))
    lines = []
    for session, owner in SESSIONS.items():
        model, sampler = f"{session}:train:0", f"{session}:sample:0"
        logged(requests, 0, Request("session", session, about={"key": owner, "owner": owner}))
        logged(requests, 1, Request("model", model, about={
            "session": session, "adapter": ADAPTER, "first": 1, "owner": owner}))
        for seq, op in enumerate(["forward_backward", "optim_step"] * 3 + ["save_weights_for_sampler"], 1):
            logged(requests, 10 * seq, Request("training", model, seq, op, b"", b"{}" * 100))
            answers.write(Answer(model, seq, b"", "user" if seq == 6 else "done"))
            if op == "optim_step" and seq < 6:
                lines.append(ModelLine(model, seq, seq // 2, BEGAN + 10 * seq + 2, 8, 16.0 / seq, 0.5, 1.5, 4 * seq))
        for seq in range(3):
            logged(requests, 100 + seq, Request("sample", sampler, seq, "asample", b"", b"{}", {"samples": 2}))
            if seq < 2:
                samples.write(Answer(sampler, seq, b"", "done", at=BEGAN + 103 + 2 * seq, tokens=12))
    for log in (requests, answers, samples):
        log.close()
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    (tmp_path / "run.json").write_text('{"run_id": "made"}')
    (tmp_path / "topology.json").write_text('{"run": {"name": "made"}}')
    (tmp_path / "supervisor.json").write_text(json.dumps({"processes": {
        "rollout/0": {"restarts": 3, "latest": "killed by <SIGKILL>"}, "tuner": {"restarts": 0}}}))
    return tmp_path


def test_a_chapter_counts_what_each_key_did_and_how_long_it_waited(run_dir: Path) -> None:
    told = chapter(run_dir)
    assert told is not None
    assert told.facts["made"] == "2 sessions, 2 models, 2 samplers"
    assert told.facts["requests"] == "6 asample, 6 forward_backward, 6 optim_step, 2 save_weights_for_sampler"
    assert told.facts["failed, open"] == "2, 2"
    assert told.facts["steps"] == "4, of 32 tokens"
    assert told.facts["drawn"] == "12 samples were asked for; 48 tokens"
    assert told.facts["wait for a step"] == "2 s; 95 of 100 within 2 s; the longest 2 s"
    models, owners = told.tables
    assert models.rows[0] == [
        "01234567:train:0", "ann", "rank 4, attn mlp", "2", "16", "1 → 0.5", "7", "1", "1 sampler weights"]
    assert [row[:8] for row in owners.rows] == [
        [owner, "1", "1", "2", "16", "6", "24", "1"] for owner in SESSIONS.values()]
    assert owners.rows[0][9] == "3.5 s; 95 of 100 within 4 s; the longest 4 s"


def test_a_chapter_draws_each_model_and_the_waits_over_time(run_dir: Path) -> None:
    told = chapter(run_dir)
    assert told is not None
    drawings = {drawing.title: drawing.lines for drawing in told.drawings}
    assert drawings["Loss"] == {f"{session[:8]}:train:0": ([1, 2], [1.0, 0.5]) for session in SESSIONS}
    assert set(drawings["Waits of clients"]) == {"steps", "samples"}
    minutes, means = drawings["Waits of clients"]["samples"]
    assert means == [3.0, 4.0] and minutes == sorted(minutes)
    assert drawings["Tokens"]["drawn"][1] != []


def test_a_damaged_log_leaves_the_rest_of_the_chapter(run_dir: Path) -> None:
    path = segment_path(ServiceFolders(run_dir).answers, 1)
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    segment_path(ServiceFolders(run_dir).answers, 2).write_bytes(b"")
    told = chapter(run_dir)
    assert told is not None
    assert "answers" in told.facts["could not be read"] and told.facts["steps"] == "4, of 32 tokens"


def test_the_page_of_a_service_shows_its_chapter_and_its_deaths(run_dir: Path) -> None:
    assert chapter(run_dir / "service") is None
    assert main(["report", str(run_dir)]) == 0
    page = (run_dir / "report.html").read_text()
    assert "<h2>Service</h2>" in page and "&lt;b&gt;bob" in page and "<b>bob" not in page
    assert "What could not be read" not in page and "<th>reward</th>" not in page
    assert "killed by &lt;SIGKILL&gt;" in page and "tuner" not in page
    assert page.count("<svg") == 5
