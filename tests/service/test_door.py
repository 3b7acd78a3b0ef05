"""The routes of a service over HTTP: what is logged, when, and what clients are told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from busrl.service import door as doors
from busrl.service.desk import Desk
from busrl.service.door import BaseModel, Door, Service
from busrl.service.driver import write_folder
from busrl.service.folders import ServiceFolders
from busrl.service.registry import Sampler
from busrl.service.requests import Answer, LogReader, LogWriter, Request
from busrl.topology.schema import Tinker

BASE = BaseModel("tiny", "qwen2", 100, tied_head=False)
LORA = {"rank": 4, "seed": 1, "train_attn": True, "train_mlp": True, "train_unembed": True}
PARTS = {"rank": 4, "seed": 1, "attn": True, "mlp": True, "unembed": True}


class NoEngine:
    """Requests for samples that stay under way."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self.stopped: list[tuple[str, int]] = []

    @property
    def under_way(self) -> int:
        return len(self.begun)

    def begin(self, sampler: Sampler, seq: int) -> None:
        self.begun.append((sampler.id, seq))

    def stop(self, name: tuple[str, int]) -> None:
        self.stopped.append(name)


class Client:
    """A client over HTTP. `lives` counts the doors so far."""

    def __init__(self, root: Path, base: BaseModel, **settings: Any) -> None:
        self.where, self._base, self._settings = ServiceFolders(root), base, Tinker(**settings)
        self.samples, self.warned = NoEngine(), list[str]()

    async def open(self) -> None:
        self.desk = Desk(self.where, sync=True)
        service = Service(self.desk, self.where, self._settings, self._base)
        app = Door(service, self.samples, "tml-right", self.warned.append).app()  # type: ignore[arg-type]
        self._server = TestServer(app, skip_url_asserts=True)
        await self._server.start_server(auto_decompress=False)  # as the role serves
        self._http = ClientSession()

    async def close(self) -> None:
        await self._http.close()
        await self._server.close()
        self.desk.close()

    async def again(self) -> None:
        """Another door in the place of this one."""
        await self.close()
        await self.open()

    async def post(self, path: str, body: Any = None, key: str = "tml-right", **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        url = self._server.make_url(f"/api/v1/{path}")
        async with self._http.post(url, data=data, headers={"X-API-Key": key, **headers}) as response:
            raw = await response.read()
            return response.status, json.loads(raw) if raw and response.content_type == "application/json" else raw

    async def session(self) -> str:
        return str((await self.post("create_session"))[1]["session_id"])

    async def model(self) -> str:
        asked = {"session_id": await self.session(), "model_seq_id": 0, "base_model": "tiny", "lora_config": LORA}
        return str((await self.post("create_model", asked))[1]["model_id"])

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
        session = await client.session()
        asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampler = (await client.post("create_sampling_session", asked))[1]["sampling_session_id"]
        prompt = {"chunks": [{"tokens": [1]}]}
        for seq in range(3):
            await client.post("asample", {"sampling_session_id": sampler, "seq_id": seq, "prompt": prompt})
        for seq in (2, 0):
            client.desk.answered(Answer(sampler, seq, b"", "done", proto=True, payload=b"p"))
        wanted = {"target": {"sampling_session_id": sampler}, "prev_cursor": 0}
        _, told = await client.post("retrieve_futures", wanted)
        assert [done["request_id"] for done in told["completions"]] == [f"{sampler}:2", f"{sampler}:0"]
        await client.again()
        _, told = await client.post("retrieve_futures", {**wanted, "prev_cursor": 1})
        assert [done["request_id"] for done in told["completions"]] == [f"{sampler}:0"]
        assert list(client.desk.open_samples()) == [(sampler, 1)]

    served(tmp_path, play)


def test_clones_of_a_sampler_get_numbers_that_are_never_given_again(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        asked = {"session_id": await client.session(), "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampler = await client.post("create_sampling_session", asked)
        numbers = [(await client.post("join_sampling_session", sampler[1]))[1]["client_counter"]]
        await client.again()
        numbers.append((await client.post("join_sampling_session", sampler[1]))[1]["client_counter"])
        assert numbers == [1, 2]

    served(tmp_path, play)


def test_a_load_that_makes_a_model_is_its_first_request(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model = await client.model()
        write_folder(client.where.saved_as(model, "weights", "one"), {"by": f"{model}:1", "adapter": PARTS},
                     lambda folder: None)
        asked = {"session_id": model.partition(":")[0], "model_seq_id": 5, "optimizer": True}
        status, told = await client.post("load_weights", {**asked, "path": f"tinker://{model}/weights/one"})
        assert (status, told["request_id"].split(":")[1:]) == (200, ["train", "5", "0"])
        assert client.desk.registry.models[told["model_id"]].first == 0
        assert (await client.post("load_weights", {**asked, "path": f"tinker://{model}/weights/two"}))[0] == 404

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
        status, told = await client.post("training_runs")
        assert status == 404 and "training_runs" in told["detail"]

    served(tmp_path, play)
