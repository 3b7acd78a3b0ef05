"""The written-out derivatives of the fused forward against numerical ones, and its plan against the obvious one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from busrl.training import fused as kernels
from busrl.training.fused import Heads, plan_of
from busrl.training.trainer import selected

HEADS = Heads(query=4, key=2, size=6)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


def test_norm_and_gate_are_the_plain_formulas() -> None:
    rows, weight, hidden = random(5, 8), random(8), random(5, 14)
    plain = rows / (rows.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(kernels.rms_norm(rows, weight, 1e-5), plain)
    torch.testing.assert_close(kernels.swiglu(hidden), F.silu(hidden[:, :7]) * hidden[:, 7:])


def test_derivatives_of_norm_gate_and_log_probability_are_the_numerical_ones() -> None:
    assert torch.autograd.gradcheck(
        lambda rows, weight: kernels.rms_norm(rows, weight, 1e-5), (random(5, 8), random(8))
    )
    assert torch.autograd.gradcheck(kernels.swiglu, (random(5, 14),))
    assert torch.autograd.gradcheck(lambda logits: selected(logits, torch.tensor([0, 3, 2]))[0], (random(3, 4),))


@pytest.mark.parametrize("normed", [True, False])
def test_derivatives_of_head_norm_and_rotation_are_the_numerical_ones(normed: bool) -> None:
    cosine, sine = torch.randn(5, 1, 6, dtype=torch.float64), torch.randn(5, 1, 6, dtype=torch.float64)
    projected, weight = random(5, HEADS.all * HEADS.size), random(6, 6)

    def turned(projected: torch.Tensor, weight: torch.Tensor) -> Any:
        return kernels.head_norm_rope(projected, HEADS, weight if normed else None, 1e-5, cosine, sine)

    assert torch.autograd.gradcheck(turned, (projected, weight) if normed else (projected, weight.detach()))


class Shape:
    """Just enough of a sample for a plan."""

    def __init__(self, prompt: list[int], count: int) -> None:
        self.prompt_ids = torch.tensor(prompt, dtype=torch.int32).numpy()
        self.token_ids = torch.arange(count, dtype=torch.int32).numpy()


def test_derivatives_of_attention_over_shared_prompts_are_the_numerical_ones() -> None:
    plan = plan_of([Shape([5, 6, 7], 2), Shape([5, 6, 7], 3), Shape([4], 1)], HEADS, torch.float64)  # type: ignore[list-item]
    rows = len(plan.ids)

    def attended(queries: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
        return kernels.attention(queries, pairs, (plan.prompts, *plan.own), HEADS, 0.4)

    assert torch.autograd.gradcheck(attended, (random(rows, 4, 6), random(rows, 4, 6)))


shapes = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=70)


@settings(deadline=None, max_examples=40)
@given(shapes=shapes)
def test_attention_over_a_plan_is_causal_attention_of_every_sample_on_its_own(shapes: list[tuple[int, int]]) -> None:
    prompts = [[9], [1, 2], [1, 2, 3, 4], [8, 7, 6]]
    samples = [Shape(prompts[which], count) for which, count in shapes]
    plan = plan_of(samples, HEADS, torch.float64)  # type: ignore[arg-type]
    rows = len(plan.ids)
    queries, pairs = random(rows, 4, 6), random(rows, 4, 6)
    blocks = (plan.prompts, *plan.own) if plan.shared else plan.own
    found = kernels.attention(queries, pairs, blocks, HEADS, 0.4).view(rows, 4, 6)
    start = plan.shared
    shared_at = {}
    for sample in samples:
        key = tuple(sample.prompt_ids.tolist())
        shared_at.setdefault(key, sum(len(other) - 1 for other in shared_at))
        own = torch.arange(start, start + len(sample.token_ids))
        places = torch.cat([torch.arange(shared_at[key], shared_at[key] + len(key) - 1), own])
        assert plan.ids[places].tolist() == [*key, *sample.token_ids.tolist()[:-1]]
        assert plan.positions[places].tolist() == list(range(len(places)))
        mine = F.scaled_dot_product_attention(
            queries[places].transpose(0, 1),
            pairs[places, :2].repeat_interleave(2, 1).transpose(0, 1),
            pairs[places, 2:].repeat_interleave(2, 1).transpose(0, 1),
            is_causal=True,
            scale=0.4,
        ).transpose(0, 1)
        torch.testing.assert_close(found[own], mine[-len(own) :])
        start += len(own)
