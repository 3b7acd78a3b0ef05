"""The rows that members of a group share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from busrl.training.forward import attention, plan_of


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


class Shape:
    """Just enough of a sample for a plan."""

    def __init__(self, prompt: list[int], count: int) -> None:
        self.prompt_ids = torch.tensor(prompt, dtype=torch.int32).numpy()
        self.token_ids = torch.arange(count, dtype=torch.int32).numpy()


shapes = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=70)


@settings(deadline=None, max_examples=40)
@given(shapes=shapes)
def test_attention_over_a_plan_is_causal_attention_of_every_sample_on_its_own(shapes: list[tuple[int, int]]) -> None:
    prompts = [[9], [1, 2], [1, 2, 3, 4], [8, 7, 6]]
    samples = [Shape(prompts[which], count) for which, count in shapes]
    plan = plan_of(samples, torch.float64)  # type: ignore[arg-type]
    rows = len(plan.ids)
    queries, keys, values = random(rows, 4, 6), random(rows, 2, 6), random(rows, 2, 6)
    blocks = (plan.prompts, *plan.own) if plan.shared else plan.own
    found = attention(queries, keys, values, blocks, 0.4).view(rows, 4, 6)
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
            keys[places].repeat_interleave(2, 1).transpose(0, 1),
            values[places].repeat_interleave(2, 1).transpose(0, 1),
            is_causal=True,
            scale=0.4,
        ).transpose(0, 1)
        torch.testing.assert_close(found[own], mine[-len(own) :])
        start += len(own)
