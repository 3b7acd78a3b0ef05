"""Runs whose episodes are played by programs outside, over HTTP: claims, calls, ends, silence and deaths."""

from __future__ import annotations

import json
import shutil
import sys
import urllib.error
import urllib.request
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from checks import check_end
from harness import ROOT, Run, beside, running

from busrl.quickstart import ensure

SERVE, CLIENT = ROOT / "configs" / "serve.toml", ROOT / "examples" / "agents" / "http_client.py"


def post(url: str, key: str, body: Any) -> tuple[int, Any]:
    head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head), timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as problem:
        return problem.code, json.load(problem)["error"]


def claim(root: str, key: str, count: int) -> list[dict[str, Any]]:
    """Up to so many episodes, as soon as the run has one: its learner may still be starting."""
    episodes: list[dict[str, Any]] = []
    while not episodes:
        status, episodes = post(f"{root}/busrl/v1/episodes", key, {"n": count, "wait_s": 10})
        assert status == 200, episodes
    return episodes


def clients(run: Run) -> AbstractContextManager[None]:
    """The example's program, which ends with the run."""
    return beside(sys.executable, CLIENT, run.directory)


@pytest.mark.long
def test_clients_over_http_train_a_run_and_silence_loses_an_episode(tmp_path: Path, quickstart: None) -> None:
    run = Run(tmp_path / "run", "limits.lease_s=3", "learner.checkpoint_every=0", "validation.at_start=false",
              "validation.samples=8", config=SERVE, steps=3)
    with running(run):
        told = run.told("serve-0")
        root, key = told["base_url"].removesuffix("/v1"), Path(told["key"]).read_text()
        assert Path(told["key"]).stat().st_mode & 0o777 == 0o600
        assert post(f"{root}/busrl/v1/episodes", "wrong", {})[0] == 401
        claimed = claim(root, key, 3)
        assert 1 <= len(claimed) <= 3 and {episode["class"] for episode in claimed} == {"train"}
        first, silent = claimed[0], claimed[-1]
        end = f"{root}/busrl/v1/episodes/{first['episode']}/end"
        assert post(end, first["api_key"], {})[1]["param"] == "reward"
        status, said = post(f"{root}/v1/completions", first["api_key"], {"prompt": first["task"]["prompt"]})
        assert status == 200 and said["usage"]["completion_tokens"] >= 1
        assert post(end, first["api_key"], {"reward": 0.5, "turn_rewards": {"7": 1}})[1]["param"] == "turn_rewards"
        status, ended = post(end, first["api_key"], {"reward": 0.5})
        assert (status, ended["outcome"], ended["turns"]) == (200, "committed", 1)
        assert post(end, key, {"reward": 9})[1] == ended, "asked again it is the first answer"
        assert post(f"{root}/v1/completions", first["api_key"], {"prompt": "1="})[0] == 401, "its key ended with it"
        with clients(run):
            check_end(run, run.wait())
    if silent is not first:
        went = run.paths.errors.read_text()
        assert f"episode {silent['episode']} goes back" in went
    assert run.step() == 3


def endless(folder: Path) -> Path:
    """The tiny model without an end token, and with room for long answers."""
    shutil.copytree(ensure("tiny:sort").model, folder)
    for name, changes in (
        ("config.json", {"eos_token_id": None, "max_position_embeddings": 4096}),
        ("generation_config.json", {"eos_token_id": None}),
        ("tokenizer_config.json", {"eos_token": None, "model_max_length": 4096}),
    ):
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


@pytest.mark.long
def test_a_stream_brings_text_while_the_engine_draws(tmp_path: Path, quickstart: None) -> None:
    run = Run(tmp_path / "run", f"model.path={endless(tmp_path / 'model')}", "generation.max_new_tokens=3000",
              "generation.max_batch=4", "agents.episodes=4", "validation.data=", "learner.checkpoint_every=0",
              config=SERVE, steps=1)
    with running(run):
        told = run.told("serve-0")
        root, key = told["base_url"].removesuffix("/v1"), Path(told["key"]).read_text()
        [claimed] = claim(root, key, 1)
        head = {"Authorization": f"Bearer {claimed['api_key']}"}
        body = {"prompt": claimed["task"]["prompt"], "stream": True, "stream_options": {"include_usage": True}}
        asked = urllib.request.Request(f"{root}/v1/completions", json.dumps(body).encode(), head)
        with urllib.request.urlopen(asked, timeout=120) as answer:
            lines = [line.removeprefix(b"data: ") for line in answer if line.startswith(b"data: ")]
        assert lines.pop().strip() == b"[DONE]"
        *chunks, usage = map(json.loads, lines)
        texts = [chunk["choices"][0]["text"] for chunk in chunks]
        assert usage["usage"]["completion_tokens"] == 3000 and len("".join(texts)) > 2000
        assert len(texts) > 2 and max(map(len, texts)) < 2500, "it came in pieces"


@pytest.mark.slow
def test_a_killed_server_gives_its_episodes_back_and_loses_nothing(tmp_path: Path, quickstart: None) -> None:
    run = Run(tmp_path / "run", "learner.checkpoint_every=0",
              "validation.samples=8", config=SERVE, steps=6)
    with running(run), clients(run):
        for step in (1, 3):
            run.until_step(step)
            run.kill("serve/0")
        check_end(run, run.wait())
    assert run.restarts("serve/0") == 2


@pytest.mark.slow
def test_a_program_for_each_episode_trains_a_run(tmp_path: Path, quickstart: None) -> None:
    program = ROOT / "examples" / "agents" / "sort_program.py"
    text = (ROOT / "configs" / "agents.toml").read_text()
    text = text.replace('function = "two_tries.py:episode"', f'program = ["python3", "{program}"]')
    config = tmp_path / "program.toml"
    config.write_text(text.replace("episodes = 256", "episodes = 8"))
    run = Run(tmp_path / "run", "learner.trigger.n_min=4", "groups.size=4", "learner.checkpoint_every=0",
              "validation.at_start=false", "validation.at_end=false", config=config, steps=3)
    with running(run):
        check_end(run, run.wait())
    rewards = [row["reward"] for row in run.metrics()]
    assert 0.15 < sum(rewards) / len(rewards) < 0.8
