"""Named tensors: their layout in one block of bytes, copies into and out of it, and which model they belong to.

Used by every transport. Knows nothing of where the bytes are or who publishes when. Imports torch only to copy tensors,
so a process that only reads the newest version's number needs none.

- Sender and receiver compare manifests before a byte is copied; the error names the first name, shape or type that
  differs.
- Tensors start at multiples of 64 bytes, in the order of the sender's names.
- `busrl._blocks` copies plain memory (contiguous, on the CPU, one dtype), many tensors in one call and without the
  interpreter's lock. `Tensor.copy_` does all else (an accelerator, a transposed tensor).
"""

from __future__ import annotations

import hashlib
import json
import struct
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from busrl._blocks import digest, move
from busrl.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

ALIGNMENT = 64


# -- adapters ---------------------------------------------------------------------------------------------------


def added(weight: torch.Tensor, up: torch.Tensor, down: torch.Tensor, scale: float, transposed: bool) -> torch.Tensor:
    """A weight with a low-rank adapter, in its number type: `up` [out, rank] times `down` [rank, in]. The experts of a
    layer are one weight [experts, out, in] (`transposed`: [experts, in, out]), with the rows of all of them in `down`
    and the columns in `up`, an expert's in every so many."""
    import torch

    if weight.ndim == 2:
        return torch.addmm(weight, up, down, alpha=scale)
    downs = down.view(len(weight), -1, down.shape[1])  # [experts, rank, in]
    ups = up.view(len(up), -1, len(weight)).permute(2, 0, 1)  # [experts, out, rank]
    left, right = (downs.mT, ups.mT) if transposed else (ups, downs)
    return torch.baddbmm(weight, left, right, alpha=scale)


# -- copies ----------------------------------------------------------------------------------------------------


def copy_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair to the first, of the same shape; plain memory in one call for all pairs."""
    to, source, sizes = array("Q"), array("Q"), array("Q")
    others: list[tuple[torch.Tensor, torch.Tensor]] = []
    for pair in pairs:
        if pair[0].dtype == pair[1].dtype and all(map(is_plain, pair)):
            to.append(pair[0].data_ptr())
            source.append(pair[1].data_ptr())
            sizes.append(pair[1].nbytes)
        else:
            others.append(pair)
    move(to, source, sizes)
    if others:
        import torch

        with torch.no_grad():
            for target, value in others:
                target.copy_(value)


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether the values lie one after another in memory that this process can address."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def bytes_of(tensor: torch.Tensor) -> Any:
    """The memory of a plain tensor, as a buffer."""
    import torch

    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def block_of(array: npt.NDArray[np.uint8]) -> torch.Tensor:
    """Wrap the bytes as a tensor, which must not be written to if the array is read-only."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of every array that is not writable
        return torch.from_numpy(array)


def new_block(nbytes: int) -> torch.Tensor:
    import torch

    return torch.empty(nbytes, dtype=torch.uint8)


# -- the layout ------------------------------------------------------------------------------------------------


