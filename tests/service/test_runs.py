"""Lists of a service: sessions, runs and checkpoints of a key; their deletion, end of life and download."""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from test_door import OTHER, Client, served, with_other
from yarl import URL

from busrl.service import runs
from busrl.service.operations import write_folder
from busrl.service.runs import Checkpoints


async def saved(client: Client, model: str, seq: int, op: str, name: str, **more: Any) -> str:
    """Save as client and tuner do; the path."""
    status, _ = await client.post(op, {"model_id": model, "seq_id": seq, "path": name, **more})
    assert status == 200
    kind = {"save_weights": "weights", "save_weights_for_sampler": "sampler_weights"}.get(op, "external_weights")
    return client.save(model, seq, kind, name)


async def listed(client: Client, model: str) -> list[str]:
    status, told = await client.ask("GET", f"training_runs/{model}/checkpoints")
    assert status == 200
    return [checkpoint["checkpoint_id"] for checkpoint in told["checkpoints"]]


def sweep(client: Client) -> None:
    """As the door does now and then."""
    checkpoints = Checkpoints(client.desk, client.where)
    checkpoints.remove(checkpoints.over())


def test_a_run_is_listed_with_its_newest_checkpoints(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model = await client.model()
        await saved(client, model, 1, "save_weights", "one", user_metadata={"loss": "3"})
        await saved(client, model, 2, "save_weights", "two", ttl_seconds=3600)
        await saved(client, model, 3, "save_weights_for_sampler", "s")
        await client.post("save_weights", {"model_id": model, "seq_id": 4, "path": "not-yet"})
        assert sorted(await listed(client, model)) == ["sampler_weights/s", "weights/one", "weights/two"]
        (run,) = (await client.ask("GET", "training_runs"))[1]["training_runs"]
        assert (run["training_run_id"], run["model_owner"], run["lora_rank"]) == (model, "run", 4)
        assert run["last_checkpoint"]["tinker_path"] == f"tinker://{model}/weights/two"
        assert run["last_checkpoint"]["expires_at"] > run["last_request_time"]
        told = (await client.ask("GET", "checkpoints?limit=2&offset=1"))[1]
        assert told["cursor"] == {"offset": 1, "limit": 2, "total_count": 3}
        assert told["checkpoints"][-1]["user_metadata"] == {"loss": "3"}

    served(tmp_path, play)


def test_a_session_tells_what_was_made_in_it(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        asked = {"user_metadata": {"who": "me"}, "display_name": "a try"}
        session = (await client.post("create_session", asked))[1]["session_id"]
        sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        await client.post("create_sampling_session", sampler)
        await client.again()
        assert (await client.ask("GET", f"sessions/{session}"))[1] == {
            "training_run_ids": [], "sampler_ids": [f"{session}:sample:0"], "user_metadata": {"who": "me"},
            "display_name": "a try"}
        assert (await client.ask("GET", "sessions"))[1]["sessions"] == [session]

    served(tmp_path, play)


def test_a_checkpoint_is_deleted_once_and_for_all(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model = await client.model()
        path = await saved(client, model, 1, "save_weights", "one")
        route = f"training_runs/{model}/checkpoints/weights/one"
        for _ in range(2):  # the SDK repeats what it got no answer to
            assert (await client.ask("DELETE", route))[0] == 204
        assert not client.where.saved_as(model, "weights", "one").exists()
        client.save(model, 1, "weights", "one")  # a tuner that died before its state ran the save again
        await client.again()
        assert await listed(client, model) == []
        assert (await client.post("weights_info", {"tinker_path": path}))[0] == 404
        sweep(client)
        assert not client.where.saved_as(model, "weights", "one").exists()
        await saved(client, model, 2, "save_weights", "one")
        sweep(client)
        assert await listed(client, model) == ["weights/one"]

    served(tmp_path, play)


def test_weights_go_with_their_snapshot_when_their_time_is_over(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model = await client.model()
        await client.post("save_weights_for_sampler", {"model_id": model, "seq_id": 1, "path": "s", "ttl_seconds": 60})
        with_snapshot(client, model, 1, "s", 7)
        assert await listed(client, model) == ["sampler_weights/s"]
        client.desk.registry.models[model].saves[1].expires -= 100
        assert await listed(client, model) == []
        assert client.where.snapshot(7).exists()
        sweep(client)
        assert not client.where.snapshot(7).exists()

    served(tmp_path, play)


def test_a_time_to_live_is_set_and_taken_back(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model = await client.model()
        await saved(client, model, 1, "save_weights", "one")
        route = f"training_runs/{model}/checkpoints/weights/one/ttl"
        ends = []
        for seconds in (3600, None):
            assert (await client.ask("PUT", route, {"ttl_seconds": seconds}))[0] == 204
            await client.again()
            ends.append((await client.ask("GET", "checkpoints"))[1]["checkpoints"][0]["expires_at"])
        assert ends[0] is not None and ends[1] is None
        assert (await client.ask("PUT", route, {"ttl_seconds": 0}))[0] == 400

    served(tmp_path, play)


def with_snapshot(client: Client, model: str, seq: int, name: str, number: int) -> None:
    """Save for a sampler, with files, as the tuner does."""
    def fill(folder: Path) -> None:
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_bytes(b"numbers" * 100)

    write_folder(client.where.snapshot(number), {"by": f"{model}:{seq}"}, fill)
    folder = client.where.saved_as(model, "sampler_weights", name)
    write_folder(folder, {"by": f"{model}:{seq}", "weights": number, "adapter": {}}, lambda folder: None)


def test_an_archive_is_downloaded_by_a_signed_address(tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        model = await client.model()
        await client.post("save_weights_for_sampler", {"model_id": model, "seq_id": 1, "path": "s"})
        with_snapshot(client, model, 1, "s", 7)
        status, address = await client.redirected(f"training_runs/{model}/checkpoints/sampler_weights/s/archive")
        assert status == 302
        status, raw = await client.fetch(address)
        with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
            assert archive.getnames() == ["adapter_config.json", "adapter_model.safetensors"]
            assert archive.extractfile("adapter_model.safetensors").read() == b"numbers" * 100  # type: ignore[union-attr]
        other = URL(address).with_path(URL(address).path.replace("archive.tar", "adapter_config.json"))
        assert (await client.fetch(str(other)))[0] == 401
        assert (await client.fetch(str(URL(address).update_query(expires="9999999999"))))[0] == 401

    served(tmp_path, play)


def test_each_file_of_external_weights_has_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(client: Client) -> None:
        model = await client.model()
        await saved(client, model, 1, "save_weights_external", "out")
        folder = client.where.saved_as(model, "external_weights", "out")
        (folder / "adapter_config.json").write_text("{}")
        route = f"training_runs/{model}/checkpoints/external_weights/out/external_weights_urls"
        urls = (await client.ask("GET", route))[1]["urls"]
        assert list(urls) == ["adapter_config.json"]
        assert await client.fetch(urls["adapter_config.json"]) == (200, b"{}")
        monkeypatch.setattr(runs, "URL_S", -10.0)
        urls = (await client.ask("GET", route))[1]["urls"]
        assert (await client.fetch(urls["adapter_config.json"]))[0] == 401

    served(tmp_path, play)


class Pyrage(ModuleType):
    """As much of pyrage as is used: a cipher that turns bytes around."""

    class x25519:
        class Recipient:
            @staticmethod
            def from_str(text: str) -> str:
                if len(text) < 10:
                    raise ValueError("too short")
                return text

    @staticmethod
    def encrypt_file(path: str, out: str, recipients: list[str]) -> None:
        Path(out).write_bytes(Path(path).read_bytes()[::-1] + recipients[0].encode())


def test_files_are_encrypted_for_the_recipients_that_a_save_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(client: Client) -> None:
        model = await client.model()
        asked = {"age_encryption_recipients": ["age1recipient"]}
        await saved(client, model, 1, "save_weights_external", "out", **asked)
        (client.where.saved_as(model, "external_weights", "out") / "adapter_config.json").write_text("abc")
        route = f"training_runs/{model}/checkpoints/external_weights/out/external_weights_urls"
        urls = (await client.ask("GET", route))[1]["urls"]
        assert list(urls) == ["adapter_config.json.age"]
        assert await client.fetch(urls["adapter_config.json.age"]) == (200, b"cbaage1recipient")
        await client.again()  # whose end waits for that of each request
        assert not list(client.where.trash.iterdir())
        await client.post("save_weights_external",
                          {"model_id": model, "seq_id": 2, "path": "x", "age_encryption_recipients": ["age1"]})
        assert "'age1' is no recipient: too short" in client.logged()[-1].about["why"]

    monkeypatch.setitem(sys.modules, "pyrage", Pyrage("pyrage"))
    served(tmp_path, play)


def test_a_save_for_recipients_fails_where_nothing_can_encrypt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(client: Client) -> None:
        asked = {"model_id": await client.model(), "seq_id": 1, "path": "x", "age_encryption_recipients": ["age1a"]}
        assert (await client.post("save_weights_external", asked))[0] == 200  # its number is taken
        refused = client.logged()[-1]
        assert refused.kind == "refused" and "pyrage" in refused.about["why"]

    monkeypatch.setitem(sys.modules, "pyrage", None)
    served(tmp_path, play)


@pytest.mark.parametrize(("method", "route"), [
    ("GET", "sessions/{session}"), ("GET", "training_runs/{model}"), ("GET", "training_runs/{model}/checkpoints"),
    ("DELETE", "training_runs/{model}/checkpoints/weights/one"),
    ("PUT", "training_runs/{model}/checkpoints/weights/one/ttl"),
    ("GET", "training_runs/{model}/checkpoints/weights/one/external_weights_urls"),
])
def test_another_key_sees_and_ends_nothing(tmp_path: Path, method: str, route: str) -> None:
    async def play(client: Client) -> None:
        model = await client.model()
        await saved(client, model, 1, "save_weights", "one")
        path = route.format(model=model, session=model.partition(":")[0])
        assert (await client.ask(method, path, key=OTHER))[0] == 404
        for everything in ("sessions", "training_runs", "checkpoints"):
            assert (await client.ask("GET", everything, key=OTHER))[1][everything] == []
        assert await listed(client, model) == ["weights/one"]

    served(tmp_path, play, key=with_other())


@pytest.mark.parametrize("query", ["limit=-1", "limit=x", "offset=-1", "limit=1001"])
def test_a_page_that_is_none_is_refused(query: str, tmp_path: Path) -> None:
    async def play(client: Client) -> None:
        status, told = await client.ask("GET", f"training_runs?{query}")
        assert status == 400 and "limit" in told["detail"]

    served(tmp_path, play)
