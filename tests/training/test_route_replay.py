"""Replay of routes: a trainer computes each token with the experts that an engine chose, in every way it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from moe_models import moe_folder, moe_model, routes_of, routing_at
from torch import Tensor

from busrl.data.routing import Routing, routing_of
from busrl.errors import ModelNotLoaded
from busrl.ledger.wal import SampleRecord
from busrl.preflight.load import load as load_topology
from busrl.roles.learner.step import TrainingStep
from busrl.routes.replay import Replay, lay
from busrl.training import packing
from busrl.training.batch import Sample, Turns, cut, flatten
from busrl.training.forward import (
    Forward,
    JoinedRows,
    PackedRows,
    PaddedRows,
    choose_forward,
    compute_again,
    prove_replay,
    replay_routes,
)
from busrl.training.model import Adapter, LoraSettings, load
from busrl.training.packing import plan_of
from busrl.training.scorer import Advantages
from busrl.training.scorer import drawn as drawn_by_lot
from busrl.training.settings import TrainerSettings
from busrl.training.step_stats import ROUTES
from busrl.training.trainer import Trainer

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.toml"
ROUTING, DEEP = Routing((0, 2), 8, 2), Routing((0, 1, 2, 3), 8, 2)
WORDS = 16
WAYS: dict[str, Any] = {"full": Forward, "padded": PaddedRows, "packed": PackedRows}


def model_of(**changes: Any) -> Any:
    return moe_model(**{"layers": 3, "mlp_only_layers": [1], **changes}).eval()


def drawn(random: Any, rows: int, routing: Routing = ROUTING) -> Any:
    """Routes of an engine that chose by lot."""
    layers, chosen = routing.shape
    return random.permuted(np.tile(np.arange(routing.experts), (rows, layers, 1)), axis=-1)[..., :chosen].astype(
        routing.dtype)


def samples(groups: int = 3, members: int = 3, routed: bool = True) -> list[Sample]:
    random, made = np.random.default_rng(5), []
    for group in range(groups):
        prompt = random.integers(3, WORDS, 1 + 4 * group).astype(np.int32)
        shared = drawn(random, len(prompt) - 1)
        for member in range(members):
            count = int(random.integers(1, 12))
            zeros = np.zeros(count, np.float32)
            tokens = random.integers(3, WORDS, count).astype(np.int32)
            made.append(Sample(
                members * group + member, group, member, prompt, tokens, zeros - 1, zeros.astype(np.uint32),
                routes=drawn(random, count) if routed else None, prompt_routes=shared if routed else None,
            ))
    return made


def episode(uid: int, random: Any) -> Sample:
    """Two sequences of one beginning, with two turns in the second, and a tool's text behind the last."""
    seqs, rows = np.array([9, 15]), np.array([[0, 4, 7], [1, 4, 6], [1, 9, 13]])
    count = int((rows[:, 2] - rows[:, 1]).sum())
    zeros, begin = np.zeros(count, np.float32), random.integers(3, WORDS, 4)
    ids = np.concatenate([begin, random.integers(3, WORDS, 5), begin, random.integers(3, WORDS, 11)]).astype(np.int32)
    routes = drawn(random, (7 - 1) + (13 - 1))
    routes[6 : 6 + 3] = routes[:3]  # as branches have them
    return Sample(uid, uid, 0, np.zeros(0, np.int32), ids, zeros - 1, zeros.astype(np.uint32),
                  turns=Turns(seqs, rows, np.zeros(count, np.bool_)), routes=routes)


def way_of(kind: str, model: Any) -> Forward:
    if kind == "packed":
        packing.adopt(model)
    way: Forward = WAYS[kind](model)
    replay_routes(way, ROUTING, 0.0)
    prove_replay(way)
    return way


def scores(way: Forward, own: Sequence[Sample]) -> tuple[Tensor, dict[str, Tensor]]:
    way.model.zero_grad()
    logprobs, _ = way.score(own, flatten(own, torch.float32, way.model.device))
    (logprobs * torch.arange(1, 1 + len(logprobs))).sum().backward()
    return logprobs.detach(), {n: p.grad.clone() for n, p in way.model.named_parameters() if p.grad is not None}


