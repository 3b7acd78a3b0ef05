"""The head in pieces gives what one log-softmax over all logits gives, value and gradient."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from busrl.data.vocabulary import ALL_ROWS, TokenRows
from busrl.training import head
from busrl.training.head import Head


def whole(
    own: Head, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor | None, bias: Tensor | None,
    known: TokenRows = ALL_ROWS,
) -> tuple[Tensor, Tensor]:
    """The same by autograd, on all logits at once, those of rows without a token not among them."""
    kept = [row for row in range(min(known.end, len(weight))) if row not in known.holes]
    targets = torch.tensor([kept.index(one) for one in targets.tolist()])
    weight, bias = weight[kept], bias if bias is None else bias[kept]
    logits = (hidden @ weight.t()).to(torch.promote_types(hidden.dtype, torch.float32))
    logits = (logits if bias is None else logits + bias) * own.scale
    logits = own.cap * torch.tanh(logits / own.cap) if own.cap else logits
    logits = logits if temperature is None else logits / temperature[:, None]
    logs = torch.log_softmax(logits, -1)
    return logs.gather(-1, targets[:, None])[:, 0], -(logs.exp() * logs.clamp(min=-1e4)).sum(-1)


def inputs(rows: int, words: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias, targets and temperatures, in float64."""
    made = torch.Generator().manual_seed(seed)
    shapes = ((rows, 12), (words, 12), (words,))
    leaves = [torch.randn(*shape, generator=made, dtype=torch.float64).requires_grad_() for shape in shapes]
    targets = torch.randint(0, words, (rows,), generator=made)
    return leaves[0], leaves[1], leaves[2], targets, 0.5 + torch.rand(rows, generator=made, dtype=torch.float64)


@settings(max_examples=60)
@given(
    rows=st.integers(1, 9), words=st.integers(2, 17), piece=st.integers(1, 10), seed=st.integers(0, 99),
    cap=st.sampled_from([0.0, 2.0]), scale=st.sampled_from([1.0, 0.3]), hot=st.booleans(), biased=st.booleans(),
    reads=st.sampled_from(["log-probabilities", "entropy", "both"]),
    known=st.sampled_from([ALL_ROWS, TokenRows(9), TokenRows(holes=(0, 3)), TokenRows(5, (1, 2))]),
)
def test_values_and_gradients_are_those_of_all_logits_at_once(
    rows: int, words: int, piece: int, seed: int, cap: float, scale: float, hot: bool, biased: bool, reads: str,
    known: TokenRows,
) -> None:
    hidden, weight, bias, targets, temperature = inputs(rows, words + 4, seed)
    drawn = [one for one in range(min(known.end, words + 4)) if one not in known.holes]
    targets = torch.tensor(drawn)[targets % len(drawn)]
    own_head, heat, shift = Head(scale, cap, piece), temperature if hot else None, bias if biased else None
    sides = torch.randn(2, rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    leaves, found = [hidden, weight, bias], []
    for way in (own_head, lambda *given: whole(own_head, *given)):
        logs, spread = way(hidden, weight, targets, heat, shift, known)
        read = ((logs, sides[0], reads != "entropy"), (spread, sides[1], reads != "log-probabilities"))
        total = torch.stack([(values * side).sum() for values, side, wanted in read if wanted]).sum()
        slopes = torch.autograd.grad(total, leaves, allow_unused=True)
        found.append([logs.detach(), spread.detach(), *(slope for slope in slopes if slope is not None)])
    assert len(found[0]) == len(found[1]) == (5 if biased else 4)
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-9)


def test_a_token_that_cannot_occur_adds_nothing() -> None:
    hidden, weight, _, targets, _ = inputs(4, 6, 1)
    never = torch.zeros(6, dtype=torch.float64)
    never[5] = -torch.inf
    logs, spread = Head(rows=3)(hidden, weight, targets.clamp(max=4), None, never)
    fewer, narrower = Head(rows=3)(hidden, weight[:5], targets.clamp(max=4))
    torch.testing.assert_close((logs, spread), (fewer, narrower))
    (logs + spread).sum().backward()
    assert hidden.grad is not None and bool(hidden.grad.isfinite().all())
    assert weight.grad is not None and not weight.grad[5].any()


def test_the_gradient_of_a_bfloat16_weight_is_summed_in_float32() -> None:
    """4,096 rows that each add 2^-9 of the first: a bfloat16 sum stops growing at 1."""
    hidden = torch.ones(4096, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    logs, _ = Head(rows=16)(hidden, weight, torch.zeros(4096, dtype=torch.int64))
    (logs * 2.0**-8).sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
    assert weight.grad[0].item() == pytest.approx(4096 * 0.5 * 2.0**-8)


def test_no_more_rows_of_logits_than_asked_for_are_ever_held(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    made = head.piece_logits
    monkeypatch.setattr(head, "piece_logits", lambda hidden, *rest: seen.append(len(hidden)) or made(hidden, *rest))
    hidden, weight, _, targets, _ = inputs(10, 6, 1)
    Head(rows=4)(hidden, weight, targets)
    assert seen == [4, 4, 2]


def test_caps_and_scales_are_read_from_the_configuration() -> None:
    assert Head.of(SimpleNamespace(final_logit_softcapping=30.0)) == Head(cap=30.0)
    assert Head.of(SimpleNamespace(logits_scaling=8.0)) == Head(scale=0.125)
    assert Head.of(SimpleNamespace(logit_scale=0.0625), rows=7) == Head(scale=0.0625, rows=7)


def test_the_gradient_of_a_bfloat16_head_is_summed_in_float32() -> None:
    torch.manual_seed(0)
    hidden = (torch.rand(2048, 4) + 0.5).bfloat16()  # of one sign: a sum in bfloat16 stops growing
    targets, grads = torch.zeros(2048, dtype=torch.int64), []
    for kind in (torch.bfloat16, torch.float32):
        weight = torch.zeros(3, 4, dtype=kind, requires_grad=True)
        logprobs, _ = Head(rows=1)(hidden.to(kind), weight, targets)
        grads.append(torch.autograd.grad(logprobs.sum(), weight)[0].float())
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-2, atol=1)
