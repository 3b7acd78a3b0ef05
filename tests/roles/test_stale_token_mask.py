"""Tokens above max_staleness are context: in no loss and no denominator, live and replayed alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from busrl.ledger.wal import SampleRecord
from busrl.roles.learner.samples import StaleTokenMask, to_sample


def record(versions: list[int], step: int, **more: Any) -> SampleRecord:
    count = len(versions)
    values: dict[str, Any] = {
        "uid": 0, "group": 0, "admission": 0, "member": 0, "attempt": 0, "prompt_crc": 0, "reward": 1.0,
        "temperature": 1.0, "version": min(versions), "step": step, "finish": 1,
        "prompt_ids": np.arange(2, 5, dtype="<i4").tobytes(),
        "token_ids": np.arange(5, 5 + count, dtype="<i4").tobytes(),
        "logprobs": np.full(count, -1, "<f4").tobytes(), "versions": np.array(versions, "<u4").tobytes(), **more,
    }
    return SampleRecord(**values)


def at(bound: int | None, *noted: tuple[int, int]) -> StaleTokenMask:
    old = StaleTokenMask(bound)
    for version, step in noted:
        old.at(version, step)
    return old


def test_leading_tokens_above_the_bound_are_left_out_and_counted() -> None:
    old = at(2, *[(version, version) for version in range(8)])
    assert old.leading(record([3, 4, 4, 5, 6], step=3)) == [3]  # made at steps 3, 4, 4: now is 7
    assert old.leading(record([5, 6, 7], step=5)) == [0]
    assert old.taken() == 3 and old.taken() == 0


def test_a_late_worker_in_the_middle_costs_what_came_before_it() -> None:
    old = at(1, *[(version, version) for version in range(6)])
    assert old.leading(record([4, 5, 2, 5], step=2)) == [3]


def test_a_version_published_again_after_a_restart_keeps_its_step() -> None:
    old = at(1, (0, 0), (1, 1), (4, 1), (5, 2), (6, 3))  # 2, 3 and 4 were all published at step 1
    assert [old.step_of(version) for version in (0, 1, 2, 3, 4, 5, 6, 7)] == [0, 1, 1, 1, 1, 2, 3, 3]


def test_without_a_bound_nothing_is_old() -> None:
    assert at(None, (9, 9)).leading(record([0, 0], step=0)) == [0]


def test_the_step_of_versions_survives_a_checkpoint() -> None:
    old, again = at(2, (0, 0), (3, 1), (4, 2)), StaleTokenMask(2)
    again.steps.load(old.steps.state())
    assert again.steps.state() == old.steps.state() and again.step_of(2) == 1


def test_a_token_ages_by_the_steps_since_its_version_was_published() -> None:
    assert at(None, (0, 0), (3, 1), (4, 2)).ages(np.array([4, 0, 3, 2, 9], np.uint32)).tolist() == [0, 2, 1, 1, 0]


def test_what_is_left_out_becomes_context() -> None:
    made = to_sample(record([3, 4, 5, 6], step=3), skipped=[2])
    assert made.context == 2 and made.token_ids.tolist() == to_sample(record([3, 4, 5, 6], step=3)).token_ids.tolist()
    assert to_sample(record([3, 4], step=3)).context == 0


@pytest.mark.parametrize("kept", [1, 256])
def test_memory_is_bounded(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("busrl.roles.learner.samples.KEPT", kept)
    old = at(2, *[(version, version) for version in range(600)])
    assert len(old.steps.state()) == kept
