"""Spoilt bodies of every route: each is read, or refused as a `BadBody`; nothing else happens."""

from __future__ import annotations

import copy
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from service_messages import recorded
from spoilt import BINARY, spoilt_bytes

from busrl.service.bodies import BODIES, BadBody, Sample, read_body
from busrl.service.sums import UserFault, check
from busrl.service.wire import MOST_DATA, digest, read_forward_backward, unpack

FEW, MANY = 300, 10_000
LIMIT = 1 << 16
ODD = [
    None, True, [], {}, "", "\n", "\ud800", "x" * 1000, 0, -1, 1, 2**31, 2**53, 2**63, 2**64, 10**300, -0.5, 1e308,
    [[]], [{}], {"": {}}, "NaN", "../..", "tinker://a/weights/b", [None], [1e9],
]


def texts(route: str) -> list[bytes]:
    bodies = [entry.body for entry in recorded(route)]
    return bodies or [b'{"request_id":"s:sample:0:1","type":"cancel_future"}']


# -- how bodies are spoilt -----


def spoilt_text(rng: random.Random, bodies: list[bytes]) -> bytes:
    """A body of JSON: as bytes, or with an odd value at one of its places."""
    if rng.random() < 0.4:
        return spoilt_bytes(rng, bodies)
    content = json.loads(rng.choice(bodies))
    for _ in range(rng.choice([1, 1, 2])):
        holder, key = rng.choice(list(places(content)) or [(content, "type")])
        kind = rng.randrange(4)
        if kind == 0 and isinstance(holder, dict):
            holder.pop(key, None)
        elif kind == 1 and isinstance(holder, dict):
            holder[rng.choice(["later", "", key * 3])] = copy.deepcopy(rng.choice(ODD))
        else:
            holder[key] = copy.deepcopy(rng.choice(ODD))
    return json.dumps(content).encode()


def places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Each holder with each of its keys."""
    entries = content.items() if isinstance(content, dict) else enumerate(content if isinstance(content, list) else ())
    for key, value in entries:
        yield content, key
        yield from places(value)


# -- what may come of them -----


def read_binary(body: bytes) -> None:
    asked = read_forward_backward(body)
    assert asked.model_id and 0 < asked.seq_id < 2**31 and 0 < len(asked.data) <= MOST_DATA
    digest("forward_backward", asked)
    try:
        check(asked.data, asked.loss_fn, asked.config, context=64, vocabulary=512)
    except UserFault as fault:
        assert len(str(fault)) < 2000


def read_text(route: str) -> Callable[[bytes], None]:
    def read(body: bytes) -> None:
        asked = read_body(BODIES[route], body)
        digest(route, asked)
        if isinstance(asked, Sample):
            ids = asked.prompt.ids(vocabulary=512, context=64)
            assert ids.min() >= 0 and ids.max() < 512

    return read


def try_all(
    read: Callable[[bytes], None], spoil: Callable[[random.Random, list[bytes]], bytes], bodies: list[bytes], count: int
) -> None:
    for body in bodies:
        read(body)
    rng, refused = random.Random(36), 0
    for _ in range(count):
        body = spoil(rng, bodies)
        try:
            read(body)
        except BadBody as problem:
            refused += 1
            assert len(str(problem)) < 2000 and str(problem).count("\n") == 0, problem
        except BaseException:
            print("the body:", body[:2000])
            raise
    assert count / 20 < refused < count, f"{refused} of {count} were refused: most bodies shall be near a right one"


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_spoilt_protobuf_is_read_or_refused(count: int) -> None:
    try_all(read_binary, spoilt_bytes, BINARY, count)


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("route", [*BODIES])
def test_spoilt_json_is_read_or_refused(route: str, count: int) -> None:
    try_all(read_text(route), spoilt_text, texts(route), count)


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_spoilt_zstd_is_unpacked_or_refused(count: int) -> None:
    zstandard = pytest.importorskip("zstandard")
    packed = [zstandard.ZstdCompressor().compress(body) for body in (*BINARY, bytes(2 * LIMIT), bytes(LIMIT))]

    def read(body: bytes) -> None:
        assert len(unpack(body, LIMIT)) <= LIMIT

    for body in packed[: len(BINARY)]:
        read(body)
    try_all(read, spoilt_bytes, packed[: len(BINARY)], count)
    try_all(read, spoilt_bytes, packed[-1:], count)
