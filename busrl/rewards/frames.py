"""The wire between a reward pool and its children: length-prefixed msgpack over two pipes.

    frame = length (u32, little endian) | msgpack
    parent -> child: first a Setup, then batches: arrays of Request
    child -> parent: one Answer when set up (seq 0), then one per request, in order, each written before the next begins

Talks to nothing. Knows nothing of processes or deadlines.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

PREFIX = struct.Struct("<I")
READY = 0  # seq of the answer that says whether the function was loaded


class Setup(msgspec.Struct, frozen=True):
    """Which function a child shall run; the fields of [reward] and where files are looked for."""

    kind: str
    function: str
    extract: str
    answer_key: str
    base_dir: str
    weights: dict[str, float]


class Request(msgspec.Struct, array_like=True, gc=False):
    """One completion to judge."""

    seq: int
    record_line: bytes
    completion: str
    token_ids: list[int]


class Answer(msgspec.Struct, array_like=True, gc=False):
    """What became of a request. `error`: "" | raised | malformed | not_loaded (seq 0 only); `seconds` it took."""

    seq: int
    value: float
    parts: dict[str, float]
    error: str
    text: str
    seconds: float = 0.0


def frame(encoder: msgspec.msgpack.Encoder, message: Any) -> bytes:
    """The bytes of one frame."""
    body = encoder.encode(message)
    return PREFIX.pack(len(body)) + body


class Splitter:
    """Cuts a byte stream into the bodies of frames."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Bodies that are complete now."""
        self._rest += data
        bodies, at, size = [], 0, len(self._rest)
        while size - at >= PREFIX.size:
            end = at + PREFIX.size + PREFIX.unpack_from(self._rest, at)[0]
            if end > size:
                break
            bodies.append(bytes(self._rest[at + PREFIX.size : end]))
            at = end
        del self._rest[:at]
        return bodies
