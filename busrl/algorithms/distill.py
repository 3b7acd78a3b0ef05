"""Distillation on a teacher's k most probable tokens per position (on its log-softmax over the full vocabulary).

- Teacher and student have the same tokenizer; the teacher is a constant; position t of its arrays is about the same
  token as row t of the student's.
- KL is 0 for a student equal to its teacher, with and without the tail. Without it the mass outside of the k does not
  count.
"""

from __future__ import annotations

import torch
from torch import Tensor


def topk_kl(student: Tensor, teacher: Tensor, tail: bool = True) -> Tensor:
    """KL(teacher || student) per position in nats, [n]; both log-probabilities at the teacher's k ids, [n, k]. `tail`:
    all other tokens are one more outcome (TRL); without it both sides are renormalised over the k."""
    teacher = teacher.detach()
    if tail:
        teacher, student = _with_tail(teacher), _with_tail(student)
    else:
        teacher, student = teacher.log_softmax(-1), student.log_softmax(-1)
    return (teacher.exp() * (teacher - student)).sum(-1)


def cross_entropy(student: Tensor, teacher: Tensor) -> Tensor:
    """-sum P log p per position, P renormalised over the k, the student over the full vocabulary."""
    return -(teacher.detach().softmax(-1) * student).sum(-1)


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(student || teacher) per position, both renormalised over the k."""
    student, teacher = student.log_softmax(-1), teacher.detach().log_softmax(-1)
    return (student.exp() * (student - teacher)).sum(-1)


def _with_tail(logprobs: Tensor) -> Tensor:
    """Add a column: the logarithm of the probability that the others leave, at least the smallest of the type."""
    smallest = torch.finfo(logprobs.dtype).eps
    left = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=smallest)
    return torch.cat([logprobs, left.log()], -1)
