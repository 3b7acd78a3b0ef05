"""What is known of open groups: finished answers, slot priorities, rows, and the records of ended groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from busrl.predict.lengths import RulesPredictor
from busrl.scheduling.admission import Rows
from busrl.scheduling.dispatch import KeyedDraws, Pool, WaitingDraws, make_policy, priority_by_length
from busrl.scheduling.groups import FinishedAnswers, GroupScanner, slot_priority
from busrl.scheduling.predictor import Candidate
from busrl.states import uid_of

FREE, RESERVED, QUEUED, GENERATING, GENERATED, REWARDING, REWARDED, TRAINING, DROPPED = range(9)
G = 4


@pytest.fixture
def ring(table: Any) -> Any:
    return table(G, 40)


# -- finished answers -----------------------------------------------------------------------------------------------


def finish(ring: Any, slot: int, tokens: int, state: int = GENERATED) -> None:
    ring.lines["finish"][slot], ring.lines["response_tokens"][slot], ring.lines["state"][slot] = 1, tokens, state


def test_every_finished_answer_is_given_once_even_if_trained_between_looks(ring: Any) -> None:
    answers = FinishedAnswers()
    slots = [ring.put(3, member) for member in range(G)]
    assert len(answers.look(ring.lines)[0]) == 0
    finish(ring, slots[1], 7)
    finish(ring, slots[2], 9, FREE)
    uids, tokens = answers.look(ring.lines)
    assert dict(zip(uids.tolist(), tokens.tolist())) == {uid_of(3, 0, 1, G): 7, uid_of(3, 0, 2, G): 9}
    for state in (REWARDING, REWARDED, TRAINING, FREE):
        finish(ring, slots[1], 7, state)
        assert len(answers.look(ring.lines)[0]) == 0
    finish(ring, ring.put(5, 0), 4)  # into the slot that came free
    assert answers.look(ring.lines)[1].tolist() == [4]


def test_accidents_partial_answers_and_validation_are_no_finished_answers(ring: Any) -> None:
    answers = FinishedAnswers()
    ring.end(ring.put(0, 0, state=GENERATING), "P")
    ring.put(0, 1, segs=1)
    finish(ring, ring.put(0, 2, cls=1), 5)
    assert len(answers.look(ring.lines)[0]) == 0


# -- what a policy makes of it --------------------------------------------------------------------------------------


def prompt(draw: int, length: int = 10) -> Candidate:
    return Candidate(draw, "x" * length, 4096)


def test_the_longest_finished_member_decides_where_its_siblings_stand() -> None:
    policy = make_policy("ljf", 8, RulesPredictor(), window=8, group_size=G)
    policy.offer([prompt(0), prompt(1)])
    assert [c.draw for c in (policy.next(), policy.next()) if c] == [0, 1]
    assert policy.priority(0, 0) == policy.priority(1, 1)
    policy.finished([0, 1, 1], [5, 100, 3])
    assert policy.priority(1, 1) > policy.priority(0, 0)
    short = make_policy("sjf", 8, RulesPredictor(), window=8, group_size=G)
    short.adopt([prompt(0), prompt(1)])  # a new scheduler is told the open groups
    short.finished([0, 1, 1], [5, 100, 3])
    assert short.priority(0, 0) > short.priority(1, 1)


def test_a_group_that_ended_leaves_a_record_and_is_forgotten() -> None:
    policy = make_policy("sjf", 8, RulesPredictor(), aging=0.0, group_size=G)
    policy.offer([prompt(0, 500), prompt(1, 10)])
    assert [c.draw for c in (policy.next(), policy.next()) if c] == [1, 0]
    policy.look([0, 1], [4, 4], 16)
    policy.finished([0, 0, 1, 9], [10, 20, 7, 1])
    assert policy.take_records() == [] and policy.unknown([0, 1, 9]) == [9]
    policy.look([1], [3], 16)
    (record,) = policy.take_records()
    assert (record.draw, record.wait, record.actual, record.longest, record.members) == (0, 1, 15.0, 20, 2)
    assert record.predicted == RulesPredictor().predict([prompt(0, 500)])[0]
    assert policy.unknown([0]) == [0] and policy.take_records() == []


class Learner:
    """Predicts what it last observed for a prompt."""

    name = "planted"

    def __init__(self) -> None:
        self.known: dict[str, float] = {}
        self.seen: list[int] = []

    def predict(self, candidates: Any) -> Any:
        return np.array([self.known.get(c.prompt, 1.0) for c in candidates])

    def observe(self, finished: Any) -> None:
        self.seen += [tokens for _, tokens in finished]
        self.known |= {c.prompt: float(tokens) for c, tokens in finished}

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: Any) -> None: ...


def test_waiting_groups_are_predicted_anew_and_each_answer_observed_once() -> None:
    learner = Learner()
    policy = make_policy("sjf", 8, learner, 0.0, group_size=G)
    policy.offer([Candidate(0, "a", 4096), Candidate(1, "a", 4096), Candidate(2, "b", 4096)])
    assert policy.next() == Candidate(0, "a", 4096)
    policy.finished([0] * 300, [50] * 300)
    assert learner.seen == [50] * 300
    assert policy.next() == Candidate(2, "b", 4096)  # "a" is long now, which the second "a" was not when it was offered


# -- slots, rows, pool ----------------------------------------------------------------------------------------------


@given(window=st.integers(1, 64), direction=st.sampled_from([-1, 1]), a=st.integers(0, 10**7),
       b=st.integers(0, 10**7), x=st.floats(0, 1e6), y=st.floats(0, 1e6))
def test_a_group_is_overtaken_in_the_ring_only_inside_its_own_window(
    window: int, direction: int, a: int, b: int, x: float, y: float
) -> None:
    first, second = (priority_by_length(window, direction, *of) for of in ((a, x), (b, y)))
    assert -(2**31) <= first <= 0
    if a < b < a + 10**6 and second > first:
        assert b - a < window and direction * y <= direction * x


def test_a_window_of_one_serves_in_the_order_of_admission() -> None:
    assert [priority_by_length(1, -1, n, 100.0 * n) for n in range(9)] == [slot_priority(n) for n in range(9)]


def test_rows_are_those_announced_lately_and_at_least_those_in_use() -> None:
    rows = Rows(64, 10.0)
    assert rows.total(0) == 64 and rows.total(80) == 80
    rows.announce("a", 16, 0.0)
    rows.announce("b", 8, 5.0)
    assert rows.workers(6.0) == ["a", "b"] and rows.total(3) == 24
    assert rows.workers(12.0) == ["b"] and rows.total(3) == 8 and rows.total(9) == 9


@settings(max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5000)), max_size=60))
def test_the_flags_of_waiting_draws_are_a_set(steps: list[tuple[bool, int]]) -> None:
    flags, model = WaitingDraws(), set[int]()
    for add, draw in steps:
        if add and draw not in model:
            flags.set(draw, 7.0 * draw)
            model.add(draw)
        elif draw in model:
            flags.clear(draw)
            model.discard(draw)
        asked = np.array([draw, draw + 1, 0, 4999, 9999])
        assert flags.missing(asked) == [d for d in asked.tolist() if d not in model]
        assert flags.oldest() == min(model, default=None)
        between, predicted = flags.between(draw, 3000)
        assert between.tolist() == sorted(d for d in model if draw <= d < 3000)
        assert predicted.tolist() == [7.0 * d for d in between]


@settings(max_examples=60)
@example(horizon=2, steps=[(True, 13, 1), (True, 14, 1), (False, 0, 1), (True, 1, 1), (False, 0, 1)])
@given(
    horizon=st.integers(1, 9),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.integers(0, 9)), max_size=80),
)
def test_a_pool_takes_the_smallest_key_within_the_horizon_in_any_history(
    horizon: int, steps: list[tuple[bool, int, int]]
) -> None:
    lengths = {draw: float(draw * 7919 % 13) for draw in range(41)}
    pool = Pool(lambda oldest: oldest + horizon, -1)
    pool.rekey(1.0, 0.0)
    model: set[int] = set()
    for add, draw, rekey in steps:
        if add:
            pool.add(prompt(draw), lengths[draw])
            model.add(draw)
        elif model:
            near = [d for d in model if d < min(model) + horizon]
            assert pool.near()
            best, first = pool.best(), pool.first()
            assert best == min(near, key=lambda d: (-lengths[d], d))
            assert first == min(near, key=lambda d: (lengths[d], d))
            assert sorted(pool.since) == sorted(near)
            assert pool.mean == pytest.approx(sum(lengths[d] for d in near) / len(near))
            candidate, wait = pool.take(first)
            assert candidate.draw == first and wait >= 0
            model.discard(first)
        if not rekey:
            pool.rekey(1.0, 0.0)
    assert set(pool.waiting) == model


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=60))
def test_draws_come_by_key_whether_sorted_or_pushed(steps: list[tuple[int, int]]) -> None:
    order, model = KeyedDraws(), dict[int, float]()
    for draw, (what, key) in enumerate(steps):
        first = min(model, key=lambda d: (model[d], d), default=None)
        assert order.first(model) == first
        if what == 0 and first is not None:
            del model[first]
        elif what == 1:
            model = {d: float((key + d) % 3) for d in range(draw)}
            order.sort(np.array(list(model.values())), np.array(list(model), np.int64))
        else:
            order.push(float(key), draw)
            model[draw] = float(key)


def test_a_group_enters_two_heaps_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    pushes: list[Any] = []
    monkeypatch.setattr("busrl.scheduling.dispatch.heapq.heappush", lambda heap, item: pushes.append(item))
    pool = Pool(lambda oldest: oldest + 8, 1)
    for draw in range(40):
        pool.add(prompt(draw), 1.0)
    for draw in range(40):
        assert pool.near() and pool.take(draw)[1] >= 0
    assert len(pushes) == 2 * 40


def test_scanning_a_group_with_a_probe_costs_no_member_list(ring: Any) -> None:
    ring.put(0, 0)
    view = GroupScanner(ring.fates, G).scan(ring.lines.copy())
    assert len(view.todo) == G - 1
