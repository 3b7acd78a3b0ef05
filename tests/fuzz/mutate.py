"""One valid message of every kind, made from the types, and a seeded mutator of bytes."""

from __future__ import annotations

import random
from typing import Any

import msgspec
from msgspec import inspect

from busrl.protocol.codec import ALL
from busrl.protocol.messages import Message, name_of

_HEADS = """
c0 c1 c2 c3 00 7f e0 ff 80 8f 90 9f a0 bf c4ff c5ffff c6ffffffff c7ff01 c8ffff01 c9ffffffff01 ca7fc00000
cb7ff0000000000000 cbfff8000000000000 ccff cdffff ceffffffff cfffffffffffffffff d080 d18000 d280000000
d38000000000000000 d4ff00 d5ff0000 d6ffffffffff d7ff0000000000000000 d9ff daffff dbffffffff dcffff ddffffffff
deffff dfffffffff
"""
HEADS = [bytes.fromhex(text) for text in _HEADS.split()]


def sample(info: inspect.Type) -> Any:
    """Plain data that a decoder of this type accepts, every optional field filled."""
    if isinstance(info, inspect.StructType):
        fields = {field.encode_name: sample(field.type) for field in info.fields}
        return {str(info.tag_field): info.tag, **fields} if info.tag_field else fields
    if isinstance(info, inspect.StrType):
        return "fuzz"
    if isinstance(info, inspect.BytesType):
        return b"\x00\x01\x02\x03"
    if isinstance(info, inspect.BoolType):
        return True
    if isinstance(info, inspect.FloatType):
        return 0.5
    if isinstance(info, inspect.IntType):
        return 1
    if isinstance(info, inspect.ListType):
        return [sample(info.item_type)] * 2
    if isinstance(info, inspect.DictType):
        return {sample(info.key_type): sample(info.value_type)}
    if isinstance(info, inspect.UnionType):
        return sample(info.types[0])
    if isinstance(info, inspect.AnyType):
        return [{"a": 1}]
    return None


def golden() -> list[tuple[type[Message], bytes]]:
    """Every kind with the bytes of a message of it."""
    corpus = []
    for kind in ALL:
        raw = msgspec.msgpack.encode({**sample(inspect.type_info(kind)), "v": 1, "type": name_of(kind)})
        msgspec.msgpack.decode(raw, type=kind)
        corpus.append((kind, raw))
    return corpus


class Mutator:
    """`next` gives changed bytes; the same seed gives the same bytes."""

    def __init__(self, seed: int, corpus: list[bytes]) -> None:
        self.random, self.corpus = random.Random(seed), corpus

    def next(self, raw: bytes) -> bytes:
        changed = bytearray(raw)
        for _ in range(1 + int(self.random.random() * 4)):
            self._change(changed)
        return bytes(changed)

    def _change(self, changed: bytearray) -> None:
        chance = self.random.random
        at = int(chance() * (len(changed) + 1))
        what = int(chance() * 8)
        if what == 0 and changed:
            changed[min(at, len(changed) - 1)] ^= 1 << int(chance() * 8)
        elif what == 1 and changed:
            changed[min(at, len(changed) - 1)] = int(chance() * 256)
        elif what == 2:
            del changed[at:]
        elif what == 3:
            head = HEADS[int(chance() * len(HEADS))]
            changed[at : at + len(head)] = head
        elif what == 4:
            changed[at:at] = HEADS[int(chance() * len(HEADS))]
        elif what == 5:
            end = at + int(chance() * 16)
            changed[at:at] = changed[at:end]
        elif what == 6:
            other = self.corpus[int(chance() * len(self.corpus))]
            changed[at:] = other[int(chance() * len(other)) :]
        elif chance() < 0.02:
            changed[at:at] = (b"\x91", b"\x81\xa1x")[int(chance() * 2)] * int(chance() * 20_000)
        else:
            changed[at:at] = self.random.randbytes(int(chance() * 12))
