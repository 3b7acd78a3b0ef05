"""Episodes of several sequences and turns as inputs of a model; answers of one turn stay exactly what they were."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import one_turn
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from busrl.ranks.wire import Work, samples_of, work_of
from busrl.training import batch, packing
from busrl.training.batch import Sample, Turns
from busrl.training.forward import JoinedRows
from busrl.training.scorer import Advantages

RECORDED = json.loads(one_turn.FILE.read_text())


@pytest.fixture(scope="module")
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_rows_places_and_masks_of_answers_are_as_before_episodes(lab: Any) -> None:
    assert one_turn.places(lab) == RECORDED["places"]


def test_losses_gradients_and_diagnostics_of_answers_are_those_before_there_were_episodes(
    lab: Any, one_thread: None
) -> None:
    for name, (loss, norm, padding, numbers, _) in one_turn.steps(lab, True).items():
        told = RECORDED["steps"][name]
        assert (loss, norm, padding) == pytest.approx(told[:3], rel=1e-12), name
        both = {field: [found[field] for found in (numbers, told[3])] for field in told[3]}
        assert all(one == other if one is None else one == pytest.approx(other, rel=1e-12, abs=1e-12)
                   for one, other in both.values()), name
        assert numbers.keys() == told[3].keys()


# -- episodes ---------------------------------------------

spans = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3)  # read, then generated
episodes = st.lists(st.tuples(spans, st.integers(0, 2)), min_size=1, max_size=3)  # and what follows the last span
shapes = st.lists(st.one_of(episodes, st.integers(1, 5)), min_size=1, max_size=5)


def made(shape: Any, index: int = 0, seed: int = 0) -> Sample:
    """An episode of these sequences, or an answer of so many tokens."""
    random = np.random.default_rng(seed + index)
    if isinstance(shape, int):
        ids = random.integers(0, 23, shape + 3).astype(np.int32)
        return finished(index, ids[:3], ids[3:], shape, random, None)
    seqs, rows = [], []
    for number, (turns, rest) in enumerate(shape):
        at = 0
        for read, drawn in turns:
            rows.append([number, at + read, at + read + drawn])
            at += read + drawn
        seqs.append(at + rest)
    count = sum(end - begin for _, begin, end in rows)
    turns = Turns(np.array(seqs), np.array(rows), random.random(count) < 0.3)
    ids = random.integers(0, 23, sum(seqs)).astype(np.int32)
    return finished(index, ids[:0], ids, count, random, turns)


def finished(index: int, prompt: Any, ids: Any, count: int, random: Any, turns: Turns | None) -> Sample:
    behaviour = (-random.random(count) - 0.5).astype(np.float32)
    return Sample(index, index // 2, index % 2, prompt, ids, behaviour, random.integers(3, 6, count).astype(np.uint32),
                  turns=turns)


def plain(sample: Sample) -> list[tuple[list[int], int]]:
    """Of each generated token the ids before it in its sequence, and itself."""
    if sample.turns is None:
        ids = [*sample.prompt_ids.tolist(), *sample.token_ids.tolist()]
        return [(ids[:t], ids[t]) for t in range(len(sample.prompt_ids), len(ids))]
    found = []
    for sequence, begin, end in sample.turns.rows.tolist():
        first = int(sample.turns.seqs[:sequence].sum())
        ids = sample.token_ids[first : first + int(sample.turns.seqs[sequence])].tolist()
        found += [(ids[:t], ids[t]) for t in range(begin, end)]
    return found


@given(shapes=shapes)
def test_each_generated_token_is_predicted_from_exactly_what_stands_before_it(shapes: Any) -> None:
    samples = [made(shape, index) for index, shape in enumerate(shapes)]
    expected = [pair for sample in samples for pair in plain(sample)]
    ids, rows, columns = batch.pad(samples)
    padded = [(ids[row, : column + 1].tolist(), int(ids[row, column + 1])) for row, column in zip(rows, columns)]
    assert padded == expected
    assert [one for sample in samples for one in sample.targets().tolist()] == [token for _, token in expected]
    joined, positions, wanted = batch.join(samples)
    assert [joined[at - positions[at] : at + 1].tolist() for at in wanted] == [before for before, _ in expected]
    assert packed(packing.plan_of(samples)) == [before for before, _ in expected]


def packed(plan: packing.Plan) -> list[list[int]]:
    """What each row that predicts a generated token attends to, itself included."""
    found = []
    for before_first, before, first, length in plan.sequences.rows():
        head = plan.ids[before_first : before_first + before].tolist()
        for at in range(first, first + length):
            assert int(plan.positions[at]) == before + at - first
            found.append(head + plan.ids[first : at + 1].tolist())
    rows = found[plan.shared :]
    return rows if plan.wanted is None else [rows[at] for at in plan.wanted.tolist()]


@given(shapes=shapes, budget=st.integers(1, 60), together=st.booleans())
def test_a_cut_holds_every_episode_once_within_the_budget_or_alone(shapes: Any, budget: int, together: bool) -> None:
    samples = [made(shape, index) for index, shape in enumerate(shapes)]
    parts = batch.cut(samples, budget, together)
    assert sorted(i for part in parts for i in part) == list(range(len(samples)))
    for part in parts:
        pieces = [len(piece.ids) for i in part for piece in samples[i].pieces]
        size = sum(samples[i].length for i in part) if together else len(pieces) * max(pieces)
        assert len(part) == 1 or size <= budget


@given(shapes=shapes)
def test_values_of_turns_and_masks_stand_at_their_tokens(shapes: Any) -> None:
    samples = [made(shape, index) for index, shape in enumerate(shapes)]
    flat = batch.flatten(samples, torch.float64, torch.device("cpu"))
    worth = [[10.0 * i + t for t in range(len(sample.turn_lengths()))] for i, sample in enumerate(samples)]
    expected = [value for i, sample in enumerate(samples)
                for value, count in zip(worth[i], sample.turn_lengths().tolist(), strict=True) for _ in range(count)]
    assert flat.per_token(worth, torch.float64).tolist() == expected == batch.spread(samples, worth).tolist()
    trained = torch.ones_like(flat.rows, dtype=torch.bool) if flat.mask is None else flat.mask
    lengths = [sample.trained for sample in samples]
    assert flat.lengths.tolist() == lengths == [int(sample.mask().sum()) for sample in samples]
    assert flat.turn_lengths.tolist() == torch.bincount(flat.turns[trained], minlength=len(flat.turn_lengths)).tolist()


@given(shapes=shapes)
def test_an_episode_reaches_another_rank_as_it_is(shapes: Any) -> None:
    import msgspec

    samples = [made(shape, index) for index, shape in enumerate(shapes)]
    worth = [[0.5] * len(sample.turn_lengths()) if sample.turns is not None else 1.0 for sample in samples]
    sent = work_of(lambda versions: versions.astype(np.int64), samples, Advantages(worth, worth), 4)
    work = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Work)
    assert work.advantages == work.weights == worth
    there = samples_of(work)
    for sample, other in zip(samples, there, strict=True):
        assert plain(sample) == plain(other) and sample.mask().tolist() == other.mask().tolist()
    assert batch.cut(samples, 30) == batch.cut(there, 30)


@pytest.mark.parametrize("way", ["full", "padded", "packed", "joined"])
def test_every_way_gives_the_log_probabilities_of_each_sequence_alone(lab: Any, way: str) -> None:
    shapes = [[([(3, 2), (2, 3)], 0), ([(4, 1)], 0)], 4, [([(1, 2), (1, 1), (3, 2)], 2)], [([(3, 1)], 0)]]
    samples = [made(shape, index, seed=5) for index, shape in enumerate(shapes)]
    trainer = lab.trainer("qwen3", None if way == "joined" else way, micro_batch_tokens=30)
    if way == "joined":
        trainer.forward = JoinedRows(lab.model())
    for sample, row in zip(samples, trainer.score(samples), strict=True):
        assert row.tolist() == pytest.approx(alone(lab.model(), sample).tolist(), abs=1e-6)


def alone(model: Any, sample: Sample) -> Tensor:
    with torch.no_grad():
        return torch.stack([
            torch.log_softmax(model(input_ids=torch.tensor([before])).logits[0, -1], -1)[token]
            for before, token in plain(sample)
        ])


@given(st.lists(shapes.map(lambda shape: shape[0]), min_size=1, max_size=4), st.integers(0, 3))
def test_a_sample_began_with_weights_that_drew_all_its_turns(found: Any, version: int) -> None:
    random, samples = np.random.default_rng(version), [made(shape, index) for index, shape in enumerate(found)]
    told = []
    for number, sample in enumerate(samples):
        versions = np.sort(random.integers(0, 3, sample.generated)).astype(np.uint32)
        samples[number] = dataclasses.replace(sample, policy_versions=versions)
        told += [int(versions[0]) == version] * sample.generated  # versions never go down, from turn to turn either
    flat = batch.flatten(samples, torch.float64, torch.device("cpu"))
    assert flat.begun(version).tolist() == told
