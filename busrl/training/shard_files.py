"""A trainer's state in shards: one file of tensors per rank, written by a thread while training goes on.

Used by checkpoints and the ranks of a learner. Talks to files; knows nothing of optimisers, plans or steps.

- A file is plain safetensors. Its header says of each tensor where its part begins in the whole, so any number of ranks
  reads what any number wrote, however either cuts it, each its own part alone. (The index of torch's own distributed
  checkpoints is a pickle, which could run code, and is planned by collectives.)
- Tensors are written from where they are. `stage` copies those that are not on disk yet: whoever is about to change
  them calls it first, so a save takes at most one more copy of the state, and none if it was written by then.
- Sizes and CRC-32 are those of the bytes that were handed to the kernel, not of what a second reading finds.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from busrl.errors import FileCorrupt, RankLost, UserError, WriteFailed
from busrl.system.files import write_error

FOLDER, REST = "shards", "optimizer.json"  # of a checkpoint: the files of all ranks, and what is no tensor
PARTS, WORLD = "parts", "world"  # in the header of a file
PIECE = 1 << 24  # bytes that are copied, summed and written at a time
WAIT_S = 0.05
TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}


def file_of(rank: int) -> str:
    return f"{FOLDER}/rank-{rank}.safetensors"


@dataclass
class Part:
    """A part of a tensor that begins at `first` (per axis) of the tensor `name` of that whole shape; `tensor` may still
    be in use."""

    name: str
    tensor: Tensor
    first: tuple[int, ...]
    shape: tuple[int, ...]


# -- writing -----------------------------------------------------------------------


class Writing:
    """A file that a thread writes. `ended` says whether it is done, well or not; `entry` gives size and CRC-32."""

    def __init__(self, path: Path, parts: Iterable[Part], world: int) -> None:
        self.path, self._parts = path, [part for part in parts if part.tensor.numel()]
        self.bytes = sum(part.tensor.nbytes for part in self._parts)
        self.copied = 0  # bytes, by `stage`
        self._head = _head(self._parts, world)
        self._at = self._size = self._crc = 0
        self._lock, self._left = threading.Lock(), False
        self._problem: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def stage(self) -> None:
        """From here on the tensors may change: what is not written yet is copied."""
        with self._lock:
            for part in self._parts[self._at:] if not self.copied else ():
                part.tensor = part.tensor.detach().to("cpu", copy=True)
                self.copied += part.tensor.nbytes

    def entry(self) -> list[int]:
        """Size and CRC-32, once it has ended; DiskFull or WriteFailed if it ended badly."""
        self._thread.join()
        if isinstance(self._problem, OSError):
            raise write_error(self.path, self.bytes, self._problem) from self._problem
        if self._problem is not None:
            raise WriteFailed(f"{self.path}: {self._problem!r} while it was written") from self._problem
        return [self._size, self._crc]

    def leave(self) -> None:
        """Give it up; half of a file stays where it is."""
        self._left = True
        self._thread.join()

    def _run(self) -> None:
        try:
            self.path.parent.mkdir(exist_ok=True)
            with open(self.path, "wb", buffering=0) as file:
                self._put(file, memoryview(self._head))
                largest = max((part.tensor.nbytes for part in self._parts), default=0)
                room = torch.empty(min(PIECE, largest), dtype=torch.uint8)
                for at in range(len(self._parts)):
                    self._write(file, at, room)
                os.fsync(file.fileno())
        except Exception as problem:
            self._problem = problem
        self._parts.clear()

    def _write(self, file: Any, at: int, room: Tensor) -> None:
        self._at, part = at, self._parts[at]
        for begin in range(0, part.tensor.nbytes, PIECE):
            with self._lock:  # nobody changes the tensor meanwhile, for that one calls `stage` first
                part.tensor = part.tensor.detach().contiguous()
                piece = part.tensor.view(-1).view(torch.uint8)[begin: begin + PIECE]
                copied = room[: piece.numel()].copy_(piece)
            self._put(file, copied.numpy().data)
            if self._left:
                raise WriteFailed(f"{self.path}: given up")
        with self._lock:
            part.tensor, self._at = room[:0], at + 1  # a copy is freed

    def _put(self, file: Any, data: memoryview) -> None:
        self._crc = zlib.crc32(data, self._crc)
        self._size += len(data)
        while data:
            data = data[file.write(data):]


def _head(parts: Sequence[Part], world: int) -> bytes:
    """A header of safetensors: its length, then JSON, padded so that the tensors are aligned."""
    where = {part.name: [list(part.first), list(part.shape)] for part in parts}
    described: dict[str, Any] = {"__metadata__": {"format": "pt", WORLD: str(world), PARTS: json.dumps(where)}}
    end = 0
    for part in parts:
        begin, end = end, end + part.tensor.nbytes
        described[part.name] = {
            "dtype": TYPES[part.tensor.dtype], "shape": list(part.tensor.shape), "data_offsets": [begin, end],
        }
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@dataclass
class Saving:
    """The files that a process writes of a checkpoint; a team has one of all ranks with the same calls."""

    writing: Writing
    rank: int = 0

    def ready(self) -> bool:
        """True if `entries` would not wait."""
        return self.writing.ended

    def whose(self) -> str:
        """Name of whoever still writes."""
        return f"rank {self.rank} ({self.writing.path})"

    def entries(self) -> dict[str, list[int]]:
        """Sizes and CRC-32 of all files, by their names in the checkpoint; waits for them."""
        return {file_of(self.rank): self.writing.entry()}

    def leave(self) -> None:
        self.writing.leave()


def wait(saving: Saving, limit_s: float, on_progress: Callable[[], None]) -> None:
    """Until it is ready; RankLost if a rank takes longer, named."""
    deadline = time.monotonic() + limit_s
    while not saving.ready():
        if time.monotonic() > deadline:
            raise RankLost(f"{saving.whose()} has not written its shard within {limit_s:g} s; is the disk stuck?")
        on_progress()
        time.sleep(WAIT_S)  # for a disk, which rings no bell


# -- trees of tensors and numbers ----------------------------------------------------

TENSOR = "$tensor"


def flattened(tree: Any, name: str) -> tuple[Any, dict[str, Tensor]]:
    """The tree as JSON, and its tensors by names that begin with `name`. UserError for what is neither."""
    if isinstance(tree, Tensor) and tree.dtype in TYPES:
        return {TENSOR: name}, {name: tree}
    if isinstance(tree, dict) and (odd := [key for key in tree if not isinstance(key, str)]):
        raise _unfit(f"{name} of the optimiser has the key {odd[0]!r}: a file of tensors has strings as keys alone")
    if isinstance(tree, (dict, list, tuple)):
        items = list(tree.items() if isinstance(tree, dict) else enumerate(tree))
        items_ = [(key, *flattened(branch, f"{name}.{key}")) for key, branch in items]
        tensors = {name: tensor for _, _, part in items_ for name, tensor in part.items()}
        if isinstance(tree, dict):
            return {key: branch for key, branch, _ in items_}, tensors
        return [branch for _, branch, _ in items_], tensors
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree, {}
    kind = f"tensor of {tree.dtype}" if isinstance(tree, Tensor) else type(tree).__name__
    raise _unfit(f"{name} of the optimiser is a {kind}, which no file of tensors can hold")


def _unfit(what: str) -> UserError:
    return UserError(f'{what}; set learner.checkpoint_mode = "sync" with one rank')


def built(tree: Any, tensor: Callable[[str], Tensor]) -> Any:
    """The tree that `flattened` was given, with the tensors that `tensor` has by their names; tuples are lists now."""
    if isinstance(tree, dict):
        return tensor(tree[TENSOR]) if TENSOR in tree else {key: built(branch, tensor) for key, branch in tree.items()}
    return [built(branch, tensor) for branch in tree] if isinstance(tree, list) else tree


# -- reading -----------------------------------------------------------------------


class Shards:
    """The files of a checkpoint, whoever wrote them. `shapes` has the whole shape of each tensor."""

    def __init__(self, checkpoint: Path) -> None:
        from safetensors import safe_open

        self.folder, self.shapes = checkpoint / FOLDER, dict[str, tuple[int, ...]]()
        self._parts: dict[str, list[tuple[tuple[int, ...], Any]]] = {}
        worlds, paths = set(), sorted(self.folder.glob("rank-*.safetensors"))
        for path in paths:
            file: Any = safe_open(str(path), "pt")
            about = file.metadata()
            worlds.add(int(about[WORLD]))
            for name, (first, shape) in json.loads(about[PARTS]).items():
                begin = tuple(first) if isinstance(first, list) else (first, *(0,) * (len(shape) - 1))[:len(shape)]
                self._parts.setdefault(name, []).append((begin, file))  # a number is of rows, in files of busrl 0.1
                self.shapes[name] = tuple(shape)
        if worlds != {len(paths)}:
            raise FileCorrupt(f"{self.folder}: files of {len(paths)} ranks, written by {sorted(worlds)}; use another "
                              "checkpoint, or put the missing files back")
        self.rest: dict[str, Any] = json.loads((self.folder / REST).read_text())

    def names(self, prefix: str) -> Iterator[str]:
        """Names of all tensors that begin so, without that beginning."""
        return (name.removeprefix(prefix) for name in self.shapes if name.startswith(prefix))

    def whole(self, name: str) -> Tensor:
        return self.part(name, tuple(slice(0, size) for size in self.shapes[name]))

    def part(self, name: str, place: tuple[slice, ...]) -> Tensor:
        """Reads that part of a tensor, read from whichever files have pieces of it."""
        if not place:
            number: Tensor = self._parts[name][0][1].get_tensor(name)
            return number
        tensor: Tensor | None = None
        missing = math.prod(span.stop - span.start for span in place)
        for begin, file in self._parts[name]:
            piece = file.get_slice(name)
            shared = [_shared(*ranges) for ranges in zip(place, begin, piece.get_shape(), strict=True)]
            if any(span.start >= span.stop for span in shared):
                continue
            read: Tensor = piece[_from(shared, begin)]
            if missing == read.numel() and tensor is None:
                return read
            tensor = read.new_empty([span.stop - span.start for span in place]) if tensor is None else tensor
            tensor[_from(shared, [span.start for span in place])] = read
            missing -= read.numel()
        if tensor is None or missing:
            raise FileCorrupt(f"{self.folder}: {missing} values of {name} are in none of the files")
        return tensor


def _from(place: Sequence[slice], begin: Sequence[int]) -> tuple[slice, ...]:
    """A place counted from another."""
    return tuple(slice(span.start - at, span.stop - at) for span, at in zip(place, begin, strict=True))


def _shared(wanted: slice, begin: int, size: int) -> slice:
    """The part of a wanted range that a piece has."""
    return slice(max(wanted.start, begin), min(wanted.stop, begin + size))


def require_same(saved: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor], where: str, model: str) -> None:
    """UserError if the tensors of a checkpoint are not those of the model, by name and shape."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wrong := sorted(name for name in saved.keys() | shapes.keys() if saved.get(name) != shapes.get(name)):
        name_ = wrong[0]
        here, there = (str(list(of[name_])) if name_ in of else "none" for of in (shapes, saved))
        raise UserError(
            f"{where} is of another model: {name_} has the shape {there} there and {here} in {model} ({len(wrong)} "
            "tensors differ); set model.path to the model that it was trained from, or take another checkpoint"
        )
