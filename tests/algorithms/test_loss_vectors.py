"""The losses, aggregations, advantages and diagnostics against published numbers, in float64 to 1e-9."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from busrl.algorithms import advantages, catalog, diagnostics, distill, losses, terms
from busrl.topology.learner import Learner
from busrl.training.head import Head

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
CASES = {case["name"]: case for case in VECTORS["losses"]}
FLOAT = ("logp", "logp_old", "logp_rollout", "logp_ref")


def array(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def inputs_of(case: dict[str, Any], logp: Tensor, hole: Tensor, planted: float) -> losses.LossInputs:
    """Flat, as in training; `planted` stands at the positions of `hole`."""
    given = case.get("inputs", VECTORS["inputs"])
    mask = array(given["mask"])
    read = {n: array(given[n]).masked_fill(hole, planted).flatten() for n in given if n in (*FLOAT, "behaviour")}
    read["logp"] = logp
    prox = "logp_old" if case["loss_name"] == "decoupled" else case.get("proximal", "logp")
    advantage = array(case.get("advantage", VECTORS["advantage"]))[:, None].expand_as(mask).masked_fill(hole, planted)
    rows = torch.arange(len(mask))[:, None].expand_as(mask).flatten()
    return losses.LossInputs(
        logp, read[case["behaviour"]].detach(), read[prox].detach(), advantage.flatten(), mask.flatten().bool(), rows,
        lengths=mask.sum(1).long(), reference_logprobs=read.get("logp_ref"),
    )


def aggregated(case: dict[str, Any], per_token: Tensor, inputs: losses.LossInputs) -> Tensor:
    assert inputs.samples is not None and inputs.lengths is not None
    tokens = inputs.lengths.tolist()
    weights, total = advantages.weights(case["aggregation"], tokens, [0] * len(tokens), case.get("length_norm", 0))
    return (per_token * array(weights)[inputs.samples]).sum() / total


def run(case: dict[str, Any], planted: float | None = None, head: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, per-token loss and gradient; `planted` is written at every masked position of every input. `head`: the
    log-probabilities come out of the head, and the gradient is that of its hidden states over d log p / d hidden."""
    given = case.get("inputs", VECTORS["inputs"])
    mask = array(given["mask"])
    hole = (mask == 0) if planted is not None else torch.zeros_like(mask, dtype=torch.bool)
    wanted = array(given["logp"]).masked_fill(hole, planted or 0.0).flatten()
    leaf, logp, slope = wanted.requires_grad_(), wanted, torch.ones_like(wanted)
    if head:
        # Two tokens with the logits (x, 0): log p = x - log(1 + e^x), so x = log p - log(1 - p).
        known = wanted.detach().where(mask.flatten().bool(), -0.5)
        leaf, slope = (known - torch.log(-torch.expm1(known))).requires_grad_(), -torch.expm1(known)
        weight = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
        logp, _ = Head(rows=3)(leaf[:, None], weight, torch.zeros(len(leaf), dtype=torch.int64))
    settings = losses.LossSettings(**{n: tuple(v) if isinstance(v, list) else v for n, v in case["settings"].items()})
    inputs = inputs_of(case, logp, hole, planted or 0.0)
    if choice := losses.CHOICES.get(case["loss_name"]):
        known_inputs = replace(inputs, trainer_logprobs=logp.detach())
        inputs = replace(inputs, chosen=choice(known_inputs, settings, torch.Generator().manual_seed(0)))
    per_token = terms.objective(losses.LOSSES[case["loss_name"]], inputs, settings, settings.kl != "none").loss
    loss = aggregated(case, per_token, inputs)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), per_token.detach().view_as(mask), (gradient / slope).view_as(mask)


