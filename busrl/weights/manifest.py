"""The layout of a set of named tensors in one flat run of bytes, and the copies in both directions.

Used by both transports, so that a version is always one contiguous block. Knows nothing of where the bytes are.

- Sender and receiver compare manifests before a single byte is copied: the first name, shape or type that differs is
  named in the error.
- Tensors start at multiples of 64 bytes, in the order of the sender's names.
- torch is imported where tensors are copied: who only wants to know which version is newest does without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from busrl.errors import UserError
from busrl.weights.copies import Copies, bytes_of

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

    @cached_property
    def expected(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Number type and shape by name."""
        import torch

        return {entry.name: (getattr(torch, entry.dtype), torch.Size(entry.shape)) for entry in self.entries}

    def matches(self, named: Mapping[str, torch.Tensor]) -> bool:
        """Whether the tensors have this layout, in whatever order."""
        return self.expected == {name: (tensor.dtype, tensor.shape) for name, tensor in named.items()}

    def gather(
        self, named: Mapping[str, torch.Tensor], flat: torch.Tensor, done: Callable[[str], None] | None = None
    ) -> None:
        """Copy the tensors into the flat block (uint8); `done` is called with each name after its copy."""
        for _ in self.gather_pieces(named, flat, 0 if done is not None else self.nbytes, done):
            pass

    def gather_pieces(
        self,
        named: Mapping[str, torch.Tensor],
        flat: torch.Tensor,
        piece: int,
        done: Callable[[str], None] | None = None,
    ) -> Iterator[int]:
        """As `gather`, in pieces of about that many bytes; yields how many bytes of the block are there by now."""
        self.check(named)
        begun: list[Entry] = []
        for entry in self.entries:
            begun.append(entry)
            if entry.offset + entry.nbytes - begun[0].offset < piece:
                continue
            self._copy_in(begun, named, flat)
            if done is not None:
                done(entry.name)
            yield entry.offset + entry.nbytes
            begun = []
        self._copy_in(begun, named, flat)
        yield self.nbytes

    def _copy_in(self, entries: list[Entry], named: Mapping[str, torch.Tensor], flat: torch.Tensor) -> None:
        copies = Copies()
        for entry in entries:
            copies.add(self.view(flat, entry), named[entry.name])
        copies.run()

    def scatter(self, flat: torch.Tensor, named: Mapping[str, torch.Tensor]) -> None:
        """Copy the flat block into the tensors, in place."""
        self.check(named)
        copies = Copies()
        for entry in self.entries:
            copies.add(named[entry.name], self.view(flat, entry))
        copies.run()

    def digest(self, named: Mapping[str, torch.Tensor], version: int, step: int) -> int:
        """64 bits that any change of a value changes; never 0. The tensors are contiguous and on the CPU."""
        from busrl._blocks import digest

        seed = digest(version.to_bytes(8, "little") + step.to_bytes(8, "little"))
        for entry in self.entries:
            seed = digest(bytes_of(named[entry.name]), seed)
        return seed or 1

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors that lie in the block, by name."""
        return {entry.name: self.view(flat, entry) for entry in self.entries}

    def check(self, named: Mapping[str, torch.Tensor]) -> None:
        """UserError with the first difference between this layout and the tensors."""
        mine = self.expected
        if missing := sorted(mine.keys() - named.keys()):
            raise UserError(f"weights: {len(missing)} published tensors are not in this model, first {missing[0]!r}")
        if extra := sorted(named.keys() - mine.keys()):
            raise UserError(f"weights: {len(extra)} tensors of this model are not published, first {extra[0]!r}")
        for name, (dtype, shape) in self.expected.items():
            tensor = named[name]
            if tensor.dtype != dtype or tensor.shape != shape:
                raise UserError(
                    f"weights: {name!r} is {_kind(dtype)}{list(shape)} where published and "
                    f"{_kind(tensor.dtype)}{list(tensor.shape)} here; both sides must run the same model.path and "
                    "model.dtype"
                )

    def view(self, flat: torch.Tensor, entry: Entry) -> torch.Tensor:
        import torch

        dtype: torch.dtype = getattr(torch, entry.dtype)
        return flat[entry.offset : entry.offset + entry.nbytes].view(dtype).view(entry.shape)


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
