"""Episodes of several models that clients play over HTTP, through deaths of the server: sides, seats and rewards."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import Run, read_lines, running
from model_runs import check_models, paths_of, step_of, three_models

STEPS = 8
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
GONE = (OSError, http.client.HTTPException)  # a server that died, or is not there yet; an answer of 401 is one too


def post(url: str, key: str, body: dict[str, Any]) -> Any:
    head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head), timeout=60) as answer:
        return json.load(answer)


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["text"]
    return text


def play(server: str, episode: dict[str, Any]) -> None:
    """The solver by its name, the judge by its key."""
    url, task = f"{episode['base_url']}/completions", episode["task"]
    answer = text_of(post(url, episode["api_key"], {"prompt": task["prompt"], "max_tokens": 1, "model": "solver"}))
    asked = {"prompt": f"{task['prompt']}{answer}=", "max_tokens": 1, "model": "gpt-x"}
    verdict = text_of(post(url, episode["keys"]["judge"], asked))
    right = answer == task["answer"]
    rewards = {"solver": float(right), "judge": {"right": float(verdict == ("|" if right else ".")), "spoke": 0.5}}
    body = {"rewards": rewards, "turn_rewards": {"judge": {"0": 0.25}}}
    post(f"{server}/busrl/v1/episodes/{episode['episode']}/end", episode["api_key"], body)


def client(run: Run, over: threading.Event, played: list[int]) -> None:
    about = run.paths.root / "serve-0.json"
    while not over.is_set():
        try:
            told = json.loads(about.read_text())
            server, key = told["base_url"].removesuffix("/v1"), Path(told["key"]).read_text()
            for episode in post(f"{server}/busrl/v1/episodes", key, {"n": 8, "wait_s": 0.5}):
                play(server, episode)
                played.append(episode["uid"])
        except GONE:
            over.wait(0.05)


@contextmanager
def clients(run: Run, count: int) -> Iterator[list[int]]:
    """Threads that claim, play and end episodes of a run; the numbers of those that they ended."""
    over, played = threading.Event(), list[int]()
    threads = [threading.Thread(target=client, args=(run, over, played)) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield played
    finally:
        over.set()
        for thread in threads:
            thread.join(90)


def served(folder: Path, where: Path, *settings: str, steps: int) -> Run:
    """A run whose episodes clients play."""
    run = three_models(folder, where, *settings, steps=steps)
    text = run.config.read_text()
    agent = f'role = "agent"\nfunction = "{where}/rounds.py:episode"\n'
    assert agent in text
    run.config.write_text(text.replace(agent, 'role = "serve"\n'))
    return run


def test_a_killed_server_gives_the_sides_of_its_episodes_back(tmp_path: Path, several: Path) -> None:
    run = served(several, tmp_path, 'learner.advantage="reward"', "limits.lease_s=30", steps=STEPS)
    with running(run), clients(run, 6) as played:
        for step in (1, 4):
            run.until(f"step {step}", lambda step=step: min(step_of(run, ""), step_of(run, "judge")) >= step)
            run.kill("serve/0", when=lambda process: process.state == "ready")
        code = run.wait()
    reports = check_models(run, code)
    assert run.restarts("serve/0") == 2 and len(played) > 100
    assert not any(sum(report.accidents.values()) for report in reports.values())
    rows = read_lines(paths_of(run, "judge").metrics)
    assert any(row["reward"] > 0.5 for row in rows if row.get("groups_ended")), "parts and the turn's reward add up"
