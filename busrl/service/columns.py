"""Data of a request for gradients: one by one, or as columns of numbers in its body that are looked at all together.

`Columns` is a sequence of `Datum`, so only what must be fast (a digest, a check of all values) knows of it. Made by the
reader of bodies (`wire`), used by what checks and executes them. Knows nothing of protobuf, of losses or of models.

- All data of `Columns` have the same inputs, each a vector with one number for every token.
- Arrays are copied when they are asked for, and not before; each look at a `Datum` makes a new one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, overload

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

TOKENS: Final = ""  # the name of the first column; an input of this name is left to what reads data one by one
JOINED: Final = 8  # data whose bytes are joined for a digest: a call of a hash costs more than a small array


@dataclass(frozen=True, eq=False)
class Datum:
    """A sequence to train on: token ids, int32 (n,), and what its loss needs, by name: (n,) or (n, k) each."""

    tokens: Array
    inputs: dict[str, Array]


class Columns(Sequence[Datum]):
    """Data whose arrays lie in `body`. The first of `names` is TOKENS, the others ascend. `lengths`: the tokens of each
    datum; `starts`: [data, names], where its arrays begin."""

    def __init__(
        self, body: bytes, names: Sequence[str], dtypes: Sequence[np.dtype[Any]], lengths: Array, starts: Array
    ) -> None:
        self.names, self.lengths, self._body, self._dtypes = names, lengths, body, dtypes
        self._starts = starts.tolist()
        sizes = np.array([dtype.itemsize for dtype in dtypes])
        self._stops = (starts + lengths[:, None] * sizes).tolist()

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, at: int) -> Datum: ...
    @overload
    def __getitem__(self, at: slice) -> list[Datum]: ...

    def __getitem__(self, at: int | slice) -> Datum | list[Datum]:
        if isinstance(at, slice):
            return [self[number] for number in range(*at.indices(len(self)))]
        cells = zip(self._dtypes, self._starts[at], self._stops[at])
        tokens, *inputs = (np.frombuffer(self._body[start:stop], dtype).copy() for dtype, start, stop in cells)
        return Datum(tokens, dict(zip(self.names[1:], inputs)))

    @property
    def tokens(self) -> int:
        """Tokens of all data."""
        return int(self.lengths.sum())

    def values(self, name: str) -> Array:
        """All numbers of a column, one datum after the other; not to be changed."""
        column, body = self.names.index(name), self._body
        joined = b"".join([body[start[column] : stop[column]] for start, stop in zip(self._starts, self._stops)])
        return np.frombuffer(joined, self._dtypes[column])

    def written(self) -> Iterator[bytes]:
        """Yield what `written_of` does, in larger pieces."""
        lengths, body = self.lengths.tolist(), self._body
        known = set(lengths)
        heads = [
            {length: head_of(name, dtype, (length,)) for length in known}
            for name, dtype in zip(self.names, self._dtypes)
        ]
        for first in range(0, len(self), JOINED):
            joined = slice(first, first + JOINED)
            pieces: list[bytes] = []
            for length, starts, stops in zip(lengths[joined], self._starts[joined], self._stops[joined]):
                for head, start, stop in zip(heads, starts, stops):
                    pieces += head[length], body[start:stop]
            yield b"".join(pieces)


def head_of(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Head of an array's numbers in a digest."""
    return f"{name} {dtype.str} {shape}\0".encode()


def written_of(data: Sequence[Datum]) -> Iterator[bytes | memoryview]:
    """Yield name, type, shape and numbers of each array of the data, the inputs of a datum in the order of their
    names."""
    if isinstance(data, Columns):
        yield from data.written()
        return
    heads: dict[tuple[str, str, tuple[int, ...]], bytes] = {}  # few differ, and each costs more than its array
    for datum in data:
        for name, array in ((TOKENS, datum.tokens), *sorted(datum.inputs.items())):
            kind = name, array.dtype.char, array.shape
            if kind not in heads:
                heads[kind] = head_of(name, array.dtype, array.shape)
            yield heads[kind]
            yield np.ascontiguousarray(array).data
