"""A real `vllm serve` teaches as the same model in the learner, and its refusals are told."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from vllm_scene import START_S, VOCABULARY, config_of, model_of, save

from busrl.errors import UserError
from busrl.teachers.endpoint import Endpoint
from busrl.topology.learner import TeacherRow
from busrl.training.batch import Sample, flatten
from busrl.training.forward import choose_forward
from busrl.training.model import load

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
WORDS, K = len(VOCABULARY), 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("teacher"), model_of(config_of(tied=False), 3))


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port),
               "--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "128", "--max-logprobs", "-1",
               "--served-model-name", "teacher", "--enforce-eager"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    log = folder.parent / "server.log"
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{port}"
        _until_healthy(server, address, log)
        yield f"{address}/v1"
    finally:
        os.killpg(server.pid, 15)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, 9)


def _until_healthy(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    import time

    end = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(address + "/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            assert server.poll() is None and time.monotonic() < end, log.read_text(errors="replace")[-3000:]
            time.sleep(0.5)


def samples() -> list[Sample]:
    chance, made = np.random.default_rng(1), []
    for member in range(6):
        count = int(chance.integers(3, 30))
        made.append(Sample(
            member, 0, member, chance.integers(2, WORDS, 9).astype(np.int32),
            chance.integers(2, WORDS, count).astype(np.int32), np.zeros(count, np.float32),
            np.zeros(count, np.uint32)))
    return made


@pytest.mark.parametrize("top", ["teacher", "student"])
def test_log_probabilities_of_a_server_are_those_of_the_folder(folder: Path, url: str, top: str) -> None:
    own, way = samples(), choose_forward(load(folder))
    flat = flatten(own, torch.float32, torch.device("cpu"))
    ids, expected = way.best(own, flat, K, WORDS)
    if top == "student":
        ids = (ids + 3) % WORDS
        from dataclasses import replace

        expected = way.score(own, replace(flat, targets=ids))[0].detach()
    teacher = Endpoint(TeacherRow(base_url=url), str(folder), K, WORDS, lambda: None, every=top == "student")
    try:
        there, logprobs = teacher.ask(own, ids if top == "student" else None)()
    finally:
        teacher.close()
    assert float((logprobs - expected).abs().max()) < 1e-4
    assert torch.equal(there, ids) or top == "teacher"


def test_a_server_with_another_tokenizer_is_refused(folder: Path, url: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    save(other, model_of(config_of(tied=False), 4))
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"a": 2', '"a": 99').replace('"b": 3', '"b": 2').replace(
        '"a": 99', '"a": 3'))
    with pytest.raises(UserError, match="another tokenizer"):
        Endpoint(TeacherRow(base_url=url), str(other), K, WORDS, lambda: None)


def test_a_model_that_the_server_does_not_have_is_told(folder: Path, url: str) -> None:
    with pytest.raises(UserError, match=r"it refuses /completions: 404.*base_url, model"):
        Endpoint(TeacherRow(base_url=url, model="nothing"), str(folder), K, WORDS, lambda: None)
