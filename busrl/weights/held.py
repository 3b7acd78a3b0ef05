"""Which tensors a receiver last wrote to: a frame of changes may be put only into those.

Used by the receivers of `weights.shm` and `weights.broadcast`. Holds the tensors, so that no other can come to lie
where they were.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Held:
    """The tensors of a model, and where their values lie."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._places: list[int] = []

    def take(self, named: dict[str, torch.Tensor]) -> None:
        self._tensors, self._places = dict(named), [tensor.data_ptr() for tensor in named.values()]

    def same(self, named: dict[str, torch.Tensor]) -> bool:
        """Whether these are the tensors taken last, with their values still in the same place."""
        return self._tensors.keys() == named.keys() and all(
            named[name] is tensor and tensor.data_ptr() == place
            for (name, tensor), place in zip(self._tensors.items(), self._places)
        )
