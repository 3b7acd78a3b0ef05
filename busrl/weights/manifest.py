"""The layout of a set of named tensors in one flat run of bytes, and the copies in both directions.

Used by both transports, so that a version is always one contiguous block. Knows nothing of where the bytes are.

- Sender and receiver compare manifests before a single byte is copied: the first name, shape or type that differs is
  named in the error.
- Tensors start at multiples of 64 bytes, in the order of the sender's names.
- torch is imported where tensors are copied: who only wants to know which version is newest does without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from busrl.errors import UserError

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64


@dataclass(frozen=True)
class Entry:
    """One tensor: its place in the flat block."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Manifest:
    """All tensors of a version; `nbytes` is the length of the flat block."""

    entries: tuple[Entry, ...]
    nbytes: int

    @classmethod
    def of(cls, named: dict[str, torch.Tensor]) -> Manifest:
        entries: list[Entry] = []
        offset = 0
        for name, tensor in named.items():
            nbytes = tensor.numel() * tensor.element_size()
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries.append(Entry(name, dtype, tuple(tensor.shape), offset, nbytes))
            offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return cls(tuple(entries), offset)

    def to_json(self) -> bytes:
        rows = [[e.name, e.dtype, list(e.shape), e.offset, e.nbytes] for e in self.entries]
        return json.dumps({"nbytes": self.nbytes, "tensors": rows}, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        read = json.loads(data)
        rows = read["tensors"]
        entries = tuple(Entry(name, dtype, tuple(shape), offset, n) for name, dtype, shape, offset, n in rows)
        return cls(entries, int(read["nbytes"]))

    def gather(
        self, named: dict[str, torch.Tensor], flat: torch.Tensor, done: Callable[[str], None] | None = None
    ) -> None:
        """Copy the tensors into the flat block (uint8); `done` is called with each name after its copy."""
        import torch

        self.check(named)
        with torch.no_grad():
            for entry in self.entries:
                self._view(flat, entry).copy_(named[entry.name])
                if done is not None:
                    done(entry.name)

    def scatter(self, flat: torch.Tensor, named: dict[str, torch.Tensor]) -> None:
        """Copy the flat block into the tensors, in place."""
        import torch

        self.check(named)
        with torch.no_grad():
            for entry in self.entries:
                named[entry.name].copy_(self._view(flat, entry))

    def check(self, named: dict[str, torch.Tensor]) -> None:
        """UserError with the first difference between this layout and the tensors."""
        mine = {entry.name: entry for entry in self.entries}
        if missing := sorted(mine.keys() - named.keys()):
            raise UserError(f"weights: {len(missing)} published tensors are not in this model, first {missing[0]!r}")
        if extra := sorted(named.keys() - mine.keys()):
            raise UserError(f"weights: {len(extra)} tensors of this model are not published, first {extra[0]!r}")
        for name, tensor in named.items():
            entry, dtype = mine[name], str(tensor.dtype).removeprefix("torch.")
            if (entry.shape, entry.dtype) != (tuple(tensor.shape), dtype):
                raise UserError(
                    f"weights: {name!r} is {entry.dtype}{list(entry.shape)} where published and "
                    f"{dtype}{list(tensor.shape)} here; both sides must run the same model.path and model.dtype"
                )

    def _view(self, flat: torch.Tensor, entry: Entry) -> torch.Tensor:
        import torch

        dtype: torch.dtype = getattr(torch, entry.dtype)
        return flat[entry.offset : entry.offset + entry.nbytes].view(dtype).view(entry.shape)
