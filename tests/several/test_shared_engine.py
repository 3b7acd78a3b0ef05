"""One engine for several models, without vLLM: whose keys, rows, tokens and places they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from busrl.engines.base import Request
from busrl.engines.tokens import NO_IDS
from busrl.engines.vllm.process import Start
from busrl.engines.vllm.weights import LoadedAdapter
from busrl.quickstart.cache import ensure
from busrl.several.shared_engine import AdaptersOfModels
from busrl.states import Finish


class Still(AdaptersOfModels):
    """The engine over a vLLM that does only what the test says: `draw` is what it would send."""

    def _start_core(self) -> Any:
        self.begun: list[Any] = []
        self.calls: list[str] = []
        loop = SimpleNamespace(call_soon_threadsafe=lambda begin: None)
        engine = SimpleNamespace(resume_generation=None)
        return SimpleNamespace(check=lambda: None, loop=loop, call=self._called, engine=engine)

    def _called(self, what: str, make: Callable[[], Any]) -> None:
        self.calls.append(what)
        if what == "abort":  # of the only request that has tokens and no end
            for running in list(self._running.values()):
                running.finish = Finish.ABORTED
                self._ended.append(running)

    def draw(self, key: int, *ids: int, end: str | None = None) -> None:
        """Tokens of the request with the engine's key."""
        places = [{token: SimpleNamespace(logprob=-1.0)} for token in ids]
        completion = SimpleNamespace(token_ids=ids, logprobs=places, finish_reason=end, weight_versions=None)
        self.take(self._running[key], SimpleNamespace(outputs=[completion], num_cached_tokens=0))


def engine(models: int = 2, capacity: int = 4) -> Still:
    start = Start(str(ensure("tiny:sort").model), "float32", capacity, 64, lora_rank=8, adapters=3 * models)
    return Still(start, {f"m{i}": 3 for i in range(models)})


def request(key: int, tokens: int = 8) -> Request:
    return Request(key, 100 + key, 0, np.array([3, 4], np.int32), NO_IDS, tokens, 1.0, 1.0, 0)


def test_answers_come_back_to_their_model_under_its_own_key() -> None:
    whole = engine()
    first, second = whole.shares
    first.submit([request(7), request(-1)])  # a probe has a key below 0
    second.submit([request(7)])
    assert sorted(running.request.key for running in whole.running) == [-2, 14, 15]
    whole.draw(15, 5, 6, end="length")
    whole.draw(-2, 8, end="stop")
    whole.draw(14, 9)
    assert (first.decoding, second.decoding) == (2, 2), "tokens are counted for their model"
    [mine], [other] = first.step(), second.step()
    assert (mine.key, mine.token_ids.tolist()) == (-1, [8]) and (other.key, other.token_ids.tolist()) == (7, [5, 6])
    assert (first.active, second.active) == (1, 0) and first.sampled(7, 0).tolist() == [9]
    ended = first.abort(7)
    assert ended is not None and (ended.key, ended.finish, ended.token_ids.tolist()) == (7, Finish.ABORTED, [9])
    assert not whole.active and first.abort(7) is None


@given(models=st.integers(2, 8), capacity=st.integers(1, 40), wanted=st.lists(st.integers(0, 40), min_size=8))
def test_no_model_is_left_without_rows_by_others(models: int, capacity: int, wanted: list[int]) -> None:
    whole = engine(models, capacity)
    for turn in range(2):
        for index, share in enumerate(whole.shares):
            share.take_turn()
            room = share.capacity - share.active
            part = -(-(capacity - whole.active) // models)
            assert room == part, "an equal part of what is free"
            share.submit([request(1000 * turn + at) for at in range(min(room, wanted[index]))])
    assert whole.active <= capacity
    if all(want >= capacity for want in wanted[:models]) and capacity >= 2 * models:
        assert all(share.active for share in whole.shares)


def test_a_closed_engine_gives_no_row_to_anybody() -> None:
    whole = engine()
    first, second = whole.shares
    second.take_turn(closed=True)
    assert second.capacity == second.active == 0 and second.is_idle
    first.take_turn()
    first.submit([request(1)])
    assert not second.is_idle and first.active == 1


def test_the_engine_stands_still_until_all_models_go_on() -> None:
    whole = engine()
    first, second = whole.shares
    assert first.pause("keep") == [] and second.pause("keep") == []
    assert whole.calls == ["pause"]
    first.resume()
    assert whole.paused and second.paused and not first.paused
    second.resume()
    assert not whole.paused and whole.calls == ["pause", "resume"]


def test_each_model_draws_with_its_newest_and_fills_its_own_places() -> None:
    whole = engine()
    first, second = whole.shares
    for version in (1, 2, 3):
        lora = SimpleNamespace(lora_int_id=1 + version)
        whole.lines[0].newest = LoadedAdapter(version, lora)
        first.submit([request(version)])
    second.submit([request(1)])
    drawing = {running.request.key: running.adapter for running in whole.running}
    assert [drawing[2 * version].version for version in (1, 2, 3)] == [1, 2, 3]
    assert drawing[3].request is None, "the other draws with the base before its first version"
    assert not first.has_room and second.has_room
    whole.draw(2, 5, end="length")
    first.step()
    assert first.has_room


def test_ids_of_adapters_are_never_those_of_another_model(tmp_path: Path) -> None:
    pytest.importorskip("vllm.lora")
    whole = engine(3)
    seen = set()
    for index, line in enumerate(whole.lines):
        for version in (0, 1, (1 << 32) - 2):
            line.add(version, tmp_path)
            assert line.newest.request.lora_name == f"m{index}-v{version}"
            seen.add(line.newest.request.lora_int_id)
    assert len(seen) == 9 and min(seen) == 1
