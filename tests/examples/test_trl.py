"""TRL's asynchronous trainer with rollouts from a busrl run: the routes that it calls, and a whole training."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, Run, running

from busrl import quickstart as made

BRIDGE, TRAIN = ROOT / "examples" / "trl" / "bridge.py", ROOT / "examples" / "trl" / "train.py"
PYTHON = Path(os.environ.get("BUSRL_TRL_PYTHON") or ROOT / ".venv" / "trl" / "bin" / "python")  # of `make trl-env`
ASKED = {"max_tokens": 8, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "seed": 5}
LIMIT_S = 120.0


class Server:
    """The bridge, as TRL calls it."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=LIMIT_S) as answer:
            return json.loads(answer.read() or b"null")

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        try:
            asked = urllib.request.Request(self.url + path, json.dumps(body).encode())
            with urllib.request.urlopen(asked, timeout=LIMIT_S) as answer:
                return answer.status, json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as problem:
            return problem.code, json.loads(problem.read())

    def drawn(self, model: str, prompt: list[int], **more: Any) -> Any:
        status, answer = self.post("/v1/completions", model=model, prompt=prompt, **{**ASKED, **more})
        assert status == 200, answer
        return answer["choices"][0]


@contextmanager
def bridged(directory: Path) -> Iterator[tuple[Run, Server]]:
    run = Run(directory, "tinker.port=0", "model.device=cpu", config=ROOT / "configs" / "tinker.toml")
    with socket.socket() as free, running(run):
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        run.until("an engine", lambda: run.pid("rollout/0"))
        run.told("tinker")
        with subprocess.Popen([sys.executable, BRIDGE, directory, "--port", str(port)], cwd=ROOT) as bridge:
            try:
                server, end = Server(port), time.monotonic() + LIMIT_S
                while True:
                    try:
                        server.get("/health")
                        break
                    except OSError:
                        assert bridge.poll() is None and time.monotonic() < end, "the bridge does not answer"
                yield run, server
            finally:
                bridge.terminate()


@pytest.mark.long
def test_the_bridge_draws_with_the_adapter_that_a_request_names(tmp_path: Path, quickstart: None) -> None:
    sys.path.insert(0, str(ROOT / "tests" / "service"))
    from test_a_service import Client, supervised

    with bridged(tmp_path / "run") as (run, server):
        client = Client(run)
        model = client.model()
        client.forward_backward(model, *[supervised([5, 6, 7, 8, 9])] * 8)
        client.result(client.step(model))
        client.sampler(model, 0)
        base = server.get("/v1/models")["data"][0]["id"]
        assert server.get("/server_info")["vllm_config"]["model_config"]["dtype"] == "torch.float32"
        folder = str(run.directory / "service" / "snapshots" / "1")
        assert server.post("/v1/load_lora_adapter", lora_name="policy-v1", lora_path=folder)[0] == 200
        before, after = server.drawn(base, [5, 6, 7]), server.drawn("policy-v1", [5, 6, 7])
        assert before["logprobs"] != after["logprobs"]
        run.kill("rollout/0")
        again = server.drawn("policy-v1", [5, 6, 7])
        assert again["token_ids"] == after["token_ids"]
        for wrong in ({"model": "policy-v2"}, {"top_k": 4}, {"prompt": [5] * 500}):
            status, answer = server.post("/v1/completions", **{**ASKED, "model": base, "prompt": [5], **wrong})
            assert status == 400 and answer["error"], wrong


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="make trl-env")
def test_trl_learns_from_rollouts_of_a_run_whose_engines_are_killed(tmp_path: Path, quickstart: None) -> None:
    task = made.ensure("tiny:sort")
    with bridged(tmp_path / "run") as (run, server), open(tmp_path / "said", "w+") as said:
        command = [PYTHON, TRAIN, task.model, task.train, tmp_path / "out", "--server", server.url, "--steps", "20"]
        with subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, cwd=tmp_path) as training:
            try:
                while training.poll() is None:
                    run.let_pass(2.0)
                    engine = run.processes().get("rollout/0")
                    if engine is not None and engine.samples:
                        run.kill_if_there("rollout/0")
            finally:
                training.kill()
        text = (tmp_path / "said").read_text()
        rewards = [float(value) for value in re.findall(r"reward (\d\.\d+)", text)]
        assert training.returncode == 0 and len(rewards) == 20, text[-3000:]
        assert sum(rewards[-5:]) > 1.2 * sum(rewards[:5]), rewards
