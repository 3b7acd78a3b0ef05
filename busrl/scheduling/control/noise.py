"""The gradient noise scale: from squared gradient norms at two batch sizes to signal and spread.

Pure arithmetic. Source: McCandlish et al. 2018 (arXiv:1812.06162), appendix A.1. Knows nothing of gradients as tensors.

- E|g_B|^2 = |G|^2 + tr(S) / B, so two sizes give an unbiased estimate of both terms. Each may be negative in a single
  step: average the two apart from each other and divide afterwards.
- In GRPO the unit of B is the group: the samples of a group share a baseline, so they are not independent draws.
"""

from __future__ import annotations


def noise_pair(small_squared: float, small: float, big_squared: float, big: float) -> tuple[float, float]:
    """(|G|^2, tr(S)) from the mean squared norm of gradients over `small` units and the squared norm over `big` units.

    With parts of unequal size `small` is their harmonic mean. ValueError unless 0 < small < big.
    """
    if not 0 < small < big:
        raise ValueError(f"batch sizes {small} and {big}: the first must be above 0 and below the second")
    signal = (big * big_squared - small * small_squared) / (big - small)
    spread = (small_squared - big_squared) / (1 / small - 1 / big)
    return signal, spread
