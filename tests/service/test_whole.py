"""All weights of a base, trained for one client at a time: steps, states, snapshots, exports, and engines that draw."""

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
from hypothesis import strategies as some
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from bases import STEP, TOKENS, data_of, supervised, train, write_base
from test_rows import answers, request

from busrl.engines.base import Request
from busrl.engines.torch.engine import TorchEngine
from busrl.errors import UserError, WeightsRefused
from busrl.service.adapters import Adapter
from busrl.service.beside import whole_turn
from busrl.service.engine import AdapterEngine
from busrl.service.export import export_saved
from busrl.service.folders import ServiceFolders
from busrl.service.model_folders import read_into
from busrl.service.models import Adam
from busrl.service.operations import write_folder
from busrl.service.sampling import Places
from busrl.service.sums import UserFault
from busrl.service.tenants import Tenants
from busrl.service.whole import ALL_WEIGHTS, WholeModels
from busrl.states import Finish
from busrl.topology.schema import Model

torch.set_num_threads(1)
TYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("bases") / "base")


@pytest.fixture(scope="module")
def snapshots(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The base, and folders of models that were trained further and further, named by numbers."""
    models, root, folders = WholeModels(base), tmp_path_factory.mktemp("snapshots"), [""]
    models.create("m", ALL_WEIGHTS)
    for number in (11, 12, 13):
        train(models, "m", 1, number)
        models.snapshot("m", root / str(number))
        folders.append(str(root / str(number)))
    return folders


def weights(models: WholeModels, name: str = "m") -> dict[str, torch.Tensor]:
    return {key: part.clone() for key, part in models.tenant(name).tensors().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(part, other[name]) for name, part in one.items())


# -- training -----


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_is_that_of_torch_on_the_whole_model(tmp_path: Path, tied: bool) -> None:
    """The gradient by autograd datum by datum; AdamW and clipping of torch, with decay of the matrices alone."""
    folder, data = write_base(tmp_path / "base", tied=tied), data_of(77)
    models = WholeModels(folder)
    models.create("m", ALL_WEIGHTS)
    plain: Any = AutoModelForCausalLM.from_pretrained(folder)
    total = torch.zeros(())
    for datum in data:
        logits = plain(torch.from_numpy(datum.tokens).long()[None]).logits[0, :, :TOKENS]
        lp = logits.log_softmax(-1)[torch.arange(len(datum.tokens)), torch.from_numpy(datum.inputs["target_tokens"])]
        q, advantage, weight = (torch.from_numpy(datum.inputs[key]) for key in ("logprobs", "advantages", "weights"))
        total = total - ((lp - q).exp() * advantage * weight).sum()
    total.backward()
    metrics = models.forward_backward("m", data, "importance_sampling", {})[1]
    assert metrics == {"loss:sum": pytest.approx(total.item(), rel=1e-5)}
    gradients = models.tenant("m").weights.gradients()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-4, rtol=1e-4)
        parameter.grad = gradients[name].clone()  # AdamW's first step makes much of a difference in a small gradient
    every = list(plain.parameters())
    groups = [{"params": [p for p in every if p.ndim > 1], "weight_decay": 0.3},
              {"params": [p for p in every if p.ndim < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.9), eps=1e-6, foreach=False)
    norm = torch.nn.utils.clip_grad_norm_(every, 0.5)
    optimizer.step()
    assert models.optim_step("m", Adam(0.1, 0.8, 0.9, 1e-6, 0.3, 0.5)) == {
        "unclipped_grad_l2:mean": pytest.approx(float(norm), rel=1e-4)}
    ours = weights(models)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(ours[f"weights.{name}"], parameter.detach(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_model_continues_from_its_state_to_the_bit(base: Path, tmp_path: Path, dtype: str) -> None:
    models, again = WholeModels(base, dtype=dtype), WholeModels(base, dtype=dtype)
    models.create("m", ALL_WEIGHTS)
    train(models, "m", 2)
    models.save_state("m", tmp_path / "state")
    wanted = train(models, "m", 2, 2)
    again.create("m", ALL_WEIGHTS)
    train(again, "m", 1, 7)
    again.forward_backward("m", data_of(3), "ppo", {})
    again.load_state("m", tmp_path / "state")
    assert train(again, "m", 2, 2) == wanted
    assert equal(weights(models), weights(again))


@pytest.mark.parametrize("dtype", TYPES)
def test_the_next_model_begins_from_the_base(base: Path, dtype: str) -> None:
    models = WholeModels(base, dtype=dtype)
    models.create("m", ALL_WEIGHTS)
    first, wanted = weights(models), train(models, "m", 2)
    models.forward_backward("m", data_of(3), "ppo", {})
    models.forget("m")
    models.create("m", ALL_WEIGHTS)
    assert equal(weights(models), first)
    with pytest.raises(UserFault, match="no gradients"):
        models.optim_step("m", STEP)
    assert train(models, "m", 2) == wanted


def test_a_state_without_its_optimizer_begins_new_moments(base: Path, tmp_path: Path) -> None:
    models = WholeModels(base)
    models.create("m", ALL_WEIGHTS)
    train(models, "m", 1)
    models.save_state("m", tmp_path / "state")
    models.load_state("m", tmp_path / "state", optimizer=False)
    assert all(name.startswith("weights.") for name in weights(models))
    assert models.tenant("m").steps == 0


def test_adapters_and_all_weights_do_not_load_each_other(base: Path, tmp_path: Path) -> None:
    models, tenants = WholeModels(base), Tenants(base)
    models.create("m", ALL_WEIGHTS)
    tenants.create("m", Adapter(4, 1))
    models.save_state("m", tmp_path / "whole")
    tenants.save_state("m", tmp_path / "adapter")
    before = weights(models)
    with pytest.raises(UserFault, match=r'holds an adapter.* = "adapters"'):
        models.load_state("m", tmp_path / "adapter")
    with pytest.raises(UserFault, match=r'holds all weights.* = "full"'):
        tenants.load_state("m", tmp_path / "whole")
    models.forget("m")
    with pytest.raises(UserFault, match="holds an adapter"):
        models.create("m", Adapter(4, 1))
    models.create("m", ALL_WEIGHTS)
    assert equal(weights(models), before)


def test_a_gradient_that_is_not_finite_changes_no_weight(base: Path) -> None:
    models, data = WholeModels(base), data_of(5)
    models.create("m", ALL_WEIGHTS)
    before = weights(models)
    models.forward_backward("m", data, "ppo", {})
    next(iter(models.tenant("m").weights.named.values())).grad[0] = torch.inf  # type: ignore[index]
    with pytest.raises(UserFault, match="norm of the gradient is inf"):
        models.optim_step("m", STEP)
    assert equal(weights(models), before)


def test_the_bytes_of_a_model_are_those_that_it_takes(base: Path) -> None:
    models = WholeModels(base, dtype="bfloat16")
    models.create("m", ALL_WEIGHTS)
    train(models, "m", 1)
    models.forward_backward("m", data_of(3), "ppo", {})
    model = models.tenant("m")
    moments = sum(part.nbytes for name, part in model.tensors().items() if not name.startswith("weights."))
    assert models.bytes_of(ALL_WEIGHTS) == moments + sum(part.nbytes for part in model.weights.gradients().values())


# -- folders -----


@pytest.mark.parametrize("dtype", TYPES)
def test_a_snapshot_loads_anywhere_as_the_model_that_was_trained(base: Path, tmp_path: Path, dtype: str) -> None:
    models = WholeModels(base, dtype=dtype)
    models.create("m", ALL_WEIGHTS)
    train(models, "m", 1)
    models.snapshot("m", tmp_path / "7")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "7")
    assert (tmp_path / "7" / "tokenizer.json").is_file()
    for name, part in loaded.named_parameters():
        assert part.dtype == getattr(torch, dtype)
        assert torch.equal(part, weights(models)[f"weights.{name}"].to(part.dtype)), name


def test_a_folder_of_another_model_changes_no_tensor(base: Path, tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    tensors = {name: part.detach() for name, part in model.named_parameters()}
    before = {name: part.clone() for name, part in tensors.items()}
    other = {**tensors, "model.norm.weight": torch.zeros(5)}
    for wrong, words in ((tmp_path, "no weights"), (base, "shape")):
        with pytest.raises(WeightsRefused, match=words):
            read_into(wrong, other)
    with pytest.raises(WeightsRefused, match="shape"):
        read_into(base, {**tensors, "another": torch.zeros(5)})
    assert equal(tensors, before)


class Topology:
    """All of a topology that matters here."""

    def __init__(self, base: Path) -> None:
        self.model = Model(path=str(base), dtype="float32")


def test_each_kind_of_saved_weights_exports_to_the_same_model(base: Path, tmp_path: Path) -> None:
    models, where = WholeModels(base), ServiceFolders(tmp_path)
    models.create("s:train:0", ALL_WEIGHTS)
    train(models, "s:train:0", 1)
    about = {"by": "s:train:0:1", "weights": 0, "adapter": {"rank": 0}}
    write_folder(where.saved_as("s:train:0", "weights", "a"), about, lambda at: models.save_state("s:train:0", at))
    write_folder(where.saved_as("s:train:0", "external_weights", "a"), about,
                 lambda at: models.snapshot("s:train:0", at))
    write_folder(where.snapshot(5), {"by": "s:train:0:1"}, lambda at: models.snapshot("s:train:0", at))
    write_folder(where.saved_as("s:train:0", "sampler_weights", "a"), {**about, "weights": 5}, lambda at: None)
    topology: Any = Topology(base)
    for kind in ("weights", "external_weights", "sampler_weights"):
        path, out = f"tinker://s:train:0/{kind}/a", tmp_path / kind
        out.mkdir()
        export_saved(tmp_path, topology, path, out, "", False)
        loaded: Any = AutoModelForCausalLM.from_pretrained(out)
        exported = {f"weights.{name}": part.detach() for name, part in loaded.named_parameters()}
        trained = {name: part for name, part in weights(models, "s:train:0").items() if name.startswith("weights.")}
        assert equal(exported, trained), kind
        assert (out / "tokenizer.json").is_file() and not (out / "about.json").exists()
        with pytest.raises(UserError, match="leave --adapter out"):
            export_saved(tmp_path, topology, path, out, "", True)


# -- engines -----


@given(some.lists(some.sampled_from("abc"), max_size=6), some.sampled_from("abc"), some.integers(0, 2))
def test_the_oldest_request_is_next_once_those_before_it_have_ended(
    waiting: list[str], loaded: str, users: int
) -> None:
    chosen = whole_turn(waiting, loaded, users)
    if not waiting or (users and {*waiting} != {loaded}):
        assert chosen is None
    else:
        assert chosen == waiting[0]


def engine_of(base: Path, **settings: Any) -> AdapterEngine:
    engine = AdapterEngine.load(base, **{"capacity": 8, "max_length": 64, "whole": True, **settings})
    assert isinstance(engine, AdapterEngine)
    return engine


def crowd(folders: Sequence[str], count: int = 20) -> list[Request]:
    return [request(key, folders[key % len(folders)]) for key in range(count)]


def test_requests_of_many_snapshots_are_drawn_by_their_own(base: Path, snapshots: list[str]) -> None:
    engine, requests = engine_of(base), crowd(snapshots)
    together = answers(engine, requests)
    for folder in snapshots:
        alone = TorchEngine.load(folder or base, capacity=8, max_length=64)
        own = [one for one in requests if one.extra["weights"] == folder]
        for key, finished in answers(alone, own).items():
            assert together[key].token_ids.tolist() == finished.token_ids.tolist()
            np.testing.assert_allclose(together[key].logprobs, finished.logprobs, atol=1e-4)
            assert set(together[key].versions.tolist()) == {int(Path(folder).name) if folder else 0}
    assert engine.active == engine.statistics().waiting == 0


def test_answers_are_equal_to_the_bit_whatever_waits_beside(base: Path, snapshots: list[str]) -> None:
    requests = crowd(snapshots, 12)
    crowded, alone = engine_of(base, capacity=24), engine_of(base)
    together = answers(crowded, requests)
    for one in requests:
        wanted = answers(alone, [one])[one.key]
        assert together[one.key].token_ids.tolist() == wanted.token_ids.tolist()
        np.testing.assert_array_equal(together[one.key].logprobs, wanted.logprobs)


def test_each_turn_of_a_snapshot_reads_it_once_for_all_who_wait(
    base: Path, snapshots: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from busrl.service import rows

    engine, read = engine_of(base, capacity=20), list[str]()
    plain = rows.read_into

    def counted(folder: Path, tensors: Any) -> None:
        read.append(folder.name)
        plain(folder, tensors)

    monkeypatch.setattr(rows, "read_into", counted)
    answers(engine, crowd(snapshots[1:3]))
    assert read == ["11", "12"]


def test_a_snapshot_that_is_no_such_model_refuses_its_requests_alone(
    base: Path, snapshots: list[str], tmp_path: Path
) -> None:
    wrong = str(tmp_path / "99")
    results = answers(engine_of(base), crowd([snapshots[1], wrong, snapshots[2]], 9))
    for key, finished in results.items():
        refused = key % 3 == 1
        assert (finished.finish == Finish.ABORTED) == bool(finished.refused) == refused
        assert len(finished.token_ids) > 0 or refused
    assert wrong in results[1].refused


def test_requests_beside_the_rows_end_with_a_pause_or_an_abort(base: Path, snapshots: list[str]) -> None:
    engine = engine_of(base, prefill_tokens=4)
    scored = replace(request(3, snapshots[1], length=9), extra={"weights": snapshots[1], **Places(1, 9).extra()})
    engine.submit([request(0, snapshots[1]), request(1, snapshots[2]), request(2, snapshots[1]), scored])
    assert engine.statistics().waiting == 4
    assert engine.step() == []  # a piece of the prompt is scored
    assert engine.abort(1) is not None
    assert engine.abort(1) is None
    assert {finished.key for finished in engine.pause("abort")} == {0, 2, 3}
    assert engine.active == 0
    engine.resume()
    assert len(answers(engine, [request(4, snapshots[3])])[4].token_ids) > 0


def test_scores_of_a_prompt_are_those_of_its_snapshot(base: Path, snapshots: list[str]) -> None:
    engine = engine_of(base)
    requests = [request(key, folder, length=9) for key, folder in enumerate(snapshots)]
    scored = answers(engine, [replace(one, extra={**one.extra, **Places(1, 9, 3).extra()}) for one in requests])
    for one in requests:
        plain: Any = AutoModelForCausalLM.from_pretrained(one.extra["weights"] or base)
        ids = torch.from_numpy(one.prompt_ids).long()
        with torch.no_grad():
            wanted = plain(ids[None]).logits[0, :-1, :TOKENS].log_softmax(-1)
        np.testing.assert_allclose(
            scored[one.key].extra["prompt_logprobs"], wanted.gather(1, ids[1:, None])[:, 0], atol=1e-4)


def test_sampler_and_trainer_agree_on_log_probabilities(base: Path, tmp_path: Path) -> None:
    models = WholeModels(base)
    models.create("m", ALL_WEIGHTS)
    train(models, "m", 2)
    models.snapshot("m", tmp_path / "3")
    [datum] = supervised(data_of(9))[:1]
    outputs, _ = models.forward_backward("m", [datum], "cross_entropy", {}, True)
    ids = np.append(datum.tokens[:1], datum.inputs["target_tokens"]).astype(np.int32)
    asked = replace(request(0, str(tmp_path / "3")), prompt_ids=ids[:2],
                    extra={"weights": str(tmp_path / "3"), **Places(1, 2).extra()})
    scores = answers(engine_of(base), [asked])[0].extra["prompt_logprobs"]
    np.testing.assert_allclose(scores[0], outputs[0]["logprobs"][0], atol=1e-4)
