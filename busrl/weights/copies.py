"""Copies between tensors, all of them in one call where both ends are plain memory of this process.

Used by `weights.manifest` for both directions of every transport. Knows nothing of names, versions or layouts. torch
is imported where it is used.

- Plain memory (contiguous, on the CPU, same number type) is copied by `busrl._blocks`, without the interpreter's lock.
- Everything else (an accelerator, a transposed tensor) goes through `Tensor.copy_`.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

from busrl._blocks import move

if TYPE_CHECKING:
    import torch


class Copies:
    """Copies to be made together."""

    def __init__(self) -> None:
        self._to, self._source, self._sizes = array("Q"), array("Q"), array("Q")
        self._others: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Both have one shape; they stay alive until `run`."""
        if is_plain(to) and is_plain(source) and to.dtype == source.dtype:
            self._to.append(to.data_ptr())
            self._source.append(source.data_ptr())
            self._sizes.append(source.nbytes)
        else:
            self._others.append((to, source))

    def run(self) -> None:
        move(self._to, self._source, self._sizes)
        if self._others:
            import torch

            with torch.no_grad():
                for to, source in self._others:
                    to.copy_(source)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the values lie one after the other in memory that this process can address."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def bytes_of(tensor: torch.Tensor) -> Any:
    """The memory of a plain tensor, as a buffer."""
    import torch

    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
