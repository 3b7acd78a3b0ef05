"""The episodes of examples/several, played by scripted models; and how the client of two runs finds pairs."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "several"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@dataclass
class Said:
    text: str


class Scripted:
    """A seat whose answers follow from what it reads."""

    def __init__(self, answer: Callable[[str], str]) -> None:
        self.answer, self.read = answer, list[str]()

    async def complete(self, text: str, max_tokens: int = 0) -> Said:
        self.read.append(text)
        return Said(self.answer(text))


def best(text: str) -> str:
    """The move that leaves a multiple of three, or one stone."""
    left = int(text[-2])
    return str(left % 3) if left % 3 else "1"


def play(episode: Any, task: dict[str, str], **seats: Callable[[str], str]) -> Any:
    return asyncio.run(episode(task, {name: Scripted(answer) for name, answer in seats.items()}))


@pytest.mark.parametrize(("second", "wins"), [(lambda text: "1", 1.0), (lambda text: "2", 1.0), (best, 1.0)])
def test_who_begins_the_taking_game_well_wins_it(second: Callable[[str], str], wins: float) -> None:
    game = example("take_game")
    assert play(game.game, {"prompt": "7="}, first=best, second=second) == {"first": wins, "second": 1.0 - wins}
    assert play(game.game, {"prompt": "7="}, first=lambda text: "2", second=best) == {"first": 0.0, "second": 1.0}
    assert play(game.together, {"prompt": "7="}, first=best, second=second) == 1.0
    assert play(game.against, {"prompt": "7="}, player=best, opponent=second) == wins


@pytest.mark.parametrize("move", ["3", "0", "=", "", "12"])
def test_a_move_that_is_none_loses_the_taking_game(move: str) -> None:
    game = example("take_game")
    assert play(game.game, {"prompt": "7="}, first=lambda text: move, second=best)["first"] == 0.0
    assert play(game.game, {"prompt": "7="}, first=best, second=lambda text: move)["first"] == 1.0
    assert play(game.game, {"prompt": "1="}, first=lambda text: "2", second=best)["first"] == 0.0, "one stone is left"


def test_both_seats_read_the_whole_game() -> None:
    first, second = Scripted(best), Scripted(lambda text: "2")
    asyncio.run(example("take_game").game({"prompt": "7="}, {"first": first, "second": second}))
    assert first.read == ["7=", "7=16=24=", "7=16=24=13=21="] and second.read == ["7=16=", "7=16=24=13="]


@pytest.mark.parametrize(("answer", "verdict", "worth"), [
    ("1", "|", (1.0, 1.0)), ("1", ".", (1.0, 0.0)), ("2", ".", (0.0, 1.0)), ("2", "|", (0.0, 0.0)), ("2", "5", (0, 0)),
])
def test_solver_and_judge_are_each_rewarded_for_their_part(answer: str, verdict: str, worth: tuple[float, ...]) -> None:
    both = example("solver_judge")
    task, seats = {"prompt": "47=", "answer": "1"}, {"solver": lambda text: answer, "judge": lambda text: verdict}
    assert tuple(play(both.episode, task, **seats).values()) == worth
    assert play(both.believed, task, **seats) == float(verdict == "|")


def test_a_client_of_two_runs_pairs_by_number_and_never_waits_long(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    joined = example("joined_runs")
    now = 100.0
    monkeypatch.setattr(joined, "time", type("Clock", (), {"monotonic": lambda: now, "sleep": time.sleep}))
    solver, judge = (joined.Claims(tmp_path / name) for name in ("solver", "judge"))
    for name in ("solver", "judge"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "serve-0.json").touch()
    solver.waiting = {uid: (now, {"uid": uid}) for uid in (7, 3, 5)}
    judge.waiting = {uid: (now, {"uid": uid}) for uid in (5, 9, 7)}

    def numbers() -> list[int | None]:
        return [one and one["uid"] for one in joined.next_pair(solver, judge, 10.0)]

    assert [numbers() for _ in range(3)] == [[5, 5], [7, 7], [None, None]], "what belongs together first"
    now += 10.0
    assert [numbers() for _ in range(3)] == [[3, None], [None, 9], [None, None]], "then alone"
    judge.waiting = {uid: (now, {"uid": uid}) for uid in (3, 4)}
    solver.waiting = {9: (now, {"uid": 9})}
    solver.ended, judge.ended = {3, 5, 7}, {5, 7, 9}
    assert [numbers() for _ in range(3)] == [[9, None], [None, 3], [None, None]], "whose partner is gone: at once"
    solver.waiting = {4: (now, {"uid": 4})}
    assert numbers() == [4, 4], "who fell behind has caught up"
    solver.waiting = {12: (now, {"uid": 12})}
    assert numbers() == [None, None]
    (tmp_path / "judge" / "serve-0.json").unlink()
    assert numbers() == [12, None], "nobody waits for a run that is over"
