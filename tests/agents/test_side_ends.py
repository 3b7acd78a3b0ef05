"""Ends of episodes of several sides: each slot gets the turns, reward and end of its seat, the lead's last."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import agent_worlds as worlds
import pytest
from seat_holder import Holder
from side_scene import LAYOUTS, SEATS

from busrl.agents.llm import Ended
from busrl.agents.renderer import Renderer
from busrl.agents.seats import Worth
from busrl.errors import CallUnanswered
from busrl.roles.answers import read_parts
from busrl.roles.episodes import context_of, messages_of, partners_of, read_episode, reward_of
from busrl.states import VALIDATE_BIT

EACH = {"first": Worth(1.0), "second": Worth(0.5, {"right": 0.75, "long": -0.25}), "third": Worth(0.0)}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return worlds.renderer(tmp_path_factory.mktemp("model"), "qwen2_5")


@pytest.fixture(params=LAYOUTS)
def holder(tmp_path: Path, chat: Renderer, request: Any) -> Iterator[Holder]:
    made = Holder(tmp_path, request.param, chat)
    yield made
    made.close()


@pytest.fixture
def in_one(tmp_path: Path, chat: Renderer) -> Iterator[Holder]:
    """All seats in one ledger, where uids alone tell them apart."""
    made = Holder(tmp_path, "one ledger", chat)
    yield made
    made.close()


def test_each_slot_gets_the_turns_and_the_reward_of_its_seat(holder: Holder) -> None:
    sample, table = holder.claimed(), holder.played(*SEATS, "old")
    assert holder.samples.settle(sample, Ended("returned", seats=EACH), table.episode) == ""
    for name in SEATS:
        ring, slot = holder.slot_of(name)
        assert holder.state_of(name) == ("GENERATED", "D")
        episode, tree = read_episode(ring, slot), table.episode.seats[name].tree
        assert episode is not None and episode.ids.tolist() == tree.turns[0].path_ids.tolist()
        assert reward_of(ring, slot) == (EACH[name].reward, [])
        assert read_parts(ring, slot) == EACH[name].parts
        said = [message.get("seat", "") for sequence in messages_of(ring, slot) for message in sequence]
        assert said == (["", "old"] if name == "first" else [""]), "what is recorded nowhere else follows the lead's"
    assert holder.samples.room == holder.settings.episodes and not holder.warned


def test_sides_end_in_order_and_nothing_is_written_before(in_one: Holder) -> None:
    sample, table = in_one.claimed(), in_one.played(*SEATS)
    assert not in_one.done
    in_one.samples.settle(sample, Ended("returned", 0.5), table.episode)
    assert in_one.order() == [("commit_segment", seat) for seat in ("third", "second", "first")]


def test_a_seat_without_a_call_is_not_used(holder: Holder) -> None:
    sample, table = holder.claimed(), holder.played("first", "third")
    assert holder.samples.settle(sample, Ended("returned", seats={"first": Worth(1.0), "third": Worth()}),
                                 table.episode) == ""
    assert [holder.state_of(name) for name in SEATS] == [("GENERATED", "D"), ("FREE", "u"), ("GENERATED", "D")]
    assert not holder.warned and holder.samples.ends["unused"] == 1


def test_what_only_other_seats_said_uses_none_of_the_trained_ones(holder: Holder) -> None:
    sample, table = holder.claimed(), holder.played("old")
    holder.samples.settle(sample, Ended("returned", 1.0), table.episode)
    assert {holder.state_of(name) for name in SEATS} == {("FREE", "u")}


@pytest.mark.parametrize("ended, spoke, fate, text", [
    (Ended("raised", text="a fault"), SEATS, "R", "its episode raised: a fault"),
    (Ended("hung"), ("first",), "H", "hung"), (Ended("crashed"), (), "P", "crashed"),
    (Ended("returned", 1.0), (), "M", "without a model call"),
    (Ended("returned", seats={"first": Worth(1.0)}), ("first", "second"), "M", "second made calls and got no reward"),
    (Ended("returned", seats={"nobody": Worth(1.0)}), ("first",), "M", "'nobody', which is no seat"),
])
def test_an_episode_without_a_good_end_drops_all_its_sides(
    holder: Holder, ended: Ended, spoke: tuple[str, ...], fate: str, text: str
) -> None:
    sample = holder.claimed()
    assert text in holder.samples.settle(sample, ended, holder.played(*spoke).episode)
    assert {holder.state_of(name) for name in SEATS} == {("FREE", fate)}
    assert len(holder.warned) == 1 and holder.samples.room == holder.settings.episodes


def test_a_budget_that_is_used_up_fails_every_seat_that_spoke(holder: Holder) -> None:
    sample = holder.claimed()
    holder.samples.settle(sample, Ended("used_up"), holder.played("first", "second").episode)
    assert [holder.state_of(name)[1] for name in SEATS] == ["D", "D", "u"]
    assert [reward_of(*holder.slot_of(name)) for name in SEATS[:2]] == [(-1.0, [])] * 2


@pytest.mark.parametrize("seat", SEATS)
def test_a_side_that_does_not_fit_is_dropped_alone(in_one: Holder, seat: str) -> None:
    sample, table = in_one.claimed(), in_one.played(*SEATS)
    in_one.full.add(in_one.uid(0, seat))
    fault = in_one.samples.settle(sample, Ended("returned", 1.0), table.episode)
    assert bool(fault) == (seat == "first") and "does not fit" in in_one.warned[0]
    for name in SEATS:
        assert in_one.state_of(name) == (("FREE", "M") if name == seat else ("GENERATED", "D"))


def test_an_orphan_is_recorded_alone_with_what_the_others_said(holder: Holder) -> None:
    sample = holder.claimed()
    holder.samples.settle(sample, Ended("returned", 1.0), holder.played("first", "second", "third").episode)
    book = holder.book("second")
    book.work()
    assert book.queue(book.uid(0, "second", attempt=1))
    (orphan,) = holder.samples.take(1)
    table = holder.played("first", "second", "old")
    orphan.answered_beside(5, 3)
    table.episode.seats["old"].counts["opponent_switched"] = 2
    assert holder.samples.settle(orphan, Ended("returned", seats=EACH), table.episode) == ""
    said = [message.get("seat", "") for sequence in messages_of(book.ring, orphan.slot) for message in sequence]
    assert said == ["", "first", "old"] and reward_of(book.ring, orphan.slot) == (0.5, [])
    counts = context_of(book.ring, orphan.slot)
    assert (counts["alone"], counts["partner_tokens"], counts["partner_age"]) == (1, 5, 15)
    assert counts["opponent_switched"] == 2, "calls of a pool that another engine answered"


def test_sides_that_are_left_at_a_stop_go_back(in_one: Holder) -> None:
    sample, table = in_one.claimed(), in_one.played("first", "second")
    in_one.stops = True
    in_one.samples.settle(sample, Ended("returned", 1.0), table.episode)
    assert in_one.order() == [("drop", "third")] and not in_one.warned
    in_one.samples.give_back_all()
    assert in_one.order()[1:] == [("release", "second"), ("release", "first")], "nobody finds the lead without it"
    assert [in_one.state_of(name)[0] for name in SEATS] == ["QUEUED", "QUEUED", "FREE"]


def test_unanswered_calls_end_all_sides_the_third_time(holder: Holder) -> None:
    sample = holder.claimed()
    for _ in range(2):
        holder.samples.begin_again(sample, CallUnanswered("late", "no engine"))
        assert {holder.state_of(name) for name in SEATS} == {("QUEUED", "D")}
        (sample,) = holder.samples.take(1)
        assert [sample.seat, *sample.siblings] == [*SEATS]
    holder.samples.begin_again(sample, CallUnanswered("late", "no engine"))
    assert {holder.state_of(name) for name in SEATS} == {("FREE", "R")}


def test_validation_records_the_lead_and_the_rewards_of_the_others_as_parts(holder: Holder) -> None:
    holder.validate(7)
    (sample,) = holder.samples.take(1)
    table = holder.played(*SEATS)
    holder.samples.settle(sample, Ended("returned", seats={**EACH, "old": Worth(0.125)}), table.episode)
    lines = holder.ring.lines()
    (slot,) = [slot for slot in range(len(lines)) if int(lines["uid"][slot]) == VALIDATE_BIT | 7]
    assert reward_of(holder.ring, slot) == (1.0, [])
    assert read_parts(holder.ring, slot) == {"second": 0.5, "third": 0.0, "old": 0.125}
    assert json.loads(table.episode.tree.transcript(1 << 16)) == messages_of(holder.ring, slot)[:1]
    assert partners_of(holder.ring, slot) == {}, "no other model was asked"
    holder.validate(8)
    (sample,) = holder.samples.take(1)
    holder.samples.settle(sample, Ended("returned", 1.0), holder.played("first", "old").episode)
    assert partners_of(holder.ring, sample.slot) == {"old": [1]}
