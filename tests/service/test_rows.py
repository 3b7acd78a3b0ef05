"""Many adapters in one torch engine: each row answers as its adapter alone does, whatever runs beside it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from bases import TOKENS, train, write_base

from busrl import _adapters
from busrl.engines.base import Engine, Finished, Request
from busrl.engines.torch.decoder import FastDecoder, GenericDecoder
from busrl.engines.torch.engine import TorchEngine
from busrl.engines.torch.lora import WeightLoader
from busrl.errors import BugError, UserError, WeightsRefused
from busrl.service.adapters import Adapter, Numbers, Wearer, write_folder
from busrl.service.engine import AdapterEngine
from busrl.service.rows import Adapters, RowsEngine
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
        _adapters.add(out.data_ptr(), of.data_ptr(), which.data_ptr(), down.data_ptr(), up.data_ptr(), end - first, 4,
                      len(out), each, inputs, width, outputs, outputs + more)
        return out

    together = added(0, len(places))
    for row, place in enumerate(places):
        lines = slice(row * each, (row + 1) * each)
        assert torch.equal(together[lines], added(row, row + 1))
        change = rows[lines].double() @ down[place].double() @ up[place, :, :outputs].double() if place else 0
        torch.testing.assert_close(together[lines].double(), before[lines].double() + change, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("places", "rows", "each"), [
    ([1, 2], 3, 1), ([1, 2], 1, 0), ([1, 2], 4, 1), ([1], 4, 2), ([], 0, 0), ([], 2, 1), ([1, 3], 2, 1), ([-1], 1, 1),
])
def test_rows_that_are_not_those_of_the_places_are_refused(places: list[int], rows: int, each: int) -> None:
    which, down, up = torch.tensor(places, dtype=torch.int64), torch.ones(3, 4, 8), torch.ones(3, 8, 4)
    of, out = torch.ones(rows, 4), torch.zeros(rows, 4)
    with pytest.raises(ValueError, match="place"):
        _adapters.add(out.data_ptr(), of.data_ptr(), which.data_ptr(), down.data_ptr(), up.data_ptr(), len(places),
                      len(down), rows, each, 4, 8, 4, 4)
    assert not out.any()


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


# -- models that call their layers otherwise -----


class Between(nn.Module):
    """An MLP that is called on other rows, or in another type, than its layer is."""

    def __init__(self, mlp: Any, how: str) -> None:
        super().__init__()
        self.inner, self.how = mlp.bfloat16() if how == "narrow" else mlp, how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "narrow":
            return self.inner(x.bfloat16()).to(x.dtype)
        if self.how == "flat":
            return self.inner(x.flatten(0, 1)).view(x.shape)
        flat = x.flatten(0, 1).clone()  # "some": every third token only
        flat[::3] += self.inner(flat[::3])
        return flat.view(x.shape)


class Mixture(nn.Module):
    """Experts of linear layers, each of which sees the tokens whose first number has its sign."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.experts = nn.ModuleList([mlp, deepcopy(mlp)])

    def forward(self, x: Tensor) -> Tensor:
        flat, out = x.flatten(0, 1), torch.zeros_like(x.flatten(0, 1))
        for expert, its in zip(self.experts, (flat[:, 0] < 0, flat[:, 0] >= 0)):
            out[its] = expert(flat[its])
        return out.view(x.shape)


def model_with(base: Path, how: str) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(base).eval()
    first, second = model.model.layers
    if how == "shared":
        second.self_attn.o_proj.weight = first.self_attn.o_proj.weight
    elif how != "plain":
        second.mlp = Mixture(second.mlp) if how == "experts" else Between(second.mlp, how)
    return model


class Worn:
    """A model's logits as training computes them with an adapter of random numbers, which is in `folder` too."""

    def __init__(self, model: Any, folder: Path, shape: Adapter) -> None:
        self._wearer, self.folder = Wearer(deepcopy(model)), str(folder)
        self._numbers = Numbers(shape, self._wearer.sites(shape), torch.device("cpu"))
        torch.nn.init.normal_(self._numbers.vector, std=0.2, generator=torch.Generator().manual_seed(shape.seed))
        write_folder(folder, self._numbers, torch.float32, "base")

    def logits(self, ids: Tensor) -> Tensor:
        with torch.no_grad(), self._wearer.wearing(self._numbers):
            return self._wearer.model(ids).logits


