"""The audit of a service finds each way in which its files could lie."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from test_driver import ADAPTER, Service, service  # noqa: F401  (a fixture)

from busrl.service.audit import Audited, audit
from busrl.service.requests import Answer, LogReader, LogWriter, Request

Change = Callable[[list[Request], list[Answer]], object]


@pytest.fixture
def played(service: Service) -> Service:  # noqa: F811
    """A service with a model that was trained, saved and sampled from."""
    service.restart(state_every_s=0.0)
    service.forward(1, 1)
    service.step(2)
    service.ask(3, "save_weights_for_sampler", sampling_session_seq_id=0)
    service.ask(4, "save_weights", path="one")
    service.log.write(Request("sample", "s:sample:0", 0, "asample", b"q", b"asked"))
    service.run()
    samples = LogWriter(service.where.samples)
    samples.write(Answer("s:sample:0", 0, b"q", "done", True, b"tokens", weights=1))
    samples.close()
    return service


def audited(service: Service) -> Audited:  # noqa: F811
    found = audit(service.where.root.parent)
    assert found is not None
    return found


def rewritten(service: Service, change: Change) -> None:  # noqa: F811
    """The logs of requests and answers with other records."""
    logs = []
    for folder, kind in ((service.where.requests, Request), (service.where.answers, Answer)):
        logs.append([msgspec.msgpack.decode(payload, type=kind) for payload, _ in LogReader(folder).read()])
        shutil.rmtree(folder)
    change(*logs)
    for folder, records in zip((service.where.requests, service.where.answers), logs):
        log = LogWriter(folder)
        for record in records:
            log.write(record)
        log.close()


def test_a_service_that_did_its_work_is_clean(played: Service) -> None:
    found = audited(played)
    assert found.errors == []
    assert found.counts == {"models": 1, "requests": 5, "answers": 4, "answers to requests for samples": 1}


CHANGES: dict[str, Change] = {
    "answers without a request": lambda asked, answers: asked.pop(3),
    "requests logged twice": lambda asked, answers: asked.append(asked[3]),
    "requests answered twice": lambda asked, answers: answers.append(answers[0]),
    "models with gaps in their answers": lambda asked, answers: answers.pop(1),
    "answers to another request": lambda asked, answers: setattr(answers[1], "digest", b"other"),
    "answers of another chain of requests": lambda asked, answers: setattr(answers[1], "chain", b"other"),
    "states of another chain of requests": lambda asked, answers: setattr(asked[2], "op", "other"),
    "saved weights of a request that failed": lambda asked, answers: setattr(answers[3], "state", "user"),
}


@pytest.mark.parametrize("wrong", CHANGES)
def test_a_change_of_the_logs_is_found(played: Service, wrong: str) -> None:
    rewritten(played, CHANGES[wrong])
    assert any(wrong in error for error in audited(played).errors), audited(played).errors


def test_a_sample_of_another_snapshot_is_found(played: Service) -> None:
    shutil.rmtree(played.where.samples)
    samples = LogWriter(played.where.samples)
    samples.write(Answer("s:sample:0", 0, b"q", "done", True, b"tokens", weights=7))
    samples.close()
    assert "samples of a snapshot" in audited(played).errors[0]


@pytest.mark.parametrize("kind, clean", [("inflight", True), ("snapshot", False)])
def test_a_sampler_in_flight_may_draw_with_what_was_published_later(
    service: Service, kind: str, clean: bool  # noqa: F811
) -> None:
    for seq in (1, 2):
        service.ask(seq, "save_weights_for_sampler", sampling_session_seq_id=seq, kind=kind)
    service.log.write(Request("sample", "s:sample:1", 0, "asample", b"q"))
    service.run()
    samples = LogWriter(service.where.samples)
    samples.write(Answer("s:sample:1", 0, b"q", "done", True, b"tokens", weights=2))
    samples.close()
    assert (not audited(service).errors) == clean


def test_a_state_of_another_history_is_found(played: Service) -> None:
    _, state = played.where.states_of("m")[-1]
    (state / "about.json").write_text(json.dumps({"applied": 2, "chain": "00"}))
    assert "states of another chain" in audited(played).errors[0]


def test_saved_weights_that_nobody_deleted_are_missed(played: Service) -> None:
    shutil.rmtree(played.where.saved_as("m", "weights", "one"))
    assert audited(played).errors == ["1 saved weights that are gone: tinker://m/weights/one"]
    played.log.write(Request("ttl", "m", 4, about={"expires": 1.0}))
    assert audited(played).errors == []
    played.log.write(Request("ttl", "m", 4, about={"expires": 0.0}))
    played.log.write(Request("delete", "m", 4, at=1.0))
    assert audited(played).errors == []


def test_weights_that_were_taken_from_another_key_are_found(played: Service) -> None:
    about = {"session": "s", "adapter": ADAPTER, "first": 0, "owner": "ann"}
    played.log.write(Request("model", "anns", about=about))
    played.log.write(Request("sampler", "t:sample:0", about={"model": "m", "seq": 3, "owner": "ann"}))
    load = {"session_id": "t", "model_seq_id": 0, "path": "tinker://m/weights/one", "optimizer": True}
    played.log.write(Request("training", "anns", 0, "load_weights", b"d", json.dumps(load).encode()))
    played.run()
    assert audited(played).errors == [
        "1 samplers of another key's weights: t:sample:0", "1 loads of another key's weights: anns:0"]


def test_a_run_without_a_service_has_no_such_audit(tmp_path: Path) -> None:
    assert audit(tmp_path) is None