def described(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Tensors with the names, shapes and types of these, perhaps without values: the mapping itself, or the
    `described` of a lazy mapping. A lazy mapping makes each tensor when it is read (by gathering it from several
    processes, say): it is read once per copy, and nothing keeps its tensors."""
    description: Mapping[str, torch.Tensor] = getattr(tensors, "described", tensors)
    return description


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor and its place in the flat block."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Manifest(msgspec.Struct, frozen=True, dict=True):
    """All tensors of a version; `nbytes` is the length of the flat block."""

    nbytes: int
    entries: tuple[Entry, ...] = msgspec.field(name="tensors")

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Manifest:
        entries: list[Entry] = []
        offset = 0
        for name, tensor in described(tensors).items():
            nbytes = tensor.numel() * tensor.element_size()
            entries.append(Entry(name, _name_of(tensor.dtype), tuple(tensor.shape), offset, nbytes))
            offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return cls(offset, tuple(entries))

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        return msgspec.json.decode(data, type=cls)

    @cached_property
    def expected(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        import torch

        return {entry.name: (getattr(torch, entry.dtype), torch.Size(entry.shape)) for entry in self.entries}

    def matches(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Tell whether the tensors have this layout, in any order."""
        return self.expected == {name: (tensor.dtype, tensor.shape) for name, tensor in described(tensors).items()}

    def gather(
        self, tensors: Mapping[str, torch.Tensor], flat: torch.Tensor, done: Callable[[str], None] | None = None
    ) -> None:
        """Copy the tensors into the flat block (uint8); `done` is called with each name after its copy."""
        for _ in self.gather_pieces(tensors, flat, 0 if done is not None else self.nbytes, done):
            pass

    def gather_pieces(
        self, tensors: Mapping[str, torch.Tensor], flat: torch.Tensor, piece: int,
        done: Callable[[str], None] | None = None,
    ) -> Iterator[int]:
        """Gather in pieces of about that many bytes, one tensor at a time from a lazy mapping (`described`); yields the
        number of bytes of the block that are complete."""
        self.check(tensors)
        lazy, begun = described(tensors) is not tensors, list[Entry]()
        for entry in self.entries:
            begun.append(entry)
            if not lazy and entry.offset + entry.nbytes - begun[0].offset < piece:
                continue
            self._copy_in(flat, tensors, begun)
            if done is not None:
                done(entry.name)
            yield entry.offset + entry.nbytes
            begun = []
        self._copy_in(flat, tensors, begun)
        yield self.nbytes

    def _copy_in(self, flat: torch.Tensor, tensors: Mapping[str, torch.Tensor], entries: list[Entry]) -> None:
        copy_all([(self.view(flat, entry), tensors[entry.name]) for entry in entries])

    def scatter(self, flat: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        self.check(tensors)
        copy_all([(tensors[entry.name], self.view(flat, entry)) for entry in self.entries])

    def digest(self, tensors: Mapping[str, torch.Tensor], version: int, step: int) -> int:
        """64 bits, never 0, that change with any value. The tensors are contiguous and on the CPU."""
        seed = digest(version.to_bytes(8, "little") + step.to_bytes(8, "little"))
        for entry in self.entries:
            seed = digest(bytes_of(tensors[entry.name]), seed)
        return seed or 1

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        return {entry.name: self.view(flat, entry) for entry in self.entries}

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """UserError with the first difference between this layout and the tensors."""
        expected, tensors = self.expected, described(tensors)
        if missing := sorted(expected.keys() - tensors.keys()):
            raise UserError(f"weights: {len(missing)} published tensors are not in this model, first {missing[0]!r}")
        if extra := sorted(tensors.keys() - expected.keys()):
            raise UserError(f"weights: {len(extra)} tensors of this model are not published, first {extra[0]!r}")
        for name, (dtype, shape) in self.expected.items():
            tensor = tensors[name]
            if tensor.dtype != dtype or tensor.shape != shape:
                raise UserError(
                    f"weights: {name!r} is {_name_of(dtype)}{list(shape)} where published and "
                    f"{_name_of(tensor.dtype)}{list(tensor.shape)} here; both sides must run the same model.path and "
                    "model.dtype"
                )

    def view(self, flat: torch.Tensor, entry: Entry) -> torch.Tensor:
        import torch

        dtype: torch.dtype = getattr(torch, entry.dtype)
        return flat[entry.offset : entry.offset + entry.nbytes].view(dtype).view(entry.shape)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- the fingerprint of a model folder -------------------------------------------------------------------------


BLOCKS, BLOCK = 32, 64 << 10
HEADER_AT_MOST = 100 << 20
# Written by the library that saved the folder; they change with its version, not with the model.
VOLATILE = ("transformers_version", "_name_or_path", "use_cache", "torch_dtype", "dtype")


def fingerprint(folder: Path) -> str:
    """Hexadecimal SHA-256 that identifies a model folder, so that no adapter is added to a wrong base.

    A copy of the folder has the same fingerprint; another architecture, another dtype on disk or other weights have
    another. Of the weights it covers names, shapes and sizes, and 32 blocks of 64 KiB spread over each file; a
    difference between these blocks is not seen. UserError for a folder without configuration or weights.
    """
    sha = hashlib.sha256()
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
        lasting = {key: value for key, value in config.items() if key not in VOLATILE}
        sha.update(json.dumps(lasting, sort_keys=True).encode())
        files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
        if not files:
            raise UserError(f"{folder}: no weights in it, so nothing tells which adapters belong to it; see model.path")
        for path in files:
            _add(sha, path)
    except (OSError, ValueError) as problem:
        raise UserError(f"{folder}: not a readable model folder: {problem}; see model.path") from problem
    return sha.hexdigest()


def _add(sha: Any, path: Path) -> None:
    """Add a file's name and size, the whole header of a safetensors file, and blocks of the rest."""
    size = path.stat().st_size
    sha.update(f"{path.name} {size}".encode())
    with open(path, "rb") as file:
        begin = 0
        if path.suffix == ".safetensors" and size > 8:
            (length,) = struct.unpack("<Q", file.read(8))
            begin = 8 + min(length, HEADER_AT_MOST)
            sha.update(file.read(begin - 8))
        step = max(BLOCK, (size - begin) // BLOCKS)
        for offset in range(begin, size, step):
            file.seek(offset)
            sha.update(file.read(BLOCK))