IDS = torch.randint(2, TOKENS, (4, 7), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("how", ["plain", "flat", "shared", "narrow"])
def test_rows_are_changed_as_training_changes_them_however_layers_are_called(
    base: Path, tmp_path: Path, how: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    model = model_with(base, how)
    worn = [Worn(model, tmp_path / str(seed), Adapter(4, seed)) for seed in (1, 2)]
    adapters = Adapters(model, GenericDecoder(model, 4, 64), 2)
    folders = [worn[0].folder, "", worn[1].folder, worn[0].folder]
    unchanged = model(IDS[1:2]).logits
    for folder in folders:
        adapters.take(folder)
    for length in (7, 1):
        ids = IDS[:, :length]
        with torch.no_grad(), adapters.using(adapters.spread(folders), 4, length):
            logits = model(ids).logits
        for row, which in enumerate((0, None, 1, 0)):
            wanted = unchanged[:, :length] if which is None else worn[which].logits(ids[row : row + 1])
            torch.testing.assert_close(logits[row : row + 1], wanted, atol=0.2 if how == "narrow" else 1e-3, rtol=1e-3)


def test_a_model_whose_adapter_the_engine_would_refuse_is_refused_first(base: Path) -> None:
    model = model_with(base, "experts")
    alone, for_rows = Wearer(deepcopy(model)), Wearer(deepcopy(model), of_experts=False)
    assert any("experts.1" in site.name for site in alone.sites(Adapter(4)))
    with pytest.raises(UserError, match=r"train_mlp: model.layers.1.mlp.experts.0.gate_proj.*train_mlp=False"):
        for_rows.sites(Adapter(4))
    assert for_rows.sites(Adapter(4, mlp=False)) == alone.sites(Adapter(4, mlp=False))


def test_adapters_of_experts_are_refused_and_those_beside_them_served(base: Path, tmp_path: Path) -> None:
    model = model_with(base, "experts")
    both, attention = (Worn(model, tmp_path / str(seed), Adapter(4, seed, mlp=seed == 1)) for seed in (1, 2))
    adapters = Adapters(model, GenericDecoder(model, 4, 64), 2)
    with pytest.raises(WeightsRefused, match=r"layers.1.mlp.experts.0.down_proj.*an expert.*train_mlp=False"):
        adapters.take(both.folder)
    adapters.take(attention.folder)
    with torch.no_grad(), adapters.using(adapters.spread([attention.folder, ""]), 2, 7):
        logits = model(IDS[:2]).logits
    torch.testing.assert_close(logits[:1], attention.logits(IDS[:1]), atol=1e-3, rtol=1e-3)


def test_a_layer_that_sees_some_tokens_alone_has_no_adapters_of_rows(base: Path, tmp_path: Path) -> None:
    model = model_with(base, "some")
    worn = [Worn(model, tmp_path / str(seed), Adapter(4, seed)) for seed in (1, 2)]
    adapters = Adapters(model, GenericDecoder(model, 4, 64), 2)
    folders = [one.folder for one in worn]
    for folder in folders:
        adapters.take(folder)
    with torch.no_grad(), adapters.using(adapters.spread(folders[:1]), 1, 7):
        torch.testing.assert_close(model(IDS[:1]).logits, worn[0].logits(IDS[:1]), atol=1e-3, rtol=1e-3)
    with (pytest.raises(UserError, match=r"layers.1.mlp.inner.*does not see every token once"),
          adapters.using(adapters.spread(folders), 2, 7)):
        model(IDS[:2])


def test_layers_that_share_a_weight_have_no_adapters_in_the_fast_decoder(base: Path, tmp_path: Path) -> None:
    model = model_with(base, "shared")
    worn = Worn(model, tmp_path / "1", Adapter(4, 1))
    with pytest.raises(WeightsRefused, match=r"layers.1.self_attn.o_proj"):
        Adapters(model, FastDecoder(model, 4, 64), 2).take(worn.folder)


def test_a_forward_of_other_rows_than_have_places_is_refused(base: Path, folders: list[str]) -> None:
    model = model_with(base, "plain")
    adapters = Adapters(model, GenericDecoder(model, 4, 64), 2)
    adapters.take(folders[1])
    with pytest.raises(BugError, match="3 rows, and places for 2"), adapters.using(adapters.spread(folders[:2]), 3, 7):
        model(IDS[:3])
