"""The prompts of a run: draw number -> one line of a JSONL file, the same for every process and after every restart.

Talks to one file, which it never changes. Knows nothing of JSON (that is `check`), groups, fates or tokenizers.

- Draw d is item d mod N of epoch d div N; an epoch's order depends on (seed, epoch) alone, so nothing is remembered.
- Empty lines at the end of the file and a byte order mark at its beginning belong to no prompt.
- The bytes of a line, without its newline, are the task: their crc32 identifies the prompt in the ledger and the log.
- A file that changes under a run is refused as soon as it shows, never silently read differently.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from busrl.data.check import BOM, decode_line, open_file
from busrl.data.prompt import plain_text
from busrl.errors import DataError

CHUNK = 8 << 20
NEWLINE = 10
EPOCHS_KEPT = 2  # a horizon of draws may reach from one epoch into the next


@dataclass(frozen=True)
class Item:
    """One prompt as dispatched: line number in the file (from 0), its bytes, and their crc32."""

    index: int
    line: bytes
    crc: int


class JsonlStream:
    """Endless stream over the lines of `path`. Building it reads the file once; an item is one `pread`."""

    def __init__(
        self, path: str | Path, seed: int, shuffle: bool, prompt_key: str = "prompt", answer_key: str = ""
    ) -> None:
        self.path = Path(path)
        self.seed, self.shuffle = seed, shuffle
        self.prompt_key, self.answer_key = prompt_key, answer_key
        self._orders: dict[int, npt.NDArray[np.int64]] = {}
        self._fd = open_file(self.path)
        try:
            self._bounds = prompt_bounds(self._fd)
            if len(self) == 0:
                raise DataError(f"{self.path}: the file is empty: it must hold one JSON object per line; write some")
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        """Lines of the file, N."""
        return len(self._bounds) - 1

    def item(self, draw: int) -> Item:
        """The prompt of draw number `draw`. `DataError` if the file is no longer what it was when it was opened."""
        if draw < 0:
            raise ValueError(f"draw must be >= 0, got {draw}")
        epoch, position = divmod(draw, len(self))
        return self.at(int(self._order(epoch)[position]) if self.shuffle else position)

    def at(self, index: int) -> Item:
        """Line `index` (from 0) of the file."""
        start, end = int(self._bounds[index]), int(self._bounds[index + 1]) - 1
        line = os.pread(self._fd, end - start, start)
        if len(line) != end - start or b"\n" in line:
            raise DataError(
                f"{self.path}:{index + 1}: the file was changed while a run uses it: the lines must stay as they "
                "were at the start; put the old file back, or start a new run"
            )
        return Item(index, line, zlib.crc32(line))

    def record(self, item: Item) -> dict[str, object]:
        """The parsed line, checked; `DataError` with file:line if it is not what the topology says."""
        return decode_line(item.line, f"{self.path}:{item.index + 1}", self.prompt_key, self.answer_key)

    def prompt(self, item: Item) -> str:
        """The text under `prompt_key`, or that of its messages, before any template."""
        return plain_text(self.record(item)[self.prompt_key])

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> JsonlStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        order = self._orders.get(epoch)
        if order is None:
            order = np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(len(self))
            self._orders[epoch] = order
            for old in list(self._orders)[:-EPOCHS_KEPT]:  # oldest use first
                del self._orders[old]
        return order


def prompt_bounds(fd: int) -> npt.NDArray[np.int64]:
    """`line_bounds` without the empty lines at the end and without a byte order mark."""
    bounds = line_bounds(fd)
    if os.pread(fd, len(BOM), 0) == BOM:
        bounds[0] = len(BOM)
    count = len(bounds)
    while count > 1 and not os.pread(fd, int(bounds[count - 1] - bounds[count - 2]), int(bounds[count - 2])).strip():
        count -= 1
    return bounds[:count]


def line_bounds(fd: int) -> npt.NDArray[np.int64]:
    """Offsets at which lines start, plus the end: line i is bytes [bounds[i], bounds[i + 1] - 1) of the file."""
    found: list[npt.NDArray[np.int64]] = [np.zeros(1, np.int64)]
    offset, last = 0, NEWLINE
    while chunk := os.pread(fd, CHUNK, offset):
        data = np.frombuffer(chunk, np.uint8)
        found.append(np.flatnonzero(data == NEWLINE).astype(np.int64) + (offset + 1))
        offset += len(chunk)
        last = chunk[-1]
    if last != NEWLINE:  # a last line without a newline counts; its bound is one past the byte that is not there
        found.append(np.array([offset + 1], np.int64))
    return np.concatenate(found)
