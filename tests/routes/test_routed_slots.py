"""Routes in slots: written with each segment, read by the learner as one array, refused by sample, layer and row."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from routed_ring import LIMIT, SHAPE, RoutedWorker, answer, claimed, dispatch, routes_at, topology

from busrl.errors import NoSuchTensor
from busrl.ring import Fates, Ring, State
from busrl.roles.learner.groups import Claimed, Malformed
from busrl.roles.learner.samples import to_sample
from busrl.states import Fate

PROMPT = 5


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    name = f"busrl.test.{os.getpid()}.routes"
    made = Ring.create(name, slots=8, slot_bytes=4096, processes=8, uuid=b"r" * 16)
    made.register("rollout", "rollout/0")
    made.bind_fates(Fates(str(tmp_path / "fates.bin"), create=True), Fates(str(tmp_path / "v.bin"), create=True))
    yield made
    made.close()
    Ring.unlink(name)


@pytest.mark.parametrize(("segments", "length"), [({}, 7), ({"length": 4, "max_segments": 3}, 11)])
def test_the_learner_gets_the_routes_of_every_position_once(
    ring: Ring, segments: dict[str, Any], length: int
) -> None:
    settings = topology(**segments)
    dispatch(ring, [0, 1])
    requests = RoutedWorker(ring, settings).run({0: "x" * length, 1: "y" * (length - 2)})
    assert {request.routes_from for request in requests if request.segment == 0} == {0}
    assert all(r.routes_from == PROMPT + len(r.prefix_ids) - 1 for r in requests if r.segment)
    group = claimed(ring, settings)
    assert isinstance(group, Claimed)
    for record, tokens in zip(group.records, (length, length - 2), strict=True):
        sample = to_sample(record)
        assert np.array_equal(sample.prompt_routes, routes_at(record.uid, 0, PROMPT - 1))
        assert np.array_equal(sample.routes, routes_at(record.uid, PROMPT - 1, PROMPT - 1 + tokens))
        assert sample.routes.dtype == SHAPE.dtype and record.routes_shape == [2, 3, 8]


def test_prompts_have_no_routes_where_only_those_of_answers_are_asked_for(ring: Ring) -> None:
    settings = topology(of="answer")
    dispatch(ring, [0])
    (request,) = RoutedWorker(ring, settings).run({0: "xyz"})
    assert request.routes_from == PROMPT - 1
    group = claimed(ring, settings)
    assert isinstance(group, Claimed)
    sample = to_sample(group.records[0])
    assert sample.prompt_routes is None and np.array_equal(sample.routes, routes_at(0, PROMPT - 1, PROMPT + 2))


def test_a_prompt_of_one_token_has_no_rows(ring: Ring) -> None:
    settings = topology()
    dispatch(ring, [0], prompt="a")
    RoutedWorker(ring, settings).run({0: "xyz"})
    group = claimed(ring, settings)
    assert isinstance(group, Claimed) and np.array_equal(to_sample(group.records[0]).routes, routes_at(0, 0, 3))


def test_answers_of_validation_carry_no_routes(ring: Ring) -> None:
    dispatch(ring, [1 << 62], cls=1)
    RoutedWorker(ring, topology()).run({1 << 62: "xyz"})
    ((slot, _),) = ring.take(State.GENERATED, State.REWARDING, cls=None, limit=1)
    for name, segment in (("routes", 0), ("prompt_routes", 255)):
        with pytest.raises(NoSuchTensor):
            ring.get(slot, name, segment)


def test_a_run_without_routes_writes_and_reads_none(ring: Ring) -> None:
    settings = topology()
    settings = dataclasses.replace(settings, derived=dataclasses.replace(settings.derived, routing=None))
    dispatch(ring, [0])
    RoutedWorker(ring, settings).run({0: "xyz"})
    group = claimed(ring, settings)
    assert isinstance(group, Claimed)
    record = group.records[0]
    assert (record.routes, record.prompt_routes, record.routes_shape) == (b"", b"", [])
    assert to_sample(record).routes is None


def test_rows_of_a_dead_maker_are_made_again_and_none_doubled(ring: Ring) -> None:
    settings = topology(length=4, max_segments=3)
    dispatch(ring, [0])
    worker = RoutedWorker(ring, settings)
    for _ in range(2):  # the first segment is begun twice: its maker dies after it wrote all of it
        (request,) = worker.take()
        half = answer(request, "x" * 10)
        word = worker.intake.claimed[request.key].word
        ring.put(request.key, word, "prompt_routes", np.zeros((4, 2, 3), np.uint8))
        ring.put(request.key, word, "tokens", half.token_ids, 0)
        ring.put(request.key, word, "routes", half.routes, 0)
        worker.intake.give_back()
        worker.intake.claimed.clear()
    worker.run({0: "x" * 10})
    group = claimed(ring, settings)
    assert isinstance(group, Claimed) and group.records[0].segments == [4, 4, 2]
    sample = to_sample(group.records[0])
    assert np.array_equal(sample.routes, routes_at(0, PROMPT - 1, PROMPT + 9))
    assert np.array_equal(sample.prompt_routes, routes_at(0, 0, PROMPT - 1))


def rotten(at: tuple[int, int, int], value: int) -> Any:
    routes = routes_at(1, PROMPT - 1, PROMPT + 6)
    routes[at] = value
    return routes


SOUND = routes_at(1, PROMPT - 1, PROMPT + 6)
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"routes": None}, "routes: slot"),
    "missing of the prompt": ({"prompt_routes": None}, "prompt_routes: slot"),
    "short": ({"routes": SOUND[:-1]}, "routes [6, 2, 3]: must be [7, 2, 3]"),
    "long": ({"routes": routes_at(1, 4, 12)}, "routes [8, 2, 3]: must be [7, 2, 3]"),
    "short of the prompt": ({"prompt_routes": SOUND[:3]}, "prompt_routes: routes [3, 2, 3]: must be [4, 2, 3]"),
    "of another type": ({"routes": SOUND.astype(np.uint16)}, "routes are uint16: must be uint8"),
    "of no expert": ({"routes": rotten((4, 1, 2), 8)}, "row 4, layer 2: expert 8 of 8"),
    "of an expert twice": ({"routes": rotten((4, 1, 2), int(SOUND[4, 1, 0]))}, f"expert {SOUND[4, 1, 0]} twice"),
    "flat": ({"routes": SOUND.reshape(7, 6)}, "must be [7, 2, 3]"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_bad_routes_cost_their_sample_which_is_named(ring: Ring, tmp_path: Path, name: str) -> None:
    lies, said = FAULTS[name]
    settings = topology()
    dispatch(ring, [1])
    RoutedWorker(ring, settings).run({1: "x" * 7}, lies)
    refused = claimed(ring, settings)
    assert isinstance(refused, Malformed) and str(refused).startswith("sample 1: ") and said in str(refused)
    assert (tmp_path / "fates.bin").read_bytes()[1:2].decode() == Fate.MALFORMED.letter
    assert set(ring.lines()["state"].tolist()) == {State.FREE}


def test_a_bad_segment_is_named_and_the_rest_of_its_group_stays(ring: Ring) -> None:
    settings = topology(length=4, max_segments=3)
    dispatch(ring, [0, 1])
    worker = RoutedWorker(ring, settings)
    while requests := worker.take():
        for request in requests:
            given = answer(request, "x" * LIMIT)
            if request.uid == 1 and request.segment == 2:
                given.routes[3, 0] = 7
            worker.intake.commit(given)
    refused = claimed(ring, settings)
    assert isinstance(refused, Malformed)
    assert str(refused) == "sample 1: routes of segment 2: row 3, layer 0: expert 7 twice"
    states = ring.lines()["state"].tolist()
    assert states.count(State.REWARDED) == 1 and states.count(State.FREE) == 7
