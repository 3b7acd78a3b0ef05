"""The losses, aggregations, advantages and diagnostics against published numbers, in float64 to 1e-9."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from busrl.algorithms import advantages, diagnostics, losses

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
CASES = {case["name"]: case for case in VECTORS["losses"] if case["aggregation"] == "token-mean"}


def array(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def run(case: dict[str, Any], planted: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, per-token loss and gradient; `planted` is written at every masked position of every input."""
    inputs = case.get("inputs", VECTORS["inputs"])
    mask = array(inputs["mask"])
    hole = (mask == 0) if planted is not None else torch.zeros_like(mask, dtype=torch.bool)
    read = {
        name: array(values).masked_fill(hole, planted or 0.0) for name, values in inputs.items() if name != "rewards"
    }
    logp = read["logp"].requires_grad_()
    behaviour = read[case["behaviour"]].detach()  # "logp": against itself, so that every ratio is 1
    prox = read["logp_old"] if case["loss_name"] == "decoupled" else logp.detach()
    advantage = (
        array(case.get("advantage", VECTORS["advantage"]))[:, None].expand_as(mask).masked_fill(hole, planted or 0.0)
    )
    tokens = losses.LossInputs(logp, behaviour, prox, advantage, mask)
    per_token = losses.per_token(losses.LOSSES[case["loss_name"]], tokens, losses.LossSettings(**case["settings"]))
    if "dmmpt" in case:
        per_token = per_token.masked_fill(found_mastered(tokens, read["token_entropy"], **case["dmmpt"]), 0)
    lengths = mask.sum(1).long()
    loss = per_token.sum() / lengths.sum()
    (gradient,) = torch.autograd.grad(loss, logp)
    return loss.detach(), per_token.detach(), gradient


def found_mastered(tokens: losses.LossInputs, entropy: Tensor, tau: float, sigma: float) -> Tensor:
    """DMMPT on the rectangle of the vectors."""
    assert tokens.mask is not None
    rows = torch.arange(len(entropy))[:, None].expand_as(entropy)
    flat = [values.flatten() for values in (tokens.trainer_logprobs, entropy, tokens.advantages, rows)]
    lengths = tokens.mask.sum(1).long()
    return losses.mastered(*flat, lengths, tau, sigma, tokens.mask.flatten()).view_as(entropy)


@pytest.mark.parametrize("planted", [None, float("nan"), 1e9, -1e9], ids=["zeros", "nan", "plus", "minus"])
@pytest.mark.parametrize("name", sorted(CASES))
def test_loss_and_gradient_are_those_of_the_vectors_whatever_stands_at_masked_positions(
    name: str, planted: float | None
) -> None:
    case = CASES[name]
    loss, per_token, gradient = run(case, planted)
    assert float(loss) == pytest.approx(case["loss"], abs=1e-9)
    torch.testing.assert_close(per_token, array(case["per_token"]), atol=1e-9, rtol=0)
    torch.testing.assert_close(gradient, array(case["grad_logp"]), atol=1e-9, rtol=0)


def test_a_known_wrong_loss_is_not_reproduced() -> None:
    (wrong,) = VECTORS["must_not_match"]
    assert float((run(wrong)[1] - array(wrong["per_token"])).abs().max()) > 0.1


@pytest.mark.parametrize("vectors", VECTORS["advantages"], ids=["binary", "uneven"])
@pytest.mark.parametrize("kind", ["group_std", "group_mean"])
def test_advantages_are_those_of_the_vectors(kind: str, vectors: dict[str, Any]) -> None:
    for group in sorted(set(vectors["group_ids"])):
        member = [i for i, g in enumerate(vectors["group_ids"]) if g == group]
        found = advantages.advantages(advantages.ADVANTAGES[kind], [vectors["rewards"][i] for i in member])
        assert found == pytest.approx([vectors[kind][i] for i in member], abs=1e-12)


def test_an_advantage_with_n_under_the_root_is_not_the_one_of_the_vectors() -> None:
    assert advantages.advantages(advantages.group_std, [1.0, 0.0]) == pytest.approx(
        [0.5 / (0.5**0.5 + 1e-6), -0.5 / (0.5**0.5 + 1e-6)]
    )


