"""Measures squared gradient norms of parts of a step and of the whole of it, for the gradient noise scale.

Used by the training step around `Trainer.accumulate`. Talks to the parameters' gradients; what the norms mean is in
`busrl.scheduling.control.noise`. Knows nothing of samples or losses.

- The gradient of a step is the sum over its parts, as without the meter, up to the order of summation.
- A part's gradient is divided by its own tokens and the whole by all tokens: both are means over tokens.
- Costs three passes over the parameters per part and as much memory as one gradient; it is made only when asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Norms:
    """`small`: harmonic mean of the parts' sizes, `big`: their sum, both in groups."""

    small_squared: float
    small: float
    big_squared: float
    big: int


class NoiseMeter:
    """`part` after the backward pass of some whole groups, `whole` before the step."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self.clear()

    def clear(self) -> None:
        """Forget the step under way."""
        self._total: list[Tensor | None] = [None] * len(self._parameters)
        self._parts: list[tuple[Tensor, int, int]] = []  # squared norm of the sum, tokens, groups

    def part(self, groups: int, tokens: int) -> None:
        """What stands in `.grad` belongs to these groups; it is put aside."""
        found = [p.grad for p in self._parameters if p.grad is not None]
        if not found:
            return
        squared = torch.stack(torch._foreach_norm(found)).square().sum()
        self._parts.append((squared, tokens, groups))
        for i, parameter in enumerate(self._parameters):
            gradient, total = parameter.grad, self._total[i]
            if gradient is not None:
                self._total[i] = gradient if total is None else total.add_(gradient)
                parameter.grad = None

    def whole(self) -> Norms | None:
        """Put the sum back into `.grad`. The norms, or None with fewer than two parts that have tokens."""
        for parameter, total in zip(self._parameters, self._total, strict=True):
            if total is not None:
                parameter.grad = total
        parts = [(float(squared) / tokens**2, groups) for squared, tokens, groups in self._parts if tokens]
        tokens = sum(tokens for _, tokens, _ in self._parts)
        found = [total for total in self._total if total is not None]
        self.clear()
        if len(parts) < 2:
            return None
        squared = float(torch.stack(torch._foreach_norm(found)).square().sum()) / tokens**2
        small = len(parts) / sum(1 / groups for _, groups in parts)
        mean = sum(square for square, _ in parts) / len(parts)
        return Norms(mean, small, squared, sum(groups for _, groups in parts))
