"""Routes of the torch engine's answers are those of a forward pass over the whole sequence, however they came about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from moe_models import moe_folder, routing_at
from moe_models import routes_of as unsorted_routes_of
from published import Published
from requests_ import endless, request, run
from transformers import AutoModelForCausalLM

from busrl.data.routing import Routing, first_fault
from busrl.engines import Finished
from busrl.engines.base import PartialAnswer
from busrl.engines.torch.engine import TorchEngine
from busrl.errors import ModelNotLoaded
from busrl.states import Finish

PROMPTS = ([5, 6, 7], [9, 8], [4], [5, 6, 7], list(range(3, 15)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return moe_folder(tmp_path_factory.mktemp("moe"), layers=3, decoder_sparse_step=1, mlp_only_layers=[1])


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def routes_of(model: Any, ids: Any) -> Any:
    return np.sort(unsorted_routes_of(model, ids), -1)


def routed(folder: Path, **settings: Any) -> TorchEngine:
    return endless(folder, **{"capacity": 4, "routing": routing_at(folder), **settings})


def every(prompt: Any, *answers: Finished) -> list[int]:
    return [*np.asarray(prompt).tolist(), *(token for answer in answers for token in answer.token_ids.tolist())]


def check(model: Any, routing: Routing, known: list[int], answer: Finished, have: int = 0) -> None:
    """Compare an answer's routes with a plain forward pass over `known`: prompt and answer. The caller had the routes
    of the first `have` tokens."""
    wanted = routes_of(model, known)[:-1]
    before = len(known) - len(answer.token_ids) - 1
    assert answer.routes is not None and answer.prompt_routes is not None
    assert first_fault(answer.routes, len(answer.token_ids), routing) == ""
    assert first_fault(answer.prompt_routes, before - have, routing) == ""
    np.testing.assert_array_equal(np.sort(answer.prompt_routes, -1), wanted[have:before])
    np.testing.assert_array_equal(np.sort(answer.routes, -1), wanted[before:])


@pytest.mark.parametrize("budget", [2048, 5])
def test_answers_of_a_crowd_have_the_routes_of_whole_forwards(folder: Path, model: Any, budget: int) -> None:
    engine = routed(folder, prefill_tokens=budget)
    results = run(engine, [request(k, prompt) for k, prompt in enumerate(PROMPTS * 2)])
    for key, prompt in enumerate(PROMPTS * 2):
        check(model, routing_at(folder), every(prompt, results[key]), results[key])


@pytest.mark.parametrize(("experts", "top_k"), [(300, 1), (256, 3), (4, 4)])
def test_ids_of_one_byte_or_two_are_those_of_whole_forwards(tmp_path: Path, experts: int, top_k: int) -> None:
    folder = moe_folder(tmp_path, layers=4, mlp_only_layers=[1], experts=experts, top_k=top_k)
    model, engine = AutoModelForCausalLM.from_pretrained(folder), routed(folder)
    results = run(engine, [request(k, prompt) for k, prompt in enumerate(PROMPTS)])
    for key, prompt in enumerate(PROMPTS):
        check(model, routing_at(folder), every(prompt, results[key]), results[key])


@pytest.mark.parametrize("budget", [2048, 3])
def test_turns_over_kept_prefixes_have_every_row(folder: Path, model: Any, budget: int) -> None:
    engine = routed(folder, prefix_keep_s=30.0, prefill_tokens=budget)
    prompt, have = list(PROMPTS[0]), 0
    for turn in range(4):
        (answer,) = run(engine, [request(turn, prompt, max_new_tokens=5, routes_from=have)]).values()
        known = every(prompt, answer)
        check(model, routing_at(folder), known, answer, have)
        prompt, have = [*known, 3, 4], len(known) - 1
    assert engine.statistics().prefix_tokens > 0
    (branch,) = run(engine, [request(9, prompt, max_new_tokens=5)]).values()  # of a caller that has none yet
    check(model, routing_at(folder), every(prompt, branch), branch)


def test_segments_join_without_a_gap_or_a_double_row(folder: Path, model: Any) -> None:
    engine = routed(folder)
    prefix, rows = np.empty(0, np.int32), []
    for segment in range(3):
        have = 0 if not segment else len(PROMPTS[0]) + len(prefix) - 1
        asked = request(segment, PROMPTS[0], prefix_ids=prefix, max_new_tokens=4, segment=segment, routes_from=have)
        (answer,) = run(engine, [asked]).values()
        assert answer.routes is not None and answer.prompt_routes is not None
        assert len(answer.prompt_routes) == (0 if segment else len(PROMPTS[0]) - 1)
        rows += [answer.prompt_routes, answer.routes]
        prefix = np.concatenate([prefix, answer.token_ids])
    wanted = routes_of(model, [*PROMPTS[0], *prefix.tolist()])[:-1]
    np.testing.assert_array_equal(np.sort(np.concatenate(rows), -1), wanted)


@pytest.mark.parametrize("routes_from", [0, 2])
def test_an_aborted_answer_goes_on_with_the_rows_that_it_has(folder: Path, model: Any, routes_from: int) -> None:
    engine, waiting = routed(folder, capacity=2), request(1, PROMPTS[4], max_new_tokens=12, routes_from=routes_from)
    partial = PartialAnswer(waiting)
    engine.submit([waiting])
    empty = engine.abort(1)  # before its first step
    assert empty is not None and empty.routes is None
    partial.add_piece(empty)
    while partial.pieces < 3:
        engine.submit([partial.rest()])
        for _ in range(3):
            assert not engine.step()
        (piece,) = engine.pause("abort")
        engine.resume()
        assert piece.finish == Finish.ABORTED
        partial.add_piece(piece)
    answer = partial.finished(Finish.LENGTH)
    assert len(answer.token_ids) == 9
    check(model, routing_at(folder), every(PROMPTS[4], answer), answer, routes_from)


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_a_token_keeps_the_route_that_it_was_drawn_by(folder: Path, model: Any, on_update: str) -> None:
    engine = routed(folder, on_update=on_update, capacity=2)
    other = AutoModelForCausalLM.from_pretrained(moe_folder(folder / "other", layers=3, mlp_only_layers=[1], seed=1))
    engine.submit([request(0, PROMPTS[0], max_new_tokens=12)])
    for _ in range(4):
        engine.step()
    engine.update_weights(Published(1, 0, other.state_dict()))
    (answer,) = run(engine, []).values()
    assert answer.routes is not None and answer.prompt_routes is not None
    old = int((answer.versions == 0).sum())
    known, routes = every(PROMPTS[0], answer), np.sort(np.concatenate([answer.prompt_routes, answer.routes]), -1)
    drawn_before = len(PROMPTS[0]) - 1 + old
    np.testing.assert_array_equal(routes[:drawn_before], routes_of(model, known)[:drawn_before])
    if on_update == "recompute":
        np.testing.assert_array_equal(routes[drawn_before:], routes_of(other, known)[drawn_before:-1])
        engine.submit([request(1, PROMPTS[1], max_new_tokens=8)])
        for _ in range(3):
            engine.step()
        engine.update_weights(Published(2, 0, model.state_dict()))
        cut = engine.abort(1)  # while it waits for its row to be computed again
        assert cut is not None and cut.routes is not None and len(cut.routes) == len(cut.token_ids) > 0
        np.testing.assert_array_equal(np.sort(cut.routes, -1), routes_of(other, every(PROMPTS[1], cut))[1:-1])


def test_an_engine_without_routing_gives_no_routes(folder: Path) -> None:
    (answer,) = run(endless(folder, capacity=2), [request(0, PROMPTS[0])]).values()
    assert answer.routes is None and answer.prompt_routes is None


def test_a_model_whose_routers_are_elsewhere_is_refused(folder: Path) -> None:
    with pytest.raises(ModelNotLoaded, match=r'layers \[0, 1, 2\] choose experts.*learner\.routes = "own"'):
        routed(folder, routing=Routing((0, 1, 2), 8, 2))
