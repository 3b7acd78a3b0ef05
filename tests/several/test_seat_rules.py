"""Topologies whose model plays several seats: what they come to, and which are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from busrl.topology import Topology

SEATS = 'model.seats=["first", "second"]'
AGENT = '[[process]]\nrole = "agent"\nfunction = "play.py:episode"\n'
BASE = """\
[model]
path = "model"
[data]
train = "train.jsonl"
[[process]]
role = "rollout"
[[process]]
role = "learner"
"""


@pytest.fixture(autouse=True)
def play(here: Path) -> None:
    (here / "play.py").write_text("async def episode(task, llm):\n    return 0.0\n")


def test_a_model_of_two_seats_has_room_for_two_groups_a_draw(loaded: Callable[..., Topology]) -> None:
    plain, two = (loaded(AGENT, *seats, base=BASE) for seats in ((), (SEATS,)))
    assert plain.seats == ("policy",) and two.seats == ("first", "second")
    assert (plain.derived.limits.seats, two.derived.limits.seats) == (1, 2)
    assert two.derived.limits.step_room == two.derived.limits.n_hi + 1 <= two.derived.limits.B
    assert Topology.from_json(two.to_json()) == two


def test_topology_json_of_one_seat_has_no_word_of_seats(loaded: Callable[..., Topology]) -> None:
    text = loaded(AGENT, base=BASE).to_json()
    data: dict[str, Any] = json.loads(text)
    assert "seats" not in data["model"] and "seats" not in data["derived"]
    assert Topology.from_json(text).seats == ("policy",)


@pytest.mark.parametrize(("extra", "overrides", "said"), [
    ("", (), "only an episode has several sides"),
    (AGENT, ("reward.kind=exact_match",), "each side has a reward of its own"),
    (AGENT, ("data.skip.max_pass_rate=0.9",), "a pass rate is that of one answer"),
    (AGENT, ("scheduler.policy=adaptive",), "lengths are predicted of one seat"),
    (AGENT, ("weights.mode=sync", "learner.trigger.n_min=3"), "set n_min to a multiple of 2"),
    ('[[process]]\nrole = "atropos"\n', (), "the samples of atropos have one side"),
    (AGENT.replace("[[process]]", '[[process]]\nhosts = ["b"]'), (), "claimed in one memory"),
])
def test_what_does_not_go_with_several_seats_is_refused(
    refused: Callable[..., list[str]], extra: str, overrides: tuple[str, ...], said: str
) -> None:
    assert any(said in problem for problem in refused(extra, SEATS, *overrides, base=BASE))


@pytest.mark.parametrize(("seats", "said"), [
    ('["first", "First"]', '"First" is no name of a seat'),
    ('["first", ".."]', '".." is no name of a seat'),
    ('["first", "a-very-long-name-of-a-seat"]', "is no name of a seat"),
    ('["\\u00e9", "b"]', "is no name of a seat"),
    ('["first", "first"]', "a seat is named twice"),
    ('["a", "b", "c", "d", "e", "f", "g", "h", "i"]', "at most 8 seats"),
])
def test_names_of_seats_are_short_plain_and_unique(refused: Callable[..., list[str]], seats: str, said: str) -> None:
    assert any(said in problem for problem in refused(AGENT, f"model.seats={seats}", base=BASE))


def test_one_named_seat_is_a_run_of_one_seat(loaded: Callable[..., Topology]) -> None:
    topology = loaded('[[process]]\nrole = "reward"\n', 'model.seats=["only"]', base=BASE)
    assert topology.seats == ("only",) and topology.derived.limits.seats == 1