@pytest.mark.parametrize("rewards", [[0.1] * 8, [1.0, 1.0], [0.0, 0.0, 0.0], [0.5]])
def test_a_group_of_equal_rewards_is_flat_and_all_its_advantages_are_exactly_zero(rewards: list[float]) -> None:
    assert advantages.is_flat(rewards)
    assert advantages.advantages(advantages.group_std, rewards) == [0.0] * len(rewards)


def test_a_group_with_two_different_rewards_is_not_flat_however_close_they_are() -> None:
    assert not advantages.is_flat([0.1, 0.1 + 1e-15])


def told(planted: float = 0.0, settings: losses.LossSettings | None = None) -> diagnostics.Diagnostics:
    inputs = VECTORS["inputs"]
    mask = array(inputs["mask"])
    read = {name: array(inputs[name]).masked_fill(mask == 0, planted) for name in ("logp", "logp_old", "logp_rollout")}
    advantage = array(VECTORS["advantage"])[:, None].expand_as(mask)
    tokens = losses.LossInputs(read["logp"], read["logp_old"], read["logp"], advantage, mask)
    zero = torch.zeros_like(mask)
    return diagnostics.finish(diagnostics.sums(tokens, zero, zero, None, settings or losses.LossSettings()))


@pytest.mark.parametrize("planted", [0.0, float("nan"), 1e9])
def test_clip_fractions_are_those_of_the_vectors(planted: float) -> None:
    found = told(planted)
    assert found.clip_low + found.clip_high == pytest.approx(VECTORS["clip_fraction"]["value"], abs=1e-12)
    assert found.dual_clip == pytest.approx(1 / 16)


def test_effective_sample_size_is_that_of_the_vectors() -> None:
    inputs = VECTORS["inputs"]
    mask = array(inputs["mask"])
    old, rollout, zero = array(inputs["logp_old"]), array(inputs["logp_rollout"]), torch.zeros_like(mask)
    tokens = losses.LossInputs(old, rollout, old, torch.ones_like(mask), mask)
    found = diagnostics.finish(diagnostics.sums(tokens, zero, zero, None, losses.LossSettings()))
    assert found.ess == pytest.approx(VECTORS["ess"]["fraction"], abs=1e-12)


def test_without_any_drift_the_ratio_diagnostics_say_exactly_nothing_happened() -> None:
    logp = torch.tensor([-0.5, -1.25, -3.0])
    tokens = losses.LossInputs(logp, logp, logp, torch.tensor([1.0, -1.0, 1.0]))
    found = diagnostics.finish(
        diagnostics.sums(tokens, logp, torch.ones(3), torch.tensor([True, False, True]), losses.LossSettings())
    )
    assert (found.log_ratio_mean, found.k3, found.ess, found.clip_low, found.clip_high) == (0.0, 0.0, 1.0, 0.0, 0.0)
    assert (found.entropy, found.mismatch) == (1.0, 0.0)


def test_only_the_decoupled_loss_wants_a_proximal_policy() -> None:
    assert losses.LOSSES.keys() - losses.WITHOUT_PROXIMAL == {"decoupled"}


def test_the_printed_sign_of_the_entropy_would_leave_out_tokens_of_every_better_answer() -> None:
    """UloRL's eq. 10 lacks the minus sign: with it the third case would leave out three tokens."""
    inputs = VECTORS["inputs"]
    advantage = array(VECTORS["advantage"])[:, None].expand(4, 5)
    tokens = losses.LossInputs(array(inputs["logp"]), array(inputs["logp"]), array(inputs["logp"]), advantage,
                           array(inputs["mask"]))
    entropy = array(inputs["token_entropy"])
    assert int(found_mastered(tokens, -entropy, 0.7, 0.45).sum()) >= 3
    assert int(found_mastered(tokens, entropy, 0.7, 0.45).sum()) == 0


def test_where_no_token_is_of_these_weights_there_is_no_mismatch_to_tell() -> None:
    logp = torch.tensor([-0.5, -1.25])
    tokens = losses.LossInputs(logp, logp - 1, logp, torch.tensor([1.0, -1.0]))
    for current in (None, torch.tensor([False, False])):
        assert diagnostics.finish(diagnostics.sums(tokens, logp, logp, current, losses.LossSettings())).mismatch is None
