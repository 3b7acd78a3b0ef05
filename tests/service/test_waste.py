"""Sampled tokens that a client trained on, and those that never came back, by the files of a service."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from service_messages import compressed, datum, request

from busrl.service.audit import Audited, audit
from busrl.service.folders import ServiceFolders
from busrl.service.requests import Answer, LogWriter, Request
from busrl.service.wire import SampledSequence, write_sample_result

PROMPT = [5, 6, 7]
ADAPTER = {"rank": 4, "seed": 0, "attn": True, "mlp": True, "unembed": False}


class Files:
    """The logs of a service with the model `s:train:0` and its sampler, written record by record."""

    def __init__(self, root: Path) -> None:
        self.root, where = root, ServiceFolders(root)
        self.logs = {name: LogWriter(getattr(where, name)) for name in ("requests", "answers", "samples")}
        self.log = self.logs["requests"]
        self.log.write(Request("session", "s", about={"key": "k"}))
        self.log.write(Request("model", "s:train:0", about={"session": "s", "adapter": ADAPTER, "first": 1}))
        self.log.write(Request("sampler", "s:sample:0", about={"model": "s:train:0", "seq": 1}))
        self.log.write(Request("sampler", "s:sample:1"))
        self._numbers = 0

    def sample(self, *answers: Sequence[int], sampler: int = 0, state: str = "done", **more: Any) -> None:
        self._numbers += 1
        name = f"s:sample:{sampler}", self._numbers
        body = {"prompt": {"chunks": [{"tokens": PROMPT}]}, "sampling_params": {"max_tokens": 4}, **more}
        self.log.write(Request("sample", *name, "asample", b"q", json.dumps(body).encode()))
        drawn = [SampledSequence(True, np.array(ids, np.int32), np.zeros(len(ids), np.float32)) for ids in answers]
        self.logs["samples"].write(Answer(*name, b"q", state, True, write_sample_result(drawn), weights=0))

    def train(self, seq: int, *data: bytes, state: str = "done", only: bool = False) -> None:
        body = request(*data, model="s:train:0", seq=seq, forward_only=only)
        self.log.write(Request("training", "s:train:0", seq, "forward_backward", b"d", body))
        self.logs["answers"].write(Answer("s:train:0", seq, b"d", state))

    def audited(self, with_waste: bool = True) -> Audited:
        found = audit(self.root, with_waste)
        assert found is not None
        return found

    def waste(self) -> Any:
        return self.audited().waste


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def shifted(tokens: Sequence[int]) -> bytes:
    """A datum as recipes make it: the last token is a target alone."""
    return datum(np.array(tokens[:-1], np.int32), target_tokens=np.array(tokens[1:], np.int64))


def test_tokens_come_back_as_the_beginning_of_a_datum(files: Files) -> None:
    files.sample([8, 9], [8, 10])
    files.sample([11, 12, 13])
    files.train(1, shifted([*PROMPT, 8, 9]), shifted([*PROMPT, 11, 12, 13, 4, 4]))
    assert files.waste() == {
        "sampled": {"samples": 3, "tokens": 7}, "trained": {"samples": 2, "tokens": 5},
        "lost": {"samples": 1, "tokens": 2}, "lost_by_model": {"s:train:0": {"samples": 1, "tokens": 2}},
        "kept_no_longer": {}}


def test_tokens_in_other_places_or_beside_another_prompt_are_lost(files: Files) -> None:
    files.sample([8, 9], [20, 21])
    files.train(1, shifted([4, *PROMPT, 8, 9]), shifted([5, 6, 8, 20, 21]), shifted([*PROMPT, 8]))
    assert files.waste()["lost"] == {"samples": 2, "tokens": 4}


def test_only_executed_requests_for_gradients_bring_tokens_back(files: Files) -> None:
    files.sample([8, 9])
    files.train(1, shifted([*PROMPT, 8, 9]), only=True)
    files.train(2, shifted([*PROMPT, 8, 9]), state="user")
    assert files.waste()["trained"] == {"samples": 0, "tokens": 0}


def test_scores_of_prompts_and_failed_requests_sampled_nothing(files: Files) -> None:
    files.sample([8], sampling_params={"max_tokens": 1}, prompt_logprobs=True)
    files.sample([8, 9], state="user")
    files.sample([10], sampler=1)
    assert files.waste()["sampled"] == {"samples": 1, "tokens": 1}
    assert list(files.waste()["lost_by_model"]) == ["the base"]


def test_data_with_several_targets_count_by_their_input(files: Files) -> None:
    files.sample([8, 9])
    targets = compressed(np.arange(1, 11).reshape(5, 2))
    files.train(1, datum(np.array([*PROMPT, 8, 9], np.int32), target_tokens=targets))
    assert files.waste()["lost"] == {"samples": 0, "tokens": 0}


def test_what_the_run_keeps_no_longer_is_counted_apart(files: Files) -> None:
    files.sample([8, 9])
    files.log.write(Request("sample", "s:sample:0", 9, "asample", b"q"))
    files.logs["samples"].write(Answer("s:sample:0", 9, b"q", "done", True))
    files.log.write(Request("training", "s:train:0", 1, "forward_backward", b"d"))
    files.logs["answers"].write(Answer("s:train:0", 1, b"d", "done"))
    assert files.waste()["kept_no_longer"] == {"samples": 1, "gradients": 1}
    assert "without what the run keeps no longer: 1 requests for samples" in "\n".join(files.audited().lines())


def test_lines_of_the_audit_say_what_was_lost(files: Files) -> None:
    files.sample([8, 9, 10], [8, 11])
    files.train(1, shifted([*PROMPT, 8, 11]))
    lines = files.audited().lines()
    assert "  sampled: 5 tokens of 2 samples" in lines
    assert "  never came back in a forward_backward: 3 tokens of 1 samples (60%)" in lines
    assert files.audited(with_waste=False).waste is None
