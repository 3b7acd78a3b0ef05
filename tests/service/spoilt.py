"""Bodies of forward_backward, and a way to spoil the bytes of any body."""

from __future__ import annotations

import random

import numpy as np
from service_messages import compressed, datum, recorded, request

MATRIX = np.array([[6, 0, 3], [7, 0, 0]])
BINARY = [entry.body for entry in recorded("forward_backward") if not entry.encoding] + [
    request(datum([1, 2], target_tokens=compressed(MATRIX), weights=compressed(MATRIX.astype(np.float32))), seq=5),
    request(*[datum([1], target_tokens=np.array([2]), mask=np.ones(1, np.float32))] * 5, config={"a": "b", "c": 1.0}),
]


def spoilt_bytes(rng: random.Random, bodies: list[bytes]) -> bytes:
    """A body with some bytes changed, cut out, put in twice, or taken from another."""
    body = bytearray(rng.choice(bodies))
    for _ in range(rng.choice([1, 1, 1, 2, 4, 16])):
        at, size = rng.randrange(len(body) + 1), rng.choice([1, 1, 2, 4, 8, 40])
        kind = rng.randrange(6)
        if kind == 0:
            body[at : at + size] = rng.randbytes(size)
        elif kind == 1:
            del body[at : at + size]
        elif kind == 2:
            body[at:at] = body[at : at + size] * rng.choice([1, 2, 50])
        elif kind == 3:
            other = rng.choice(bodies)
            start = rng.randrange(len(other))
            body[at:at] = other[start : start + size]
        elif kind == 4:
            body[at : at + 1] = rng.choice([b"\x00", b"\xff", b"\x7f", b"\x80", b"\xff" * 9 + b"\x01"])
        else:
            del body[at:]
    return bytes(body)
