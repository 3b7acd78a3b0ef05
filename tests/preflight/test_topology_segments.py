"""[segments]: what cannot reach the limit or cannot be stored is refused, and a slot has room for all segments."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from busrl.preflight.derive import ALIGN
from busrl.ring import MAX_TENSORS
from busrl.topology import Topology
from busrl.topology.schema import MOST_SEGMENTS, TABLE_TENSORS

Loaded = Callable[..., Topology]
Refused = Callable[..., list[str]]
WAVES = "rounds = 'segments'\nlength = 16\n"

REFUSED = [
    (
        "length = 7\nmax_segments = 9",
        "segments.length = 7, segments.max_segments = 9, generation.max_new_tokens = 64: 9 segments of 7 tokens cannot "
        "reach the limit of 64; length >= 8, or more segments",
    ),
    ("length = 20\nmax_segments = 2\nglobal_max_length = 50", "2 segments of 20 tokens cannot reach the limit of 50"),
    ("length = 8\nmax_segments = 15", "segments.max_segments = 15: expected a whole number >= 1 and <= 14"),
    ("global_max_length = 100", "segments are off, so generation.max_new_tokens is the limit"),
    ('loss = "pois"', "ratio 1 corrects nothing"),
    ('loss = "pois"\n[weights]\nmode = "sync"\n[learner]\nloss = "decoupled"', "ratios that pois sets to 1"),
    ('loss = "pois"\n[weights]\nmode = "sync"\n[learner]\nupdates_per_batch = 2', "is not 1 any more"),
    ('rounds = "segments"\n[weights]\nmode = "sync"', "segments are off, so a round has none"),
    ('rounds = "segments"\nlength = 16', "only synchronous steps have rounds"),
    ('rounds = "segments"\nlength = 16\n[weights]\nmode = "sync"\n[experiments]\nforced_age = 1', "of several ages"),
    ('rounds = "segments"\nlength = 16\n[weights]\nmode = "sync"\n[learner]\npublish_every = 2', "is published"),
    (
        f"{WAVES}[weights]\nmode = 'sync'\ntransport = 'checkpoint_restart'\nrestart_every = 2\n",
        "weights.restart_every = 2: the next wave begins when what this one completed is published; restart_every = 1",
    ),
    ("[reward]\ntruncated = 0\ntruncated_penalty = 0.5", "either a fixed number or its reward less a penalty"),
    ('[reward]\ntruncated = "half"', 'expected a number "reward"'),
    ('length = "auto"\n[learner]\ndeterministic = true\n[weights]\nmode = "sync"', "depends on who finished first"),
    ('length = "long"', "segments.length"),
    ("length = -1", "segments.length = -1"),
    ('loss = "pos"', 'did you mean "pois"?'),
]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[case[1][:40] for case in REFUSED])
def test_settings_that_cannot_work_are_refused_with_rule_and_remedy(
    refused: Refused, text: str, message: str
) -> None:
    (problem,) = refused(f"[segments]\n{text}\n")
    assert problem.startswith("t.toml:1") and message in problem


def test_two_limits_of_one_answer_are_refused_and_either_alone_is_taken(loaded: Loaded, refused: Refused) -> None:
    text = "[segments]\nlength = 30\nglobal_max_length = 90\n"
    (problem,) = refused(f"[generation]\nmax_new_tokens = 64\n{text}")
    assert "an answer has one limit, and both are given; remove one of them" in problem
    alone = loaded(text)
    assert alone.generation.max_new_tokens == 90  # so every part of the run goes by it
    assert Topology.from_json(alone.to_json()) == alone
    assert loaded("[generation]\nmax_new_tokens = 90\n" + text).generation.max_new_tokens == 90
    assert loaded("[generation]\nmax_new_tokens = 90\n[segments]\nlength = 30\n").generation.max_new_tokens == 90


def test_a_slot_has_room_for_the_tensors_of_every_segment(loaded: Loaded) -> None:
    whole_answer = loaded().derived.slot_bytes
    eight = loaded("[segments]\nlength = 8\n").derived
    assert whole_answer < eight.slot_bytes <= whole_answer + 3 * 7 * ALIGN + 256
    assert any("64 tokens in at most 8 of 8 tokens; loss = behaviour" in line for line in eight.explain)
    auto = loaded('[segments]\nlength = "auto"\nmax_segments = 4\n').derived
    assert any("at most 4 of 16 or more" in line for line in auto.explain)


def test_rounds_of_segments_have_slots_for_every_segment_of_answers(loaded: Loaded) -> None:
    text = '[segments]\nlength = 16\nmax_segments = 4\nrounds = "segments"\n[weights]\nmode = "sync"\n'
    derived = loaded(text).derived
    assert (derived.limits.B, derived.limits.W, derived.train_slots) == (128, 128, 1024)
    assert any("at most 4 rounds in flight" in line for line in derived.explain)


def test_the_rule_about_the_table_is_that_of_the_ring() -> None:
    assert TABLE_TENSORS == MAX_TENSORS and MOST_SEGMENTS == 14


def test_settings_that_do_nothing_are_warned_about(loaded: Loaded) -> None:
    (warned,) = loaded('[segments]\nloss = "last_segment"\n').derived.warnings
    assert "the last one is the whole answer" in warned
    (warned,) = loaded("[segments]\nlength = 64\n").derived.warnings
    assert "every answer ends within its first segment" in warned
    (warned,) = loaded(f"[segments]\n{WAVES}[weights]\nmode = 'sync'\n[scheduler]\nahead = 4\n").derived.warnings
    assert "a wave begins when all of its round is dispatched, so nothing is held back; ahead = 0" in warned


def test_pois_is_allowed_in_synchronous_rounds_and_numbers_stand_for_cut_answers(loaded: Loaded) -> None:
    topology = loaded(
        '[segments]\nlength = 16\nloss = "pois"\n[reward]\ntruncated = -0.5\n[weights]\nmode = "sync"\n', "run.name=x"
    )
    assert not topology.derived.warnings
    assert Topology.from_json(topology.to_json()).reward.truncated == -0.5
