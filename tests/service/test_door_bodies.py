"""Bodies on their way into a door: how many bytes of a key are in memory, whatever they come packed as."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from service_messages import datum, request, sparse
from test_door import OTHER, Client, served, with_other

from busrl.service import door as doors
from busrl.service import routes

ZSTD = {"Content-Encoding": "zstd"}


def test_large_bodies_of_a_key_are_bounded_and_hold_nobody_else_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(client: Client) -> None:
        large = b"{}".ljust(routes.BESIDE_BYTES + 2)

        async def slowly(rest: asyncio.Event) -> AsyncIterator[bytes]:
            yield large
            await rest.wait()

        status = 0
        while status != 429:  # until the door has seen the slow one first
            rest = asyncio.Event()
            under_way = asyncio.ensure_future(client.post("create_session", slowly(rest)))
            await asyncio.sleep(0)
            status, _ = await client.post("create_session", large)
            if status != 429:
                rest.set()
                await under_way
        assert (await client.post("create_session"))[0] == 200
        assert (await client.post("create_session", large, OTHER))[0] == 200
        rest.set()
        assert (await under_way)[0] == 200
        assert (await client.post("create_session", large))[0] == 200

    monkeypatch.setattr(routes, "MOST_READ_BYTES", routes.BESIDE_BYTES + 10)
    served(tmp_path, play, key=with_other())


def frame(size: int, tells_size: bool = True) -> bytes:
    """An empty session of so many bytes, as zstd."""
    zstandard = pytest.importorskip("zstandard")
    packed: bytes = zstandard.ZstdCompressor(write_content_size=tells_size).compress(b"{}".ljust(size))
    return packed


@pytest.fixture
def unpacking(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Bodies are unpacked once this is set."""
    go, unpack = threading.Event(), routes.unpack

    def later(body: bytes, limit: int) -> bytes:
        go.wait(20)
        return unpack(body, limit)

    monkeypatch.setattr(routes, "unpack", later)
    yield go
    go.set()


@pytest.mark.parametrize(("size", "tells_size", "taken"), [(2 << 20, True, 4), (1000, False, 2)])
def test_packed_bodies_of_a_key_count_with_what_they_unpack_to(
    size: int, tells_size: bool, taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    unpacking: threading.Event,
) -> None:
    async def play(client: Client) -> None:
        body = frame(size, tells_size)
        posts = [asyncio.ensure_future(client.post("create_session", body, **ZSTD)) for _ in range(taken + 2)]
        refused, _ = await asyncio.wait(posts, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        assert len(body) < 1000 and refused, "all of them are in memory"
        assert {post.result()[0] for post in refused} == {429}
        unpacking.set()
        assert sorted([(await post)[0] for post in posts]) == [200] * taken + [429] * 2
        assert (await client.post("create_session", body, **ZSTD))[0] == 200

    monkeypatch.setattr(routes, "MOST_READ_BYTES", 8 << 20)
    monkeypatch.setattr(routes, "BODY_BYTES", 4 << 20)
    served(tmp_path, play)


def test_a_small_body_that_unfolds_into_much_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, check, threads = threading.Event(), doors.check, list[bool]()

    def later(*args: Any) -> None:
        threads.append(threading.current_thread() is threading.main_thread())
        if not threads[-1]:
            go.wait(20)
        check(*args)

    async def play(client: Client) -> None:
        model = await client.model()
        few, many = (datum([1], target_tokens=sparse([7], [0, 1], [0], (1, width)),
                           weights=sparse(np.ones(1, np.float32), [0, 1], [0], (1, width))) for width in (20, 1 << 20))
        small, large = (request(part, model=model, seq=seq, loss="cross_entropy")
                        for seq, part in enumerate((few, many), 1))
        post = asyncio.ensure_future(client.post("forward_backward", large))
        assert len(large) < 1000 and (await client.post("forward_backward", small))[0] == 200
        go.set()
        assert (await post)[0] == 200
        assert [request.kind for request in client.logged()[2:]] == ["training", "training"]
        assert sorted(threads) == [False, True]

    monkeypatch.setattr(doors, "check", later)
    served(tmp_path, play)


def test_small_packed_bodies_are_all_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unpacking: threading.Event
) -> None:
    async def play(client: Client) -> None:
        posts = [asyncio.ensure_future(client.post("create_session", frame(2000), **ZSTD)) for _ in range(40)]
        posts.append(asyncio.ensure_future(client.post("create_session", frame(1 << 20), **ZSTD)))
        assert not (await asyncio.wait(posts, timeout=0.1, return_when=asyncio.FIRST_COMPLETED))[0]
        unpacking.set()
        assert {(await post)[0] for post in posts} == {200}

    monkeypatch.setattr(routes, "MOST_READ_BYTES", 1 << 20)
    served(tmp_path, play)


def test_bodies_are_read_by_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, now, most, unpack = threading.Lock(), 0, 0, routes.unpack

    def counted(body: bytes, limit: int) -> bytes:
        nonlocal now, most
        with lock:
            now, most = now + 1, max(most, now + 1)
        try:
            return unpack(body, limit)
        finally:
            with lock:
                now -= 1

    async def play(client: Client) -> None:
        asked = [client.post("create_session", frame(1 << 20), **ZSTD) for _ in range(12)]
        assert {status for status, _ in await asyncio.gather(*asked)} == {200}

    monkeypatch.setattr(routes, "unpack", counted)
    monkeypatch.setattr(routes, "READERS", 1)
    served(tmp_path, play)
    assert most == 1


@pytest.mark.parametrize("size", [1, 300, 1000, 1001, 5000])
def test_a_body_without_a_length_is_taken_up_to_the_bound(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(client: Client) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            body = b'{"session_id": "' + b"s" * size
            for at in range(0, size, 100):
                yield body[at : min(at + 100, size)]

        status, told = await client.post("session_heartbeat", pieces())
        assert (status, "Too Large" in told["detail"]) == ((413, True) if size > 1000 else (400, False))
        assert (await client.post("create_session"))[0] == 200

    monkeypatch.setattr(routes, "BODY_BYTES", 1000)
    served(tmp_path, play)
