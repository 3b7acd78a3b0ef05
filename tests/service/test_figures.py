"""Figures of a service for people: a line for each step of a model, and what status and monitors show."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from test_driver import Service, service  # noqa: F401  (a fixture)

from busrl.errors import DiskFull
from busrl.observe.monitor import phrases
from busrl.paths import RunPaths
from busrl.service.figures import KIND, Census, Course, Standing
from busrl.service.folders import ServiceFolders
from busrl.service.overview import overview
from busrl.service.registry import Registry
from busrl.service.requests import Answer, Place, Request
from busrl.status.runfiles import RunFiles
from busrl.status.state import Facts, RunState
from busrl.status.words import printable
from busrl.system import files

SESSION = "0123456789abcdef"
MODEL, SAMPLER = f"{SESSION}:train:0", f"{SESSION}:sample:0"
ADAPTER = {"rank": 4, "seed": 0, "attn": True, "mlp": True, "unembed": False}


@pytest.fixture
def where(tmp_path: Path) -> ServiceFolders:
    folders = ServiceFolders(tmp_path)
    folders.root.mkdir()
    return folders


def request(seq: int, op: str, kind: str = "training", id: str = MODEL, size: int = 0) -> Request:
    return Request(kind, id, seq, op, body=bytes(size))


def course_of(where: ServiceFolders) -> Course:
    return Course(where.root.parent / "metrics.jsonl", where, lambda text: None)


def lines(where: ServiceFolders) -> list[dict[str, Any]]:
    return list(files.json_lines(where.root.parent / "metrics.jsonl"))


def trained(course: Course, first: int) -> None:
    """A step of two parts; 4 tokens, a loss of 3."""
    for seq, loss in ((first, 1.0), (first + 1, 2.0)):
        course.took(MODEL, 0.25)
        course.executed(request(seq, "forward_backward"), True, {"loss:sum": loss, "tokens": 2})
    course.took(MODEL, 0.5)
    course.executed(request(first + 2, "optim_step"), True, {"unclipped_grad_l2:mean": 0.5})


def test_a_step_has_a_line_with_the_sums_of_its_parts(where: ServiceFolders) -> None:
    course = course_of(where)
    trained(course, 1)
    trained(course, 4)
    assert [{key: row[key] for key in row if key != "time"} for row in lines(where)] == [
        {"model": MODEL, "number": number, "model_step": step, "tokens": 4, "loss": 3.0, "norm": 0.5, "seconds": 1.0,
         "tokens_in_all": 4 * step, "kind": KIND} for step, number in ((1, 3), (2, 6))]


def test_requests_that_are_run_again_give_no_second_line(where: ServiceFolders) -> None:
    trained(course_of(where), 1)
    course = course_of(where)
    trained(course, 1)
    trained(course, 4)
    assert [(row["number"], row["model_step"], row["tokens_in_all"]) for row in lines(where)] == [(3, 1, 4), (6, 2, 8)]


def test_a_model_that_goes_back_to_its_state_counts_nothing_twice(where: ServiceFolders) -> None:
    course = course_of(where)
    trained(course, 1)
    course.executed(request(4, "forward_backward"), True, {"loss:sum": 9.0, "tokens": 9})
    trained(course, 1)
    trained(course, 4)
    assert [(row["number"], row["tokens"], row["loss"]) for row in lines(where)] == [(3, 4, 3.0), (6, 4, 3.0)]


def test_a_refused_step_has_no_line_and_its_parts_count_nowhere(where: ServiceFolders) -> None:
    course = course_of(where)
    course.executed(request(1, "forward_backward"), True, {"loss:sum": 9.0, "tokens": 9})
    course.executed(request(2, "optim_step"), False, {})
    trained(course, 3)
    assert [(row["number"], row["tokens"], row["loss"]) for row in lines(where)] == [(5, 4, 3.0)]


def test_a_full_disk_costs_the_line_of_a_step_alone(where: ServiceFolders, monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    course = Course(where.root.parent / "metrics.jsonl", where, warned.append)

    def full(file: files.LineFile, line: bytes) -> None:
        raise DiskFull("no space")

    with monkeypatch.context() as patched:
        patched.setattr(files.LineFile, "append", full)
        trained(course, 1)
    trained(course, 4)
    assert "no line of its step 1" in warned[0]
    assert [row["model_step"] for row in lines(where)] == [2]


def test_lines_of_models_are_no_steps_of_the_run(where: ServiceFolders) -> None:
    trained(course_of(where), 1)
    root = where.root.parent
    (root / "run.json").write_text('{"run_id": "r"}')
    run = RunState()
    RunFiles(RunPaths.of(root)).fold_into(run)
    assert not len(run.steps) and run.idle is None


def test_a_driver_tells_of_each_request_once_over_its_lives(service: Service) -> None:  # noqa: F811
    service.forward(1, 3)
    service.step(2)
    service.run()
    service.restart()
    service.run()
    service.forward(3, 4)
    service.step(4)
    service.run()
    assert [(row["number"], row["loss"]) for row in lines(service.where)] == [(2, 3.0), (4, 4.0)]


def shown(where: ServiceFolders) -> Registry:
    """What a door and a tuner show of a client with a model that is trained, and a sampler."""
    registry, census, course = Registry(), Census(where), course_of(where)
    asked = [
        Request("session", SESSION, about={"key": "k", "owner": "ann"}),
        Request("model", MODEL, about={"session": SESSION, "adapter": ADAPTER, "first": 1, "owner": "ann"}),
        Request("sampler", SAMPLER), request(0, "asample", "sample", SAMPLER), request(1, "asample", "sample", SAMPLER),
        *(request(seq, "optim_step", size=1 << 20) for seq in (1, 2, 3, 4)),
    ]
    for record in asked:
        registry.add(record, Place(1, 0, 0))
        census.logged(record)
    census.heard(SESSION)
    trained(course, 1)
    for seq in (1, 2, 3):
        census.answered(Answer(MODEL, seq, b"", "done"))
    census.answered(Answer(SAMPLER, 0, b"", "done", weights=7))
    census.show(registry)
    course.show({MODEL: Standing(3, False, 2)})
    return registry


def test_status_has_sessions_models_samplers_and_the_queue(where: ServiceFolders) -> None:
    shown(where)
    found = overview(where.root.parent)
    assert found is not None
    data = found.data
    model = data["models"][MODEL]
    assert (model["logged"], model["applied"], model["answered"], model["steps"], model["tokens"]) == (4, 3, 3, 1, 4)
    assert (model["loss"], model["norm"], model["parked"], model["bytes"]) == (3.0, 0.5, True, 1 << 20)
    sampler = data["samplers"][SAMPLER]
    assert (sampler["logged"], sampler["answered"], sampler["weights"], sampler["waiting"]) == (2, 1, 7, 1)
    assert data["counts"] == {"sessions": 1, "models": 1, "samplers": 1} and data["replays"] == 2
    assert time.time() - data["sessions"][SESSION]["heard"] < 60
    assert (data["queue"]["waiting"], data["samples"]["waiting"]) == (1, 1)


def test_lines_of_status_name_who_waits_and_what_is_executed(where: ServiceFolders) -> None:
    shown(where)
    where.executing.write_text(json.dumps({"id": "other:train:1", "seq": 9, "op": "forward_backward", "deaths": 0}))
    found = overview(where.root.parent)
    assert found is not None and all(line == printable(line) for line in found.lines)
    text = "\n".join(found.lines)
    assert "1 session · 1 model · 1 sampler · 1 request waiting, 1.0 MB, the first for 0s ·" in text
    assert "executing other:train:1:9 (forward_backward)" in text
    assert "01234567:train:0 of ann · step 1 · 4 tokens · loss 3 · norm 0.5 · answered 3 of 4 · parked · waits" in text
    assert "01234567:sample:0 · snapshot 7 · 1 request waiting" in text
    assert "01234567 of ann · last heard 0s ago" in text


def test_monitors_have_the_lines_of_status(where: ServiceFolders) -> None:
    shown(where)
    run = RunState(facts=Facts(run_dir=str(where.root.parent)))
    said = phrases.said_of_parts(run)
    assert list(said) == ["service", "model", "sampler", "session"] and "step 1" in said["model"]
    assert [line.split()[0] for line in phrases.lines(run, 0.0, 0.0) if "01234567" in line] == [*said][1:]
    run.replayed(run.facts, 1.0, False)
    assert not phrases.said_of_parts(run), "the files of a replayed run may be another's"


def test_a_door_that_begins_again_knows_when_clients_were_heard(where: ServiceFolders) -> None:
    registry = shown(where)
    before = files.read_map(where.clients_shown)["sessions"]
    Census(where).show(registry)
    assert files.read_map(where.clients_shown)["sessions"] == before


def test_what_is_shown_has_a_bound(where: ServiceFolders) -> None:
    registry, census = Registry(), Census(where)
    for number in range(300):
        registry.add(Request("session", f"s{number}", about={"key": f"k{number}"}), Place(1, 0, 0))
        registry.add(Request("sampler", f"s{number}:sample:0"), Place(1, 0, 0))
    census.show(registry)
    told = files.read_map(where.clients_shown)
    assert len(told["sessions"]) == len(told["samplers"]) == 256 and told["counts"]["samplers"] == 300


def test_a_run_without_a_service_shows_none(tmp_path: Path) -> None:
    assert overview(tmp_path) is None
