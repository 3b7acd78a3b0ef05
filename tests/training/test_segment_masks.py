"""Which tokens of an answer in segments reach the gradient, and with which ratio: against a plain loop over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

WAYS = ["full", "padded", "packed"]


def with_context(samples: Sequence[Any], seed: int = 5) -> list[Any]:
    """Some tokens at the start of each are of earlier segments; at least one is left, sometimes none is earlier."""
    random = np.random.default_rng(seed)
    return [replace(sample, context=int(random.integers(0, len(sample.token_ids)))) for sample in samples]


def plain(model: Any, samples: Sequence[Any], advantages: Sequence[float], *, pois: bool = False
          ) -> tuple[dict[str, Tensor], float]:
    """One token at a time, as learner.md 6 is written."""
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for sample, advantage in zip(samples, advantages, strict=True):
        ids = torch.tensor([*sample.prompt_ids.tolist(), *sample.token_ids.tolist()])
        every = torch.log_softmax(model(input_ids=ids[None]).logits[0] / sample.temperature, -1)
        at = [len(sample.prompt_ids) - 1 + t for t in range(len(sample.token_ids))]
        for t in range(sample.context, len(at)):
            now = every[at[t], int(sample.token_ids[t])]
            tokens += 1
            ratio = torch.exp(now - (now.item() if pois else float(sample.behaviour_logprobs[t])))
            value = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            total = total + (torch.minimum(value, torch.tensor(-3.0 * advantage)) if advantage < 0 else value)
    value = total / tokens
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
    return {name: g for name, g in zip(parameters, gradients, strict=True) if g is not None}, float(value.detach())


@pytest.mark.parametrize("way", WAYS)
def test_earlier_segments_are_context_and_no_denominator_counts_them(lab: Any, apart: Any, way: str) -> None:
    trainer = lab.trainer("qwen3", way)
    samples = with_context(lab.samples(temperatures=(1.0, 0.7), model=trainer.model))
    advantages = lab.advantages(len(samples))
    gradient, stats = lab.step(trainer, [(samples[:5], advantages[:5]), (samples[5:], advantages[5:])])
    expected, value = plain(trainer.model, samples, advantages)
    assert apart(gradient, expected) < 1e-6 and stats.loss == pytest.approx(value, rel=1e-6)
    context = sum(sample.context for sample in samples)
    assert context > 0 and stats.context_tokens == context
    assert stats.tokens == sum(len(sample.token_ids) for sample in samples) - context


def test_an_earlier_segment_changes_gradients_only_as_context(lab: Any, apart: Any) -> None:
    """Its log-probabilities are of no interest; its token ids are read."""
    trainer = lab.trainer("qwen3", "padded")
    samples = with_context(lab.samples(model=trainer.model))
    advantages = lab.advantages(len(samples))

    def changed(sample: Any, **arrays: Any) -> Any:
        return replace(sample, **{
            name: np.concatenate([value[: sample.context], getattr(sample, name)[sample.context :]])
            for name, value in arrays.items()
        })

    gradient, _ = lab.step(trainer, [(samples, advantages)])
    behaviour = [changed(s, behaviour_logprobs=np.full(len(s.behaviour_logprobs), -17, np.float32)) for s in samples]
    assert apart(lab.step(trainer, [(behaviour, advantages)])[0], gradient) < 1e-9
    ids = [changed(s, token_ids=(s.token_ids + 1) % 16) for s in samples]
    assert apart(lab.step(trainer, [(ids, advantages)])[0], gradient) > 1e-3


@pytest.mark.parametrize("way", WAYS)
def test_pois_trains_with_ratio_one_and_reports_the_true_mismatch(
    lab: Any, apart: Any, way: str
) -> None:
    trainer, plainly = lab.trainer("qwen3", way, ratio_one=True), lab.trainer("qwen3", way)
    samples = lab.samples(model=trainer.model)
    advantages = lab.advantages(len(samples))
    gradient, stats = lab.step(trainer, [(samples, advantages)], version=4)
    expected, value = plain(trainer.model, samples, advantages, pois=True)
    assert apart(gradient, expected) < 1e-6 and stats.loss == pytest.approx(value, rel=1e-6)
    true = lab.step(plainly, [(samples, advantages)], version=4)[1].diagnostics
    assert stats.diagnostics.k3 == pytest.approx(true.k3) and true.k3 > 0.01
    assert stats.diagnostics.mismatch == pytest.approx(true.mismatch) and true.mismatch > 0.01
    assert stats.diagnostics.clip_low + stats.diagnostics.clip_high > 0  # what the true ratio would have had clipped


def test_a_sample_that_is_all_context_is_a_fault(lab: Any) -> None:
    sample = lab.samples()[0]
    told = replace(sample, context=len(sample.token_ids)).fault()
    assert told is not None and "at least one must be left to train" in told
