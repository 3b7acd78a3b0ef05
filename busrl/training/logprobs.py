"""From logits to the log-probability of each trained token and the entropy of its whole distribution.

Called by the trainer and the probes. Knows nothing of samples and losses.

- The distribution is the one that was sampled from: logits divided by the sampling temperature.
- Entropy carries no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def at_temperature(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """Logits of the distribution that was sampled from; `temperature` per row, None where all are 1."""
    return logits if temperature is None else logits / temperature[:, None]


def selected(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of the target and entropy in nats, one of each per row."""
    result: tuple[Tensor, Tensor] = _Selected.apply(logits, targets)  # type: ignore[no-untyped-call]
    return result


class _Selected(torch.autograd.Function):
    """One log-softmax for both results; keeps it alone for backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        every = torch.log_softmax(logits, -1)
        ctx.save_for_backward(every, targets)
        # A token that can not occur (-inf) adds nothing to the entropy; 0 * -inf would.
        entropy = -(every.exp() * every.clamp(min=-1e4)).sum(-1)
        ctx.mark_non_differentiable(entropy)
        return every.gather(-1, targets[:, None])[:, 0], entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        every, targets = ctx.saved_tensors
        gradient = gradients[0][:, None]
        out = every.exp().mul_(-gradient)
        return out.scatter_add_(-1, targets[:, None], gradient), None
