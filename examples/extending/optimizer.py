"""An optimiser of your own: Lion, which keeps one state per weight and moves each by the rate, up or down."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, https://arxiv.org/abs/2302.06675, algorithm 2."""

    def __init__(
        self, params: Iterable[Tensor], lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            rate, (first, second) = group["lr"], group["betas"]
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                parameter.mul_(1 - rate * group["weight_decay"])
                parameter.sub_(momentum.lerp(parameter.grad, 1 - first).sign_(), alpha=rate)
                momentum.lerp_(parameter.grad, 1 - second)
