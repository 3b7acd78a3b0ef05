"""How per-token losses become one number: a weight per token, and the denominator that the step divides by once.

The trainer sums weight x loss over all micro-batches and divides at the step. Knows nothing of losses or models.

- A weight depends on its own sequence alone and a denominator only adds up, so the cut into micro-batches changes
  nothing.
- Sequences without a trained token are in no denominator.
"""

from __future__ import annotations

import torch
from torch import Tensor

TOKEN_MEAN = "token-mean"
SEQUENCE_MEAN = "seq-mean-token-mean"
AGGREGATIONS = (TOKEN_MEAN, SEQUENCE_MEAN)


def sequence_weights(kind: str, lengths: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight of every token of a sequence with that many trained tokens."""
    if kind == TOKEN_MEAN:
        return (lengths > 0).to(dtype)
    if kind == SEQUENCE_MEAN:
        return torch.where(lengths > 0, 1.0 / lengths.clamp(min=1).to(dtype), torch.zeros((), dtype=dtype))
    raise ValueError(f"aggregation {kind!r} is not known; choose one of {', '.join(AGGREGATIONS)}")


def denominator(kind: str, tokens: int, sequences: int) -> int:
    """What a sum over that many trained tokens and non-empty sequences is divided by."""
    if kind not in AGGREGATIONS:
        raise ValueError(f"aggregation {kind!r} is not known; choose one of {', '.join(AGGREGATIONS)}")
    return tokens if kind == TOKEN_MEAN else sequences
