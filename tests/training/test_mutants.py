"""Planted mistakes. Each replaces one function, and a named check, which the good code passes, has to notice it.

A wrong normalisation or shift still learns on a small task, so the quickstart can not find these; the checks must.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from busrl.algorithms import advantages, diagnostics, losses, terms
from busrl.training import batch, head, packing, trainer

# ------------------------------------------------------------------------------------------------------- the checks


def gradient_is_the_plain_one(lab: Any, distance: Any, way: str, **settings: Any) -> None:
    trainer = lab.trainer("qwen3", way, **settings)
    samples = lab.samples(temperatures=(1.0, 0.6), model=trainer.model, members=5)
    values = lab.advantages(len(samples))
    gradient, stats = lab.step(trainer, [(samples[:6], values[:6]), (samples[6:], values[6:])])
    expected, value = lab.reference(trainer.model, samples, values)
    assert distance(gradient, expected) < 1e-6
    assert stats.loss == pytest.approx(value, rel=1e-6)


def step_gradient(lab: Any, distance: Any, with_logprobs: Any) -> None:
    gradient_is_the_plain_one(lab, distance, "padded")


def shared_step_gradient(lab: Any, distance: Any, with_logprobs: Any) -> None:
    gradient_is_the_plain_one(lab, distance, "packed")


def wild_ratio(lab: Any, distance: Any, with_logprobs: Any) -> None:
    """A token that was all but impossible when it was sampled: bounded loss, finite gradient."""
    trainer = lab.trainer("qwen3", "padded", double=False)
    samples = [with_logprobs(sample, sample.behaviour_logprobs * 0 - 400) for sample in lab.samples()]
    _, stats = lab.step(trainer, [(samples, [-1.0] * len(samples))])
    assert not stats.skipped
    assert stats.loss == pytest.approx(3.0, rel=1e-6)


def clip_interval(lab: Any, distance: Any, with_logprobs: Any) -> None:
    """Between 1.2 and 1.28 a token is still trained, between 0.72 and 0.8 no longer."""
    logp = torch.log(torch.tensor([1.25, 1.3, 0.75, 0.85], dtype=torch.float64)).requires_grad_()
    sign = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    tokens = losses.LossInputs(logp, torch.zeros_like(sign), torch.zeros_like(sign), sign)
    losses.ppo_clip(tokens, losses.LossSettings()).sum().backward()
    assert logp.grad is not None
    assert logp.grad.ne(0).tolist() == [True, False, False, True]


def importance_weight_is_a_constant(lab: Any, distance: Any, with_logprobs: Any) -> None:
    trainer = lab.trainer("qwen3", "padded", loss="decoupled")
    samples = lab.samples(model=trainer.model)
    values = lab.advantages(len(samples))
    gradient, _ = lab.step(trainer, [(samples, values)])
    assert distance(gradient, lab.reference(trainer.model, samples, values, loss="decoupled")[0]) < 1e-6


def group_advantage(lab: Any, distance: Any, with_logprobs: Any) -> None:
    assert advantages.advantages(advantages.group_std, [1.0, 0.0, 0.0, 0.0]) == pytest.approx(
        [1.499997, -0.499999, -0.499999, -0.499999]
    )
    assert advantages.advantages(advantages.group_std, [0.1] * 7) == [0.0] * 7


def entropy_of_the_sampling_distribution(lab: Any, distance: Any, with_logprobs: Any) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]], dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.float64)
    _, entropy = head.Head()(one, logits.t(), torch.tensor([1]), torch.tensor([0.5], dtype=torch.float64))
    assert float(entropy) == pytest.approx(float(torch.distributions.Categorical(logits=logits * 2).entropy()))


def norm_is_clipped_after_the_division(lab: Any, distance: Any, with_logprobs: Any) -> None:
    trainer = lab.trainer("qwen3", "padded", max_grad_norm=0.01)
    samples = lab.samples()
    gradient, stats = lab.step(trainer, [(samples, lab.advantages(len(samples)))])
    free, _ = lab.step(lab.trainer("qwen3", "padded"), [(samples, lab.advantages(len(samples)))])
    size = sum(float(value.square().sum()) for value in gradient.values()) ** 0.5
    assert stats.grad_norm == pytest.approx(sum(float(value.square().sum()) for value in free.values()) ** 0.5)
    assert size == pytest.approx(0.01, rel=1e-3)


def drift_is_measured(lab: Any, distance: Any, with_logprobs: Any) -> None:
    trainer = lab.trainer("qwen3", "padded")
    samples = lab.samples()
    shifted = [with_logprobs(sample, row - 0.3) for sample, row in zip(samples, trainer.score(samples), strict=True)]
    _, stats = lab.step(trainer, [(shifted, [1.0] * len(shifted))])
    assert stats.diagnostics.log_ratio_mean == pytest.approx(0.3, abs=1e-5)
    assert stats.diagnostics.k3 == pytest.approx(np.exp(0.3) - 1.3, abs=1e-5)
    assert (stats.diagnostics.clip_low, stats.diagnostics.clip_high) == (0.0, 1.0)


CHECKS: list[Callable[[Any, Any, Any], None]] = [
    step_gradient,
    shared_step_gradient,
    wild_ratio,
    clip_interval,
    importance_weight_is_a_constant,
    group_advantage,
    entropy_of_the_sampling_distribution,
    norm_is_clipped_after_the_division,
    drift_is_measured,
]

# ------------------------------------------------------------------------------------------------------ the mutants

good_positions, good_masked, good_plan = batch.predicting_positions, losses.masked, packing.plan_of
good_visible, good_flatten, good_per_token = packing.visible, batch.flatten, batch.Flat.per_token


def shifted_by_one(pieces: Any) -> Any:
    rows, columns = good_positions(pieces)
    return rows, np.minimum(columns + 1, np.array([len(piece.ids) for piece in pieces])[rows] - 2)


def end_untrained(samples: Any, dtype: Any, device: Any) -> Any:
    flat = good_flatten(samples, dtype, device)
    return replace(flat, mask=torch.cat([flat.rows[1:] == flat.rows[:-1], torch.tensor([False])]))


def mean_per_micro_batch(values: Any, inputs: Any) -> Any:
    return good_masked(values, inputs) / len(inputs.advantages) * 30


def siblings(flat: Any, values: Any, dtype: Any) -> Any:
    return good_per_token(flat, [*values[1:], values[0]], dtype)


def behaviour_of_a_neighbour(samples: Any, dtype: Any, device: Any) -> Any:
    flat = good_flatten(samples, dtype, device)
    return replace(flat, behaviour_logprobs=flat.behaviour_logprobs.roll(1))


def no_log_ratio(logp: Any, reference: Any) -> Any:
    return logp - logp.detach()


def without_clamp(logp: Any, reference: Any) -> Any:
    return logp - reference


def one_division_short(parameters: Any, count: int) -> float:
    actual: float = good_norm(parameters, max(count - 1, 1))
    return actual


good_norm = trainer.normalised_norm


def plan_with_wrong_places(samples: Any, device: Any, **more: Any) -> Any:
    plan = good_plan(samples, device, **more)
    return replace(plan, positions=torch.cat([plan.positions[: plan.shared], plan.positions[plan.shared :] + 1]))


def sees_one_ahead(before: Any, *rest: Any) -> Any:
    return good_visible(before + 1, *rest)


def plan_that_mixes_prompts(samples: Any, device: Any, **more: Any) -> Any:
    plan = good_plan(samples, device, **more)
    return replace(plan, ids=torch.cat([plan.ids[: plan.shared].roll(1), plan.ids[plan.shared :]]))


def temperature_one(rows: Any, temperature: Any, part: Any) -> None:
    pass


def sign_lost(ratio: Any, advantage: Any, settings: Any) -> Any:
    low, high = losses.clip_bounds(settings)
    pair = ratio * advantage, ratio.clamp(low, high) * advantage
    return -torch.where(advantage > 0, torch.minimum(*pair), torch.maximum(*pair))


MUTANTS: dict[str, tuple[Any, str, Any, Any]] = {
    "logits are taken one position late": (batch, "predicting_positions", shifted_by_one, step_gradient),
    "the end token is not trained": (batch, "flatten", end_untrained, step_gradient),
    "temperature is ignored": (head, "_divide", temperature_one, step_gradient),
    "entropy is taken at temperature 1": (head, "_divide", temperature_one, entropy_of_the_sampling_distribution),
    "a mean per micro-batch": (losses, "masked", mean_per_micro_batch, step_gradient),
    "a sample is trained with a sibling's advantage": (batch.Flat, "per_token", siblings, step_gradient),
    "log-probabilities of the token before": (batch, "flatten", behaviour_of_a_neighbour, step_gradient),
    "the recorded log-probabilities are not used": (losses, "log_ratio", no_log_ratio, step_gradient),
    "drift is measured against oneself": (losses, "log_ratio", no_log_ratio, drift_is_measured),
    "the ratio is not clamped": (losses, "log_ratio", without_clamp, wild_ratio),
    "the clip bounds are swapped": (losses, "clip_bounds", lambda s: (1 - s.clip_high, 1 + s.clip_low), clip_interval),
    "the dual clip is missing": (losses, "dual_clipped", lambda loss, advantage, s: loss, wild_ratio),
    "the worse of two is the better for negative advantages": (losses, "surrogate", sign_lost, step_gradient),
    "the importance weight is not capped": (
        losses,
        "importance_weight",
        lambda t, s: (t.proximal_logprobs - t.behaviour_logprobs).exp(),
        importance_weight_is_a_constant,
    ),
    "the importance weight has a gradient": (
        losses,
        "importance_weight",
        lambda t, s: (t.trainer_logprobs - t.behaviour_logprobs).exp().clamp(max=s.tis_cap),
        importance_weight_is_a_constant,
    ),
    "n instead of n - 1 under the root": (
        advantages,
        "group_std",
        lambda rewards, lengths: (torch.tensor(rewards) - np.mean(rewards)) / (np.std(rewards) + 1e-6),
        group_advantage,
    ),
    "equal rewards are not flat": (advantages, "is_flat", lambda rewards: False, group_advantage),
    "the sum is divided by one too few": (trainer, "normalised_norm", one_division_short, step_gradient),
    "the gradient is not clipped": (
        trainer,
        "clip",
        lambda parameters, norm, limit: None,
        norm_is_clipped_after_the_division,
    ),
    "own tokens stand one place too far": (packing, "plan_of", plan_with_wrong_places, shared_step_gradient),
    "attention sees one token ahead": (packing, "visible", sees_one_ahead, shared_step_gradient),
    "prompts are mixed up": (packing, "plan_of", plan_that_mixes_prompts, shared_step_gradient),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_good_code_passes(check: Any, lab: Any, apart: Any, with_logprobs: Any) -> None:
    check(lab, apart, with_logprobs)


@pytest.mark.parametrize("mistake", MUTANTS)
def test_a_planted_mistake_is_noticed(
    mistake: str, lab: Any, apart: Any, with_logprobs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name, mutant, check = MUTANTS[mistake]
    assert check in CHECKS
    monkeypatch.setattr(module, name, mutant)
    try:
        check(lab, apart, with_logprobs)
    except AssertionError:
        return
    pytest.fail(f"{check.__name__} did not notice: {mistake}")


def test_every_diagnostic_field_has_its_row() -> None:
    logp = torch.zeros(4)
    inputs = losses.LossInputs(logp, logp, logp, logp + 1)
    row = diagnostics.sums(inputs, terms.Objective(logp), logp, None, losses.LossSettings())
    assert len(row) == len(diagnostics.FIELDS)
