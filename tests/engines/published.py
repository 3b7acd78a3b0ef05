"""A receiver that a test publishes to: one version, with tensors or without."""

from __future__ import annotations

import torch


class Published:
    """The newest version is this one; `fetch` writes its tensors into those of the same name."""

    kind = "tensors"

    def __init__(self, version: int, step: int, tensors: dict[str, torch.Tensor] | None = None) -> None:
        self.version, self.step, self.tensors = version, step, tensors or {}

    def newest(self) -> tuple[int, int]:
        return self.version, self.step

    def wait_for(self, version: int, timeout_s: float) -> tuple[int, int]:
        assert version <= self.version
        return self.newest()

    def fetch(self, params: dict[str, torch.Tensor]) -> tuple[int, int]:
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                if name in params:
                    params[name].copy_(tensor)
        return self.newest()

    def close(self) -> None:
        pass
