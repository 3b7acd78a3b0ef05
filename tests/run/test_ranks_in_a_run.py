"""A learner of two ranks in a whole run: it trains as one does, and the death of either is survived."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from checks import check_end
from harness import ROOT, Run, read_lines, running

from tools.oracle.check import check

RANKS = '\n[[process]]\nrole = "learner"\nranks = {ranks}\n'
KILLS = 20
OTHERS = '\n[[process]]\nrole = "rollout"\n\n[[process]]\nrole = "reward"\n'


def a_run(folder: Path, *settings: str, ranks: int = 2, steps: int = 6) -> Run:
    config = folder / f"ranks{ranks}.toml"
    config.write_text((ROOT / "configs" / "quickstart.toml").read_text() + RANKS.format(ranks=ranks) + OTHERS)
    return Run(folder / "run", "learner.checkpoint_every=3", *settings, config=config, steps=steps)


@pytest.mark.long
def test_a_run_with_two_ranks_trains_every_sample_once(tmp_path: Path, quickstart: None) -> None:
    keys = ("learner.parity.every=1", "learner.parity.wait_s=100", "learner.kl=k3", "learner.kl_coef=0.02")
    run = a_run(tmp_path, "validation.data=", *keys, steps=3)
    with running(run):
        code = run.wait()
    check_end(run, code)
    report = check(run.directory)  # the weights of its shards among them
    assert report.wrong == report.left_out == [], report.text()
    assert report.done["weights"] == 1 and report.done["kl"] == 3, report.text()
    compared = [row["parity"] for row in run.metrics() if row["parity_engines"]]
    assert len(compared) >= 2 and max(compared) < 1e-4
    assert run.paths.log("rank/1").exists() and run.restarts("rank/1") == run.restarts("learner") == 0
    assert len(run.metrics()) == 3 and all(row["grad_norm"] > 0 for row in run.metrics())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_compiling_their_layers_train_every_sample_once(
    tmp_path: Path, quickstart: None
) -> None:
    run = a_run(tmp_path, "validation.data=", "learner.memory.compile=true", steps=3)
    with running(run):
        check_end(run, run.wait(600))
    assert run.restarts("rank/1") == run.restarts("learner") == 0
    rows = run.metrics()
    assert all(row["grad_norm"] > 0 for row in rows) and rows[0]["mismatch"] < 1e-4, "later ones are over kept keys"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("settings", [
    ("lora.rank=4", "weights.transport=lora_hotswap", "learner.kl=k3", "learner.kl_coef=0.01"),
    ("lora.rank=4", "learner.lr=2e-3"),
    ("learner.optimizer=torch.optim:SGD", "learner.options={momentum = 0.9}", "learner.kl=k1", "learner.kl_coef=0.01",
     "learner.kl_in=reward"),
])
def test_a_run_with_ranks_and_an_adapter_or_a_reference_is_continued(
    tmp_path: Path, quickstart: None, settings: tuple[str, ...]
) -> None:
    for ranks, steps in ((2, 3), (1, 5), (2, 7)):
        run = a_run(tmp_path, "validation.data=", *settings, ranks=ranks, steps=steps)
        with running(run):
            check_end(run, run.wait())
        assert run.step() == steps
        assert all(row["grad_norm"] > 0 and not row["skipped"] for row in run.metrics())


@pytest.mark.slow
def test_a_deterministic_run_with_two_ranks_is_that_of_one(tmp_path: Path, quickstart: None) -> None:
    rows = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        run = a_run(folder, "learner.deterministic=true", "weights.mode=sync", "validation.data=", ranks=ranks)
        with running(run):
            check_end(run, run.wait())
        rows.append(run.metrics())
    # The same samples as long as the last bits of the weights draw the same tokens: at least in the first step.
    alone, two = (of_run[0] for of_run in rows)
    assert two["tokens"] == alone["tokens"]
    assert two["loss"] == pytest.approx(alone["loss"], abs=1e-5)
    assert two["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", ["sync", "batch-async"])
def test_whatever_rank_is_killed_each_sample_is_trained_once(tmp_path: Path, quickstart: None, mode: str) -> None:
    run, chance = a_run(tmp_path, f"weights.mode={mode}", "validation.data=", steps=2 * KILLS + 4), random.Random(mode)
    with running(run):
        for _ in range(KILLS):
            run.until_step(run.step() + 1)
            run.let_pass(chance.uniform(0, 0.5))
            before, begun = run.step(), time.monotonic()
            run.kill(chance.choice(["learner", "rank/1"]))
            run.until("a step after the kill", lambda before=before: run.step() > before, 180)
            print(f"killed at step {before}: the next one after {time.monotonic() - begun:.1f} s")
        code = run.wait(600)
    check_end(run, code)
    assert run.restarts("learner") == run.restarts("rank/1") == KILLS, "they start again together, once for each kill"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rank/1", "learner"])
def test_a_team_with_a_stopped_rank_is_back_before_its_collective_fails(
    tmp_path: Path, quickstart: None, name: str
) -> None:
    run = a_run(tmp_path, "validation.data=", "learner.parallel.collective_timeout_s=900", steps=8)
    with running(run):
        run.until_step(2)
        before, pid = run.step(), run.pid(name)
        os.kill(pid, signal.SIGSTOP)
        run.until("a step after it", lambda: run.step() > before + 1, 120)
        code = run.wait()
    check_end(run, code)
    said = [line["text"] for line in read_lines(run.paths.errors)]
    assert any(f"{name} (pid {pid}) is stopped (SIGSTOP; `kill -CONT {pid}`" in text for text in said), said
    assert run.restarts("rank/1") == run.restarts("learner") == 1


@pytest.mark.slow
def test_a_stopped_rank_is_named_in_time_and_the_run_continues(tmp_path: Path, quickstart: None) -> None:
    run = a_run(tmp_path, "learner.parallel.collective_timeout_s=5", steps=12)
    with running(run):
        run.until_step(2)
        pid = run.pid("rank/1")
        os.kill(pid, signal.SIGSTOP)
        run.until("its name", lambda: f"rank 1 (pid {pid})" in run.paths.errors.read_text()
                  if run.paths.errors.exists() else False, 40)
        code = run.wait()
    check_end(run, code)
    said = [line["text"] for line in read_lines(run.paths.errors)]
    assert any("stopped or stuck" in text for text in said), json.dumps(said)


@pytest.mark.slow
def test_a_run_of_two_ranks_is_continued_by_three_and_by_one(tmp_path: Path, quickstart: None) -> None:
    steps = 3
    for ranks in (2, 3, 1):
        run = a_run(tmp_path, "validation.data=", ranks=ranks, steps=steps)
        with running(run):
            check_end(run, run.wait())
        assert run.step() == steps
        steps += 3


LOSS = """
import os

def loss(inputs, settings):
    if os.environ.get("BUSRL_NAME") == "rank/1":
        raise RuntimeError("no memory for these samples")
    return -inputs.advantages * inputs.trainer_logprobs
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rank_failing_twice_on_the_same_samples_ends_the_run(
    tmp_path: Path, quickstart: None
) -> None:
    (tmp_path / "own.py").write_text(LOSS)
    run = a_run(tmp_path, f"learner.loss={tmp_path}/own.py:loss", "validation.data=", "weights.mode=sync")
    with running(run):
        assert run.wait(500) == 1
    text = run.text()
    assert "the ranks of the learner failed twice with samples" in text and "no memory for these samples" in text
    assert "rank 1 (pid" in text and run.step() == 0
