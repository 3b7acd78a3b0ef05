"""A door towards clients whose service died, that ask again for something else, vanish, or ended their session."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from service_messages import datum, request
from test_door import LORA, OTHER, Client, served, step, whole, wish, with_other

from busrl.service import routes
from busrl.service.routes import BODY_BYTES


def session_of(id: str) -> str:
    return id.partition(":")[0]


def shown(client: Client) -> None:
    client.desk.census.show(client.desk.registry)


def test_a_service_that_was_away_costs_no_client_its_place(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model = (await client.post("create_model", whole(await client.session())))[1]["model_id"]
        shown(client)
        seen = json.loads(client.where.clients_shown.read_text())  # the service was down for an hour
        seen["time"] -= 3600
        for session in seen["sessions"].values():
            session["heard"] -= 3600
        client.where.clients_shown.write_text(json.dumps(seen))
        await client.again()
        status, words = await client.post("create_model", whole(await client.session(OTHER)), OTHER)
        assert status == 400 and "another key's model" in words["detail"]
        assert (await client.post("optim_step", step(model, 1)))[0] == 200

    served(tmp_path, play, key=with_other(), weights="full", session_s=1800.0)


def test_a_door_that_dies_at_once_costs_no_client_its_place(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        await client.post("create_model", whole(await client.session()))
        await client.again()  # before any file for people was written
        status, words = await client.post("create_model", whole(await client.session(OTHER)), OTHER)
        assert status == 400 and "another key's model" in words["detail"]

    served(tmp_path, play, key=with_other(), weights="full")


def test_who_was_silent_before_the_door_died_has_no_place_after_it(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        await client.post("create_model", whole(await client.session()))
        shown(client)
        seen = json.loads(client.where.clients_shown.read_text())
        for session in seen["sessions"].values():
            session["heard"] -= 3600
        client.where.clients_shown.write_text(json.dumps(seen))
        await client.again()
        assert (await client.post("create_model", whole(await client.session(OTHER)), OTHER))[0] == 200

    served(tmp_path, play, key=with_other(), weights="full", session_s=1800.0)


def test_a_number_that_stands_for_something_else_is_refused(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model = await client.model()
        session = session_of(model)
        asked = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": LORA}
        assert (await client.post("create_model", asked))[0] == 200
        status, words = await client.post("create_model", {**asked, "lora_config": {**LORA, "rank": 32}})
        assert status == 400 and "model_seq_id 0 stands for another one" in words["detail"]
        path = client.save(model, 1, "sampler_weights", "a")
        asked = {"session_id": session, "sampling_session_seq_id": 3, "base_model": "tiny"}
        assert [(await client.post("create_sampling_session", asked))[0] for _ in range(2)] == [200, 200]
        status, words = await client.post("create_sampling_session", {**asked, "model_path": path})
        assert status == 400 and "made with the base" in words["detail"]
        save = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 3}
        assert (await client.post("save_weights_for_sampler", save))[0] == 200
        refused = client.logged()[-1]
        assert refused.kind == "refused" and "another sampler's" in refused.about["why"]
        save |= {"seq_id": 2, "sampling_session_seq_id": 4}
        assert [(await client.post("save_weights_for_sampler", save))[0] for _ in range(2)] == [200, 200]
        assert client.logged()[-1].kind == "training"

    served(tmp_path, play)


def test_nothing_new_is_taken_for_a_session_that_has_ended(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model, sampler = await client.model(), await client.sampler()
        assert (await client.post("optim_step", step(model, 1)))[0] == 200
        for id in (model, sampler):
            await client.post(f"sessions/{session_of(id)}/finish")
        status, words = await client.post("optim_step", step(model, 2))
        assert status == 410 and "has ended" in words["detail"]
        assert (await client.post("asample", wish(sampler, 0)))[0] == 410
        assert (await client.post("optim_step", step(model, 1)))[0] == 200, "it was taken before"

    served(tmp_path, play)


def test_clients_that_vanish_while_they_send_hold_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(client: Client) -> None:
        model, count = await client.model(), 40_000
        inputs = {"target_tokens": np.ones(count, np.int64), "weights": np.ones(count, np.float32)}
        large = request(datum(np.ones(count), **inputs), model=model, seq=1, loss="cross_entropy")
        gone = [await client.announced(size) for size in (*[BODY_BYTES] * 9, 10**14)]
        told = [int((await reader.readline()).split()[1]) for reader, _ in gone]
        assert sorted(told) == [408] * 8 + [413, 429]
        assert (await client.post("forward_backward", large))[0] == 200
        for _, writer in gone:
            writer.close()

    monkeypatch.setattr(routes, "IDLE_BODY_S", 0.2)
    served(tmp_path, play, context=100_000)


def test_a_forward_alone_that_is_refused_is_logged_as_such(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model = await client.model()
        wrong = datum([1, 2], target_tokens=np.array([1, 2]))
        for seq, forward_only in ((1, True), (2, False)):
            body = request(wrong, model=model, seq=seq, loss="importance_sampling", forward_only=forward_only)
            assert (await client.post("forward_backward", body))[0] == 200
        assert [(asked.kind, asked.about.get("forward_only")) for asked in client.logged()[-2:]] == [
            ("refused", True), ("refused", None)]

    served(tmp_path, play)
