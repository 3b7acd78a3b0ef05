"""`busrl init`: from a model folder to a run, with questions that are made up or with a file of the user's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from chat_folders import make
from checks import check_end
from harness import Run, running


def busrl(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "busrl.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("init") / "model", positions=2048)


def questions(path: Path, count: int = 60, key: str = "question") -> Path:
    rows = [{key: f"What is {n} + {n}?", "answer": f"Twice {n}.\n#### {2 * n}"} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_file_of_questions_becomes_a_folder_whose_topology_is_short_and_passes(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    done = busrl("init", "gsm8k", "--model", model, "--out", out, "--data", questions(tmp_path / "q.jsonl"))
    assert done.returncode == 0, done.stderr
    files = sorted(path.name for path in out.iterdir() if path.is_file())
    assert files == ["gsm8k.toml", "held-out.jsonl", "reward.py", "train.jsonl"]
    train, held_out = ((out / name).read_text().splitlines() for name in ("train.jsonl", "held-out.jsonl"))
    assert len(train) + len(held_out) == 60 == len({*train, *held_out}) and len(held_out) == 6
    assert json.loads(train[0])["prompt"].startswith("What is 1 + 1?\nThink step by step")
    text = (out / "gsm8k.toml").read_text()
    assert len(text.splitlines()) < 40 and 'template = "chat"' in text
    checked = busrl("check", out / "gsm8k.toml")
    assert checked.returncode == 0, checked.stderr
    assert "reward of the right answer" in checked.stdout and ": 1\n" in checked.stdout
    again = busrl("init", "gsm8k", "--model", model, "--out", out, "--data", tmp_path / "q.jsonl")
    assert again.returncode == 2 and "nothing is overwritten" in again.stderr


@pytest.mark.parametrize(
    ("case", "options", "holds"),
    [
        ("own", [], 'function = "reward.py:score"'),
        ("chat", [], "system = "),
        ("agents", [], 'function = "agent.py:episode"'),
        ("gpus", ["--gpus", "4"], 'devices = ["0", "1", "2"]'),
        ("hosts", ["--host", "gpu-0", "--host", "gpu-1", "--endpoint", "tcp://127.0.0.1:5600"], '"gpu-0", "gpu-1"'),
    ],
)
def test_what_is_written_for_a_case_says_what_it_is_and_passes_check(
    model: Path, tmp_path: Path, case: str, options: list[str], holds: str
) -> None:
    data = questions(tmp_path / "q.jsonl")
    env = {**os.environ, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    assert busrl("keys", "init", env=env).returncode == 0
    done = busrl("init", case, "--model", model, "--out", tmp_path / "mine", "--data", data, *options, env=env)
    assert done.returncode == 0, done.stderr
    made = tmp_path / "mine" / f"{case}.toml"
    assert holds in made.read_text() and "#" in made.read_text()
    checked = busrl("check", made, env=env)
    assert checked.returncode == 0, checked.stderr
    prompt = json.loads((tmp_path / "mine" / "train.jsonl").read_text().splitlines()[0])["prompt"]
    assert ("Think step by step" in prompt) == (case not in ("own", "chat"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["own"], "init own needs --data FILE"),
        (["hosts"], "init hosts needs --host NAME"),
        (["gpus", "--gpus", "1"], "init gpus shares 2 or more"),
        (["nothing"], "invalid choice"),
    ],
)
def test_what_a_case_needs_is_named(model: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    done = busrl("init", *arguments, "--model", model, "--out", tmp_path / "mine")
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert not (tmp_path / "mine").exists()


def test_a_model_without_a_chat_template_is_refused_where_one_is_needed(model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model, bare)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (bare / name).unlink(missing_ok=True)
    data = questions(tmp_path / "q.jsonl")
    done = busrl("init", "agents", "--model", bare, "--out", tmp_path / "mine", "--data", data)
    assert done.returncode == 2 and "needs a chat template, and it has none" in done.stderr


def test_what_is_missing_is_named_and_nothing_is_left(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    done = busrl("init", "gsm8k", "--model", tmp_path, "--out", out)
    assert done.returncode == 2 and "no model folder (config.json); nothing is downloaded" in done.stderr
    data = questions(tmp_path / "q.jsonl", key="text")
    done = busrl("init", "gsm8k", "--model", model, "--out", out, "--data", data)
    assert done.returncode == 2 and "q.jsonl:1: no column 'question'; the columns are answer, text" in done.stderr
    (tmp_path / "reasoning_gym.py").write_text("raise ImportError('not here')\n")
    done = busrl("init", "gsm8k", "--model", model, "--out", out, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2, done.stdout
    assert "pip install 'busrl[rewards]', or give a file of questions and answers with --data" in done.stderr
    assert not list(out.iterdir())


@pytest.mark.slow
def test_made_up_questions_are_trained_on(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    out = tmp_path / "mine"
    done = busrl("init", "gsm8k", "--model", model, "--out", out)
    assert done.returncode == 0, done.stderr
    assert len((out / "held-out.jsonl").read_text().splitlines()) == 200
    # A model of random weights never answers right: its groups are flat, so the reward is of another kind.
    (out / "reward.py").write_text("def score(record, completion, token_ids):\n    return len(set(completion))\n")
    small = ["generation.max_new_tokens=24", "validation.samples=8", "groups.size=4", "learner.trigger.n_min=4"]
    run = Run(tmp_path / "run", *small, config=out / "gsm8k.toml", steps=2)
    with running(run):
        check_end(run, run.wait())
    assert run.audit().counts.trained >= 2 * 4 * 4