def without(given: Sequence[Sample]) -> list[Sample]:
    """The samples without their routes."""
    return [replace(sample, routes=None, prompt_routes=None) for sample in given]


def furthest(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest relative difference of a parameter's gradient."""
    return max(float((left[name] - right[name]).norm() / (right[name].norm() + 1e-6)) for name in right)


def own_routes(model: Any, sample: Sample) -> Sample:
    """The sample with the routes that the model itself takes."""
    routes = routes_of(model, np.concatenate([sample.prompt_ids, sample.token_ids]))[:-1].astype(ROUTING.dtype)
    first = len(sample.prompt_ids) - 1
    return replace(sample, prompt_routes=routes[:first], routes=routes[first:])


# -- the same numbers, whichever way ----


@pytest.mark.parametrize("kind", WAYS)
def test_own_routes_given_back_change_no_bit_of_scores_and_gradients(kind: str) -> None:
    plain = model_of()
    way, bare = way_of(kind, model_of()), samples(routed=False)
    own = [own_routes(plain, sample) for sample in bare]
    logprobs, slopes = scores(way, bare)
    again, same = scores(way, own)
    assert torch.equal(again, logprobs)
    assert all(torch.equal(same[name], slopes[name]) for name in slopes)


def test_routes_of_an_engine_lead_elsewhere_and_train_the_router() -> None:
    way, given = way_of("packed", model_of()), samples()
    (logprobs, slopes), (own, _) = scores(way, given), scores(way, without(given))
    assert float((logprobs - own).abs().mean()) > 0.1
    assert all(float(slope.norm()) > 0 for name, slope in slopes.items() if name.endswith("mlp.gate.weight"))


@pytest.mark.parametrize("kind", WAYS)
def test_packed_samples_have_the_numbers_of_each_sample_alone(kind: str) -> None:
    way, random = way_of(kind, model_of()), np.random.default_rng(9)
    given = [*samples(), *(episode(90 + number, random) for number in range(3))]
    logprobs, _ = scores(way, given)
    alone = [scores(way, [sample])[0] for sample in given]
    torch.testing.assert_close(logprobs, torch.cat(alone), atol=1e-5, rtol=0)
    other, _ = scores(way_of("packed", model_of()), given)
    torch.testing.assert_close(logprobs, other, atol=1e-5, rtol=0)


def test_rows_of_whole_samples_one_after_another_replay_too() -> None:
    model = model_of()
    way, given = JoinedRows(model), samples(1, 1)
    replay_routes(way, ROUTING, 0.0)
    prove_replay(way)
    logprobs, _ = scores(way, given)
    wanted, _ = scores(way_of("full", model_of()), given)
    torch.testing.assert_close(logprobs, wanted, atol=1e-5, rtol=0)


def test_layers_that_are_computed_again_take_the_same_routes() -> None:
    way, given = way_of("packed", model_of()), samples()
    logprobs, slopes = scores(way, given)
    compute_again(way.model)
    again, same = scores(way, given)
    assert torch.equal(again, logprobs) and furthest(same, slopes) == 0.0
    figures = way.replay.figures() if way.replay is not None else None
    assert figures is not None and figures[0] == len(logprobs)
    assert len(figures) == len(ROUTES) + len(ROUTING.layers), "each layer is counted once"


def test_a_sample_without_routes_or_a_prompt_without_takes_its_own() -> None:
    plain, way, given = model_of(), way_of("packed", model_of()), samples()
    bare = replace(given[0], routes=None, prompt_routes=None)
    (mixed, _), (own, _) = scores(way, [bare, given[1]]), scores(way, [bare])
    torch.testing.assert_close(mixed[: len(own)], own, atol=1e-5, rtol=0)
    answer = [replace(own_routes(plain, sample), routes=sample.routes) for sample in given]
    alone = [replace(sample, prompt_routes=None) for sample in given]
    torch.testing.assert_close(scores(way, alone)[0], scores(way, answer)[0], atol=1e-5, rtol=0)


def test_the_lowest_member_gives_a_shared_prompt_its_routes() -> None:
    first, second = samples(3, 2)[4:]
    random = np.random.default_rng(1)
    second = replace(second, prompt_routes=drawn(random, len(second.prompt_ids) - 1))
    plan = plan_of([second, first])
    laid = lay([second, first], ROUTING, len(plan.ids), *plan.begins)
    assert first.prompt_routes is not None and second.prompt_routes is not None
    np.testing.assert_array_equal(laid.routes[: plan.shared], first.prompt_routes)
    differ = (np.sort(first.prompt_routes, -1) != np.sort(second.prompt_routes, -1)).any((1, 2)).sum()
    assert (laid.shared, laid.differ) == (len(first.prompt_ids) - 1, differ) and differ > 0


# -- what a trainer counts ----


def test_a_step_counts_the_rows_whose_router_chose_others() -> None:
    plain, given = model_of(), samples()
    trainer = Trainer(model_of(), TrainerSettings(routing=ROUTING, micro_batch_tokens=40))
    planted, changed = [], 0
    for number, sample in enumerate(own_routes(plain, one) for one in given):
        assert sample.routes is not None
        routes = sample.routes.copy()
        if number and not number % 2:  # another expert in the last layer, of the last token: no other reads its routes
            free = next(i for i in range(ROUTING.experts) if i not in routes[-1, 1])
            routes[-1, 1, 0], changed = free, changed + 1
        planted.append(replace(sample, routes=routes))
    planted[0] = replace(planted[0], routes=None)
    trainer.accumulate(planted, [1.0] * len(planted))
    figures = trainer.step(1e-3).route_figures()
    rows = sum(sample.generated for sample in planted[1:])
    assert figures["rows"] == figures["by_layer_max"] == pytest.approx(changed / rows)
    assert figures["changed"] == pytest.approx(changed / rows / 2)
    assert figures["own_tokens"] == planted[0].generated and figures["prompt_differs"] == 0


def test_tokens_without_routes_are_counted_once_for_several_passes(tmp_path: Path) -> None:
    base, folder = load_topology(QUICKSTART), moe_folder(tmp_path / "moe")
    topology = replace(
        base, model=replace(base.model, path=str(folder)), derived=replace(base.derived, routing=routing_at(folder)),
        learner=replace(base.learner, passes_per_batch=2, updates_per_batch=2))
    random, records = np.random.default_rng(3), []
    for uid in range(4):
        ids, routes = random.integers(3, WORDS, 12).astype("<i4"), drawn(random, 11, Routing((0, 1), 8, 2))
        own = uid == 3
        records.append(SampleRecord(
            uid=uid, group=uid // 2, admission=0, member=uid % 2, attempt=0, prompt_crc=0, reward=float(uid % 2),
            temperature=1.0, version=0, step=0, finish=1, prompt_ids=ids[:4].tobytes(), token_ids=ids[4:].tobytes(),
            logprobs=np.full(8, -1, "<f4").tobytes(), versions=np.zeros(8, "<u4").tobytes(), routes_shape=[2, 2, 8],
            routes=b"" if own else routes[3:].tobytes(), prompt_routes=b"" if own else routes[:3].tobytes()))
    figures = TrainingStep(topology).train(records, 2, version=0).route_figures()
    assert figures["own_tokens"] == 8 and 0 < figures["rows"] <= 1


def test_every_so_many_micro_batches_are_compared_with_the_learners_own_routes() -> None:
    given = samples()
    settings = TrainerSettings(routing=ROUTING, micro_batch_tokens=30)
    trainers = [Trainer(model_of(), replace(settings, routes_compare_every=every)) for every in (0, 1, 2)]
    replayed, own = (trainers[0].score(some) for some in (given, without(given)))
    parts = cut(given, 30, together=True)
    assert len(parts) > 2
    some = [part for place, part in enumerate(parts) if drawn_by_lot(0, place, 2)]
    assert some and len(some) < len(parts)
    expected = [[], [at for part in parts for at in part], [at for part in some for at in part]]
    weights = []
    for trainer, chosen in zip(trainers, expected):
        trainer.accumulate(given, [1.0, -1.0, 0.5] * 3, version=0)
        stats = trainer.step(1e-3)
        figures = stats.route_figures()
        for name, logprobs in (("mismatch", replayed), ("mismatch_own", own)):
            gaps = [abs(logprobs[at] - given[at].behaviour_logprobs) for at in chosen]
            assert (name in figures) == bool(gaps)
            assert not gaps or figures[name] == pytest.approx(float(np.concatenate(gaps).mean()), rel=1e-4)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in trainer.parameters]))
    assert figures["mismatch"] != pytest.approx(figures["mismatch_own"], rel=1e-2)
    whole = trainers[1]
    whole.accumulate(given, [1.0] * 9, version=1)  # which drew none of these tokens
    assert "mismatch_own" not in whole.step(1e-3).route_figures()
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])


