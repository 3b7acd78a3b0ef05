"""The gradient noise scale: the published numbers, and norms of parts of a real step against gradients taken apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from busrl.scheduling.control import noise_pair
from busrl.training.trainer import NoiseMeter

VECTOR = json.loads((Path(__file__).parents[1] / "algorithms" / "vectors.json").read_text())["gradient_noise_scale"]


def test_the_published_numbers() -> None:
    one = VECTOR
    signal, spread = noise_pair(one["mean_sq_small"], one["B_small"], one["sq_big"], one["B_big"])
    assert (signal, spread) == pytest.approx((one["G2"], one["S"]))
    assert spread / signal == pytest.approx(one["B_simple"])


def test_a_meter_finds_the_norms_of_the_vector() -> None:
    parameter = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    meter = NoiseMeter([parameter])
    for row in VECTOR["microbatch_grads"]:  # means over one token each, of groups that count as B_small
        parameter.grad = torch.tensor(row, dtype=torch.float64)
        meter.part(VECTOR["B_small"], 1)
    norms = meter.whole()
    assert norms is not None and (norms.small, norms.big) == (VECTOR["B_small"], VECTOR["B_big"])
    assert norms.small_squared == pytest.approx(VECTOR["mean_sq_small"])
    assert norms.big_squared == pytest.approx(VECTOR["sq_big"])


def gradient(trainer: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in trainer.parameters])


def test_the_gradient_of_a_step_is_the_same_with_a_meter_and_its_parts_are_those_of_the_groups(lab: Any) -> None:
    samples = lab.samples(groups=5)
    advantages = lab.advantages(len(samples))
    plain, metered = lab.trainer(), lab.trainer()
    plain.accumulate(samples, advantages)
    meter = NoiseMeter(metered.parameters)
    squares = []
    for low, high in ((0, 8), (8, 12), (12, 20)):  # 2, 1 and 2 groups of 4
        alone = lab.trainer()
        alone.accumulate(samples[low:high], advantages[low:high])
        squares.append(float((gradient(alone) / alone.tokens).square().sum()))
        before = metered.tokens
        metered.accumulate(samples[low:high], advantages[low:high])
        meter.part((high - low) // 4, metered.tokens - before)
    norms = meter.whole()
    assert torch.allclose(gradient(plain), gradient(metered), rtol=1e-9)
    assert norms is not None and norms.big == 5 and norms.small == pytest.approx(3 / (1 / 2 + 1 + 1 / 2))
    assert norms.small_squared == pytest.approx(sum(squares) / 3)
    assert norms.big_squared == pytest.approx(float((gradient(plain) / plain.tokens).square().sum()))


def test_one_part_alone_says_nothing_and_loses_no_gradient(lab: Any) -> None:
    trainer = lab.trainer()
    samples = lab.samples(groups=2)
    trainer.accumulate(samples, lab.advantages(len(samples)))
    before = gradient(trainer).clone()
    meter = NoiseMeter(trainer.parameters)
    meter.part(2, trainer.tokens)
    assert meter.whole() is None and torch.equal(gradient(trainer), before)


def test_the_entropy_of_a_sample_set_is_the_mean_over_its_tokens(lab: Any) -> None:
    trainer = lab.trainer()
    samples = lab.samples(temperatures=(1.0, 0.7))
    found = trainer.entropy(samples)
    total, tokens = 0.0, 0
    for sample in samples:
        total += trainer.entropy([sample]) * len(sample.token_ids)
        tokens += len(sample.token_ids)
    assert found == pytest.approx(total / tokens)
    trainer.accumulate(samples, lab.advantages(len(samples)))
    assert trainer.step(0.0).diagnostics.entropy == pytest.approx(found)
