"""A receiver of weights that never come: the endpoint keeps those that it was started with. Knows nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from busrl.errors import BugError
from busrl.weights.base import NOTHING, Kind

if TYPE_CHECKING:
    import torch


class FixedReceiver:
    """Version 0 it is, and stays."""

    kind: Kind = "tensors"

    def newest(self) -> tuple[int, int]:
        return NOTHING

    def wait_for(self, version: int, timeout_s: float) -> tuple[int, int]:
        return NOTHING

    def fetch(self, params: dict[str, torch.Tensor]) -> tuple[int, int]:
        raise BugError('an endpoint with openai.update = "none" has no new weights')

    def step_of(self, version: int) -> int:
        return 0

    def close(self) -> None:
        """Nothing was opened."""
