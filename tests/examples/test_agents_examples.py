"""Runs on environments of verifiers, OpenEnv and atroposlib themselves, by the Python of virtual environments of their
own; what examples/agents has for them is run as it is."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checks import check_end
from harness import ROOT, Run, beside, read_lines, running

from busrl.ledger.wal import Wal
from busrl.quickstart import ensure
from busrl.quickstart.task import VOCABULARY

AGENTS_PYTHON = ROOT / ".venv" / "agents" / "bin" / "python"  # of `make agents-env`
OPENENV_PYTHON = ROOT / ".venv" / "openenv" / "bin" / "python"  # of `make openenv-env`
ATROPOS_PYTHON = ROOT / ".venv" / "atropos" / "bin" / "python"  # of `make atropos-env`
TRIES = 3  # at guessing a number



@pytest.fixture(scope="session")
def games(quickstart: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of examples/agents with the model that `make_games.py` makes."""
    folder = tmp_path_factory.mktemp("examples") / "agents"
    shutil.copytree(ROOT / "examples" / "agents", folder, ignore=shutil.ignore_patterns("made", "__pycache__"))
    subprocess.run([sys.executable, folder / "make_games.py"], check=True, timeout=300)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.skipif(not AGENTS_PYTHON.exists(), reason="make agents-env")
def test_a_verifiers_environment_teaches_its_model_the_text_around_tool_calls(
    tmp_path: Path, games: Path
) -> None:
    run = Run(tmp_path / "run", f"process.agent.python={AGENTS_PYTHON}", "learner.checkpoint_every=0",
              config=games / "calculator.toml", steps=20)
    with running(run):
        check_end(run, run.wait(2000))
    for row in run.metrics():
        assert row["episodes"]["turns_mean"] > 1.5 and row["episodes"]["sequences_mean"] == 1
    rewards = [row["reward"] for row in run.metrics()]
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.15, rewards


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not AGENTS_PYTHON.exists(), reason="make agents-env")
@pytest.mark.parametrize("client", [
    "", 'client = { type = "train", renderer_model_name = "made/model", renderer = { name = "default" } }',
], ids=["evaluation", "training"])
def test_both_clients_of_verifiers_play_episodes_of_two_turns_as_one_sequence(
    tmp_path: Path, games: Path, client: str
) -> None:
    """The one for evaluation sends messages, the one for training ids that it rendered itself, few of them otherwise
    than they were drawn."""
    shutil.copy(ROOT / "tests" / "examples" / "typed_taskset.py", games)
    config = games / f"typed_{len(client)}.toml"
    text = (games / "calculator.toml").read_text().replace("verifiers:calculator_taskset", "verifiers:typed_taskset")
    config.write_text(text.replace("[agents]\n", f"options = {{ {client} }}\n\n[agents]\n"))
    run = Run(tmp_path / "run", f"process.agent.python={AGENTS_PYTHON}", "validation.samples=0",
              "generation.max_new_tokens=2", config=config, steps=4)
    with running(run):
        check_end(run, run.wait(1500))
    for row in run.metrics():
        episodes = row["episodes"]
        assert episodes["turns_mean"] > 1.5 and 1 <= episodes["sequences_mean"] <= (1.1 if client else 1), episodes
        assert episodes["refused"] == episodes["overridden"] == 0, episodes


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not OPENENV_PYTHON.exists(), reason="make openenv-env")
def test_a_run_trains_on_openenv_episodes_despite_fewer_server_sessions(tmp_path: Path, games: Path) -> None:
    command = [OPENENV_PYTHON, ROOT / "tests" / "agents" / "openenv_server.py", "16", str(TRIES), "= | . !"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            name = f"openenv:ws://127.0.0.1:{int(server.stdout.readline())}"
            options = 'options = { observation = "said", action = "[0-9]", no_action = -1.0 }'
            text = (games / "games.toml").read_text()
            text = text.replace('function = "games.py:calculator"', f'environment = "{name}"\n{options}')
            config = tmp_path / "openenv.toml"
            config.write_text(text)
            run = Run(tmp_path / "run", f"model.path={games / 'made' / 'model'}", f"data.train={name}",
                      "generation.max_new_tokens=1", "agents.episodes=32", "learner.trigger.n_min=4",
                      "learner.checkpoint_every=0", config=config, steps=5)
            with running(run):
                check_end(run, run.wait(400))
        finally:
            server.kill()
    turns = [row["episodes"]["turns_mean"] for row in run.metrics()]
    assert min(turns) > 1 and {row["episodes"]["sequences_mean"] for row in run.metrics()} == {1.0}
    groups = trained_groups(run)
    assert len(groups) == 5 * 4
    for members in groups:
        games_of = [("".join(VOCABULARY[one] for one in ids), reward) for ids, _, reward in members]
        assert any(all(worth(text, secret) == reward for text, reward in games_of) for secret in range(10)), games_of


def worth(text: str, secret: int) -> float | None:
    """What an episode `=3|5` is worth with that secret; None if the server would have said something else."""
    total, guesses, marks = 0.0, text[1::2], text[2::2].ljust(len(text[1::2]))
    for tries, (guess, mark) in enumerate(zip(guesses, marks), 1):
        if not guess.isdigit():
            return total - 1.0 if mark == " " else None
        right = int(guess) == secret
        over, total = right or tries == TRIES, total + (1.0 if right else -0.25)
        if mark != (" " if over else "|" if int(guess) < secret else "."):
            return None
    return total


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not ATROPOS_PYTHON.exists(), reason="make atropos-env")
def test_an_atroposlib_environment_posts_each_trained_group_once(
    tmp_path: Path, quickstart: None
) -> None:
    groups = tmp_path / "groups.jsonl"
    run = Run(tmp_path / "run", "learner.checkpoint_every=0", config=ROOT / "configs" / "atropos.toml", steps=4)
    with running(run):
        run.told("atropos")
        environment = ROOT / "examples" / "agents" / "atropos_environment.py"
        with beside(ATROPOS_PYTHON, environment, run.directory, ensure("tiny:sort").model, "--groups", groups):
            check_end(run, run.wait(400))
    posted = [posted_group(one) for one in read_lines(groups)]
    trained = trained_groups(run)
    assert len(trained) == 4 * 8, "each step took its groups"
    assert all(posted.count(one) == 1 == trained.count(one) for one in trained)


def posted_group(group: dict[str, Any]) -> list[Any]:
    """Ids, log-probabilities of the trained ones, and score of each member."""
    members = zip(group["tokens"], group["masks"], group["inference_logprobs"], group["scores"])
    return sorted([ids, [np.float32(one) for one, trained in zip(logprobs, mask) if trained != -100], score]
                  for ids, mask, logprobs, score in members)


def trained_groups(run: Run) -> list[list[Any]]:
    found: dict[int, list[Any]] = defaultdict(list)
    for one in (sample for record in Wal(run.paths.wal).records() for sample in record.samples):
        ids, logprobs = np.frombuffer(one.token_ids, np.int32), np.frombuffer(one.logprobs, np.float32)
        found[one.group].append([ids.tolist(), list(logprobs), one.reward])
    return [sorted(members) for members in found.values()]
