"""Which prompt a draw selects, worked out again from the prompt file, the seed and the shuffle switch.

Talks to one JSONL file. Knows nothing of the stream that the run itself reads.

- Proven is the line: the bytes of a draw's task, whatever its prompt is made of (a text, messages).
- Not proven is what an engine made of it: chat template, system prompt and tokenizer are not applied again here.
"""

from __future__ import annotations

import mmap
import zlib
from array import array
from pathlib import Path

import numpy as np
import numpy.typing as npt

UNREAD = -1  # no crc yet


class Prompts:
    """Lines of the prompt file in the order of a run."""

    def __init__(self, path: Path, seed: int, shuffle: bool) -> None:
        self.seed, self.shuffle = seed, shuffle
        starts, ends = array("q"), array("q")  # a file may have millions of lines
        self._path = path
        offset = last = 0
        with path.open("rb") as file:
            for line in file:
                starts.append(offset)
                offset += len(line)
                ends.append(offset - line.endswith(b"\n"))
                last = len(ends) if line.strip(b" \t\r\n\v\f\xef\xbb\xbf") else last
        self._starts, self._ends = starts[:last], ends[:last]  # empty lines at the end are no prompts
        with path.open("rb") as file:
            if self._starts and file.read(3) == b"\xef\xbb\xbf":  # a byte order mark
                self._starts[0] = 3
        self._crcs = np.full(last, UNREAD, np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    def crcs(self, draws: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The crc32 of the line that each draw selects."""
        distinct, back = np.unique(draws, return_inverse=True)
        items = self._items(distinct)
        self._read(np.unique(items[self._crcs[items] == UNREAD]))
        return self._crcs[items][back]

    def _items(self, draws: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Line numbers of ascending draws, epoch by epoch."""
        epochs, items = np.divmod(draws, len(self))
        if self.shuffle and draws.size:
            starts = np.append(0, np.flatnonzero(np.diff(epochs)) + 1)
            for start, end in zip(starts, [*starts[1:], draws.size]):
                generator = np.random.Generator(np.random.PCG64([self.seed, int(epochs[start])]))
                items[start:end] = generator.permutation(len(self))[items[start:end]]
        return items

    def _read(self, items: npt.NDArray[np.int64]) -> None:
        if not items.size:
            return
        with self._path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for item in items.tolist():
                self._crcs[item] = zlib.crc32(data[self._starts[item] : self._ends[item]])