def test_micro_batches_are_compared_at_any_place_of_a_step() -> None:
    """Also where the steps have as many as the lot, and where only the first of two updates is of a version."""
    for every in (2, 3, 10):
        chosen = {(version, place) for version in range(300) for place in range(every)
                  if drawn_by_lot(version, place, every)}
        for place in range(every):
            assert 0.4 < sum(at == place for _, at in chosen) * every / 300 < 1.8


def test_weights_without_a_version_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(model_of(), TrainerSettings(routing=ROUTING, routes_compare_every=1))
    monkeypatch.setattr(trainer.forward, "by_itself", lambda: pytest.fail("a forward for nothing"))
    trainer.accumulate(samples(), [1.0] * 9, version=None)
    assert "mismatch_own" not in trainer.step(1e-3).route_figures()


def test_a_run_without_routes_has_no_figures_of_them() -> None:
    trainer = Trainer(model_of(), TrainerSettings())
    trainer.accumulate(samples(routed=False), [1.0] * 9)
    assert trainer.forward.replay is None and trainer.step(1e-3).route_figures() == {}


def test_the_base_of_an_adapter_routes_by_itself() -> None:
    given, model = samples(), model_of()
    adapter = Adapter(model, LoraSettings(4, 1.0, ("q_proj",), seed=3))
    trainer = Trainer(model, TrainerSettings(routing=ROUTING, kl="k3"), adapter=adapter,
                      refer=lambda forward, _: adapter.base_alone(forward.by_itself().score))
    wanted = trainer.score(without(given))
    for own, base in zip(wanted, trainer.score(given, "reference"), strict=True):
        np.testing.assert_allclose(base, own, atol=1e-5)
    trainer.accumulate(given, [1.0] * len(given))
    assert trainer.step(1e-3).route_figures()["rows"] > 0  # the forward that is trained replays all the same


