"""Distillation on a teacher's k most probable tokens per position (on its log-softmax over the full vocabulary).

- Teacher and student have the same tokenizer; the teacher is a constant; position t of its arrays is about the same
  token as row t of the student's.
- `tail` gives 0 for a student equal to its teacher. `renormalised` too; it says nothing of the mass outside of the k.
"""

from __future__ import annotations

import torch
from torch import Tensor


def topk_kl(student: Tensor, teacher: Tensor, tail: bool = True) -> Tensor:
    """KL(teacher || student) per position in nats, [n]; both log-probabilities at the teacher's k ids, [n, k]. `tail`:
    all other tokens are one more outcome (TRL); without it both sides are renormalised over the k."""
    known = teacher.detach()
    if tail:
        known, student = _with_tail(known), _with_tail(student)
    else:
        known, student = known.log_softmax(-1), student.log_softmax(-1)
    return (known.exp() * (known - student)).sum(-1)


def cross_entropy(student: Tensor, teacher: Tensor) -> Tensor:
    """-sum P log p per position, P renormalised over the k, the student over the full vocabulary."""
    return -(teacher.detach().softmax(-1) * student).sum(-1)


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(student || teacher) per position, both renormalised over the k."""
    own, known = student.log_softmax(-1), teacher.detach().log_softmax(-1)
    return (own.exp() * (own - known)).sum(-1)


def _with_tail(logprobs: Tensor) -> Tensor:
    """Adds a column: the logarithm of what the others leave, at least the smallest number of the type."""
    smallest = torch.finfo(logprobs.dtype).eps
    left = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=smallest)
    return torch.cat([logprobs, left.log()], -1)
