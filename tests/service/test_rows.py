"""Many adapters in one torch engine: each row answers as its adapter alone does, whatever runs beside it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from bases import TOKENS, train, write_base

from busrl import _adapters
from busrl.engines.base import Engine, Finished, Request
from busrl.engines.torch.engine import TorchEngine
from busrl.engines.torch.lora import WeightLoader
from busrl.service.adapters import Adapter
from busrl.service.engine import AdapterEngine
from busrl.service.rows import RowsEngine
from busrl.service.sampling import Places
from busrl.service.tenants import Tenants
from busrl.states import Finish

torch.set_num_threads(1)
SHAPES = [Adapter(1, 1), Adapter(4, 2, unembed=False), Adapter(8, 3, mlp=False), Adapter(3, 4, attn=False)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("bases") / "base")


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Folders of adapters of different ranks and parts, named by numbers; and "", the base."""
    tenants, root = Tenants(base), tmp_path_factory.mktemp("snapshots")
    for number, shape in enumerate(SHAPES, 11):
        tenants.create(str(number), shape)
        train(tenants, str(number), 4)
        tenants.snapshot(str(number), root / str(number))
    return ["", *(str(root / str(number)) for number in range(11, 11 + len(SHAPES)))]


def request(key: int, weights: str, length: int = 0, **changes: Any) -> Request:
    random = np.random.default_rng(key // 5)  # five requests with each prompt
    prompt = random.integers(2, TOKENS, length or int(random.integers(1, 9))).astype(np.int32)
    fields: dict[str, Any] = {"max_new_tokens": 6 + key % 7, "temperature": 1.0, "top_p": 1.0, "seed": 5, **changes}
    return Request(key, 1000 + key, 0, prompt, np.empty(0, np.int32), extra={"weights": weights}, **fields)


def crowd(folders: Sequence[str], count: int = 20, **changes: Any) -> list[Request]:
    return [request(key, folders[key % len(folders)], **changes) for key in range(count)]


def answers(engine: Engine, requests: Sequence[Request], before: int = 0) -> dict[int, Finished]:
    """Answers to these requests, and to so many that were submitted before."""
    waiting, results = list(requests), dict[int, Finished]()
    for _ in range(2000):
        room = engine.capacity - engine.active
        engine.submit(waiting[:room])
        waiting = waiting[room:]
        results |= {finished.key: finished for finished in engine.step()}
        if len(results) == len(requests) + before:
            return results
    raise AssertionError(f"{engine.active} requests without an answer, {len(waiting)} not submitted")


def same(one: Finished, other: Finished, bound: float) -> None:
    assert one.token_ids.tolist() == other.token_ids.tolist()
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=bound)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("prefill_tokens", [2048, 4])
def test_rows_of_many_adapters_equal_the_run_of_each_alone(
    base: Path, folders: list[str], fast: bool, prefill_tokens: int
) -> None:
    settings: dict[str, Any] = {"capacity": 8, "max_length": 64, "fast": fast, "prefill_tokens": prefill_tokens}
    requests = crowd(folders)
    together = answers(RowsEngine.load(base, **settings), requests)
    for folder in folders:
        own = [request for request in requests if request.extra["weights"] == folder]
        merged = TorchEngine.load(base, **settings)
        if folder:
            merged.update_weights(OneAdapter(Path(folder)))  # type: ignore[arg-type]
        rows = answers(RowsEngine.load(base, **settings), own)
        for key, finished in answers(merged, own).items():
            same(together[key], rows[key], 1e-5)
            same(together[key], finished, 1e-4)
            assert set(together[key].versions.tolist()) == {int(Path(folder).name) if folder else 0}
    drawn = {tuple(together[key].token_ids.tolist()) for key in range(5)}
    assert len(drawn) > 1  # one prompt, five adapters


@pytest.mark.parametrize("prefill_tokens", [2048, 7])
@pytest.mark.parametrize("threads", [1, 2])
def test_an_answer_is_equal_to_the_bit_whatever_is_drawn_beside(
    base: Path, folders: list[str], prefill_tokens: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)  # with more than one: batched products
    settings: dict[str, Any] = {"capacity": 24, "max_length": 64, "prefill_tokens": prefill_tokens}
    requests = [request(key, folders[key % len(folders)], length=1 + 7 * key % 39, max_new_tokens=3 + 5 * key % 11,
                        temperature=0.5 + key % 3 / 2, top_p=1 - key % 2 / 4) for key in range(24)]
    crowded, alone = (AdapterEngine.load(base, **settings) for _ in range(2))
    together = answers(crowded, requests)
    few = answers(crowded, requests[:3])
    for one in requests:
        wanted = answers(alone, [one])[one.key]
        for finished in [results[one.key] for results in (together, few) if one.key in results]:
            assert finished.token_ids.tolist() == wanted.token_ids.tolist()
            np.testing.assert_array_equal(finished.logprobs, wanted.logprobs)


@pytest.mark.parametrize("fast", [True, False])
def test_batched_products_answer_as_rows_one_by_one(
    base: Path, folders: list[str], fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"capacity": 8, "max_length": 64, "fast": fast}
    one_by_one = answers(RowsEngine.load(base, **settings), crowd(folders))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for key, finished in answers(RowsEngine.load(base, **settings), crowd(folders)).items():
        same(finished, one_by_one[key], 1e-5)


sizes = st.integers(1, 70)


@given(sizes, st.integers(1, 130), st.integers(0, 5), sizes, st.lists(st.integers(0, 3), min_size=1, max_size=9),
       st.integers(1, 3))
