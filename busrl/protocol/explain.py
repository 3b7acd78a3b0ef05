"""Msgpack bytes taken apart for a reader: each token with its offset, its bytes and what it says.

Pure, and its own decoder on purpose: docs/protocol.md shows what the wire holds, not what the codec believes. Knows
only the part of msgpack that messages use; extension types are refused.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_SIZED = {0xC4: "bin 8", 0xC5: "bin 16", 0xC6: "bin 32", 0xD9: "str 8", 0xDA: "str 16", 0xDB: "str 32"}
_NESTED = {0xDC: "array 16", 0xDD: "array 32", 0xDE: "map 16", 0xDF: "map 32"}
_NUMBERS = {
    0xCA: (">f", "float 32"), 0xCB: (">d", "float 64"),
    0xCC: (">B", "uint 8"), 0xCD: (">H", "uint 16"), 0xCE: (">I", "uint 32"), 0xCF: (">Q", "uint 64"),
    0xD0: (">b", "int 8"), 0xD1: (">h", "int 16"), 0xD2: (">i", "int 32"), 0xD3: (">q", "int 64"),
}  # fmt: skip
_PLAIN = {0xC0: "nil", 0xC2: "false", 0xC3: "true"}
_WIDTH = (1, 2, 4)


@dataclass(frozen=True)
class Token:
    """One value or header: where it begins, its bytes, its type, what it says, how deep it lies."""

    offset: int
    raw: bytes
    form: str
    text: str
    depth: int
    children: int = 0


def tokens(raw: bytes) -> list[Token]:
    """All tokens of one msgpack value; ValueError for bytes that are none."""
    found = list(_walk(raw, 0, 0))
    last = found[-1]
    if last.offset + len(last.raw) != len(raw):
        raise ValueError(f"{len(raw) - last.offset - len(last.raw)} bytes after the value")
    return found


def fields(raw: bytes) -> list[tuple[bytes, str]]:
    """The pieces of a value, in order, that together are `raw`: a new one at each key of a map; with a text."""
    pieces: list[tuple[bytes, str]] = []
    open_: list[list[int]] = []  # of each map or array around: values still to come, 1 if it is a map
    for token in tokens(raw):
        while open_ and open_[-1][0] == 0:
            open_.pop()
        is_key = bool(open_ and open_[-1][1] and open_[-1][0] % 2 == 0)
        if open_:
            open_[-1][0] -= 1
        said = " ".join(filter(None, (token.form, token.text)))
        if is_key:
            pieces.append((token.raw, "  " * (sum(one[1] for one in open_) - 1) + said + ":"))
        else:
            before, text = pieces.pop() if pieces else (b"", "")
            pieces.append((before + token.raw, f"{text} {said}" if text else said))
        if "map" in token.form or "array" in token.form:
            open_.append([token.children, int("map" in token.form)])
    return pieces


def _walk(raw: bytes, at: int, depth: int) -> Iterator[Token]:
    token = _token(raw, at, depth)
    yield token
    at += len(token.raw)
    for _ in range(token.children):
        for inner in _walk(raw, at, depth + 1):
            yield inner
            at = inner.offset + len(inner.raw)


def _token(raw: bytes, at: int, depth: int) -> Token:
    if at >= len(raw):
        raise ValueError(f"the bytes end at {at}, in the middle of a value")
    head = raw[at]
    if head < 0x80:
        return _made(raw, at, 1, "fixint", str(head), depth)
    if head < 0x90:
        return _made(raw, at, 1, "fixmap", f"of {head & 15}", depth, 2 * (head & 15))
    if head < 0xA0:
        return _made(raw, at, 1, "fixarray", f"of {head & 15}", depth, head & 15)
    if head < 0xC0:
        return _text(raw, at, 1, head & 31, "fixstr", depth)
    if head >= 0xE0:
        return _made(raw, at, 1, "negative fixint", str(head - 256), depth)
    if head in _PLAIN:
        return _made(raw, at, 1, "", _PLAIN[head], depth)
    if head in _NUMBERS:
        code, form = _NUMBERS[head]
        body = raw[at + 1 : at + 1 + struct.calcsize(code)]
        number = struct.unpack(code, body)[0] if len(body) == struct.calcsize(code) else ""
        return _made(raw, at, 1 + struct.calcsize(code), form, str(number), depth)
    return _sized(raw, at, head, depth)


def _sized(raw: bytes, at: int, head: int, depth: int) -> Token:
    if head in _SIZED:
        width = _WIDTH[(head - 0xC4) % 3 if head < 0xC8 else head - 0xD9]
        return _text(raw, at, 1 + width, int.from_bytes(raw[at + 1 : at + 1 + width], "big"), _SIZED[head], depth)
    if head in _NESTED:
        width = 2 if head in (0xDC, 0xDE) else 4
        count = int.from_bytes(raw[at + 1 : at + 1 + width], "big")
        return _made(raw, at, 1 + width, _NESTED[head], f"of {count}", depth, 2 * count if head >= 0xDE else count)
    raise ValueError(f"byte {head:#04x} at {at} begins nothing that a message may hold")


def _text(raw: bytes, at: int, header: int, size: int, form: str, depth: int) -> Token:
    body = raw[at + header : at + header + size]
    shown = f"{size} bytes" if form.startswith("bin") else f'"{body.decode()}"'
    return _made(raw, at, header + size, form, shown, depth)


def _made(raw: bytes, at: int, size: int, form: str, text: str, depth: int, children: int = 0) -> Token:
    if at + size > len(raw):
        raise ValueError(f"the value at {at} has {size} bytes, {len(raw) - at} are there")
    return Token(at, raw[at : at + size], form, text, depth, children)
