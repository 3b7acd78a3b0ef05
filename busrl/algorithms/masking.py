"""Which tokens are mastered: those that the policy writes almost surely, in a better answer of low entropy.

UloRL (2507.19766) calls leaving them out DMMPT, eq. 10, whose entropy lacks the minus sign: H = -sum p log p here. Pure
tensors. Knows nothing of samples or of when to do it (`busrl.scheduling.controller`).

- A constant: no gradient flows through the choice. The denominator of the loss stays that of all trained tokens.
- "Better" is an advantage above 0, which for rewards of 0 and 1 is a reward of 1.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mastered(
    logprobs: Tensor, entropy: Tensor, advantages: Tensor, rows: Tensor, lengths: Tensor, tau: float, sigma: float,
    mask: Tensor | None = None,
) -> Tensor:
    """True for each token with probability >= tau, of a sample with advantage > 0 and mean entropy < sigma nats.

    `logprobs` and `entropy` are under the current policy, `rows` names each token's sample, `lengths` counts the
    trained tokens (those of `mask`) of each sample.
    """
    counted = entropy.detach() if mask is None else entropy.detach().where(mask.bool(), 0)
    total = torch.zeros(len(lengths), dtype=counted.dtype, device=counted.device).index_add_(0, rows, counted)
    low = (total / lengths.clamp(min=1) < sigma)[rows]
    found: Tensor = low & (advantages > 0) & (logprobs.detach().exp() >= tau)
    return found if mask is None else found & mask.bool()
