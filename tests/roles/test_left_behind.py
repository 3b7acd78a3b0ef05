"""A rollout worker that new weights do not reach starts nothing too old, and says so when it lasts."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from busrl.roles import rollout
from busrl.roles.rollout import Rollout


class Worker(Rollout):
    """The decision alone: a header, weights that do not come, and a record of what was said."""

    def __init__(self, published: int, bound: int | None = 2) -> None:
        self.limits = SimpleNamespace(max_staleness=bound, waves=0)  # type: ignore[assignment]
        self.ring = SimpleNamespace(header=lambda word: published)  # type: ignore[assignment]
        self.topology = SimpleNamespace(experiments=SimpleNamespace(forced_age=0))  # type: ignore[assignment]
        self.receiver = SimpleNamespace(newest=lambda: (3, 3))  # type: ignore[assignment]
        self.version, self.step_of, self._behind_since = 3, {3: 3}, math.inf
        self.said: list[str] = []

    def warn(self, where: str, text: str, severity: str = "warning", kind: str = "") -> None:
        self.said.append(text)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(now=100.0)
    monkeypatch.setattr(rollout, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def test_a_worker_that_stays_behind_names_both_versions_after_a_while(clock: SimpleNamespace) -> None:
    worker = Worker(published=5)
    assert worker._left_behind() and worker.said == []
    clock.now += rollout.LEFT_BEHIND_S + 1
    assert worker._left_behind()
    assert worker.said == ["starts nothing: published is version 5, what reaches it is 3"]


def test_the_time_begins_anew_when_the_weights_have_come(clock: SimpleNamespace) -> None:
    worker = Worker(published=5)
    assert worker._left_behind()
    worker.version, worker.step_of = 5, {5: 5}
    assert not worker._left_behind()
    clock.now += rollout.LEFT_BEHIND_S + 1
    worker.version, worker.step_of = 3, {3: 3}
    assert worker._left_behind() and worker.said == []


def test_without_a_bound_nobody_is_left_behind(clock: SimpleNamespace) -> None:
    assert not Worker(published=50, bound=None)._left_behind()
