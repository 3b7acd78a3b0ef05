"""A teacher's most probable tokens: through the head, in the loss, and as a term beside another one."""

from __future__ import annotations

import pytest
import torch

from busrl.algorithms import distill, losses, terms
from busrl.training.head import Head


def wide(rows: int = 7, width: int = 5, words: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, width, dtype=torch.float64), torch.randn(words, width, dtype=torch.float64)


@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_several_tokens_in_a_place_score_as_by_all_logits(cap: float) -> None:
    hidden, weight = wide()
    targets = torch.randint(0, 11, (7, 4))
    targets[:, 1] = targets[:, 0]  # the drawn token may be among the teacher's
    temperature = torch.linspace(0.5, 2, 7, dtype=torch.float64)
    factors = torch.randn(7, 4, dtype=torch.float64)
    grads = []
    for plain in (True, False):
        own, table = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if plain:
            logits = own @ table.t()
            logits = (logits if not cap else cap * (logits / cap).tanh()) / temperature[:, None]
            every = logits.log_softmax(-1)
            actual, entropy = every.gather(-1, targets), -(every.exp() * every).sum(-1)
        else:
            actual, entropy = Head(cap=cap, rows=3)(own, table, targets, temperature)
        total = (actual * factors).sum() + 0.3 * entropy.sum()
        grads.append((total.detach(), *torch.autograd.grad(total, (own, table))))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


def test_the_best_tokens_are_those_of_all_logits_below_the_limit() -> None:
    hidden, weight = wide()
    every = (hidden @ weight.t() / 0.7).log_softmax(-1)
    ids, logprobs = Head(rows=3).best(hidden, weight, 3, 11, torch.full((7,), 0.7, dtype=torch.float64))
    expected, best = every.topk(3, -1)
    assert torch.equal(ids, best) and torch.allclose(logprobs, expected, atol=1e-12)
    few, known = Head(rows=3).best(hidden, weight, 8, 5)
    assert int(few.max()) < 5 and few.shape == (7, 5)
    assert torch.allclose(known, (hidden @ weight.t()).log_softmax(-1).gather(-1, few), atol=1e-12)


def inputs(student: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor) -> losses.LossInputs:
    zero = torch.zeros(len(mask), dtype=torch.float64)
    return losses.LossInputs(zero.clone().requires_grad_(), zero, zero, zero + 1, mask, teacher_logprobs=teacher,
                             student_logprobs=student)


@pytest.mark.parametrize("planted", [0.0, float("nan"), 1e9])
def test_the_loss_of_a_teacher_and_its_gradient_are_the_formulas(planted: float) -> None:
    hidden, weight = wide(3)
    teacher = (hidden @ weight.t()).log_softmax(-1).topk(4, -1).values
    own = (teacher - torch.tensor([0.1, 0.4, -0.05, 0.2], dtype=torch.float64)).detach()
    mask = torch.tensor([True, False, True])
    known, leaf = teacher.clone(), own.clone()
    known[1] = planted
    leaf[1] = planted
    leaf.requires_grad_()
    actual = terms.objective(losses.topk_kl, inputs(leaf, known, mask), losses.LossSettings(), False).loss
    plain = own.clone().requires_grad_()
    expected = distill.topk_kl(plain, teacher) * mask
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)
    (gradient,) = torch.autograd.grad(actual.sum(), leaf)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), plain)[0], atol=1e-12, rtol=0)
    assert float(gradient[1].abs().sum()) == 0.0 and float(actual[0].detach()) > 0


def test_beside_another_loss_the_teacher_counts_with_its_coefficient() -> None:
    hidden, weight = wide(2)
    teacher = (hidden @ weight.t()).log_softmax(-1).topk(3, -1).values
    mask = torch.ones(2, dtype=torch.bool)
    seen = inputs((teacher - 0.3).requires_grad_(), teacher, mask)
    plain = terms.objective(losses.ppo_clip, seen, losses.LossSettings(), False).loss
    both = terms.objective(losses.ppo_clip, seen, losses.LossSettings(teacher_coef=0.5), False).loss
    torch.testing.assert_close(both - plain, 0.5 * distill.topk_kl(teacher - 0.3, teacher), atol=1e-12, rtol=0)


def test_without_a_teacher_its_loss_says_what_is_missing() -> None:
    zero = torch.zeros(2)
    with pytest.raises(ValueError, match=r"model\.teacher"):
        losses.topk_kl(losses.LossInputs(zero, zero, zero, zero), losses.LossSettings())