def test_balance_is_the_loss_that_transformers_defines() -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    model, bare = model_of(), samples(2, 3, routed=False)
    trainer = Trainer(model, TrainerSettings(balance=0.5))
    logits: list[Tensor] = []
    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [router.register_forward_hook(lambda _, __, out: logits.append(out[0])) for router in routers]
    trainer.accumulate(bare, [1.0] * 6)
    for hook in hooks:
        hook.remove()
    assert trainer.forward.replay is not None
    loss, own = trainer.forward.replay.loss(torch.tensor(1.0)), [torch.softmax(rows, -1) for rows in logits]
    assert loss is not None
    used = torch.stack([rows.topk(2)[1].flatten().bincount(minlength=8) / len(rows) for rows in own]).mean(0)
    exactly = 0.5 * 8 * (used * torch.stack([rows.mean(0) for rows in own]).mean(0)).sum()
    assert torch.equal(loss, exactly), "a rank alone rounds nothing more"
    wanted = load_balancing_loss_func(tuple(logits), 8, 2)
    assert float(loss.detach()) == pytest.approx(0.5 * float(wanted.detach()), rel=1e-5)
    with_balance = {name: p.grad.clone() for name, p in model.named_parameters() if "gate.weight" in name}
    other = Trainer(model_of(), TrainerSettings())
    other.accumulate(bare, [1.0] * 6)
    slopes = {name: p.grad for name, p in other.model.named_parameters() if "gate.weight" in name}
    assert all(not torch.allclose(with_balance[name], slope) for name, slope in slopes.items())


