"""Spoilt bodies for every route of a door: each gets an answer that the SDK can take, and other clients are served."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from service_messages import datum, recorded, request
from test_door import Client, served
from test_fuzz_bodies import spoilt_bytes, spoilt_text, texts

from busrl.service import door as doors
from busrl.service.bodies import BODIES

FEW, MANY, A_LIFE = 40, 10_000, 500
TAKEN = {200, 204, 400, 404, 408, 410, 413, 429}


@pytest.fixture(autouse=True)
def no_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "HOLD_S", 0.001)
    monkeypatch.setattr(doors, "HOLD_MANY_S", 0.001)


async def prepared(client: Client) -> tuple[str, str]:
    """A model that was saved, and a sampler of the base; their ids."""
    model = await client.model()
    session = model.partition(":")[0]
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    assert (await client.post("create_sampling_session", sampler))[0] == 200
    assert (await client.post("save_weights", {"model_id": model, "seq_id": 2000, "path": "one"}))[0] == 200
    client.save(model, 2000, "weights", "one")
    return model, session


def bodies_of(route: str, session: str) -> list[bytes]:
    """What the SDK sent, about things of that session."""
    if route == "forward_backward":
        ones = np.ones(2, np.float32)
        data = [datum([1, 2], target_tokens=np.array([2, 3]), weights=ones)] * 2
        return [request(*data, model=f"{session}:train:0", seq=seq, config={"beta": 0.5}) for seq in range(1, 9)]
    return [body.replace(b'"s1', b'"' + session.encode()) for body in texts(route)]


def numbered(bodies: list[bytes], rng: random.Random) -> Iterator[bytes]:
    """Bodies of JSON with other numbers, so that few come again."""
    while True:
        content: dict[str, Any] = json.loads(rng.choice(bodies))
        for name in {"seq_id", "model_seq_id", "sampling_session_seq_id"} & set(content):
            content[name] = rng.randrange(1, 1000)
        yield json.dumps(content).encode()


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
@pytest.mark.parametrize("route", [*BODIES, "forward_backward"])
def test_a_spoilt_body_is_answered_and_others_are_served(route: str, count: int, tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model, session = await prepared(client)
        path = route.replace("/S/", f"/{session}/").replace("/M/", f"/{model}/").replace("/C/", "/weights/one/")
        method, bodies = "PUT" if path.endswith("/ttl") else "POST", bodies_of(route, session)
        fresh = numbered(bodies, rng) if route in BODIES else None
        for _ in range(min(count, A_LIFE)):
            body = spoilt_text(rng, [next(fresh)]) if fresh else spoilt_bytes(rng, bodies)
            status, told = await client.ask(method, path, body)
            assert status in TAKEN, (status, told, body)
            assert status < 400 or status == 408 or told["detail"], (status, body)
        assert client.warned == [], "a fault of the service's own"
        assert (await client.post("get_info", {"model_id": model}))[0] == 200
        await client.again()  # which reads the whole log
        assert (await client.post("get_info", {"model_id": model}))[0] == 200

    rng = random.Random(36)
    for life in range(-(-count // A_LIFE)):
        served(tmp_path / str(life), play, samples_in_flight=1 << 20, models=1 << 16)


@pytest.mark.parametrize("encoding", ["zstd", "gzip", "br", "zstd, zstd"])
def test_a_body_in_another_encoding_is_refused_in_words(encoding: str, tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        status, told = await client.post("forward_backward", recorded("forward_backward")[0].body,
                                         **{"Content-Encoding": encoding})
        assert status == 400 and told["detail"] and client.warned == []

    served(tmp_path, play)
