"""A whole service: real processes, a client over HTTP, and kills of each process while it trains and samples."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import shutil
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import ROOT, Run, running
from replays import Answers
from service_messages import compressed, datum, read_forward_backward_result, read_sample_result, request, tensor

from busrl.quickstart import ensure
from busrl.service.keys import digest_of
from busrl.service.overview import overview

CONFIG = ROOT / "configs" / "tinker.toml"
LORA = {"rank": 4, "seed": 7, "train_unembed": False}
PROMPT = [5, 6, 7, 8]
PATIENCE_S = 120.0
LONG = 4000  # tokens that take seconds


class Client:
    """A client of one session, which a `call` of another name begins, as patient as the SDK is with a door that is
    away."""

    def __init__(self, run: Run, key: str = "", call: str = "a call") -> None:
        self._run, self._call = run, call
        self.key = key or (run.directory / "tinker.key").read_text()
        self.session = self.ask("create_session")["session_id"]
        self._numbers: dict[str, int] = {}

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Send a body until some door answers."""
        headers = {"X-API-Key": self.key, "X-Idempotency-Key": self._call}
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                url = f"{self._run.told('tinker')['base_url']}/api/v1/{path}"
                with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
                    return answer.status, answer.read()
            except urllib.error.HTTPError as problem:
                return problem.code, problem.read()
            except (OSError, http.client.HTTPException):
                assert time.monotonic() < end, f"no door answered within {PATIENCE_S:g} s\n{self._run.tail()}"
                self._run.until("a door", lambda: self._run.pid("tinker"))

    def ask(self, path: str, **body: Any) -> Any:
        status, answer = self.post(path, json.dumps(body).encode())
        assert status == 200, answer
        return json.loads(answer)

    def result(self, future: Any) -> bytes:
        """Wait for the answer of a future."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            asked = json.dumps({"request_id": future["request_id"]}).encode()
            status, answer = self.post("retrieve_future", asked)
            if status == 200:
                return answer
            assert status == 408, answer
        raise AssertionError(f"no answer to {future} within {PATIENCE_S:g} s\n{self._run.tail()}")

    # -- what the SDK offers -----

    def model(self, number: int = 0) -> str:
        base = self.ask_get("get_server_capabilities")["supported_models"][0]["model_name"]
        made = self.ask("create_model", session_id=self.session, model_seq_id=number, base_model=base, lora_config=LORA)
        self._numbers[made["model_id"]] = 0
        return str(made["model_id"])

    def ask_get(self, path: str) -> Any:
        url = f"{self._run.told('tinker')['base_url']}/api/v1/{path}"
        with urllib.request.urlopen(urllib.request.Request(url, headers={"X-API-Key": self.key})) as answer:
            return json.load(answer)

    def next_number(self, model: str) -> int:
        self._numbers[model] += 1
        return self._numbers[model]

    def forward_backward(self, model: str, *data: bytes, loss: str = "cross_entropy", only: bool = False,
                         config: Mapping[str, float] | None = None) -> Any:
        body = request(*data, model=model, seq=self.next_number(model), loss=loss, config=config, forward_only=only)
        status, answer = self.post("forward_backward", body)
        assert status == 200, answer
        return json.loads(answer)

    def step(self, model: str) -> Any:
        number = self.next_number(model)
        return self.ask("optim_step", model_id=model, seq_id=number, adam_params={"learning_rate": 0.01})

    def sampler(self, model: str, number: int) -> str:
        saved = self.ask("save_weights_for_sampler", model_id=model, seq_id=self.next_number(model),
                         sampling_session_seq_id=number)
        return str(json.loads(self.result(saved))["sampling_session_id"])

    def sample(self, sampler: str, seq: int, prompt: Sequence[int] = PROMPT, **more: Any) -> tuple[list[Any], Any]:
        asked = {"sampling_session_id": sampler, "seq_id": seq, "prompt": {"chunks": [{"tokens": list(prompt)}]},
                 "sampling_params": {"max_tokens": 6, "seed": seq}, "num_samples": 2, **more}
        answer = self.result(self.ask("asample", **asked))
        assert not answer.startswith(b"{"), answer
        return read_sample_result(answer)


def supervised(tokens: Sequence[int]) -> bytes:
    return datum(np.array(tokens[:-1], np.int32), target_tokens=np.array(tokens[1:], np.int64),
                 weights=np.ones(len(tokens) - 1, np.float32))


def train(client: Client, steps: int) -> list[Any]:
    """Losses, norms, samples and their log-probabilities of a small training, as its client gets them."""
    seen: list[Any] = []
    model = client.model()
    for step in range(steps):
        sampler = client.sampler(model, step)
        sequences, _ = client.sample(sampler, step)
        seen += [(sequence.tokens, sequence.logprobs) for sequence in sequences]
        first = client.forward_backward(model, *(supervised(PROMPT + sequence.tokens) for sequence in sequences))
        second = client.forward_backward(model, supervised([5, 6, 7, 9, 8]))
        stepped = client.step(model)
        seen += [read_forward_backward_result(client.result(future))[1] for future in (first, second)]
        seen.append(json.loads(client.result(stepped))["metrics"])
    return seen


def shown(run: Run) -> Any:
    """What status tells of the service."""
    found = overview(run.directory)
    assert found is not None
    return found.data


@contextmanager
def service(directory: Path, *settings: str, config: Path = CONFIG) -> Iterator[tuple[Run, Client]]:
    run = Run(directory, "tinker.port=0", "model.device=cpu", *settings, config=config)
    with running(run):
        run.told("tinker")
        yield run, Client(run)


@pytest.mark.long
def test_a_client_trains_and_samples_what_it_trained(tmp_path: Path, quickstart: None) -> None:
    with service(tmp_path / "run") as (_, client):
        model, data = client.model(), [supervised([5, 6, 7, 8, 9])] * 4
        losses = []
        for _ in range(8):
            future = client.forward_backward(model, *data)
            client.result(client.step(model))
            losses.append(read_forward_backward_result(client.result(future))[1]["loss:sum"])
        assert losses[-1] < 0.5 * losses[0]
        sampler = client.sampler(model, 0)
        sequences, scores = client.sample(
            sampler, 0, [5, 6, 7, 8, 9], prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=3)
        outputs, _ = read_forward_backward_result(client.result(client.forward_backward(model, data[0], only=True)))
        assert np.isnan(scores["logprobs"][0])
        np.testing.assert_allclose(scores["logprobs"][1:], outputs[0]["logprobs"], atol=1e-4)
        assert scores["topk"][0].shape == (5, 2)
        assert all(sequence.topk[0].shape == (len(sequence.tokens), 3) for sequence in sequences)


@pytest.mark.long
def test_a_sampler_keeps_its_weights_while_training_goes_on(tmp_path: Path, quickstart: None) -> None:
    with service(tmp_path / "run") as (_, client):
        model = client.model()
        old = client.sampler(model, 0)
        before = client.sample(old, 0, prompt_logprobs=True)[1]["logprobs"]
        client.forward_backward(model, supervised([5, 6, 7, 8, 9]))
        client.result(client.step(model))
        new = client.sampler(model, 1)
        assert not np.allclose(client.sample(new, 0, prompt_logprobs=True)[1]["logprobs"][1:], before[1:])
        np.testing.assert_array_equal(client.sample(old, 1, prompt_logprobs=True)[1]["logprobs"], before)


@pytest.mark.long
def test_kills_of_every_process_change_nothing_that_a_client_sees(tmp_path: Path, quickstart: None) -> None:
    steps = 4
    with service(tmp_path / "calm") as (_, client):
        calm = train(client, steps)
    with service(tmp_path / "rough", "tinker.state_every_s=0", "limits.crash_attempts=100",
                 "limits.restart_attempts=100") as (run, client):
        names, result = itertools.cycle(["tinker", "tuner", "rollout/0", "bus", "launch"]), client.result

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


@pytest.mark.long
def test_a_service_that_was_stopped_continues(tmp_path: Path, quickstart: None) -> None:
    with service(tmp_path / "run") as (run, client):
        model = client.model()
        client.result(client.forward_backward(model, supervised([5, 6, 7, 8, 9])))
        assert run.child is not None
        run.child.send_signal(signal.SIGTERM)
        run.wait()
        run.start()
        run.until("a door", lambda: run.pid("tinker"))
        metrics = json.loads(client.result(client.step(model)))["metrics"]
        assert metrics["unclipped_grad_l2:mean"] > 0


@pytest.mark.long
def test_a_client_that_comes_while_the_door_is_away_waits(tmp_path: Path, quickstart: None) -> None:
    with service(tmp_path / "run") as (run, _):
        url = run.told("tinker")["base_url"]
        for _ in range(3):
            door = Path(f"/proc/{run.until('the door was there', lambda: run.pid('tinker'))}")
            os.kill(int(door.name), signal.SIGKILL)
            run.until("it was gone", partial(is_gone, door))
            with urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=PATIENCE_S) as answer:
                assert json.load(answer) == {"status": "ok"}


def is_gone(process: Path) -> bool:
    return not process.exists()


@pytest.mark.long
def test_another_key_trains_beside_and_sees_nothing(tmp_path: Path, quickstart: None) -> None:
    config = tmp_path / "two.toml"
    lines = f'[[tinker.key]]\nname = "ann"\ndigest = "{digest_of("tml-ann")}"\nmodels = 1\n'
    config.write_text(f"{CONFIG.read_text()}\n{lines}")
    with service(tmp_path / "run", config=config) as (run, client):
        other = Client(run, "tml-ann")
        models = client.model(), other.model()
        for owner, model in zip((client, other), models):
            owner.result(owner.forward_backward(model, supervised([5, 6, 7, 8, 9])))
        asked = json.dumps({"model_id": models[0]}).encode()
        assert (client.post("get_info", asked)[0], other.post("get_info", asked)[0]) == (200, 404)
        assert client.session != other.session


@pytest.mark.long
def test_strangers_hold_no_connection_and_nobody_up(tmp_path: Path, quickstart: None) -> None:
    with service(tmp_path / "run") as (run, client):
        told = run.told("tinker")
        silent = [socket.create_connection(("127.0.0.1", told["port"])) for _ in range(400)]
        for key, kept in (("tml-wrong", False), (client.key, True)):
            connection = http.client.HTTPConnection("127.0.0.1", told["port"], timeout=PATIENCE_S)
            statuses = []
            for _ in range(2):
                connection.request("GET", "/api/v1/get_server_capabilities", headers={"X-API-Key": key})
                answer = connection.getresponse()
                statuses.append(answer.status)
                answer.read()
                assert (connection.sock is not None) == kept
            assert statuses == [200 if kept else 401] * 2
            connection.close()
        for stranger in silent:
            stranger.close()


@pytest.mark.long
def test_a_silent_client_lends_its_row_until_it_is_back(tmp_path: Path, quickstart: None) -> None:
    folder = far_reaching(tmp_path / "model")
    settings = f"model.path={folder}", "tinker.silent_s=0.2", "tinker.context=8192", "generation.max_batch=1"
    with service(tmp_path / "run", *settings) as (run, busy):
        base = busy.ask_get("get_server_capabilities")["supported_models"][0]["model_name"]
        heard = Client(run, call="another call")
        for client in (busy, heard):
            client.ask("create_sampling_session", session_id=client.session, sampling_session_seq_id=0, base_model=base)
        future = busy.ask("asample", sampling_session_id=f"{busy.session}:sample:0", seq_id=0,
                          prompt={"chunks": [{"tokens": PROMPT}]},
                          sampling_params={"max_tokens": LONG, "seed": 1, "stop": []})
        heard.sample(f"{heard.session}:sample:0", 0)  # there is one row: the long sample was drawn, or gave it up
        answered = {name for name, _ in Answers(run.directory).follow()}
        assert answered == {f"{heard.session}:sample:0"}, "a sample of a client that was silent was drawn to its end"
        run.until("status tells of the sample", lambda: shown(run)["aside"] == 1)
        (sequence,), _ = read_sample_result(busy.result(future))
        assert len(sequence.tokens) == LONG
        run.until("nothing is set aside", lambda: shown(run)["aside"] == 0)


@pytest.mark.long
def test_sparse_targets_train_as_the_dense_ones_that_they_stand_for(tmp_path: Path, quickstart: None) -> None:
    tokens, listed = np.array(PROMPT, np.int32), np.array([[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0]])
    random = np.random.default_rng(2)
    targets = (random.integers(5, 10, listed.shape) * listed).astype(np.int64)
    reals = [(random.normal(size=listed.shape) * listed).astype(np.float32) for _ in range(2)]
    losses = {"cross_entropy": {"weights": reals[0]},
              "importance_sampling": {"logprobs": -abs(reals[0]), "advantages": reals[1]}}
    with service(tmp_path / "run") as (_, client):
        told = []
        for number, write in enumerate((tensor, compressed)):
            model = client.model(number)
            for loss, inputs in losses.items():
                written = {name: write(values) for name, values in {"target_tokens": targets, **inputs}.items()}
                future = client.forward_backward(model, datum(tokens, **written), loss=loss)
                (outputs,), metrics = read_forward_backward_result(client.result(future))
                assert outputs["logprobs"].shape == listed.shape
                told.append((outputs["logprobs"].tolist(), metrics))
            told.append(json.loads(client.result(client.step(model))))
        assert told[:3] == told[3:] and all(metrics["loss:sum"] != 0 for _, metrics in told[:2])
        answer = client.result(client.forward_backward(model, datum(tokens, target_tokens=compressed(targets), **{
            name: compressed(values) for name, values in losses["importance_sampling"].items()}), loss="dro",
            config={"beta": 0.1}))
        assert b"dro is not 0 at a cell without a target; give weights or mask" in answer


def far_reaching(folder: Path) -> Path:
    """The tiny model, which was taught short sequences, as one that takes long ones."""
    shutil.copytree(ensure("tiny:sort").model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    return folder
