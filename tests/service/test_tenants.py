"""Models of clients over one base: gradients, steps, states, snapshots, parking; none sees another."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from bases import STEP, TOKENS, Datum, data_of, supervised, train, write_base

from busrl.service.adapters import Adapter
from busrl.service.models import STATE_TENSORS, Adam
from busrl.service.sums import UserFault
from busrl.service.tenants import Tenants

torch.set_num_threads(1)
ALL = Adapter(rank=4, seed=1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("bases") / "base")


def vector(tenants: Tenants, name: str) -> torch.Tensor:
    return tenants.tenant(name).numbers.vector


def test_a_step_is_that_of_torch_on_a_model_with_merged_weights(base: Path) -> None:
    """The gradient by autograd through W + scale B A of a plain model, datum by datum; AdamW and clipping of torch."""
    from transformers import AutoModelForCausalLM

    tenants = Tenants(base)
    tenants.create("m", ALL)
    train(tenants, "m", 1)
    pairs = {n: [p.detach().clone().requires_grad_() for p in low[:2]]
             for n, low in tenants.tenant("m").numbers.pairs.items()}
    leaves = [leaf for pair in pairs.values() for leaf in pair]
    plain: Any = AutoModelForCausalLM.from_pretrained(base).requires_grad_(False)
    data, total = data_of(77), torch.zeros(())
    for datum in data:
        merged = {f"{n}.weight": plain.get_submodule(n).weight + 8.0 * b @ a for n, (a, b) in pairs.items()}
        ids = torch.from_numpy(datum.tokens).long()[None]
        logits = torch.func.functional_call(plain, merged, kwargs={"input_ids": ids}).logits[0, :, :TOKENS]
        scores = logits.log_softmax(-1)
        lp = scores[torch.arange(len(datum.tokens)), torch.from_numpy(datum.inputs["target_tokens"])]
        q, advantage, weight = (torch.from_numpy(datum.inputs[key]) for key in ("logprobs", "advantages", "weights"))
        total = total - ((lp - q).exp() * advantage * weight).sum()
    total.backward()
    metrics = tenants.forward_backward("m", data, "importance_sampling", {})[1]
    assert metrics == {"loss:sum": pytest.approx(total.item(), rel=1e-5)}
    gradients = [low for pair in tenants.tenant("m").numbers.pairs.values() for low in pair[:2]]
    for ours, theirs in zip(gradients, leaves, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-4, rtol=1e-4)

    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    for ours, theirs in zip(gradients, leaves, strict=True):
        theirs.grad = ours.grad.clone()
    before = tenants.tenant("m")
    optimizer = torch.optim.AdamW(leaves, lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3, foreach=False)
    for leaf, first, second in zip(leaves, *(
        [part for pair in before.numbers.views(moment).values() for part in pair] for moment in before.moments
    ), strict=True):
        optimizer.state[leaf] = {"step": torch.tensor(1.0), "exp_avg": first.clone(), "exp_avg_sq": second.clone()}
    norm = torch.nn.utils.clip_grad_norm_(leaves, 0.5)
    optimizer.step()
    assert tenants.optim_step("m", Adam(0.1, 0.8, 0.9, 1e-6, 0.3, 0.5)) == {
        "unclipped_grad_l2:mean": pytest.approx(float(norm), rel=1e-5)}
    for ours, theirs in zip(gradients, leaves, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_eight_models_of_many_ranks_equal_their_own_runs_alone(base: Path) -> None:
    shapes = {f"m{rank}": Adapter(rank, rank, mlp=rank % 3 != 0, unembed=rank % 2 == 0)
              for rank in (1, 2, 3, 4, 8, 16, 24, 32)}
    together = Tenants(base)
    for name, adapter in shapes.items():
        together.create(name, adapter)
    for step in range(3):
        for name in shapes:
            train(together, name, 1, step)
    alone = Tenants(base)
    for name, adapter in shapes.items():
        alone.create(name, adapter)
        train(alone, name)
        assert torch.equal(vector(alone, name), vector(together, name)), name
        alone.forget(name)
    assert together.names() == list(shapes)


def test_gradients_add_up_over_requests_until_a_step_uses_them(base: Path) -> None:
    tenants, data = Tenants(base), data_of(5, 6)
    for name, parts in {"whole": [data], "parts": [data[:2], data[2:]]}.items():
        tenants.create(name, ALL)
        for part in parts:
            tenants.forward_backward(name, part, "cispo", {})
        tenants.optim_step(name, STEP)
    torch.testing.assert_close(vector(tenants, "whole"), vector(tenants, "parts"), atol=1e-5, rtol=1e-4)
    with pytest.raises(UserFault, match="no gradients since the last step"):
        tenants.optim_step("whole", STEP)


def test_dropped_gradients_and_a_forward_leave_a_model_as_it_was(base: Path) -> None:
    tenants = Tenants(base)
    for name in ("kept", "m"):
        tenants.create(name, ALL)
    tenants.forward_backward("kept", data_of(5), "ppo", {})
    tenants.forward_backward("m", data_of(4), "ppo", {})
    tenants.drop_gradients("m")
    tenants.forward_backward("m", data_of(3), "ppo", {}, forward_only=True)
    with pytest.raises(UserFault, match="no gradients"):
        tenants.optim_step("m", STEP)
    tenants.forward_backward("m", data_of(5), "ppo", {})
    for name in ("kept", "m"):
        tenants.optim_step(name, STEP)
    assert torch.equal(vector(tenants, "kept"), vector(tenants, "m"))


def test_answers_come_in_the_order_and_shape_of_the_targets(base: Path) -> None:
    small, large = Tenants(base, micro_batch_tokens=12), Tenants(base)
    mixed: list[Datum] = [datum for pair in zip(data_of(1, 7), data_of(2, 7, targets=3)) for datum in pair]
    for tenants in (small, large):
        tenants.create("m", ALL)
    outputs = [tenants.forward_backward("m", mixed, "ppo", {}, forward_only=True)[0] for tenants in (small, large)]
    for datum, one, other in zip(mixed, *outputs, strict=True):
        assert one["logprobs"].dtype == np.float32
        assert one["logprobs"].shape == datum.inputs["target_tokens"].shape
        np.testing.assert_allclose(one["logprobs"], other["logprobs"], atol=1e-5)
        alone = large.forward_backward("m", [datum], "ppo", {}, forward_only=True)[0][0]["logprobs"]
        np.testing.assert_allclose(one["logprobs"], alone, atol=1e-5)


def test_models_between_whose_micro_batches_others_train_stay_apart(base: Path) -> None:
    alone, between = Tenants(base, micro_batch_tokens=12), Tenants(base, micro_batch_tokens=12)
    for name in ("m", "other"):
        alone.create(name, ALL)
        between.create(name, ALL)
        alone.forward_backward(name, data_of(len(name)), "ppo", {})
    passes = [between.begin(name, data_of(len(name)), "ppo", {}) for name in ("m", "other")]
    under_way, rounds = passes, 0
    while under_way:
        under_way, rounds = [part for part in under_way if part.advance()], rounds + 1
    assert rounds > 1
    for name, part in zip(("m", "other"), passes, strict=True):
        assert torch.equal(between.tenant(name).numbers.gradients, alone.tenant(name).numbers.gradients)
        assert len(part.outputs) == 5


def test_the_bytes_of_a_model_are_known_before_it_is_made(base: Path) -> None:
    tenants = Tenants(base)
    expected = tenants.bytes_of(ALL)
    tenants.create("m", ALL)
    train(tenants, "m", 1)
    assert expected == 4 * vector(tenants, "m").nbytes
    with pytest.raises(UserFault, match="rank = 0"):
        tenants.bytes_of(Adapter(0))


def test_data_may_have_weights_a_mask_or_neither(base: Path) -> None:
    tenants, alone, data = Tenants(base), 0.0, data_of(6, 3)
    tenants.create("m", ALL)
    data[1].inputs["mask"] = data[1].inputs.pop("weights")
    del data[2].inputs["weights"]
    for datum in data:
        alone += tenants.forward_backward("m", [datum], "ppo", {}, forward_only=True)[1]["loss:sum"]
    assert tenants.forward_backward("m", data, "ppo", {}, forward_only=True)[1]["loss:sum"] == pytest.approx(alone)


def test_a_loss_that_is_not_finite_is_refused_and_changes_no_weight(base: Path) -> None:
    tenants, data = Tenants(base), data_of(5)
    tenants.create("m", ALL)
    before = vector(tenants, "m").clone()
    data[3].inputs["logprobs"][:] = -1e9
    data[3].inputs["weights"][:] = 1.0
    with pytest.raises(UserFault, match=r"^datum 3: the loss of position \d+ is not finite"):
        tenants.forward_backward("m", data, "importance_sampling", {})
    tenants.drop_gradients("m")
    assert torch.equal(vector(tenants, "m"), before)


@pytest.mark.parametrize(("changes", "words"), [
    ({"learning_rate": float("nan")}, "learning_rate = nan"), ({"beta1": 1.0}, "beta1 = 1.0"), ({"eps": 0}, "eps = 0"),
    ({"grad_clip_norm": -1}, "grad_clip_norm = -1"), ({"weight_decay": None}, "weight_decay = None"),
])
def test_settings_of_a_step_that_cannot_be_are_refused(base: Path, changes: Any, words: str) -> None:
    tenants = Tenants(base)
    tenants.create("m", ALL)
    tenants.forward_backward("m", data_of(5), "ppo", {})
    with pytest.raises(UserFault, match=words):
        tenants.optim_step("m", Adam(**changes))


@pytest.mark.parametrize(("adapter", "words"), [
    (Adapter(0), "rank = 0; 1 to 64"), (Adapter(-1), "rank = -1"), (Adapter(10**6), "rank = 1000000"),
    (Adapter(4, 0, False, False, False), "trains nothing"),
])
def test_an_adapter_that_cannot_be_is_refused(base: Path, adapter: Adapter, words: str) -> None:
    tenants = Tenants(base)
    with pytest.raises(UserFault, match=words):
        tenants.create("m", adapter)
    assert tenants.names() == []


def test_a_head_that_is_the_embedding_gets_no_adapter(tmp_path: Path) -> None:
    tenants = Tenants(write_base(tmp_path / "tied", tied=True))
    with pytest.raises(UserFault, match="train_unembed=False"):
        tenants.create("m", ALL)
    tenants.create("m", Adapter(4, unembed=False))
    train(tenants, "m", 1)


# -- states -----


def test_a_state_continues_to_the_bit(base: Path, tmp_path: Path) -> None:
    tenants, later = Tenants(base), Tenants(base)
    tenants.create("m", ALL)
    train(tenants, "m", 2)
    tenants.forward_backward("m", data_of(9), "ppo", {})  # gradients are no part of a state
    tenants.save_state("m", tmp_path / "state")
    tenants.drop_gradients("m")
    later.create("m", Adapter(4, seed=99))
    later.load_state("m", tmp_path / "state", True)
    assert train(later, "m", 2, 2) == train(tenants, "m", 2, 2)
    assert torch.equal(vector(later, "m"), vector(tenants, "m"))


def test_a_state_without_its_optimiser_begins_with_fresh_moments(base: Path, tmp_path: Path) -> None:
    tenants = Tenants(base)
    for name in ("m", "fresh"):
        tenants.create(name, ALL)
    train(tenants, "m", 2)
    tenants.save_state("m", tmp_path / "state")
    tenants.load_state("fresh", tmp_path / "state", False)
    assert torch.equal(vector(tenants, "m"), vector(tenants, "fresh"))
    assert not tenants.tenant("fresh").moments
    before = vector(tenants, "fresh").clone()
    tenants.forward_backward("fresh", data_of(1), "ppo", {})
    tenants.optim_step("fresh", Adam(0.5))
    moved = (vector(tenants, "fresh") - before).abs()
    assert float(moved[moved > 0].median()) == pytest.approx(0.5, rel=1e-3)  # a first step of Adam is the rate itself


@pytest.mark.parametrize("fault", ["rank", "part", "base", "short", "absent"])
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(base: Path, tmp_path: Path, fault: str) -> None:
    tenants, folder = Tenants(base), tmp_path / "state"
    tenants.create("m", ALL)
    train(tenants, "m", 1)
    if fault != "absent":
        tenants.save_state("m", folder)
    other = {"rank": Adapter(8), "part": Adapter(4, mlp=False)}.get(fault, ALL)
    if fault == "short":
        (folder / STATE_TENSORS).write_bytes((folder / STATE_TENSORS).read_bytes()[:-100])
    if fault == "base":
        (folder / "model_state.json").write_text((folder / "model_state.json").read_text().replace("qwen2", "llama"))
    tenants.create("other", other)
    before = copy.deepcopy(vector(tenants, "other"))
    words = {"rank": "rank = 4, this model has 8", "part": "mlp = True", "base": "another base model"}
    with pytest.raises(UserFault, match=words.get(fault, "no saved state that can be read")):
        tenants.load_state("other", folder, True)
    assert torch.equal(vector(tenants, "other"), before)


# -- snapshots -----


class OneAdapter:
    """A receiver that has one folder."""

    kind = "adapter"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def take(self) -> tuple[int, int, Path]:
        return 1, 1, self.folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_snapshot_scores_in_the_engine_as_the_model_does(base: Path, tmp_path: Path, dtype: str) -> None:
    from busrl.engines.base import Request
    from busrl.engines.torch.engine import TorchEngine

    tenants = Tenants(base, dtype=dtype)
    tenants.create("m", ALL)
    train(tenants, "m", 4)
    tenants.snapshot("m", tmp_path / "snapshot")
    engine = TorchEngine.load(base, capacity=1, max_length=64, dtype=dtype)
    engine.update_weights(OneAdapter(tmp_path / "snapshot"))  # type: ignore[arg-type]
    prompt = np.array([5, 9, 7], np.int32)
    engine.submit([Request(0, 1, 0, prompt, np.empty(0, np.int32), 20, 1.0, 1.0, 3)])
    finished: list[Any] = []
    while not finished:
        finished = engine.step()
    drawn = finished[0].token_ids
    ids = np.concatenate([prompt, drawn]).astype(np.int32)
    datum = Datum(ids[:-1], {"target_tokens": ids[1:].astype(np.int64), "weights": np.ones(len(ids) - 1, np.float32)})
    scores = tenants.forward_backward("m", [datum], "cross_entropy", {}, forward_only=True)[0][0]["logprobs"]
    bound = 1e-4 if dtype == "float32" else 0.1
    np.testing.assert_allclose(scores[len(prompt) - 1 :], finished[0].logprobs, atol=bound)


def test_a_snapshot_loads_in_peft(base: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    tenants, data = Tenants(base), supervised(data_of(8))
    tenants.create("m", ALL)
    train(tenants, "m")
    tenants.snapshot("m", tmp_path / "snapshot")
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "snapshot")
    outputs = tenants.forward_backward("m", data, "cross_entropy", {}, forward_only=True)[0]
    for datum, output in zip(data, outputs, strict=True):
        with torch.no_grad():
            logits = model(torch.from_numpy(datum.tokens).long()[None]).logits[0, :, :TOKENS].log_softmax(-1)
        wanted = logits[torch.arange(len(datum.tokens)), torch.from_numpy(datum.inputs["target_tokens"])]
        np.testing.assert_allclose(output["logprobs"], wanted.numpy(), atol=1e-4)


def test_layers_computed_again_in_backward_give_the_same_gradient(base: Path) -> None:
    vectors = []
    for again in (False, True):
        tenants = Tenants(base, again=again)
        tenants.create("m", ALL)
        train(tenants, "m", 1)
        vectors.append(vector(tenants, "m"))
    torch.testing.assert_close(*vectors, atol=1e-6, rtol=1e-5)


def test_a_base_in_bfloat16_trains_adapters_in_float32(base: Path) -> None:
    tenants = Tenants(base, dtype="bfloat16")
    tenants.create("m", ALL)
    losses = [tenants.forward_backward("m", supervised(data_of(3)), "cross_entropy", {})[1]["loss:sum"]]
    for _ in range(8):
        tenants.optim_step("m", STEP)
        losses.append(tenants.forward_backward("m", supervised(data_of(3)), "cross_entropy", {})[1]["loss:sum"])
    assert vector(tenants, "m").dtype == torch.float32
    assert losses[-1] < 0.5 * losses[0]
