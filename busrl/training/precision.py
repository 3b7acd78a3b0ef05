"""A model that computes in fewer bits than it is trained in: rounded parameters, and a float32 master of each.

Used by the trainer where `model.dtype` has fewer bits than float32. Talks to the parameters alone; knows nothing of
optimisers, losses or publication.

- What a forward and a backward compute with is the master, rounded; nothing is computed in float32 but what the model
  itself, the head and the loss compute in it. That is what FSDP2 does with a mixed-precision policy of that type.
- A parameter's gradient goes to its master as soon as a backward has all of it: sums over micro-batches are float32,
  and no second gradient stays.
- A frozen parameter is rounded and has no master: the base under an adapter has one copy, in few bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

ATTRIBUTE = "busrl_master"  # the attribute of a parameter


def exact(parameter: Tensor) -> Tensor:
    """The value that is trained: the master of a rounded parameter, else the parameter itself; a view."""
    found: Tensor = getattr(parameter, ATTRIBUTE, parameter)
    return found.detach()


class Masters:
    """Rounds a model in place. `named`: the float32 tensors that are trained, by name, with their summed gradients."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self.named: dict[str, Tensor] = {}
        self._rounded: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self.named[name] = parameter.detach().to(torch.float32)
                self._rounded.append(parameter)
            parameter.data = parameter.data.to(dtype)  # buffers stay: positions need their bits
        for parameter, master in zip(self._rounded, self.named.values(), strict=True):
            setattr(parameter, ATTRIBUTE, master)
            parameter.register_post_accumulate_grad_hook(_pass_on)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def round(self) -> None:
        """After the masters have changed: the parameters are their rounded values again."""
        for parameter, master in zip(self._rounded, self.named.values(), strict=True):
            parameter.copy_(master)


def _pass_on(parameter: Tensor) -> None:
    """Adds what a backward found to the master's gradient."""
    found, master = parameter.grad, getattr(parameter, ATTRIBUTE)
    parameter.grad = None
    if found is not None and master.grad is None:
        master.grad = found.to(master.dtype)
    elif found is not None:
        master.grad.add_(found)