@pytest.mark.parametrize("again", [False, True])
def test_balance_counts_the_experts_that_were_used(again: bool) -> None:
    model = model_of()
    trainer = Trainer(model, TrainerSettings(
        routing=ROUTING, balance=0.5, activation_checkpointing="full" if again else "none"))
    given = samples(1, 2)
    logits: list[Tensor] = []
    model.model.layers[0].mlp.gate.register_forward_hook(lambda _, __, out: logits.append(out[0]))
    model.model.layers[2].mlp.gate.register_forward_hook(lambda _, __, out: logits.append(out[0]))
    trainer.accumulate(given, [1.0, -1.0])
    plan = plan_of(given)
    used = lay(given, ROUTING, len(plan.ids), *plan.begins).routes
    tokens = np.stack([np.bincount(used[:, layer].ravel(), minlength=8) for layer in range(2)]) / len(used)
    probability = torch.stack([torch.softmax(one, -1).mean(0) for one in logits[:2]]).mean(0).detach().numpy()
    assert trainer.forward.replay is not None
    loss = trainer.forward.replay.loss(torch.tensor(1.0), lambda values: values)
    assert loss is not None
    assert float(loss.detach()) == pytest.approx(0.5 * 8 * float(tokens.mean(0) @ probability), rel=1e-5)


@pytest.mark.parametrize("context", [0, 1])
def test_balance_weighs_the_same_under_every_aggregation(context: int) -> None:
    """Two samples of different lengths, whose advantages are 0: all of the gradient is that of the balance."""
    given = [replace(sample, context=context if sample.generated > 1 else 0) for sample in samples(2, 2)]
    counts = [sample.trained for sample in given]
    slopes = []
    for weights, denominator in (None, sum(counts)), ([1 / count for count in counts], len(counts)):
        model = model_of()
        trainer = Trainer(model, TrainerSettings(routing=ROUTING, balance=0.5, micro_batch_tokens=4096))
        trainer.accumulate(given, Advantages([0.0] * len(given), weights=weights))
        gates = [p.grad for name, p in model.named_parameters() if name.endswith("mlp.gate.weight")]
        slopes.append(torch.cat([gate.flatten() for gate in gates if gate is not None]) / denominator)
    assert float(slopes[0].norm()) > 1e-4
    torch.testing.assert_close(slopes[1], slopes[0], rtol=1e-4, atol=1e-8)


# -- against an engine ----


