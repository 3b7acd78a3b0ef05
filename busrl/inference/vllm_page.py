"""One page of shared memory on which a vLLM worker tells which weights it has at hand: written there, read here.

The worker's receiving thread writes, the rollout process reads at every step without a call to the engine: such a call
would wait for a decoding step. Knows nothing of vLLM, of tensors or of transports.

- A reader sees a whole line or the one before: the sequence word is odd while it is written, and a checksum decides.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from busrl.errors import UserError

SIZE = 4096
HEAD = struct.Struct("<QIIqqqq")  # sequence, checksum, bytes of text; staged version and step, loaded version and step
BODY_AT = 16
TRIES = 100


@dataclass(frozen=True)
class Line:
    """What a worker tells: (version, step) received and waiting, and in the model; what is wrong, if anything."""

    staged: tuple[int, int] = (-1, -1)
    loaded: tuple[int, int] = (-1, -1)
    trouble: str = ""

    @property
    def newest(self) -> tuple[int, int]:
        """What an update would give, or gave."""
        return max(self.staged, self.loaded)


class Page:
    """A mapping of the file. One writer."""

    def __init__(self, path: str | Path, *, create: bool = False) -> None:
        self.path = Path(path)
        if create:
            self._create()
        flags = os.O_RDWR if create else os.O_RDONLY
        try:
            descriptor = os.open(self.path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as problem:
            raise UserError(f"{self.path}: {problem.strerror}; a worker of vLLM should have made it") from None
        try:
            access = mmap.ACCESS_WRITE if create else mmap.ACCESS_READ
            self._map = mmap.mmap(descriptor, SIZE, access=access)
        finally:
            os.close(descriptor)
        self._sequence = 0
        self._seen = Line()

    def write(self, line: Line) -> None:
        text = line.trouble.encode()[: SIZE - HEAD.size]
        self._sequence += 1
        struct.pack_into("<Q", self._map, 0, self._sequence)
        numbers = (*line.staged, *line.loaded)
        body = struct.pack("<qqqq", *numbers) + text
        self._sequence += 1
        HEAD.pack_into(self._map, 0, self._sequence - 1, zlib.crc32(body), len(text), *numbers)
        self._map[HEAD.size : HEAD.size + len(text)] = text
        struct.pack_into("<Q", self._map, 0, self._sequence)

    def read(self) -> Line:
        """The last whole line; an empty one before the first."""
        for _ in range(TRIES):
            data = bytes(self._map[:])
            sequence, checksum, length, *numbers = HEAD.unpack_from(data)
            if sequence == self._sequence:
                return self._seen
            body = data[BODY_AT : HEAD.size + min(length, SIZE)]
            if not sequence & 1 and zlib.crc32(body) == checksum:
                text = data[HEAD.size : HEAD.size + length].decode(errors="replace")
                self._sequence, self._seen = sequence, Line((numbers[0], numbers[1]), (numbers[2], numbers[3]), text)
                return self._seen
        return self._seen

    def close(self) -> None:
        self._map.close()

    def _create(self) -> None:
        """A new file under that name, readable by this user only; whoever maps an old one keeps it."""
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.ftruncate(descriptor, SIZE)
        os.close(descriptor)
        os.rename(temporary, self.path)
