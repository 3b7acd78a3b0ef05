"""Models that are trained beside each other: who waits for whom, how old samples get, and what unused seats cost."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from learners import Game
from openings import Model

Make = Callable[..., Model]


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Make]:
    made: list[Model] = []

    def make(tag: str = "one", **settings: Any) -> Model:
        made.append(Model(tmp_path, tag, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def zero_sum(dice: random.Random, draw: int) -> list[list[float | None]]:
    won = dice.random() < 0.5
    return [[float(won), float(not won)]]


def asked(share: float) -> Callable[[random.Random, int], list[list[float | None]]]:
    """Rewards of a solver, and of a judge that is asked in a share of the episodes."""
    def rewards(dice: random.Random, draw: int) -> list[list[float | None]]:
        return [[dice.random()], [dice.random() if dice.random() < share else None]]

    return rewards


def test_each_seat_of_a_zero_sum_game_has_its_own_baseline(model: Make) -> None:
    game = Game([model(seats=2, n_min=8)], zero_sum)
    game.play(12)
    learner = game.learners[0]
    assert learner.trained[0] > 30 and abs(learner.trained[0] - learner.trained[1]) <= 12
    assert learner.aside["f"] < sum(learner.trained.values()) / 2 and not learner.aside["i"]


def test_one_reward_per_game_instead_of_seats_makes_every_group_flat(model: Make) -> None:
    def summed(dice: random.Random, draw: int) -> list[list[float | None]]:
        return [[sum(reward or 0.0 for reward in zero_sum(dice, draw)[0])]]

    game = Game([model(n_min=8)], summed)
    with pytest.raises(AssertionError, match="stuck"):
        game.play(1, turns=60)
    assert set(game.learners[0].aside) == {"f"}


@pytest.mark.parametrize("share", [0.9, 0.5, 0.05])
def test_episodes_without_a_seat_cost_its_model_no_group_that_others_played(model: Make, share: float) -> None:
    models = [model("solver", n_min=8), model("judge", n_min=8 if share > 0.5 else 2)]
    game = Game(models, asked(share), seed=3)
    game.play(8 if share > 0.1 else 3)
    solver, judge = game.learners
    assert not solver.aside and judge.trained[0] > 0
    if share > 0.5:
        assert judge.aside["i"] <= 2 and game.apart <= 4
    assert judge.oldest <= judge.model.topology.derived.limits.max_staleness


@pytest.mark.parametrize("mode", ["batch-async", "sync"])
def test_a_slow_learner_holds_the_others_back_by_name(model: Make, mode: str) -> None:
    models = [model("solver", n_min=4, mode=mode), model("judge", n_min=4, mode=mode, staleness=1)]
    game = Game(models, asked(1.0), slow={1: 40})
    game.play(6)
    reason = "round (judge)" if mode == "sync" else "in_flight (judge)"
    assert game.waits[reason] > game.turn / 4
    for learner in game.learners:
        assert learner.oldest <= (learner.model.topology.derived.limits.max_staleness or 0)


def test_two_seats_and_a_judge_with_other_sizes_of_steps_go_on(model: Make) -> None:
    models = [model("player", seats=2, n_min=6), model("judge", n_min=5)]
    game = Game(models, lambda dice, draw: [*zero_sum(dice, draw), [dice.random()]])
    game.play(8)
    assert all(learner.step >= 8 for learner in game.learners)


@pytest.mark.parametrize(("seats", "n_min"), [(2, 1), (2, 3), (3, 4), (3, 2), (8, 3)])
def test_steps_that_are_no_whole_number_of_draws_never_stop_the_run(model: Make, seats: int, n_min: int) -> None:
    def rewards(dice: random.Random, draw: int) -> list[list[float | None]]:
        return [[float(dice.random() < 0.3) for _ in range(seats)]]

    game = Game([model(seats=seats, n_min=n_min, staleness=6)], rewards, seed=n_min)
    game.play(25)


def test_rounds_of_other_sizes_wait_for_each_other_and_go_on(model: Make) -> None:
    models = [model("solver", n_min=8, mode="sync"), model("judge", n_min=4, mode="sync")]
    game = Game(models, asked(1.0))
    game.play(4)
    assert game.learners[1].step >= 2 * game.learners[0].step - 1