def test_a_row_gets_its_adapter_alone_to_the_bit(
    inputs: int, outputs: int, more: int, width: int, places: list[int], each: int
) -> None:
    random = torch.Generator().manual_seed(inputs)
    down, up = (torch.randn(4, *shape, generator=random) for shape in ((inputs, width), (width, outputs + more)))
    rows, before = (torch.randn(len(places) * each, count, generator=random) for count in (inputs, outputs))

    def added(first: int, end: int) -> torch.Tensor:
        out, of, which = before[first * each : end * each].clone(), rows[first * each :], torch.tensor(places[first:])
        _adapters.add(out.data_ptr(), of.data_ptr(), which.data_ptr(), down.data_ptr(), up.data_ptr(), len(out), each,
                      inputs, width, outputs, outputs + more)
        return out

    together = added(0, len(places))
    for row, place in enumerate(places):
        lines = slice(row * each, (row + 1) * each)
        assert torch.equal(together[lines], added(row, row + 1))
        change = rows[lines].double() @ down[place].double() @ up[place, :, :outputs].double() if place else 0
        torch.testing.assert_close(together[lines].double(), before[lines].double() + change, atol=1e-3, rtol=1e-3)


class OneAdapter:
    """A receiver that has one folder."""

    kind = "adapter"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def take(self) -> tuple[int, int, Path]:
        return 1, 1, self.folder


def test_more_adapters_than_places_wait_for_one_and_answer_the_same(base: Path, folders: list[str]) -> None:
    requests = crowd(folders)
    few, many = (RowsEngine.load(base, capacity=8, max_length=64, places=places) for places in (1, 4))
    wanted = answers(many, requests)
    for key, finished in answers(few, requests).items():
        same(finished, wanted[key], 1e-5)
    assert few.active == few.statistics().waiting == 0


def test_an_adapter_that_cannot_be_used_refuses_its_requests_alone(
    base: Path, folders: list[str], tmp_path: Path
) -> None:
    engine = RowsEngine.load(base, capacity=8, max_length=64, places=1)
    wrong = str(tmp_path / "99")
    results = answers(engine, crowd([folders[1], wrong], 6))
    for key, finished in results.items():
        refused = key % 2 == 1
        assert (finished.finish == Finish.ABORTED) == bool(finished.refused) == refused
        assert len(finished.token_ids) > 0 or refused
    assert wrong in results[1].refused


def test_an_adapter_of_another_model_is_refused(base: Path, tmp_path: Path, folders: list[str]) -> None:
    from safetensors.torch import load_file, save_file

    other = tmp_path / "7"
    other.mkdir()
    tensors = load_file(Path(folders[1]) / "adapter_model.safetensors")
    save_file({name.replace("layers.0", "layers.9"): part for name, part in tensors.items()},
              other / "adapter_model.safetensors")
    (other / "adapter_config.json").write_text((Path(folders[1]) / "adapter_config.json").read_text())
    results = answers(RowsEngine.load(base, capacity=2, max_length=64), [request(0, str(other))])
    assert "layers.9" in results[0].refused


def test_requests_that_end_early_give_their_places_back(base: Path, folders: list[str]) -> None:
    engine = RowsEngine.load(base, capacity=4, max_length=64, places=1)
    engine.submit([request(0, folders[1]), request(1, folders[2]), request(2, folders[3])])
    engine.step()
    assert engine.statistics().waiting >= 2  # their adapters have no place
    aborted = engine.abort(1)
    assert aborted is not None and not len(aborted.token_ids)
    aborted = engine.abort(0)
    assert aborted is not None and len(aborted.token_ids) == 1
    assert set(aborted.versions.tolist()) == {11}
    assert {*answers(engine, [request(3, folders[4])], before=1)} == {2, 3}
    engine.submit([request(4, folders[1]), request(5, folders[2])])
    engine.step()
    ended = {finished.key: finished.finish for finished in engine.pause("abort")}
    assert ended[4] == ended[5] == Finish.ABORTED
    assert engine.active == 0
    engine.resume()
    assert len(answers(engine, [request(6, folders[2])])[6].token_ids)


def test_a_prompt_over_the_budget_is_computed_in_pieces_for_its_adapter(base: Path, folders: list[str]) -> None:
    requests = [request(key, folders[key % 3], length=40) for key in range(5)]  # one prompt, three adapters
    whole = answers(RowsEngine.load(base, capacity=8, max_length=64), requests)
    pieces = answers(RowsEngine.load(base, capacity=8, max_length=64, prefill_tokens=7), requests)
    for key, finished in whole.items():
        same(finished, pieces[key], 1e-5)


def test_scores_of_a_prompt_are_those_of_its_adapter(base: Path, folders: list[str]) -> None:
    engine = AdapterEngine.load(base, capacity=4, max_length=64, fast=True)
    requests = [request(key, folders[key], length=9) for key in range(3)]
    asked = [replace(one, extra={**one.extra, **Places(1, 9, 3).extra()}) for one in requests]
    scored = answers(engine, asked)
    for one in requests:
        merged = AutoModelForCausalLM.from_pretrained(base)
        if one.extra["weights"]:
            WeightLoader(merged).swap(Path(one.extra["weights"]))
        ids = torch.from_numpy(one.prompt_ids).long()
        with torch.no_grad():
            wanted = merged(ids[None]).logits[0, :-1, :TOKENS].log_softmax(-1)
        extra = scored[one.key].extra
        np.testing.assert_allclose(extra["prompt_logprobs"], wanted.gather(1, ids[1:, None])[:, 0], atol=1e-4)
        np.testing.assert_allclose(extra["prompt_top_logprobs"], wanted.topk(3).values, atol=1e-4)
        assert scored[one.key].token_ids.tolist()
