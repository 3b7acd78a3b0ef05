"""A rollout worker that new weights do not reach starts nothing too old, and says so when it lasts; of the versions
that did reach it it remembers the newest."""

from __future__ import annotations

import itertools
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from role_parts import parts

from busrl.roles import rollout
from busrl.roles.rollout import Rollout
from busrl.scheduling.admission import AdmissionLimits, LeftBehind, derive, steps_behind
from busrl.weights.base import VersionSteps

LIMITS = derive("batch-async", 8, 2, 4)


@pytest.mark.parametrize(
    ("limits", "forced_age", "bound"),
    [
        (LIMITS, 0, 2), (LIMITS, 3, None), (derive("fully-async", 8, 2, 4), 0, None), (derive("sync", 8, 0, 4), 0, 0),
        (derive("sync", 8, 0, 4, waves=3), 0, 0),
    ],
)
def test_the_bound_follows_the_mode_and_is_none_under_forced_age(
    limits: AdmissionLimits, forced_age: int, bound: int | None
) -> None:
    assert steps_behind(limits, forced_age) == bound


@pytest.mark.parametrize(
    ("behind", "bound", "holds"),
    [(0, 0, False), (1, 0, True), (1, 1, True), (1, 2, False), (2, 2, True), (50, None, False), (-1, 0, False)],
)
def test_a_worker_is_left_behind_from_its_bound_on(behind: int, bound: int | None, holds: bool) -> None:
    assert LeftBehind(10.0).look(behind, bound, now=0.0) == holds


def test_the_time_of_a_worker_left_behind_begins_anew_when_weights_come() -> None:
    rule = LeftBehind(10.0)
    looks = [(2, 100.0, False), (2, 110.0, False), (2, 110.5, True), (0, 111.0, False), (2, 112.0, False)]
    for behind, now, lasts in looks:
        rule.look(behind, 2, now)
        assert rule.lasts(now) == lasts, now


class Worker(Rollout):
    """A rollout with a header, weights that do not come, and a record of its warnings."""

    shown: Any

    def __init__(self, run: Path, published: int) -> None:
        ring = SimpleNamespace(
            header=lambda word: published, activity=lambda *what: None, progress=lambda: None,
            set_version_seen=lambda version: None,
        )
        topology = SimpleNamespace(
            experiments=SimpleNamespace(forced_age=0), derived=SimpleNamespace(limits=LIMITS),
            limits=SimpleNamespace(ready_s=1.0),
        )
        super().__init__(run, "rollout/0", parts(topology, ring))
        self.receiver: Any = SimpleNamespace(newest=lambda: (3, 3))
        self.intake: Any = SimpleNamespace(steps=VersionSteps(), only_validates=False, segments=None, version=3)
        self.intake.steps.add(3, 3)
        self.intake.loaded = self.note_version
        self.behind = LeftBehind(-1.0)
        self.said: list[str] = []

    def note_version(self, version: int, step: int) -> None:
        self.intake.version = version
        self.intake.steps.add(version, step)

    def warn(self, where: str, text: str, *more: Any, **named: Any) -> None:
        self.said.append(text)


def test_a_worker_left_behind_names_both_versions_after_a_while(tmp_path: Path) -> None:
    worker = Worker(tmp_path, published=5)
    assert worker.is_left_behind()
    assert worker.said == ["takes no new prompts: version 5 is published, but only 3 has reached this worker"]


class Updated(Worker):
    """One that only ever takes the next version."""

    def __init__(self, run: Path) -> None:
        super().__init__(run, published=0)
        newest, intake = itertools.count(4), self.intake
        self.receiver = SimpleNamespace(newest=lambda: (next(newest), 0))
        self.engine: Any = SimpleNamespace(update_weights=lambda receiver: (intake.version + 1, intake.version + 1))
        self.prober: Any = SimpleNamespace(loaded=lambda version: None)
        self.pace: Any = SimpleNamespace(row=rollout.PaceRow())

    def take(self, versions: int) -> int:
        """Bytes of memory after so many more."""
        for _ in range(versions):
            self.update_weights()
        return tracemalloc.get_traced_memory()[0]


def test_the_memory_of_a_worker_does_not_grow_with_its_versions(tmp_path: Path) -> None:
    worker = Updated(tmp_path)
    tracemalloc.start()
    try:
        early = worker.take(10_000)
        late = worker.take(20_000)
    finally:
        tracemalloc.stop()
    assert worker.intake.version == 30_003 and worker.intake.steps.step_of(30_003) == 30_003
    assert late - early < 200_000, "20,000 versions remembered are 2 MB"
