"""A user's own model, prompts and reward function train like the quickstart's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import own
import pytest
from checks import check_end
from harness import ROOT, Run, running


@pytest.mark.long
@pytest.mark.parametrize("kind", ["llama", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gpt2", "lfm2"))])
def test_another_architecture_with_own_prompts_and_reward_trains(kind: str, tmp_path: Path) -> None:
    topology = own.make_all(tmp_path / "mine", kind)
    run = Run(tmp_path / "run", "learner.lr=0.01", config=topology, steps=8)
    with running(run):
        code = run.wait()
    check_end(run, code)
    rewards = [row["reward"] for row in run.metrics()]
    assert 0 < rewards[0] < 1 and rewards[-1] > rewards[0], rewards
    checkpoint = run.paths.checkpoints / "global_step_8" / "model"
    assert (checkpoint / "config.json").is_file() and (checkpoint / "tokenizer.json").is_file()


@pytest.mark.parametrize("verb", ["check", "launch"])
def test_a_model_with_too_few_positions_is_refused_up_front(verb: str, tmp_path: Path) -> None:
    topology = own.make_all(tmp_path / "mine", "gpt2", positions=31)
    command = [sys.executable, "-m", "busrl.cli", verb, str(topology)]
    if verb == "launch":
        command += ["--run-dir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    for text in ("own.toml:", "max_new_tokens", "prompt and completion have 32 tokens, the model takes 31", "lower"):
        assert text in done.stderr
    assert not (tmp_path / "run").exists()
