"""A rollout worker that new weights do not reach starts nothing too old, and says so when it lasts; of the versions
that did reach it it remembers the newest."""

from __future__ import annotations

import contextlib
import itertools
import math
import tracemalloc
from types import SimpleNamespace

import pytest

from busrl.roles import rollout
from busrl.roles.rollout import Rollout
from busrl.weights.base import VersionSteps


class Worker(Rollout):
    """The decision alone: a header, weights that do not come, and a record of what was said."""

    def __init__(self, published: int, bound: int | None = 2) -> None:
        self.shown: list[str] = []
        self.ring = SimpleNamespace(  # type: ignore[assignment]
            header=lambda word: published, activity=self.shown.append
        )
        self.topology = SimpleNamespace(  # type: ignore[assignment]
            experiments=SimpleNamespace(forced_age=0),
            derived=SimpleNamespace(limits=SimpleNamespace(max_staleness=bound, waves=0)),
        )
        self.receiver = SimpleNamespace(newest=lambda: (3, 3))  # type: ignore[assignment]
        self.intake = SimpleNamespace(  # type: ignore[assignment]
            steps=VersionSteps(), only_validates=False, segments=None
        )
        self._behind_since = math.inf
        self.has(3)
        self.said: list[str] = []

    def has(self, version: int) -> None:
        self.intake.version = version
        self.intake.steps.add(version, version)

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
    assert worker.said == ["takes no new prompts: version 5 is published, but only 3 has reached this worker"]


def test_the_time_begins_anew_when_the_weights_have_come(clock: SimpleNamespace) -> None:
    worker = Worker(published=5)
    assert worker._left_behind()
    worker.has(5)
    assert not worker._left_behind()
    clock.now += rollout.LEFT_BEHIND_S + 1
    worker.has(3)
    assert worker._left_behind() and worker.said == []


def test_without_a_bound_nobody_is_left_behind(clock: SimpleNamespace) -> None:
    assert not Worker(published=50, bound=None)._left_behind()


class Updated(Worker):
    """One that only ever takes the next version."""

    def __init__(self) -> None:
        super().__init__(published=0)
        newest = itertools.count(4)
        self.receiver = SimpleNamespace(newest=lambda: (next(newest), 0))  # type: ignore[assignment]
        own = self.intake
        self.engine = SimpleNamespace(  # type: ignore[assignment]
            update_weights=lambda receiver: (own.version + 1, own.version + 1)
        )
        self.topology.limits = SimpleNamespace(ready_s=1.0)  # type: ignore[misc]
        self.prober = SimpleNamespace(loaded=lambda version: None)  # type: ignore[assignment]
        self.activity = lambda *what: contextlib.nullcontext()  # type: ignore[method-assign, assignment]
        self.ring.set_version_seen = lambda version: None  # type: ignore[method-assign]
        self.pace = SimpleNamespace(row=rollout.PaceRow())  # type: ignore[assignment]

    def take(self, versions: int) -> int:
        """Bytes of memory after so many more."""
        for _ in range(versions):
            self._update_weights()
        return tracemalloc.get_traced_memory()[0]


def test_the_memory_of_a_worker_does_not_grow_with_the_versions_that_it_has_run() -> None:
    worker = Updated()
    tracemalloc.start()
    try:
        early = worker.take(10_000)
        late = worker.take(20_000)
    finally:
        tracemalloc.stop()
    assert worker.intake.version == 30_003 and worker.intake.steps.step_of(30_003) == 30_003
    assert late - early < 200_000, "20,000 versions remembered are 2 MB"
