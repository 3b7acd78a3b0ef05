"""A session's requests in a new run directory, as if its client had been alone, and what a service answers to them.

Works on the logs of a service that has ended. What a sample is drawn by is the name of its future, so the same requests
get the same samples, whoever else is there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from service_messages import read_forward_backward_result, read_sample_result

from busrl.service.folders import ServiceFolders
from busrl.service.requests import Answer, LogReader, LogWriter, Request

Name = tuple[str, int]  # model or sampler, and number
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def requests(run_dir: Path) -> list[Request]:
    return [msgspec.msgpack.decode(payload, type=Request)
            for payload, _ in LogReader(ServiceFolders(run_dir).requests).read()]


def sessions(run_dir: Path) -> list[str]:
    return [request.id for request in requests(run_dir) if request.kind == "session"]


def alone(run_dir: Path, session: str, into: Path) -> set[Name]:
    """Write the requests of one session to another run directory; returns those that will be answered."""
    log = LogWriter(ServiceFolders(into).requests)
    own = [request for request in requests(run_dir) if request.id.partition(":")[0] == session]
    for request in own:
        if request.kind != "finish":
            log.write(request)
    log.close()
    return {(request.id, request.seq) for request in own if request.kind in ("training", "refused", "sample")}


class Answers:
    """Answers of a service, by the name of their request; `follow` reads on."""

    def __init__(self, run_dir: Path) -> None:
        where = ServiceFolders(run_dir)
        self._logs = LogReader(where.answers), LogReader(where.samples)
        self.by_name: dict[Name, Answer] = {}

    def follow(self) -> dict[Name, Answer]:
        for log in self._logs:
            for payload, _ in log.read():
                answer = msgspec.msgpack.decode(payload, type=Answer)
                self.by_name[answer.id, answer.seq] = answer
        return self.by_name


def require_close(one: Answer, other: Answer) -> None:
    """AssertionError unless two answers to the same request say the same: numbers to 1e-6, all else exactly."""
    assert (one.state, one.digest, one.proto) == (other.state, other.digest, other.proto), (one, other)
    if not one.proto:
        _require_same(json.loads(one.payload), json.loads(other.payload))
    elif ":sample:" in one.id:
        for first, second in zip(*(read_sample_result(answer.payload)[0] for answer in (one, other)), strict=True):
            assert (first.stopped, first.tokens) == (second.stopped, second.tokens), f"{one.id}:{one.seq}"
            np.testing.assert_allclose(first.logprobs, second.logprobs, **CLOSE)
    else:
        (outputs, metrics), (others, other_metrics) = (
            read_forward_backward_result(answer.payload) for answer in (one, other))
        _require_same(metrics, other_metrics)
        for first, second in zip(outputs, others, strict=True):
            np.testing.assert_allclose(first["logprobs"], second["logprobs"], **CLOSE)


def _require_same(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            _require_same(one[key], other[key])
    elif isinstance(one, float):
        np.testing.assert_allclose(one, other, **CLOSE)
    else:
        assert one == other