@pytest.mark.parametrize("planted", [None, float("nan"), 1e9, -1e9], ids=["zeros", "nan", "plus", "minus"])
@pytest.mark.parametrize("name", sorted(CASES))
def test_loss_and_gradient_are_those_of_the_vectors_whatever_is_masked(
    name: str, planted: float | None
) -> None:
    case = CASES[name]
    loss, per_token, gradient = run(case, planted)
    assert float(loss) == pytest.approx(case["loss"], abs=1e-9)
    torch.testing.assert_close(per_token, array(case["per_token"]), atol=1e-9, rtol=0)
    torch.testing.assert_close(gradient, array(case["grad_logp"]), atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", sorted(set(CASES) - {"wild_ratio_negative_advantage"}))
def test_through_the_head_value_and_gradient_are_those_of_the_vectors(name: str) -> None:
    case = CASES[name]
    loss, per_token, gradient = run(case, head=True)
    assert float(loss) == pytest.approx(case["loss"], abs=1e-9)
    torch.testing.assert_close(per_token, array(case["per_token"]), atol=1e-9, rtol=0)
    smooth = torch.ones_like(gradient, dtype=torch.bool)
    if name.startswith("kl_cov"):  # |log r| has a kink at 0, which the way through the head misses by a rounding
        smooth = array(VECTORS["inputs"]["logp"]) != array(VECTORS["inputs"]["logp_old"])
    torch.testing.assert_close(gradient[smooth], array(case["grad_logp"])[smooth], atol=1e-9, rtol=0)


def test_every_loss_and_every_correction_but_one_has_vectors() -> None:
    assert {case["loss_name"] for case in CASES.values()} == set(losses.LOSSES) - {"topk_kl"}  # its own: distill_topk
    named = {case["settings"].get("correction", "none") for case in CASES.values()}
    assert set(catalog.CORRECTIONS) - named == {"k3_rs"}
    assert losses.LOSSES.keys() == catalog.LOSS_FACTS.keys() and losses.CHOICES.keys() == {
        name for name, facts in catalog.LOSS_FACTS.items() if facts.chooses
    }
    assert advantages.ADVANTAGES.keys() == catalog.ADVANTAGE_FACTS.keys()
    assert {"none", *terms.WEIGHTS} == catalog.CORRECTIONS.keys()
    assert {"none", "k3_is", *terms.ESTIMATORS} == set(catalog.KL_TERMS)


@pytest.mark.parametrize("wrong", VECTORS["must_not_match"], ids=lambda case: case["name"])
def test_a_known_wrong_loss_is_not_reproduced(wrong: dict[str, Any]) -> None:
    loss, _, _ = run(wrong)
    assert abs(float(loss) - wrong["loss"]) > 0.05


@pytest.mark.parametrize("masked", [False, True])
def test_k3_rs_keeps_the_samples_whose_mean_k3_is_within_the_bounds(masked: bool) -> None:
    """Without vectors: each sample's mean of rho - log rho - 1, plainly."""
    given = VECTORS["inputs"]
    mask = array(given["mask"])
    logs = array(given["logp_old"]) - array(given["logp_rollout"])
    means = ((logs.exp() - logs - 1) * mask).sum(1) / mask.sum(1)
    bound = float(means.sort().values[1:3].mean())
    settings = losses.LossSettings(correction="k3_rs", correction_high=bound)
    case = {"loss_name": "reinforce", "behaviour": "logp_rollout", "proximal": "logp_old"}
    hole = (mask == 0) if masked else torch.zeros_like(mask, dtype=torch.bool)
    inputs = inputs_of(case, array(given["logp"]).flatten(), hole, 1e9 if masked else 0.0)
    actual = terms.correction(losses.hidden(inputs), settings).view_as(mask)
    assert torch.equal(actual[mask.bool()], (means <= bound).double()[:, None].expand_as(mask)[mask.bool()])
    assert 0 < int((means <= bound).sum()) < len(means)


@pytest.mark.parametrize("planted", [0.0, float("nan"), 1e9])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k3_is"])
def test_value_and_gradient_of_a_kl_are_those_of_the_vectors(kind: str, planted: float) -> None:
    mask = array(VECTORS["inputs"]["mask"])
    hole = mask == 0
    logp = array(VECTORS["inputs"]["logp"]).masked_fill(hole, planted).flatten().requires_grad_()
    case = {"loss_name": "reinforce", "behaviour": "logp_old", "advantage": [0.0] * 4}
    inputs = inputs_of(case, logp, hole, planted)
    settings = losses.LossSettings(kl=kind, kl_coef=1.0)
    nothing = terms.objective(lambda seen, _: seen.trainer_logprobs * 0, inputs, settings, True).loss
    torch.testing.assert_close(nothing.view_as(mask), array(VECTORS["kl"][kind]), atol=1e-9, rtol=0)
    (gradient,) = torch.autograd.grad(nothing.sum() / mask.sum(), logp)
    torch.testing.assert_close(
        gradient.view_as(mask), array(VECTORS["kl"]["gradient"][kind]) * mask, atol=1e-9, rtol=0)


def test_an_entropy_term_is_taken_from_the_loss_with_its_gradient() -> None:
    entropy = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    logp = array([-1.0, -2.0])
    inputs = losses.LossInputs(logp, logp, logp, array([0.0, 0.0]), torch.tensor([True, False]), entropy=entropy)
    actual = terms.objective(losses.reinforce, inputs, losses.LossSettings(entropy_coef=0.25), False).loss
    assert actual.tolist() == [-0.125, 0.0]
    assert torch.autograd.grad(actual.sum(), entropy)[0].tolist() == [-0.25, 0.0]


@pytest.mark.parametrize("kind", ["tail", "renormalised", "cross_entropy", "reverse_kl"])
def test_distillation_on_the_teachers_best_tokens_is_that_of_the_vectors(kind: str) -> None:
    given = VECTORS["distill_topk"]
    logits = array(given["inputs"]["student_logits"]).requires_grad_()
    ids, teacher = torch.tensor(given["inputs"]["teacher_ids"]), array(given["inputs"]["teacher_logprobs"])
    student = logits.log_softmax(-1).gather(-1, ids)
    functions: dict[str, Any] = {
        "tail": distill.topk_kl, "renormalised": lambda s, t: distill.topk_kl(s, t, tail=False),
        "cross_entropy": distill.cross_entropy, "reverse_kl": distill.reverse_kl,
    }
    actual = functions[kind](student, teacher)
    torch.testing.assert_close(actual, array(given[kind]), atol=1e-9, rtol=0)
    (gradient,) = torch.autograd.grad(actual.mean(), logits)
    torch.testing.assert_close(gradient, array(given["gradient"][kind]), atol=1e-9, rtol=0)
    same = functions[kind](student.detach(), student.detach())
    assert kind == "cross_entropy" or float(same.abs().max()) < 1e-12


@pytest.mark.parametrize("vectors", VECTORS["advantages"], ids=["binary", "uneven"])
@pytest.mark.parametrize("kind", ["group_std", "group_mean", "leave_one_out", "mean_normalised"])
def test_advantages_are_those_of_the_vectors(kind: str, vectors: dict[str, Any]) -> None:
    for group in sorted(set(vectors["group_ids"])):
        member = [i for i, g in enumerate(vectors["group_ids"]) if g == group]
        credit = advantages.advantages(advantages.ADVANTAGES[kind], [vectors["rewards"][i] for i in member])
        assert credit == pytest.approx([vectors[kind][i] for i in member], abs=1e-12)


@pytest.mark.parametrize("vectors", VECTORS["advantages"], ids=["binary", "uneven"])
def test_batch_std_divides_by_the_spread_of_all_centred_rewards(vectors: dict[str, Any]) -> None:
    centred = [0.0] * len(vectors["rewards"])
    for group in sorted(set(vectors["group_ids"])):
        member = [i for i, g in enumerate(vectors["group_ids"]) if g == group]
        credit = advantages.advantages(advantages.ADVANTAGES["batch_std"], [vectors["rewards"][i] for i in member])
        for i, value in zip(member, credit, strict=True):
            centred[i] = value
    scale = advantages.batch_scale(centred)
    assert [value / scale for value in centred] == pytest.approx(vectors["batch_std"], abs=1e-9)


def test_batch_whiten_whitens_all_tokens_with_their_samples_rewards() -> None:
    rewards, lengths = [1.0, 0.0, 0.25, 1.0, 0.0], [3, 7, 1, 4, 2]
    tokens = array([reward for reward, length in zip(rewards, lengths, strict=True) for _ in range(length)])
    white = (tokens - tokens.mean()) / (tokens.var(correction=1) + 1e-8).sqrt()
    expected = [float(white[sum(lengths[:i])]) for i in range(len(rewards))]
    assert advantages.advantages(advantages.batch_whiten, rewards, lengths) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("kind", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("empty", [False, True], ids=["all", "one sample without a trained token"])
def test_an_aggregation_is_that_of_the_vectors(kind: str, empty: bool) -> None:
    given = VECTORS["aggregation"]
    expected, mask = (given["empty_row"], given["empty_row"]["mask"]) if empty else (given, VECTORS["inputs"]["mask"])
    rows = [i for i, row in enumerate(mask) if sum(row)]
    tokens = [int(sum(mask[i])) for i in rows]
    weights, total = advantages.weights(kind, tokens, [0] * len(rows), given["length_norm"])
    sums = [(array(given["loss_matrix"][i]) * array(mask[i])).sum() for i in rows]
    actual = sum(w * float(one) for w, one in zip(weights, sums, strict=True)) / total
    assert actual == pytest.approx(expected[kind], abs=1e-12)


def test_a_prompt_mean_gives_every_prompt_the_same_weight() -> None:
    weights, total = advantages.weights("prompt-mean", [1, 3, 6], [7, 7, 9], 0)
    assert (weights, total) == ([1 / 4, 1 / 4, 1 / 6], 2.0)


def test_an_advantage_with_n_under_the_root_is_another() -> None:
    assert advantages.advantages(advantages.group_std, [1.0, 0.0]) == pytest.approx(
        [0.5 / (0.5**0.5 + 1e-6), -0.5 / (0.5**0.5 + 1e-6)]
    )


@pytest.mark.parametrize("rewards", [[0.1] * 8, [1.0, 1.0], [0.0, 0.0, 0.0], [0.5]])
def test_a_group_of_equal_rewards_has_advantages_of_zero(rewards: list[float]) -> None:
    assert advantages.is_flat(rewards)
    assert advantages.advantages(advantages.group_std, rewards) == [0.0] * len(rewards)


def test_a_group_with_different_rewards_is_not_flat_however_close() -> None:
    assert not advantages.is_flat([0.1, 0.1 + 1e-15])


def told(planted: float = 0.0, settings: losses.LossSettings | None = None) -> diagnostics.Diagnostics:
    inputs = VECTORS["inputs"]
    mask = array(inputs["mask"])
    read = {name: array(inputs[name]).masked_fill(mask == 0, planted) for name in ("logp", "logp_old", "logp_rollout")}
    advantage = array(VECTORS["advantage"])[:, None].expand_as(mask)
    tokens = losses.LossInputs(read["logp"], read["logp_old"], read["logp"], advantage, mask)
    zero = torch.zeros_like(mask)
    settings = settings or losses.LossSettings()
    return diagnostics.finish(diagnostics.sums(tokens, terms.Objective(zero), zero, None, settings))


def test_diagnostics_compute_no_term_that_the_loss_has_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(function: Any) -> Any:
        return lambda *given: calls.append(function.__name__) or function(*given)

    monkeypatch.setattr(terms, "correction", counted(terms.correction))
    monkeypatch.setattr(distill, "topk_kl", counted(distill.topk_kl))
    monkeypatch.setitem(terms.ESTIMATORS, "k3", counted(terms.k3))
    monkeypatch.setattr(terms, "k3", terms.ESTIMATORS["k3"])
    logp, best = torch.tensor([-0.5, -1.25]), torch.log(torch.tensor([[0.5, 0.2], [0.3, 0.1]]))
    settings = losses.LossSettings(correction="token_tis", kl="k3", kl_coef=0.1, teacher_coef=0.1)
    inputs = losses.LossInputs(
        logp, logp - 1, logp, torch.tensor([1.0, -1.0]), torch.tensor([True, False]), reference_logprobs=logp - 2,
        teacher_logprobs=best, student_logprobs=best + 0.1)
    objective = terms.objective(losses.ppo_clip, inputs, settings, True)
    figures = diagnostics.finish(diagnostics.sums(inputs, objective, logp, None, settings))
    assert sorted(calls) == ["correction", "k3", "topk_kl"]
    assert figures.kl == pytest.approx(float(terms.k3(logp, logp - 2)[0])) and figures.teacher_kl


@pytest.mark.parametrize("planted", [0.0, float("nan"), 1e9])
def test_clip_fractions_are_those_of_the_vectors(planted: float) -> None:
    actual = told(planted)
    assert actual.clip_low + actual.clip_high == pytest.approx(VECTORS["clip_fraction"]["value"], abs=1e-12)
    assert actual.dual_clip == pytest.approx(1 / 16)


def test_effective_sample_size_is_that_of_the_vectors() -> None:
    inputs = VECTORS["inputs"]
    mask = array(inputs["mask"])
    old, rollout, zero = array(inputs["logp_old"]), array(inputs["logp_rollout"]), torch.zeros_like(mask)
    tokens = losses.LossInputs(old, rollout, old, torch.ones_like(mask), mask)
    figures = diagnostics.finish(diagnostics.sums(tokens, terms.Objective(zero), zero, None, losses.LossSettings()))
    assert figures.ess == pytest.approx(VECTORS["ess"]["fraction"], abs=1e-12)


def test_without_any_drift_the_ratio_diagnostics_say_exactly_nothing_happened() -> None:
    logp = torch.tensor([-0.5, -1.25, -3.0])
    tokens = losses.LossInputs(logp, logp, logp, torch.tensor([1.0, -1.0, 1.0]))
    figures = diagnostics.finish(
        diagnostics.sums(
            tokens, terms.Objective(logp), torch.ones(3), torch.tensor([True, False, True]), losses.LossSettings())
    )
    assert (figures.log_ratio_mean, figures.k3, figures.ess) == (0.0, 0.0, 1.0)
    assert (figures.clip_low, figures.clip_high) == (0.0, 0.0)
    assert (figures.entropy, figures.mismatch) == (1.0, 0.0)


def test_only_what_reads_the_proximal_policy_wants_it_scored() -> None:
    wanting = {n for n in losses.LOSSES if catalog.needs_proximal(replace(Learner(1e-4), loss=n))}
    assert wanting == {"decoupled", "m2po"}
    assert catalog.needs_proximal(replace(Learner(1e-4), ratio="proximal"))
    assert catalog.needs_proximal(replace(Learner(1e-4), loss="reinforce", correction="token_tis"))


def test_without_a_token_of_these_weights_there_is_no_mismatch() -> None:
    logp = torch.tensor([-0.5, -1.25])
    tokens = losses.LossInputs(logp, logp - 1, logp, torch.tensor([1.0, -1.0]))
    for current in (None, torch.tensor([False, False])):
        row = diagnostics.sums(tokens, terms.Objective(logp), logp, current, losses.LossSettings())
        assert diagnostics.finish(row).mismatch is None
