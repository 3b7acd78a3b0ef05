"""The routes of a service over HTTP: what is logged, when, and what clients are told."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from service_messages import datum, request

from busrl.ledger.wal import HEAD
from busrl.service import desk as desks
from busrl.service import door as doors
from busrl.service import figures
from busrl.service.desk import Desk
from busrl.service.door import Door
from busrl.service.folders import ServiceFolders
from busrl.service.keys import Keys, digest_of
from busrl.service.operations import write_folder
from busrl.service.registry import Sampler
from busrl.service.requests import Answer, LogReader, LogWriter, Request, segment_path, strip
from busrl.service.routes import BaseModel, Service
from busrl.service.upkeep import without_payload
from busrl.topology.schema import Tinker, TinkerKey

BASE = BaseModel("tiny", "qwen2", 100, tied_head=False)
LORA = {"rank": 4, "seed": 1, "train_attn": True, "train_mlp": True, "train_unembed": True}
PARTS = {"rank": 4, "seed": 1, "attn": True, "mlp": True, "unembed": True}
OTHER = "tml-other"


class NoEngine:
    """Requests for samples that stay under way."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self.stopped: list[tuple[str, int]] = []

    def begin(self, sampler: Sampler, seq: int, weights: int) -> None:
        self.begun.append((sampler.id, seq))

    def stop(self, name: tuple[str, int]) -> None:
        self.stopped.append(name)

    def stop_session(self, id: str) -> None:
        self.ended = id


