"""`busrl init`: from a model folder to a run, with questions that are made up or with a file of the user's."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chat_folders import make
from checks import check_end
from commands import busrl
from harness import Run, running

from busrl.cli import init


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("init") / "model", positions=2048)


def questions(path: Path, count: int = 60, key: str = "question") -> Path:
    rows = [{key: f"What is {n} + {n}?", "answer": f"Twice {n}.\n#### {2 * n}"} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def written(code: str) -> dict[str, Any]:
    """The names in code that init writes."""
    names: dict[str, Any] = {}
    exec(code, names)
    return names


def played(record: dict[str, str], *replies: str) -> float:
    """The reward of an episode in which the model says these."""
    rest = list(replies)

    class Model:
        async def chat(self, messages: list[Any]) -> dict[str, Any]:
            return {"role": "assistant", "content": rest.pop(0)}

    reward: float = asyncio.run(written(init.AGENT)["episode"](record, Model()))
    return reward


@pytest.mark.parametrize("again", [0, 7])
def test_rows_that_become_no_prompts_are_counted(model: Path, tmp_path: Path, again: int) -> None:
    file = questions(tmp_path / "q.jsonl")
    file.write_text("".join([*file.read_text().splitlines(keepends=True), *file.read_text().splitlines(True)[:again]]))
    done = busrl("init", "own", "--model", model, "--out", tmp_path / "mine", "--data", file)
    assert done.returncode == 0, done.stderr
    assert (f"60 of {60 + again} rows are prompts; left out: {again} as duplicates" in done.stdout) == bool(again)
    assert ("left out" in done.stdout) == bool(again)


def test_a_question_file_becomes_a_folder_with_a_short_passing_topology(model: Path, tmp_path: Path) -> None:
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
        ("hosts", ["--host", "gpu-0", "--host", "gpu-1"], '"gpu-0", "gpu-1"'),
    ],
)
def test_the_written_case_describes_itself_and_passes_check(
    model: Path, tmp_path: Path, case: str, options: list[str], holds: str
) -> None:
    data = questions(tmp_path / "q.jsonl")
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")  # with the tokenizer of the model
    env = {**os.environ, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "XDG_CACHE_HOME": cache}
    assert busrl("keys", "init", env=env).returncode == 0
    done = busrl("init", case, "--model", model, "--out", tmp_path / "mine", "--data", data, *options, env=env)
    assert done.returncode == 0, done.stderr
    config = tmp_path / "mine" / f"{case}.toml"
    assert holds in config.read_text() and "#" in config.read_text()
    checked = busrl("check", config, env=env)
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
    command = [sys.executable, "-m", "busrl.cli", "init", "gsm8k", "--model", model, "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120,  # PYTHONPATH is read at a cold start
                          env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2, done.stdout
    assert "pip install 'busrl[rewards]', or give a file of questions and answers with --data" in done.stderr
    assert not list(out.iterdir())


WON_BY_ACCIDENT = [
    ("2", "12"), ("2", "-2"), ("2", "0.2"), ("2", ".2"), ("5", "1e5"), ("2", "1, 2, 3, 4, 5"), ("2", "2 or 3"),
    ("2", ""), ("2", "no idea"), ("1234", "1, 234"), ("-3", "5-3"),
]


@pytest.mark.parametrize(("answer", "completion"), WON_BY_ACCIDENT)
def test_no_reward_that_init_writes_is_won_by_accident(answer: str, completion: str) -> None:
    record = {"prompt": "?", "answer": answer}
    for code in (init.NUMBER_REWARD, init.TEXT_REWARD):
        assert written(code)["score"](record, completion, [])["right"] == 0.0, code
        assert written(code)["score"](record, f"{completion} so it is {answer}.", [])["right"] == 1.0, code
    assert played(record, completion, completion) == 0.0
    assert played(record, completion, f"It is {answer}.") == 0.5
    assert played(record, f"It is {answer}.") == 1.0


@pytest.mark.parametrize(("answer", "completion", "worth"), [
    ("New York", "It is in new york.", 1.0), ("New York", "York", 0.0), ("York", "Newyork", 0.0),
    ("yes", "yes and no", 0.0), ("(a)", "I take **(a)**", 1.0),
])
def test_words_are_compared_whole_and_from_the_end(answer: str, completion: str, worth: float) -> None:
    assert written(init.TEXT_REWARD)["score"]({"answer": answer}, completion, [])["right"] == worth


@pytest.mark.parametrize("answer", ["", "   ", "unknown"])
def test_a_record_that_cannot_be_judged_is_refused_and_never_right(answer: str) -> None:
    codes = (init.NUMBER_REWARD, init.TEXT_REWARD) if not answer.strip() else (init.NUMBER_REWARD,)
    for code in codes:
        for completion in ("", "12", answer):
            with pytest.raises(ValueError, match="to compare with"):
                written(code)["score"]({"answer": answer}, completion, [])
    with pytest.raises(ValueError, match="to compare with"):
        played({"prompt": "?", "answer": answer}, "", answer)


@pytest.mark.parametrize(("case", "says"), [
    ("own", "holds no word"), ("gsm8k", "holds no number"), ("agents", "holds no number"),
])
def test_answers_that_nothing_can_be_compared_with_end_init(model: Path, tmp_path: Path, case: str, says: str) -> None:
    data, out = questions(tmp_path / "q.jsonl"), tmp_path / "mine"
    with data.open("a") as file:
        file.write('{"question": "And what is nothing?", "answer": " "}\n')
    done = busrl("init", case, "--model", model, "--out", out, "--data", data)
    assert done.returncode == 2 and "q.jsonl: 1 of 61 rows cannot be judged: answer = ' '" in done.stderr, done.stderr
    assert says in done.stderr and not list(out.iterdir())


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
