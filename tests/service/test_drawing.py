"""How a service's engine draws: its log-probabilities, ends of answers, and the scores of prompts."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bases import TOKENS, train, write_base
from test_rows import answers, request

from busrl.engines.base import Finished, Request
from busrl.service.adapters import Adapter
from busrl.service.engine import AdapterEngine
from busrl.service.sampling import SCORES, Places
from busrl.service.tenants import Tenants
from busrl.states import Finish

torch.set_num_threads(1)
EOS = 1


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("bases") / "base")


@pytest.fixture(scope="module")
def folder(base: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    tenants, path = Tenants(base), tmp_path_factory.mktemp("snapshots") / "11"
    tenants.create("a", Adapter(4, 2))
    train(tenants, "a", 4)
    tenants.snapshot("a", path)
    return str(path)


def engine_of(base: Path, **settings: Any) -> AdapterEngine:
    engine = AdapterEngine.load(base, **{"capacity": 8, "max_length": 64, **settings})
    assert isinstance(engine, AdapterEngine)
    return engine


def asking(plain: Request, **extra: Any) -> Request:
    return replace(plain, extra={**plain.extra, **extra})


def scoring(plain: Request, ids: Any, places: Places) -> Request:
    return replace(asking(plain, **places.extra()), prompt_ids=np.asarray(ids, np.int32), max_new_tokens=1)


def scores(engine: AdapterEngine, plain: Request, ids: Any, places: Places) -> dict[str, Any]:
    return answers(engine, [scoring(plain, ids, places)])[plain.key].extra


@pytest.mark.parametrize("settings", [
    {"temperature": 0.6}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 3, "temperature": 1.5}])
def test_log_probabilities_are_of_the_full_softmax_whatever_is_drawn_from(
    base: Path, folder: str, settings: dict[str, Any]
) -> None:
    top_k = settings.pop("top_k", 0)
    plain = request(3, folder, **settings)
    drawn = answers(engine_of(base), [asking(plain, top_k=top_k)])[3]
    ids = np.concatenate([plain.prompt_ids, drawn.token_ids])
    scored = scores(engine_of(base), plain, ids, Places(len(plain.prompt_ids), len(ids)))[SCORES[0]]
    np.testing.assert_allclose(drawn.logprobs, scored, atol=1e-4)


def test_only_the_likeliest_tokens_are_drawn_with_top_k(base: Path, folder: str) -> None:
    engine, drawn, k = engine_of(base), list[Finished](), 2
    for turn in range(4):
        plain = [request(key, folder, seed=turn, temperature=2.0) for key in range(8)]
        asked = [asking(one, top_k=k if one.key % 2 else 0) for one in plain]
        finished = answers(engine, asked)
        for one in plain:
            ids = np.concatenate([one.prompt_ids, finished[one.key].token_ids])
            places = Places(len(one.prompt_ids), len(ids), top=k)
            likeliest = scores(engine, one, ids, places)[SCORES[1]]
            inside = (finished[one.key].token_ids[:, None] == likeliest).any(1)
            assert inside.all() or not one.key % 2
            drawn += [] if inside.all() else [finished[one.key]]
    assert drawn  # rows without top-k draw others too


def test_a_row_draws_the_same_beside_rows_with_other_settings(base: Path, folder: str) -> None:
    plain = request(0, folder)
    others = [request(1, folder, top_p=0.5), asking(request(2, folder, temperature=0.0), top_k=2)]
    alone, beside = answers(engine_of(base), [plain])[0], answers(engine_of(base), [plain, *others])[0]
    assert alone.token_ids.tolist() == beside.token_ids.tolist()


def test_an_answer_without_ends_goes_on_behind_the_models_own(base: Path) -> None:
    plain = [request(key, "", max_new_tokens=40) for key in range(8)]
    usual = answers(engine_of(base), plain)
    endless = answers(engine_of(base), [asking(one, ends=False) for one in plain])
    ended = [key for key, finished in usual.items() if finished.finish == Finish.EOS]
    assert ended
    for key, finished in endless.items():
        assert (finished.finish, len(finished.token_ids)) == (Finish.LENGTH, 40)
        count = len(usual[key].token_ids)
        assert finished.token_ids[:count].tolist() == usual[key].token_ids.tolist()


def test_a_text_ends_its_row_with_the_token_that_completes_it(base: Path) -> None:
    plain = [asking(request(key, "", max_new_tokens=40), ends=False) for key in range(8)]
    engine = engine_of(base)
    whole = answers(engine, plain)
    stops = {key: engine.decode(finished.token_ids[4:6], False) for key, finished in whole.items()}
    cut = answers(engine, [asking(one, stop_texts=["????", stops[one.key]]) for one in plain])
    for key, finished in cut.items():
        text = engine.decode(finished.token_ids, False)
        assert finished.finish == Finish.EOS and len(finished.token_ids) <= 6
        assert stops[key] in text and stops[key] not in engine.decode(finished.token_ids[:-1], False)
        assert finished.token_ids.tolist() == whole[key].token_ids[: len(finished.token_ids)].tolist()
    assert engine.active == 0


@pytest.mark.parametrize("first, end", [(1, 30), (1, 9), (11, 30), (29, 30), (7, 15)])
def test_a_prompt_is_scored_in_pieces_as_it_is_whole(base: Path, folder: str, first: int, end: int) -> None:
    random = np.random.default_rng(4)
    ids, targets = random.integers(2, TOKENS, 30), random.integers(-1, TOKENS, (end - first, 3)).astype(np.int32)
    places = Places(first, end, 4, targets.tobytes())
    plain = request(0, folder)
    whole = scores(engine_of(base), plain, ids, Places(1, 30, TOKENS))
    pieces = scores(engine_of(base, prefill_tokens=7), plain, ids, places)
    every = np.empty((29, TOKENS), np.float32)
    np.put_along_axis(every, whole[SCORES[1]].astype(np.int64), whole[SCORES[2]], 1)
    part = slice(first - 1, end - 1)
    np.testing.assert_allclose(pieces[SCORES[0]], whole[SCORES[0]][part], atol=1e-5)
    np.testing.assert_allclose(pieces[SCORES[2]], whole[SCORES[2]][part, :4], atol=1e-5)
    wanted = np.take_along_axis(every[part], np.maximum(targets, 0).astype(np.int64), 1)
    np.testing.assert_allclose(pieces[SCORES[3]], wanted, atol=1e-5)


def test_rows_draw_while_a_long_prompt_is_scored(base: Path, folder: str) -> None:
    engine = engine_of(base, prefill_tokens=4)
    asked = scoring(request(5, folder), np.arange(2, TOKENS), Places(1, TOKENS - 2))
    engine.submit([asked, request(6, folder, max_new_tokens=3)])
    ended: list[int] = []
    while engine.active:
        ended += [finished.key for finished in engine.step()]
    assert ended == [6, 5]


def test_a_scored_prompt_that_is_given_up_frees_its_adapter(base: Path, folder: str, tmp_path: Path) -> None:
    engine, other = engine_of(base, prefill_tokens=4, places=1), str(shutil.copytree(folder, tmp_path / "12"))
    asked = scoring(request(5, folder), np.arange(2, TOKENS), Places(1, TOKENS - 2))
    for end in (lambda: engine.abort(5), lambda: next(iter(engine.pause("abort")))):
        engine.submit([asked])
        engine.step()
        finished = end()
        assert finished is not None and finished.finish == Finish.ABORTED
        assert engine.active == 0 and engine.adapters.take(other) == 1, "the one place is not free"
        engine.adapters.release(other)
        engine.resume()
