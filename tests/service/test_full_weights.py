"""A whole service that trains all weights: real processes, a client over HTTP, kills, exports and a second client."""

from __future__ import annotations

import itertools
import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
from service_messages import read_forward_backward_result
from test_a_service import Client, service, supervised, train

from busrl.service.audit import audit

FULL = 'tinker.weights="full"'
DATA = [5, 6, 7, 9, 8]


def learn(client: Client, model: str, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        future = client.forward_backward(model, *[supervised([5, 6, 7, 8, 9])] * 4)
        client.result(client.step(model))
        losses.append(read_forward_backward_result(client.result(future))[1]["loss:sum"])
    return losses


def path_of(client: Client, op: str, model: str, path: str, **more: Any) -> str:
    """The path that a request about saved weights is answered with."""
    body = {"model_id": model, "seq_id": client.next_number(model), "path": path, **more}
    status, future = client.post(op, json.dumps(body).encode())
    assert status == 200, future
    return str(json.loads(client.result(json.loads(future)))["path"])


@pytest.mark.long
def test_a_client_trains_all_weights_and_samples_what_it_trained(tmp_path: Path, quickstart: None) -> None:
    with service(tmp_path / "run", FULL) as (run, client):
        base = client.ask_get("get_server_capabilities")["supported_models"][0]["model_name"]
        untrained = client.ask("create_sampling_session", session_id=client.session, sampling_session_seq_id=9,
                               base_model=base)["sampling_session_id"]
        before = client.sample(untrained, 0, [5, 6, 7, 8, 9], prompt_logprobs=True)[1]["logprobs"]
        model = client.model()
        info = client.ask("get_info", model_id=model)
        assert (info["is_lora"], info["lora_rank"]) == (False, None)
        losses = learn(client, model, 6)
        assert losses[-1] < 0.5 * losses[0]
        sampler = client.sampler(model, 0)
        _, scores = client.sample(sampler, 0, [5, 6, 7, 8, 9], prompt_logprobs=True)
        outputs, _ = read_forward_backward_result(
            client.result(client.forward_backward(model, supervised([5, 6, 7, 8, 9]), only=True)))
        np.testing.assert_allclose(scores["logprobs"][1:], outputs[0]["logprobs"], atol=1e-4)
        np.testing.assert_array_equal(  # the engine reads the base again
            client.sample(untrained, 1, [5, 6, 7, 8, 9], prompt_logprobs=True)[1]["logprobs"], before)
        paths = [path_of(client, op, model, "one") for op in
                 ("save_weights", "save_weights_for_sampler", "save_weights_external")]
        assert client.ask("weights_info", tinker_path=paths[0])["is_lora"] is False
        exported = [export(run.directory, path, tmp_path / f"out{number}") for number, path in enumerate(paths)]
        downloaded = download(client, model, tmp_path / "downloaded")
    assert exported[0] == exported[1] == exported[2] == downloaded


def export(run_dir: Path, path: str, out: Path) -> bytes:
    """The weights that `busrl export` writes."""
    done = commands.busrl("export", run_dir, path, "--out", out)
    assert done.returncode == 0, done.stderr
    return (out / "model.safetensors").read_bytes()


def download(client: Client, model: str, out: Path) -> bytes:
    """The weights that a client downloads from the door."""
    told = client.ask_get(f"training_runs/{model}/checkpoints/external_weights/one/external_weights_urls")["urls"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= told.keys()
    with urllib.request.urlopen(told["model.safetensors"]) as answer:
        return bytes(answer.read())


@pytest.mark.long
def test_kills_of_every_process_change_no_number_of_full_weights(tmp_path: Path, quickstart: None) -> None:
    steps = 4
    with service(tmp_path / "calm", FULL) as (_, client):
        calm = train(client, steps)
    with service(tmp_path / "rough", FULL, "tinker.state_every_s=0", "limits.crash_attempts=100",
                 "limits.restart_attempts=100") as (run, client):
        names, result = itertools.cycle(["tuner", "rollout/0", "tinker", "tuner", "bus", "launch"]), client.result

        def killing(future: Any) -> bytes:
            name = next(names)
            if name == "launch":
                run.kill_launch()
                run.start()
            else:
                pid = run.until(f"{name} was there", lambda: run.pid(name))
                os.kill(pid, signal.SIGKILL)
            return result(future)

        client.result = killing  # type: ignore[method-assign]
        rough = train(client, steps)
    assert rough == calm
    audited = audit(tmp_path / "rough")
    assert audited is not None and audited.errors == []


@pytest.mark.long
def test_a_second_model_is_refused_until_the_first_one_is_over(tmp_path: Path, quickstart: None) -> None:
    with service(tmp_path / "run", FULL) as (run, client):
        base = client.ask_get("get_server_capabilities")["supported_models"][0]["model_name"]
        model = client.model()
        first = learn(client, model, 2)
        path = path_of(client, "save_weights", model, "kept")
        client.forward_backward(model, supervised(DATA))  # waits when its session ends, and is answered
        other = Client(run, call="another")
        asked = {"session_id": other.session, "model_seq_id": 0, "base_model": base}
        status, words = other.post("create_model", json.dumps(asked).encode())
        assert status == 400 and b"one model at a time" in words and model.encode() in words
        client.post(f"sessions/{client.session}/finish", json.dumps({"reason": {"type": "success"}}).encode())
        later = other.model()
        assert learn(other, later, 2) == first
        body = json.dumps({"model_id": model, "seq_id": client.next_number(model), "adam_params": {}}).encode()
        status, words = client.post("optim_step", body)
        assert status == 400 and b"is over" in words
        assert path_of(other, "load_weights", later, path, optimizer=True) == path
        assert learn(other, later, 1)[0] < first[1]
    audited = audit(tmp_path / "run")
    assert audited is not None and audited.errors == []
