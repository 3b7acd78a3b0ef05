"""The figures of each seat in a step's line: rewards, groups, flat ones, and episodes in which it was not used."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from busrl.ring import Fates
from busrl.roles.learner.observers import RestingGroup
from busrl.several.seat_figures import SeatFigures, observers
from busrl.states import uid_of

SIZE = 4
SEATS = ("first", "second")


class Steps:
    """A learner's observer, its fates, and the steps that are made."""

    def __init__(self, folder: Path) -> None:
        self.fates = Fates(str(folder / "fates.bin"), create=True)
        self.fates.reserve(1)
        topology = SimpleNamespace(seats=SEATS, groups=SimpleNamespace(size=SIZE))
        self.parts: Any = SimpleNamespace(topology=topology, paths=SimpleNamespace(fates=folder / "fates.bin"))
        self.figures = SeatFigures(self.parts)

    def unused(self, group: int, *members: int) -> None:
        for member in members:
            uid = uid_of(group, 0, member, SIZE)
            self.fates.reserve(uid + 1)
            self.fates.store(uid, "D")
            self.fates.store(uid, "u")

    def aside(self, group: int, fate: str, *rewards: float) -> None:
        lines = np.array([(reward,) for reward in rewards], [("reward", "f8")])
        self.figures.set_aside(RestingGroup(group, fate, lines, dict))

    def step(self, trained: dict[int, list[float]], open_groups: tuple[int, ...] = (), end: int = 0) -> dict[str, Any]:
        samples = [SimpleNamespace(group=group, reward=reward) for group, of in trained.items() for reward in of]
        coming: Any = SimpleNamespace(record=SimpleNamespace(samples=samples), view=View(open_groups, end))
        self.figures.before(coming)
        return dict(self.figures.numbers())


class View:
    """The open groups of a view."""

    def __init__(self, groups: tuple[int, ...], end: int) -> None:
        self.draws, self.end = np.array(groups, np.int64), end

    def __len__(self) -> int:
        return len(self.draws)


@pytest.fixture
def steps(tmp_path: Path) -> Steps:
    return Steps(tmp_path)


def test_each_seat_has_its_own_mean_of_the_groups_that_ended(steps: Steps) -> None:
    steps.aside(2, "f", 1.0, 1.0)
    row = steps.step({0: [1.0, 0.0], 1: [0.0, 0.5]})
    assert row == {
        "seat/first/groups": 2, "seat/first/unused": 0, "seat/first/flat_share": 0.5, "seat/first/reward": 0.75,
        "seat/second/groups": 1, "seat/second/unused": 0, "seat/second/flat_share": 0.0, "seat/second/reward": 0.25,
    }


def test_a_step_without_groups_of_a_seat_has_no_mean_of_it(steps: Steps) -> None:
    steps.step({0: [1.0]})
    assert steps.step({}) == {
        "seat/first/groups": 0, "seat/first/unused": 0, "seat/second/groups": 0, "seat/second/unused": 0,
    }


def test_unused_seats_are_counted_once_also_in_groups_that_end_by_themselves(steps: Steps) -> None:
    steps.unused(1, 0, 1, 2, 3)
    steps.unused(3, 2)
    first = steps.step({0: [1.0]}, open_groups=(2, 3), end=4)
    steps.unused(2, 0)
    steps.unused(5, 0, 1)
    second = steps.step({2: [1.0]}, open_groups=(5,), end=6)
    third = steps.step({}, end=6)
    assert [row["seat/second/unused"] for row in (first, second, third)] == [5, 2, 0]
    assert [row["seat/first/unused"] for row in (first, second, third)] == [0, 1, 0]


def test_unused_seats_of_before_the_start_are_not_counted_again(steps: Steps) -> None:
    steps.unused(1, 0, 1)
    steps.figures = SeatFigures(steps.parts)
    assert steps.step({}, end=2)["seat/second/unused"] == 0


def test_a_model_of_one_seat_has_no_such_figures(steps: Steps) -> None:
    steps.parts.topology.seats = ("policy",)
    assert observers(steps.parts) == []
