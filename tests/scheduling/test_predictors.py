"""Length predictors: they rank, they stay in range, they forget what they must, and what they learned can be saved."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busrl.data.trace import TracedPrompt, make_trace
from busrl.predict.lengths import (
    BlendPredictor,
    HistoryPredictor,
    LearnedPredictor,
    OraclePredictor,
    kendall_tau,
    make_predictor,
)
from busrl.predict.lengths.base import Evidence, Level, PromptTable, key_of
from busrl.predict.lengths.history import Neighbours, Stack
from busrl.predict.lengths.learned import COUNTS, HASHED, Ridge, features
from busrl.scheduling.predictor import Candidate, Predictor

LEARNING = ("learned", "history", "blend")
ALL = ("rules", *LEARNING)
LIMIT, GROUP = 8192, 8


def candidate(draw: int, task: TracedPrompt) -> Candidate:
    return Candidate(draw, task.prompt, LIMIT, task.tag)


def teach(predictor: Predictor, tasks: Sequence[TracedPrompt], begin: int, end: int, members: int = GROUP) -> None:
    """Groups finish 50 at a time, one member after another."""
    for first in range(begin, end, 50):
        for member in range(members):
            part = range(first, min(end, first + 50))
            predictor.observe([(candidate(draw, tasks[draw]), tasks[draw].length(member)) for draw in part])


@pytest.fixture(scope="module")
def tasks() -> list[TracedPrompt]:
    return make_trace(2400)


# -- the bars, on the long-tailed trace (many seeds and all phases: benchmarks/predictors.py) ---------------------


def test_learned_ranks_unseen_prompts_after_two_thousand_finished_ones(tasks: list[TracedPrompt]) -> None:
    predictor = LearnedPredictor()
    teach(predictor, tasks, 0, 2000)
    said = predictor.predict([candidate(d, tasks[d]) for d in range(2000, 2400)])
    taus = [kendall_tau(said, [t.length(m) for t in tasks[2000:]]) for m in range(GROUP)]
    assert statistics.mean(taus) >= 0.45


@pytest.mark.parametrize("name", ["history", "blend"])
def test_finished_siblings_lift_the_ranking_to_six_tenths(name: str, tasks: list[TracedPrompt]) -> None:
    predictor, said, real = make_predictor(name), list[float](), list[int]()
    teach(predictor, tasks, 0, 2000)
    for first in range(2000, 2400, 50):
        part = [candidate(d, tasks[d]) for d in range(first, first + 50)]
        for member in range(GROUP):
            if member:  # 1 to 7 siblings have finished
                said += predictor.predict(part).tolist()
                real += [tasks[c.draw].length(member) for c in part]
            predictor.observe([(c, tasks[c.draw].length(member)) for c in part])
    assert kendall_tau(said, real) >= 0.6


def test_blend_starts_with_the_rules_and_ends_with_what_learned(tasks: list[TracedPrompt]) -> None:
    part = [candidate(d, tasks[d]) for d in range(2000, 2400)]
    blend, rules = BlendPredictor(), make_predictor("rules")
    assert kendall_tau(blend.predict(part), rules.predict(part)) == pytest.approx(1.0, abs=1e-3)
    teach(blend, tasks, 0, 2000)
    mean = [statistics.mean(t.lengths) for t in tasks[2000:]]
    assert kendall_tau(blend.predict(part), mean) > kendall_tau(rules.predict(part), mean) + 0.02


def test_blend_forgets_rules_that_are_wrong() -> None:
    tasks = [TracedPrompt(f"{'briefly' if d % 2 else 'prove'} {d}", (1000 if d % 2 else 10,)) for d in range(200)]
    blend = BlendPredictor()
    teach(blend, tasks, 0, 200, members=1)
    long, short = blend.predict([Candidate(1000, "briefly 5000", LIMIT), Candidate(1001, "prove 5000", LIMIT)])
    assert long > 300 and short < 60


# -- own answers ------------------------------------------------------------------------------------------------------


def test_finished_siblings_of_a_draw_move_its_prediction_more_and_more(tasks: list[TracedPrompt]) -> None:
    predictor = HistoryPredictor()
    teach(predictor, tasks, 0, 400)
    asked = Candidate(5000, "Compute the sum of 12, 13.", LIMIT, "arithmetic")
    said = [float(predictor.predict([asked])[0])]
    for _ in range(GROUP):
        predictor.observe([(asked, 3000)])
        said.append(float(predictor.predict([asked])[0]))
    assert said == sorted(said) and said[0] < 600 < said[1] and 1500 < said[-1] < 3000


def test_a_prompt_that_comes_again_is_known_by_its_earlier_answers(tasks: list[TracedPrompt]) -> None:
    predictor = HistoryPredictor()
    teach(predictor, tasks, 0, 400)
    again, other = Candidate(9000, tasks[3].prompt, LIMIT, tasks[3].tag), Candidate(9001, tasks[3].prompt + "?", LIMIT)
    before = predictor.predict([again, other])
    for draw in range(6000, 6004):
        predictor.observe([(Candidate(draw, tasks[3].prompt, LIMIT, tasks[3].tag), 8000)] * GROUP)
    after = predictor.predict([again, other])
    assert after[0] > 2 * before[0] and after[0] > 2 * after[1]


def test_a_straggler_of_an_earlier_draw_is_no_sibling() -> None:
    evidence = Evidence(PromptTable(8))
    old, new = Candidate(1, "p", LIMIT), Candidate(2, "p", LIMIT)
    assert evidence.add(old, 5.0) and evidence.add(new, 7.0)
    assert not evidence.add(old, 5.0)
    table = evidence.table
    assert table.count[0] == 1 and table.mean[0] == 7.0 and table.old_count[0] == 2 and table.old_mean[0] == 5.0


def test_one_outlier_among_siblings_does_not_count_in_full() -> None:
    evidence = Evidence(PromptTable(8))
    asked = Candidate(1, "p", LIMIT)
    evidence.add(asked, 20.0)
    together = evidence.combine([asked], [key_of(asked)], np.array([5.0]))
    assert 5.0 < together[0] < 7.0


# -- bounds ---------------------------------------------------------------------------------------------------------


def test_memory_is_bounded_and_the_oldest_prompts_go() -> None:
    predictor = HistoryPredictor(prompts=64, vectors=32)
    prompts = [f"prompt number {'x' * d}" for d in range(200)]
    for draw, prompt in enumerate(prompts):
        predictor.observe([(Candidate(draw, prompt, LIMIT), 10 + draw)])
    assert len(predictor.table) == 64 and len(predictor.neighbours) == 32
    assert predictor.table.rows([key_of(Candidate(0, prompts[d], LIMIT)) for d in (0, 135, 136, 199)]).min() == -1
    known = [d for d in range(200) if predictor.table.rows([key_of(Candidate(0, prompts[d], LIMIT))])[0] >= 0]
    assert known == list(range(136, 200))


def test_the_window_of_the_linear_model_lets_the_oldest_rows_go(monkeypatch: pytest.MonkeyPatch) -> None:
    from busrl.predict.lengths import learned as module

    monkeypatch.setattr(module, "ROWS", 20)
    monkeypatch.setattr(module, "ENTRIES", 60)
    ridge = Ridge()
    for key in range(50):
        f = features([Candidate(key, f"one two three {key}", LIMIT)], 14)
        ridge.add([key], f, np.array([float(key)]), np.array([1.0]))
        assert len(ridge) <= 20 and len(ridge.column) <= 60 and int(ridge.size.sum()) == len(ridge.column)
    assert ridge.keys[-1] == 49 and ridge.target[-1] == 49.0
    assert not ridge.update(0, 1.0) and ridge.update(49, 51.0) and ridge.target[-1] == 50.0


def test_the_linear_model_reaches_the_optimum_of_its_window() -> None:
    ridge, tasks = Ridge(), make_trace(300, seed=3)
    f = features([candidate(d, t) for d, t in enumerate(tasks)], 14)
    target = np.log([statistics.mean(t.lengths) for t in tasks])
    ridge.add(list(range(300)), f, target, np.full(300, 8.0))
    for _ in range(60):
        ridge.fit()
    full = np.zeros((300, HASHED + COUNTS))
    full[f.row, f.column] = f.value.astype(np.float32)
    full[:, HASHED:] = ridge.counts
    used = np.flatnonzero(full.any(0))
    sure, penalty = 2 * 8 / 9, np.where(used < HASHED, 30.0, 1.0)
    a, y = full[:, used], target - ridge.offset

    def loss(weights: np.ndarray) -> float:
        return float(sure * ((y - a @ weights) ** 2).sum() + (penalty * weights**2).sum())

    best = np.linalg.solve(sure * a.T @ a + np.diag(penalty), sure * a.T @ y)
    assert loss(best) <= loss(ridge.weights[used]) <= 1.001 * loss(best) < 0.7 * loss(np.zeros(len(used)))
    assert not ridge.weights[~full.any(0)].any()


# -- features -------------------------------------------------------------------------------------------------------


def columns(text: str, tag: str = "") -> set[int]:
    none = features([Candidate(0, "", 1)], 40).column.tolist()  # that there is no tag is a feature too
    return set(features([Candidate(0, text, 1, tag)], 40).column.tolist()) - set(none)


def test_features_are_words_and_pairs_of_any_script_and_digits_are_alike() -> None:
    assert columns("add 12 now") == columns("Add 97, now!") != columns("add 123 now")
    assert columns("证明勾股定理") & columns("请证明") and not columns("证明") & columns("计算")
    assert columns("a b") != columns("b a")
    assert columns("a", "code") != columns("a", "proof")


@given(st.lists(st.tuples(st.text(max_size=40), st.sampled_from(["", "a", "代码"])), min_size=1, max_size=12))
def test_features_of_a_prompt_do_not_depend_on_its_batch(texts: list[tuple[str, str]]) -> None:
    batch = [Candidate(i, text, 5, tag) for i, (text, tag) in enumerate(texts)]
    together = features(batch, 14)
    for i, candidate in enumerate(batch):
        alone, mine = features([candidate], 14), together.row == i
        assert np.array_equal(together.column[mine], alone.column)
        assert np.array_equal(together.value[mine], alone.value)
        assert np.array_equal(together.counts[i], alone.counts[0])


# -- every predictor ------------------------------------------------------------------------------------------------

PROMPTS = st.sampled_from(["prove it", "简短", "sum 1 2 3", "", "\ud800", "x" * 3000, "Write a story 故事"])
CANDIDATES = st.builds(
    Candidate, st.integers(0, 9), PROMPTS | st.text(max_size=30), st.integers(1, 9000), st.sampled_from(["", "code"])
)
ANSWERS = st.lists(st.lists(st.tuples(CANDIDATES, st.integers(1, 10**6)), max_size=8), max_size=6)
SLOW = settings(max_examples=25)


@pytest.mark.parametrize("name", ALL)
@SLOW
@given(ANSWERS, st.lists(CANDIDATES, max_size=10))
def test_predictions_are_in_range_whatever_was_seen(
    name: str, answers: list[list[tuple[Candidate, int]]], asked: list[Candidate]
) -> None:
    predictor = make_predictor(name)
    for finished in answers:
        predictor.observe(finished)
    said = predictor.predict(asked)
    assert said.shape == (len(asked),) and said.dtype == np.float64 and np.isfinite(said).all()
    assert all(1 <= tokens <= c.max_new_tokens for tokens, c in zip(said, asked))


@pytest.mark.parametrize("name", ALL)
@SLOW
@given(ANSWERS, st.lists(CANDIDATES, max_size=10), st.randoms(use_true_random=False))
def test_the_order_of_a_batch_does_not_matter_and_asking_changes_nothing(
    name: str, answers: list[list[tuple[Candidate, int]]], asked: list[Candidate], random: object
) -> None:
    predictor = make_predictor(name)
    for finished in answers:
        predictor.observe(finished)
    order = list(range(len(asked)))
    random.shuffle(order)  # type: ignore[attr-defined]
    said, shuffled = predictor.predict(asked), predictor.predict([asked[i] for i in order])
    assert np.allclose(said[order], shuffled, rtol=1e-4)
    assert np.array_equal(predictor.predict(asked), said)


@pytest.mark.parametrize("name", ALL)
@SLOW
@given(ANSWERS, ANSWERS, st.lists(CANDIDATES, max_size=10))
def test_what_was_learned_survives_saving_and_goes_on_the_same(
    name: str,
    before: list[list[tuple[Candidate, int]]],
    after: list[list[tuple[Candidate, int]]],
    asked: list[Candidate],
) -> None:
    first, second = make_predictor(name), make_predictor(name)
    for finished in before:
        first.observe(finished)
    second.load(first.state())
    for finished in after:
        first.observe(finished)
        second.observe(finished)
    assert np.allclose(first.predict(asked), second.predict(asked), rtol=1e-4)


@pytest.mark.parametrize("name", LEARNING)
def test_a_long_history_survives_saving(name: str, tasks: list[TracedPrompt]) -> None:
    first, second = make_predictor(name), make_predictor(name)
    teach(first, tasks, 0, 700)
    second.load(first.state())
    asked = [candidate(d, tasks[d]) for d in range(650, 900)]
    assert np.array_equal(first.predict(asked), second.predict(asked))
    teach(first, tasks, 700, 900)
    teach(second, tasks, 700, 900)
    assert np.allclose(first.predict(asked), second.predict(asked), rtol=1e-6)


def damaged(state: dict[str, object]) -> Iterator[dict[str, object]]:
    """States that can not be used: a part missing, or of another shape."""
    for name in state:
        yield {key: value for key, value in state.items() if key != name}
    for name in set(state) & {"ridge", "evidence", "neighbours", "stack"}:
        yield {**state, name: {}}
    if isinstance(ridge := state.get("ridge"), dict):
        yield {**state, "ridge": {**ridge, "weights": np.zeros(3)}}
        yield {**state, "ridge": {**ridge, "column": np.asarray(ridge["column"]) - HASHED}}
        yield {**state, "ridge": {**ridge, "target": np.full(len(ridge["target"]), np.nan)}}
    if isinstance(index := state.get("neighbours"), dict):
        yield {**state, "neighbours": {**index, "vectors": np.zeros((1, 2))}}
        yield {**state, "neighbours": {**index, "next": len(index["keys"]) + 1}}
    if isinstance(evidence := state.get("evidence"), dict):
        yield {**state, "evidence": {**evidence, "table": {**evidence["table"], "oldest": -1}}}
        yield {**state, "evidence": {**evidence, "variances": {**evidence["variances"], "drift": [np.nan, 5.0]}}}
    yield {**state, "level": {"answers": 5, "mean": np.inf, "base": 0.0}}


@pytest.mark.parametrize("name", LEARNING)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(name: str, tasks: list[TracedPrompt]) -> None:
    other, predictor = make_predictor(name), make_predictor(name)
    teach(other, tasks, 0, 300)
    teach(predictor, tasks, 300, 500)
    asked = [candidate(d, tasks[d]) for d in range(600, 650)]
    said, tried = predictor.predict(asked), 0
    for state in damaged(other.state()):
        with pytest.raises((KeyError, ValueError)):
            predictor.load(state)
        tried += 1
    assert tried >= 5 and np.array_equal(predictor.predict(asked), said)


def test_an_oracle_without_knowledge_is_refused() -> None:
    with pytest.raises(ValueError, match="nobody knows the lengths"):
        make_predictor("oracle")


def test_the_oracle_knows_the_mean_of_answers_cut_at_the_limit() -> None:
    oracle = OraclePredictor({0: [10, 30], 1: [5, 5000]}.__getitem__)
    assert oracle.predict([Candidate(1, "", 105), Candidate(0, "", 105)]).tolist() == [55.0, 20.0]


# -- small parts ----------------------------------------------------------------------------------------------------


def test_the_level_follows_lengths_that_grow() -> None:
    level = Level()
    for _ in range(1000):
        assert level.relative(100) == pytest.approx(np.log(100))
    for _ in range(8000):
        level.relative(200)
    assert level.value == pytest.approx(np.log(2), abs=0.01)
    assert level.relative(200) == pytest.approx(np.log(100), abs=0.01)


def test_a_mixture_follows_the_source_that_is_right_and_none_counts_negatively() -> None:
    stack, random = Stack(3), np.random.default_rng(0)
    inputs = random.normal(size=(400, 3))
    assert np.array_equal(stack.mix(inputs), inputs[:, 0])
    stack.remember(range(400), inputs + 5.0)
    stack.fit(inputs[:, 2] - 0.5 * inputs[:, 0] + 5.0, np.ones(400), 5.0)
    assert (stack.weights[:-1] >= 0).all() and stack.weights[0] == 0 and stack.weights[2] > 0.9


def test_a_prompt_is_no_neighbour_of_itself() -> None:
    table = PromptTable(8)
    index, asked = Neighbours(table, 8), [Candidate(0, "alpha beta", LIMIT), Candidate(1, "alpha gamma", LIMIT)]
    keys, f = [key_of(c) for c in asked], features(asked, 14)
    for key, value in zip(keys, (3.0, 9.0)):
        table.add(table.row(key), 0, value)
    index.add(keys, table.rows(keys), f)
    assert index.predict(f, keys, 5.0) == pytest.approx([9.0, 3.0], abs=1e-4)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=40))
def test_kendall_tau_is_what_its_definition_says(pairs: list[tuple[int, int]]) -> None:
    p, a = [x for x, _ in pairs], [y for _, y in pairs]
    agree = sum(np.sign(p[i] - p[j]) * np.sign(a[i] - a[j]) for i in range(len(p)) for j in range(i))
    varying = [sum(v[i] != v[j] for i in range(len(v)) for j in range(i)) for v in (p, a)]
    expected = agree / np.sqrt(varying[0] * varying[1]) if all(varying) else 0.0
    assert kendall_tau(p, a) == pytest.approx(expected)