class Client:
    """A client over HTTP, with the run's key unless another one is named."""

    def __init__(self, root: Path, base: BaseModel, **settings: Any) -> None:
        self.where, self._base, self.settings = ServiceFolders(root), base, Tinker(**settings)
        self.samples, self.warned, self.rung = NoEngine(), list[str](), 0

    async def open(self) -> None:
        self.desk = Desk(self.where, True, self.settings.keep_answers_s, self._ring)
        service = Service(self.desk, self.where, self.settings, self._base)
        keys = Keys("tml-right", self.settings)
        app = Door(service, self.samples, keys, self.warned.append).app()  # type: ignore[arg-type]
        self._server = TestServer(app, skip_url_asserts=True)
        await self._server.start_server(auto_decompress=False)  # as the role serves
        self._http = ClientSession()

    def _ring(self) -> None:
        self.rung += 1

    async def close(self) -> None:
        await self._http.close()
        await self._server.close()
        self.desk.close()

    async def again(self) -> None:
        """Another door in the place of this one."""
        await self.close()
        await self.open()

    async def post(self, path: str, body: Any = None, key: str = "tml-right", **headers: str) -> tuple[int, Any]:
        return await self.ask("POST", path, body, key, **headers)

    async def ask(
        self, method: str, path: str, body: Any = None, key: str = "tml-right", **headers: str
    ) -> tuple[int, Any]:
        data = body if isinstance(body, bytes | AsyncIterator) else json.dumps(body or {}).encode()
        url = self._server.make_url(f"/api/v1/{path}")
        async with self._http.request(method, url, data=data, headers={"X-API-Key": key, **headers}) as response:
            raw = await response.read()
            return response.status, json.loads(raw) if raw and response.content_type == "application/json" else raw

    async def spoken(self, *lines: bytes) -> int:
        """The status of a request without a body that is sent as it is."""
        reader, writer = await asyncio.open_connection(self._server.host, self._server.port)
        head = b"Host: here", b"X-API-Key: tml-right", b"Connection: close", b"Content-Length: 0"
        writer.write(b"\r\n".join((*lines, *head, b"", b"")))
        status = int((await reader.readline()).split()[1])
        writer.close()
        return status

    async def announced(self, size: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A body of that size, of which two bytes come."""
        reader, writer = await asyncio.open_connection(self._server.host, self._server.port)
        head = b"Host: here", b"X-API-Key: tml-right", b"Content-Length: %d" % size, b"", b"ab"
        writer.write(b"\r\n".join((b"POST /api/v1/forward_backward HTTP/1.1", *head)))
        return reader, writer

    async def redirected(self, path: str) -> tuple[int, str]:
        """Status and address of a redirection."""
        url = self._server.make_url(f"/api/v1/{path}")
        headers = {"X-API-Key": "tml-right"}
        async with self._http.get(url, headers=headers, allow_redirects=False) as response:
            return response.status, response.headers["Location"]

    async def fetch(self, url: str) -> tuple[int, bytes]:
        """A download without a key."""
        async with self._http.get(url) as response:
            return response.status, await response.read()

    async def session(self, key: str = "tml-right") -> str:
        return str((await self.post("create_session", key=key))[1]["session_id"])

    async def model(self, key: str = "tml-right") -> str:
        asked = {"session_id": await self.session(key), "model_seq_id": 0, "base_model": "tiny", "lora_config": LORA}
        return str((await self.post("create_model", asked, key))[1]["model_id"])

    async def sampler(self, key: str = "tml-right") -> str:
        asked = {"session_id": await self.session(key), "sampling_session_seq_id": 0, "base_model": "tiny"}
        return str((await self.post("create_sampling_session", asked, key))[1]["sampling_session_id"])

    def save(self, model: str, seq: int, kind: str, name: str) -> str:
        """Save as the tuner saves; the path."""
        folder = self.where.saved_as(model, kind, name)
        write_folder(folder, {"by": f"{model}:{seq}", "weights": 0, "adapter": PARTS}, lambda folder: None)
        return f"tinker://{model}/{kind}/{name}"

    def answer(self, id: str, seq: int, payload: bytes = b"{}", state: str = "done", weights: int = 0) -> None:
        """As the tuner answers."""
        log = LogWriter(self.where.answers)
        log.write(Answer(id, seq, b"", state, payload=payload, weights=weights))
        log.close()
        self.desk.follow()

    def logged(self) -> list[Request]:
        decode = msgspec.msgpack.Decoder(Request).decode
        return [decode(payload) for payload, _ in LogReader(self.where.requests).read()]


def served(root: Path, play: Callable[[Client], Awaitable[None]], base: BaseModel = BASE, **settings: Any) -> None:
    async def main() -> None:
        client = Client(root, base, **settings)
        await client.open()
        try:
            await asyncio.wait_for(play(client), 30)
        finally:
            await client.close()

    asyncio.run(main())


@pytest.fixture(autouse=True)
def short_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "HOLD_S", 0.05)
    monkeypatch.setattr(doors, "HOLD_MANY_S", 0.05)


def step(model: str, seq: int, rate: float = 0.1) -> dict[str, Any]:
    return {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": rate}}


def wish(sampler: str, seq: int, samples: int = 1, prompt: int = 1) -> dict[str, Any]:
    """A request for samples, with a prompt of so many tokens."""
    return {"sampling_session_id": sampler, "seq_id": seq, "num_samples": samples,
            "prompt": {"chunks": [{"tokens": [1] * prompt}]}}


def with_other(**limits: int) -> tuple[TinkerKey, ...]:
    return (TinkerKey(**{"name": "other", "digest": digest_of(OTHER), "models": 16, **limits}),)


def test_a_request_that_comes_again_is_logged_once(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model = await client.model()
        first = await client.post("optim_step", step(model, 1))
        assert first == await client.post("optim_step", step(model, 1)) == (
            200, {"request_id": f"{model}:1", "model_id": model})
        status, told = await client.post("optim_step", step(model, 1, 0.2))
        assert status == 400 and "was another one" in told["detail"]
        assert [request.kind for request in client.logged()] == ["session", "model", "training"]
        await client.again()
        assert first == await client.post("optim_step", step(model, 1))
        assert len(client.logged()) == 3

    served(tmp_path, play)


def test_a_wrong_request_with_a_number_fails_its_future(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model = await client.model()
        status, told = await client.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {"eps": 0}})
        assert (status, told["request_id"]) == (200, f"{model}:1")
        refused = client.logged()[-1]
        assert refused.kind == "refused" and "adam_params.eps" in refused.about["why"]
        status, _ = await client.post("forward_backward", b"\xff\xff")
        assert status == 400

    served(tmp_path, play)


def test_a_wait_ends_with_try_again_and_then_with_the_answer(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model = await client.model()
        await client.post("optim_step", step(model, 1))
        asked = {"request_id": f"{model}:1"}
        status, told = await client.post("retrieve_future", asked)
        assert (status, told["type"]) == (408, "try_again")
        client.answer(model, 1, b'{"metrics":{}}')
        assert await client.post("retrieve_future", asked) == (200, {"metrics": {}})
        await client.again()
        assert await client.post("retrieve_future", asked) == (200, {"metrics": {}})
        assert (await client.post("retrieve_future", {"request_id": f"{model}:2"}))[0] == 410

    served(tmp_path, play)


def test_a_large_answer_is_announced_where_the_client_allows(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model = await client.model()
        await client.post("optim_step", step(model, 1))
        client.answer(model, 1, b'"' + b"x" * (2 << 20) + b'"')
        asked = {"request_id": f"{model}:1", "allow_metadata_only": True}
        status, told = await client.post("retrieve_future", asked)
        assert (status, told) == (200, {"status": "complete_metadata", "response_payload_size": (2 << 20) + 2})

    served(tmp_path, play)


def test_the_creation_of_a_model_needs_no_tuner(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model = await client.model()
        status, told = await client.post("retrieve_future", {"request_id": f"{model}:0"})
        assert (status, told["model_id"]) == (200, model)

    served(tmp_path, play)


@pytest.mark.parametrize(("changed", "said"), [
    ({"base_model": "other"}, "other is not served here; tiny is"),
    ({"lora_config": {**LORA, "rank": 65}}, "1 to 64 are served"),
    ({"lora_config": {**LORA, "rank": 0}}, "lora_config.rank"),
    ({"lora_config": {**LORA, "train_attn": False, "train_mlp": False, "train_unembed": False}}, "trains no part"),
    ({"optimizer_config": {"type": "dimuon"}}, "dimuon"),
])
def test_a_model_that_is_not_served_is_refused_in_words(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    async def play(client: Client) -> None:
        asked = {"session_id": await client.session(), "model_seq_id": 0, "base_model": "tiny", "lora_config": LORA}
        status, told = await client.post("create_model", {**asked, **changed})
        assert status == 400 and said in told["detail"]
        assert len(client.logged()) == 1

    served(tmp_path, play)


def test_a_tied_head_is_not_adapted(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        asked = {"session_id": await client.session(), "model_seq_id": 0, "base_model": "tiny", "lora_config": LORA}
        status, told = await client.post("create_model", asked)
        assert status == 400 and "train_unembed=False" in told["detail"]

    served(tmp_path, play, BaseModel("tiny", "qwen2", 100, tied_head=True))


def test_a_wrong_key_is_refused_everywhere_but_at_the_health(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        for key in ("", "tml-wrong"):
            assert (await client.post("create_session", key=key))[0] == 401
        assert not client.logged()

    served(tmp_path, play)


@pytest.mark.parametrize("key", [b"\xff", "é".encode(), b"a\tb", "\U0001f600".encode()])
def test_the_key_of_a_call_is_of_plain_letters(key: bytes, tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        assert await client.spoken(b"POST /api/v1/create_session HTTP/1.1", b"X-Idempotency-Key: " + key) == 400
        assert client.warned == [] and client.logged() == []

    served(tmp_path, play)


@pytest.mark.parametrize("path", [
    "sessions/%ff", "samplers/%ff%00", "training_runs/%ff/checkpoints/weights/%ff/archive", "sessions?limit=%ff",
    "files/%ff/weights/%ff/%ff?expires=%ff&signature=%ff", "files/%ed%a0%80/weights/a/b?signature=%ed%a0%80",
    "files/\xff/weights/a/b?signature=\xff", "sessions/\xff",
])
def test_an_address_that_is_no_text_is_the_clients_fault(path: str, tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        for header in (b"Accept: \xff", b"X-API-Key: \xff", b"Content-Encoding: \xff"):
            assert 400 <= await client.spoken(f"GET /api/v1/{path} HTTP/1.1".encode("latin1"), header) < 500
            assert client.warned == []

    served(tmp_path, play)


def test_a_session_is_made_once_for_a_call(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        made = [await client.post("create_session", **{"X-Idempotency-Key": key}) for key in ("a", "a", "b")]
        assert made[0] == made[1] != made[2]
        session = made[0][1]["session_id"]
        assert (await client.post("session_heartbeat", {"session_id": session}))[0] == 200
        assert (await client.post(f"sessions/{session}/finish", {"reason": {"type": "success"}}))[0] == 204
        assert (await client.post("session_heartbeat", {"session_id": session}))[0] == 410
        assert (await client.post("session_heartbeat", {"session_id": "none"}))[0] == 404

    served(tmp_path, play)


def test_the_next_number_has_room_however_much_waits(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model = await client.model()
        big = {"user_metadata": {"text": "x" * 15_000}}
        saves = [{"model_id": model, "seq_id": seq, "path": f"n{seq}", **big} for seq in range(1, 200)]
        statuses = [(await client.post("save_weights", save))[0] for save in saves[1:]]
        assert set(statuses) == {200, 429}
        assert (await client.post("save_weights", saves[0]))[0] == 200
        assert (await client.post("save_weights", saves[1]))[0] == 200

    served(tmp_path, play, pending_mb=1)


def test_small_requests_that_wait_have_a_bound_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(client: Client) -> None:
        model, wrong = await client.model(), {"adam_params": {"eps": 0}}
        asked = [{"model_id": model, "seq_id": seq, **wrong} for seq in range(1, 8)]
        assert [(await client.post("optim_step", body))[0] for body in asked[2:]] == [200, 200, 200, 200, 429]
        assert [(await client.post("optim_step", body))[0] for body in asked[:2]] == [200, 429]
        client.answer(model, 1, state="user")
        assert [(await client.post("optim_step", body))[0] for body in asked[1:3]] == [200, 200]

    monkeypatch.setattr(doors, "MOST_WAITING", 4)
    served(tmp_path, play)


@pytest.mark.parametrize("name", ["x" * 1_000_000, "\0" * 1_000_000, "é" * 500_000])
def test_why_a_request_is_refused_is_told_in_few_words(name: str, tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model, ones = await client.model(), np.ones(2, np.float32)
        wrong = datum([1, 2], **{f"{number}{name}": ones for number in range(16)})
        right = datum([1, 2], target_tokens=np.array([2, 3]), weights=ones)
        bodies = [
            request(right, model=model, seq=1, loss=name), request(right, model=model, seq=2, config={name: name}),
            request(right, model=model, seq=3, config={"clip_low_threshold": name}),
            request(wrong, model=model, seq=4),
        ]
        assert [(await client.post("forward_backward", body))[0] for body in bodies] == [200] * 4
        assert [request.kind for request in client.logged()[2:]] == ["refused"] * 4
        assert max(len(request.about["why"].encode()) for request in client.logged()[2:]) < 2000

    served(tmp_path, play)


def test_an_ephemeral_save_makes_a_sampler(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model = await client.model()
        save = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 3}
        await client.post("save_weights_for_sampler", save)
        assert (await client.post("save_weights_for_sampler", {**save, "sampling_session_seq_id": 4}))[0] == 200
        sampler = f"{model.partition(':')[0]}:sample:3"
        assert list(client.desk.registry.samplers) == [sampler]
        asked = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [{"tokens": [1, 2]}]},
                 "num_samples": 2}
        status, told = await client.post("asample", asked)
        assert (status, told["sample_sequence_ids"]) == (200, [f"{sampler}:0:0", f"{sampler}:0:1"])
        assert (await client.post("asample", asked))[0] == 200
        assert client.samples.begun == [(sampler, 0)]
        assert (await client.post("asample", {**asked, "num_samples": 3}))[0] == 400
        assert (await client.post("cancel_future", {"request_id": f"{sampler}:0"}))[0] == 204
        assert client.samples.stopped == [(sampler, 0)]

    served(tmp_path, play)


def test_completions_keep_their_places_over_a_restart(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        sampler = await client.sampler()
        for seq in range(3):
            await client.post("asample", wish(sampler, seq))
        for seq in (2, 0):
            client.desk.answered(Answer(sampler, seq, b"", "done", proto=True, payload=b"p"))
        wanted = {"target": {"sampling_session_id": sampler}, "prev_cursor": 0}
        _, told = await client.post("retrieve_futures", wanted)
        assert [done["request_id"] for done in told["completions"]] == [f"{sampler}:2", f"{sampler}:0"]
        await client.again()
        _, told = await client.post("retrieve_futures", {**wanted, "prev_cursor": 1})
        assert [done["request_id"] for done in told["completions"]] == [f"{sampler}:0"]
        assert list(client.desk.under_way) == [(sampler, 1)]

    served(tmp_path, play)


def test_clones_of_a_sampler_get_numbers_that_are_never_given_again(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        asked = {"sampling_session_id": await client.sampler()}
        numbers = [(await client.post("join_sampling_session", asked))[1]["client_counter"]]
        await client.again()
        numbers.append((await client.post("join_sampling_session", asked))[1]["client_counter"])
        assert numbers == [1, 2]

    served(tmp_path, play)


def test_a_load_that_makes_a_model_is_its_first_request(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model = await client.model()
        path = client.save(model, 1, "weights", "one")
        asked = {"session_id": model.partition(":")[0], "model_seq_id": 5, "optimizer": True}
        status, told = await client.post("load_weights", {**asked, "path": path})
        assert (status, told["request_id"].split(":")[1:]) == (200, ["train", "5", "0"])
        assert client.desk.registry.models[told["model_id"]].first == 0
        assert (await client.post("load_weights", {**asked, "path": f"tinker://{model}/weights/two"}))[0] == 404

    served(tmp_path, play)


def test_weights_info_tells_of_saved_weights_and_of_a_samplers_own(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model = await client.model()
        saved = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 4}
        assert (await client.post("save_weights_for_sampler", saved))[0] == 200
        sampler = f"{model.partition(':')[0]}:sample:4"
        own = (await client.ask("GET", f"samplers/{sampler}"))[1]["model_path"]
        named = client.save(model, 2, "weights", "one")
        for path in (own, named):
            status, told = await client.post("weights_info", {"tinker_path": path})
            assert (status, told["base_model"], told["lora_rank"], told["train_mlp"]) == (200, "tiny", 4, True)
        for path in (f"{own}1", f"tinker://{model}/sampler_weights/two", "tinker://nobody/weights/one", "one"):
            assert (await client.post("weights_info", {"tinker_path": path}))[0] == 404, path

    served(tmp_path, play)


def test_a_fault_of_the_service_is_no_5xx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(client: Client) -> None:
        async def broken(*_: object) -> web.Response:
            raise ZeroDivisionError("nobody foresaw it")

        monkeypatch.setattr(client.desk, "durable", broken)
        status, _ = await client.post("create_session")
        assert (status, client.warned) == (400, ["/api/v1/create_session: ZeroDivisionError: nobody foresaw it"])

    served(tmp_path, play)


def test_an_unknown_route_is_404_in_words(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        status, told = await client.post("nowhere")
        assert status == 404 and "nowhere" in told["detail"]

    served(tmp_path, play)


def test_what_another_key_made_does_not_exist(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model, sampler = await client.model(), await client.sampler()
        session, path = model.partition(":")[0], client.save(model, 1, "weights", "one")
        await client.post("optim_step", step(model, 1))
        saved = {"path": path, "optimizer": True}
        asked = {
            "session_heartbeat": {"session_id": session}, f"sessions/{session}/finish": {},
            "create_model": {"session_id": session, "model_seq_id": 1, "base_model": "tiny", "lora_config": LORA},
            "get_info": {"model_id": model}, "optim_step": step(model, 2), "weights_info": {"tinker_path": path},
            "load_weights": {**saved, "session_id": await client.session(OTHER), "model_seq_id": 0},
            "join_sampling_session": {"sampling_session_id": sampler}, "asample": wish(sampler, 0),
            "retrieve_futures": {"target": {"sampling_session_id": sampler}},
        }
        for route, body in asked.items():
            assert (await client.post(route, body, OTHER))[0] == 404, route
        assert (await client.post("retrieve_future", {"request_id": f"{model}:1"}, OTHER))[0] == 410
        assert (await client.ask("GET", f"samplers/{sampler}", key=OTHER))[0] == 404
        assert (await client.ask("GET", f"samplers/{sampler}"))[0] == 200

    served(tmp_path, play, key=with_other())


def test_a_load_of_what_is_anothers_fails_as_one_of_nothing(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model, path = await client.model(OTHER), client.save(await client.model(), 1, "weights", "one")
        asked = {"model_id": model, "seq_id": 1, "path": path, "optimizer": True}
        assert (await client.post("load_weights", asked, OTHER))[0] == 200  # its number is taken
        refused = client.logged()[-1]
        assert (refused.kind, refused.about["why"]) == ("refused", f"{path} does not exist")

    served(tmp_path, play, key=with_other())


def test_the_keys_of_a_call_are_told_apart_by_their_owner(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        call = {"X-Idempotency-Key": "a call"}
        made = [await client.post("create_session", key=key, **call) for key in ("tml-right", OTHER)]
        assert made[0][0] == made[1][0] == 200 and made[0][1] != made[1][1]

    served(tmp_path, play, key=with_other())


def test_a_key_has_its_own_limits(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        sampler, model = await client.sampler(OTHER), await client.model(OTHER)
        asked = {"session_id": model.partition(":")[0], "model_seq_id": 1, "base_model": "tiny", "lora_config": LORA}
        status, told = await client.post("create_model", asked, OTHER)
        assert status == 400 and "the 1 models of other" in told["detail"]
        await client.model()
        statuses = [(await client.post("asample", wish(sampler, seq, 3), OTHER))[0] for seq in range(2)]
        assert statuses == [200, 429]
        client.desk.answered(Answer(sampler, 0, b"", "done", proto=True, payload=b"p"))
        assert (await client.post("asample", wish(sampler, 1, 5), OTHER))[0] == 200  # alone, however many
        assert (await client.post("client/config", key=OTHER))[1]["sample_max_concurrent_requests"] == 4

    served(tmp_path, play, key=with_other(models=1, samples_in_flight=4))


def test_models_of_a_session_that_has_ended_make_room(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model = await client.model()
        asked = {"session_id": await client.session(), "model_seq_id": 0, "base_model": "tiny", "lora_config": LORA}
        assert (await client.post("create_model", asked))[0] == 400
        await client.post(f"sessions/{model.partition(':')[0]}/finish")
        assert (await client.post("create_model", asked))[0] == 200
        assert (await client.post("get_info", {"model_id": model}))[0] == 200  # it is there all the same

    served(tmp_path, play, models=1)


def test_tokens_of_a_day_are_counted_over_a_restart(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        sampler, model = await client.sampler(OTHER), await client.model(OTHER)
        await client.post("asample", wish(sampler, 0, prompt=5), OTHER)
        client.desk.answered(Answer(sampler, 0, b"", "done", proto=True, payload=b"p", tokens=7))
        assert client.desk.tokens_today("other") == 12
        await client.again()
        assert client.desk.tokens_today("other") == 12
        data = datum([1, 2, 3], target_tokens=np.array([2, 3, 4]), weights=np.ones(3, np.float32))
        body = request(data, model=model, seq=1, loss="cross_entropy")
        assert (await client.post("forward_backward", body, OTHER))[0] == 200
        assert client.desk.tokens_today("other") == 15
        assert (await client.post("asample", wish(sampler, 1), OTHER))[0] == 429
        assert (await client.post("asample", wish(sampler, 0, prompt=5), OTHER))[0] == 200  # which is known
        assert (await client.post("optim_step", step(model, 2), OTHER))[0] == 429

    served(tmp_path, play, key=with_other(tokens_per_day=15))


def test_an_answer_is_forgotten_after_it_was_fetched(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model, now = await client.model(), time.monotonic()
        for seq in (1, 2):
            await client.post("optim_step", step(model, seq))
            client.answer(model, seq)
        futures = [{"request_id": f"{model}:{seq}"} for seq in (1, 2)]
        assert (await client.post("retrieve_future", futures[0]))[0] == 200
        client.desk.expire(now + desks.KEEP_FETCHED_S - 1)
        assert (await client.post("retrieve_future", futures[0]))[0] == 200
        client.desk.expire(now + desks.KEEP_FETCHED_S + 60)
        assert [(await client.post("retrieve_future", future))[0] for future in futures] == [410, 200]
        status, words = await client.post("optim_step", step(model, 1))
        assert status == 400 and "request 1" in words["detail"] and "is past" in words["detail"]
        assert [*client.desk.registry.models[model].requests] == [2]

    served(tmp_path, play)


def test_an_answer_that_nobody_fetches_is_forgotten(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model, sampler, now = await client.model(), await client.sampler(), time.monotonic()
        await client.post("optim_step", step(model, 1))
        client.answer(model, 1)
        await client.post("asample", wish(sampler, 0))
        client.desk.answered(Answer(sampler, 0, b"", "done", proto=True, payload=b"p"))
        client.desk.expire(now + 160)
        for future in (f"{model}:1", f"{sampler}:0"):
            assert (await client.post("retrieve_future", {"request_id": future}))[0] == 410
        told = (await client.post("retrieve_futures", {"target": {"sampling_session_id": sampler}}))[1]
        assert told == {"cursor": 1, "completions": []}
        assert (await client.post("asample", wish(sampler, 0)))[0] == 400  # which is not drawn again

    served(tmp_path, play, keep_answers_s=100.0)


def test_a_list_of_completions_stays_in_order_behind_those_that_were_forgotten(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        sampler, listed, cursor = await client.sampler(), list[str](), 0
        for seq in range(12):
            await client.post("asample", wish(sampler, seq))
            client.desk.answered(Answer(sampler, seq, b"", "done", proto=True, payload=b"p"))
            asked = {"target": {"sampling_session_id": sampler}, "prev_cursor": cursor}
            told = (await client.post("retrieve_futures", asked))[1]
            cursor, new = told["cursor"], [done["request_id"] for done in told["completions"]]
            listed += new
            for name in new:
                await client.post("retrieve_future", {"request_id": name})
            if seq % 3 == 2:
                client.desk.expire(time.monotonic() + desks.KEEP_FETCHED_S + 1)
                assert client.desk.registry.samplers[sampler].requests == {}
        assert cursor == 12 and listed == [f"{sampler}:{seq}" for seq in range(12)]

    served(tmp_path, play)


def test_a_sampler_outlives_the_answer_of_its_save(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model = await client.model()
        await client.post("save_weights_for_sampler", {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 3})
        client.answer(model, 1, weights=1)
        client.desk.expire(time.monotonic() + 1000)
        assert client.desk.found((model, 1)) is not None

    served(tmp_path, play, keep_answers_s=100.0)


@pytest.mark.parametrize(("session_s", "status"), [(1800.0, 400), (1e-9, 200)])
def test_a_session_that_fell_silent_makes_room_for_another(
    session_s: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(client: Client) -> None:
        first = await client.session()
        assert (await client.post("create_session"))[0] == status
        assert (await client.post("session_heartbeat", {"session_id": first}))[0] == 200

    monkeypatch.setattr(doors, "MOST_SESSIONS", 1)
    served(tmp_path, play, session_s=session_s)


def test_the_tuner_is_woken_for_what_it_executes_alone(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model, sampler = await client.model(), await client.sampler()
        await client.post("asample", wish(sampler, 0))
        assert client.rung == 0
        await client.post("optim_step", step(model, 1))
        await client.post("optim_step", step(model, 1))
        assert client.rung == 1

    served(tmp_path, play)


def test_a_sampler_whose_weights_are_gone_says_so_at_once(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model = await client.model()
        save = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 3}
        await client.post("save_weights_for_sampler", save)
        sampler = f"{model.partition(':')[0]}:sample:3"
        client.where.snapshot(1).mkdir(parents=True)
        client.answer(model, 1, weights=1)
        assert (await client.post("asample", wish(sampler, 0)))[0] == 200
        client.where.snapshot(1).rmdir()
        status, told = await client.post("asample", wish(sampler, 1))
        assert status == 404 and "ephemeral-1 are gone" in told["detail"]
        assert (await client.post("asample", wish(sampler, 0)))[0] == 200  # which was taken before

    served(tmp_path, play)


@pytest.mark.parametrize(("version", "warned"), [("0.38.0", False), ("", False), ("0.99.0", True)])
def test_a_version_of_the_sdk_that_nobody_tried_is_named(version: str, warned: bool, tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        status, told = await client.post("create_session", {"sdk_version": version})
        assert status == 200 and ("0.99.0" in told.get("warning_message", "")) == warned

    served(tmp_path, play)


def test_data_that_no_loss_reads_fails_its_future_at_the_door(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model = await client.model()
        wrong = datum(np.array([5, 6], np.int32), target_tokens=np.array([6, 700]), weights=np.ones(2, np.float32))
        body = request(wrong, model=model, loss="cross_entropy")
        for _ in range(2):
            assert (await client.post("forward_backward", body))[1]["request_id"] == f"{model}:1"
        refused = client.logged()[-1]
        assert (refused.kind, refused.seq, refused.body) == ("refused", 1, b"")
        assert "token 700 in target_tokens" in refused.about["why"]
        status, _ = await client.post("forward_backward", request(wrong, model=model, seq=2, loss="guess"))
        assert status == 200 and "loss 'guess' is not served" in client.logged()[-1].about["why"]

    served(tmp_path, play)


def test_an_answer_that_is_kept_no_longer_is_gone(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model = await client.model()
        await client.post("optim_step", step(model, 1))
        client.answer(model, 1)
        segment_path(client.where.answers, 2).write_bytes(HEAD)
        strip(client.where.answers, 1, Answer, without_payload)
        for _ in range(2):
            status, told = await client.post("retrieve_future", {"request_id": f"{model}:1"})
            assert status == 410 and "tinker.keep_answers_s" in told["detail"]
            await client.again()

    served(tmp_path, play)


@pytest.mark.parametrize(("host", "compresses"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_clients_on_other_machines_compress_large_bodies(tmp_path: Path, host: str, compresses: bool) -> None:
    pytest.importorskip("zstandard")

    async def play(client: Client) -> None:
        assert (await client.post("client/config"))[1]["proto_compress_fwdbwd"] is compresses

    served(tmp_path, play, host=host)


# -- all weights -----


def whole(session: str, number: int = 0, **more: Any) -> dict[str, Any]:
    return {"session_id": session, "model_seq_id": number, "base_model": "tiny", **more}


def test_a_model_of_all_weights_is_no_adapter_whatever_its_client_sends(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        made = (await client.post("create_session"))[1]
        assert "all weights of tiny" in made["info_message"]
        asked = whole(made["session_id"], lora_config={**LORA, "rank": 1000})
        model = (await client.post("create_model", asked))[1]["model_id"]
        assert (await client.post("create_model", asked))[0] == 200  # the call came again
        info = (await client.post("get_info", {"model_id": model}))[1]
        assert (info["is_lora"], info["lora_rank"]) == (False, None)
        run = (await client.ask("GET", f"training_runs/{model}"))[1]
        assert (run["is_lora"], run["lora_rank"]) == (False, None)

    served(tmp_path, play, BaseModel("tiny", "qwen2", 100, tied_head=True), weights="full")


def test_one_model_has_all_weights_until_its_session_ends(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        sessions = [await client.session() for _ in range(2)]
        model = (await client.post("create_model", whole(sessions[0])))[1]["model_id"]
        assert (await client.post("optim_step", step(model, 1)))[0] == 200
        for session, number in ((sessions[0], 1), (sessions[1], 0)):
            status, words = await client.post("create_model", whole(session, number))
            assert status == 400 and "one model at a time" in words["detail"] and model in words["detail"]
        await client.post(f"sessions/{sessions[0]}/finish", {"reason": {"type": "success"}})
        later = (await client.post("create_model", whole(sessions[1])))[1]["model_id"]
        assert (await client.post("optim_step", step(model, 1)))[0] == 200  # which is known
        status, words = await client.post("optim_step", step(model, 2))
        assert status == 400 and f"{model} is over" in words["detail"]
        assert (await client.post("optim_step", step(later, 1)))[0] == 200

    served(tmp_path, play, weights="full")


def test_the_model_of_another_key_is_not_named(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        await client.post("create_model", whole(await client.session()))
        status, words = await client.post("create_model", whole(await client.session(OTHER)), OTHER)
        assert status == 400 and "another key's model" in words["detail"]

    served(tmp_path, play, key=with_other(), weights="full")


def test_a_silent_client_gives_up_the_place_of_all_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(client: Client) -> None:
        first, second = await client.session(), await client.session()
        await client.post("create_model", whole(first))
        later = SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + 101)  # it was heard so long ago
        monkeypatch.setattr(figures, "time", later)
        assert (await client.post("create_model", whole(second)))[0] == 200

    served(tmp_path, play, session_s=100.0, weights="full")


def test_an_adapter_is_not_loaded_into_all_weights(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        adapter = await client.model()
        body = {"model_id": adapter, "seq_id": 1, "path": "one"}
        await client.post("save_weights", body)
        path = client.save(adapter, 1, "weights", "one")
        client.settings = Tinker(weights="full")
        await client.again()
        await client.post(f"sessions/{adapter.partition(':')[0]}/finish", {"reason": {"type": "success"}})
        asked = {**whole(await client.session()), "path": path, "optimizer": True}
        status, words = await client.post("load_weights", asked)
        assert status == 400 and 'tinker.weights = "adapters"' in words["detail"]

    served(tmp_path, play)


def test_an_adapter_needs_the_settings_of_one(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        status, words = await client.post("create_model", whole(await client.session()))
        assert status == 400 and "lora_config is missing" in words["detail"]

    served(tmp_path, play)