def answers(folder: Path, dtype: str) -> list[Sample]:
    """Samples that the torch engine drew, with its routes."""
    from busrl.engines import Request
    from busrl.engines.torch.engine import TorchEngine

    engine = TorchEngine.load(folder, capacity=8, dtype=dtype, routing=DEEP)
    random, none = np.random.default_rng(2), np.zeros(0, np.int32)
    prompts = [random.integers(3, WORDS, 30).astype(np.int32) for _ in range(10)]
    endless = {"ends": False}
    waiting = [Request(i, i, 0, prompts[i // 4], none, 64, 1.0, 1.0, 3, extra=endless) for i in range(40)]
    made: list[Sample] = []
    while waiting or engine.active:
        room = engine.capacity - engine.active
        engine.submit(waiting[:room])
        del waiting[:room]
        made += [
            Sample(one.key, one.key // 4, one.key % 4, prompts[one.key // 4], one.token_ids, one.logprobs, one.versions,
                   routes=one.routes, prompt_routes=one.prompt_routes)
            for one in engine.step()
        ]
    return sorted(made, key=lambda sample: sample.uid)


def gaps(trainer: Trainer, given: Sequence[Sample]) -> Any:
    rows = trainer.score(given)
    return np.abs(np.concatenate(rows) - np.concatenate([sample.behaviour_logprobs for sample in given]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replay_closes_the_gap_to_an_engine_of_the_same_type(dtype: str, tmp_path: Path) -> None:
    folder = moe_folder(tmp_path / "moe", dtype=dtype, layers=4)
    given = answers(folder, dtype)
    trainer = Trainer(load(folder), TrainerSettings(routing=DEEP, compute_dtype=dtype))
    replayed, own = gaps(trainer, given), gaps(trainer, without(given))
    trainer.accumulate(given, [1.0] * len(given))
    figures = trainer.step(1e-5).route_figures()
    assert sum(4 * sample.generated for sample in given) > 10_000
    if dtype == "float32":
        assert figures["rows"] == 0 and max(own.max(), replayed.max()) < 1e-4
    else:
        assert figures["rows"] > 0.02
        assert replayed.mean() < 0.8 * own.mean() and np.quantile(replayed, 0.99) < 0.5 * np.quantile(own, 0.99)


# -- families, and what is refused ----

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe": ("Qwen2MoeConfig", {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
                                     "shared_expert_intermediate_size": 16}),
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 8, "num_experts_per_tok": 3}),
    "olmoe": ("OlmoeConfig", {"num_experts": 8, "num_experts_per_tok": 3}),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 8, "eos_token_id": 1}),
    "deepseek_v3": ("DeepseekV3Config", {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
        "n_group": 2, "topk_group": 1, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}),
    "glm4_moe": ("Glm4MoeConfig", {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
                                   "first_k_dense_replace": 1, "head_dim": 8}),
    "granitemoe": ("GraniteMoeConfig", {"num_local_experts": 8, "num_experts_per_tok": 3}),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_families_whose_routers_are_known_pass_the_proof(family: str, dtype: torch.dtype) -> None:
    import transformers as hf

    name, more = FAMILIES[family]
    torch.manual_seed(3)
    model = hf.AutoModelForCausalLM.from_config(getattr(hf, name)(**{**SIZES, **more})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    routing = routing_of(model.config.to_dict())
    assert routing is not None
    way = choose_forward(model.to(dtype))
    replay_routes(way, routing, 0.0)
    prove_replay(way)


def test_a_router_whose_weights_follow_no_known_rule_is_refused() -> None:
    model = model_of()
    gate = model.model.layers[2].mlp.gate
    plain = gate.forward
    gate.forward = lambda hidden: (out := plain(hidden)) and (out[0], out[1] * 1.01, out[2])
    way = choose_forward(model)
    replay_routes(way, ROUTING, 0.0)
    with pytest.raises(ModelNotLoaded, match=r'Qwen3MoeForCausalLM: how its routers weigh.*learner\.routes = "own"'):
        prove_replay(way)
    balanced = choose_forward(model)
    replay_routes(balanced, None, 0.1)
    prove_replay(balanced)  # the loss needs no rule


def test_a_shape_that_is_not_the_model_s_is_refused() -> None:
    way = choose_forward(model_of())
    replay_routes(way, Routing((0, 2), 8, 3), 0.0)
    with pytest.raises(ModelNotLoaded, match="do not choose 3 of 8 experts"):
        prove_replay(way)
    with pytest.raises(ModelNotLoaded, match=r"layers \[0, 1, 2\] choose experts"):
        Replay(model_of(), Routing((0, 1, 2), 8, 2))


def test_routes_of_too_many_rows_or_layers_name_their_sample() -> None:
    way, (first, *_) = way_of("packed", model_of()), samples()
    assert first.routes is not None
    for routes in (np.repeat(first.routes, 9, 0), first.routes[:, :1]):
        with pytest.raises(ValueError, match="sample 0: routes"):
            scores(way, [replace(first, routes=routes)])


def test_a_trainer_of_several_updates_replays_in_each(tmp_path: Path) -> None:
    trainer, given = Trainer(model_of(), TrainerSettings(routing=ROUTING, loss="ppo_clip")), samples()
    proximal = trainer.score(given)
    for _ in range(2):
        trainer.accumulate(given, Advantages([1.0] * len(given), proximal=proximal))
        figures = trainer.step(1e-3).route_figures()
        assert figures["own_tokens"] == 0 and figures["rows"] > 0.5
