"""A user's own model, prompts and reward function train like the quickstart's."""

from __future__ import annotations

from pathlib import Path

import own
import pytest
from checks import check_end
from commands import busrl
from harness import ROOT, Run, running
from wide_folders import widen

from busrl.ledger.wal import Wal
from busrl.quickstart import ensure
from busrl.system.files import read_map


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
    more = ("--run-dir", tmp_path / "run") if verb == "launch" else ()
    done = busrl(verb, topology, *more, cwd=ROOT, timeout_s=60)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    for text in ("own.toml:", "max_new_tokens", "prompt and completion have 32 tokens, the model takes 31", "lower"):
        assert text in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_model_with_rows_that_no_token_has_trains_on_tokens_alone(tmp_path: Path) -> None:
    """The quickstart's model of 16 tokens with 8 more rows, as likely as digits: nearly every answer would hold one."""
    task = ensure("tiny:sort")
    folder = widen(Path(task.model), tmp_path / "model", 24)
    run = Run(tmp_path / "run", f"model.path={folder}", steps=4)
    with running(run):
        code = run.wait()
    check_end(run, code)
    samples = [sample for record in Wal(run.paths.wal).records() for sample in record.samples]
    assert len(samples) >= 4 * 8 and max(sample.token_array().max() for sample in samples) < 16
    assert run.metrics()[0]["mismatch"] < 1e-5  # every token of the first step is of the weights that are trained
    exported = read_map(run.paths.checkpoints / "global_step_4" / "model" / "config.json")
    assert exported["vocab_size"] == 24
