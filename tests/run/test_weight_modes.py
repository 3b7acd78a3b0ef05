"""Real runs whose versions are folders: they end in order, whoever is killed while one is written or taken."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from pathlib import Path

import pytest
from checks import check_end
from harness import Run, running

from busrl.weights import folders

# Not imported where tests are only collected: it takes seconds.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="pip install peft")
LORA = ("lora.rank=4", "learner.lr=2e-3")
MODES = {
    "lora_hotswap": LORA,
    "lora_restart": LORA,
    "checkpoint_restart": (),
}


def root_of(run: Run, mode: str) -> Path:
    return run.paths.published if mode == "checkpoint_restart" else run.paths.adapters


def run_in(tmp_path: Path, mode: str, *settings: str, steps: int = 8) -> Run:
    return Run(tmp_path / "run", f"weights.transport={mode}", *MODES[mode], *settings, steps=steps)


def check(run: Run, mode: str, code: int) -> None:
    check_end(run, code)
    assert not root_of(run, mode).exists()
    versions = [row["version"] for row in run.metrics()]
    assert versions == sorted(versions) and versions[-1] >= run.steps
    assert max(row["age_max"] for row in run.metrics()) <= 2
    if mode != "lora_hotswap" or "weights.mode=sync" in run.settings:  # else keys and values of older weights are kept
        assert 0 < max(row["mismatch"] or 0.0 for row in run.metrics()) < 1e-4, "engine and learner have other weights"
    newest = max(run.paths.checkpoints.glob("global_step_*"), key=lambda path: int(path.name.split("_")[-1]))
    if mode != "checkpoint_restart":
        config = json.loads((newest / "adapter" / "adapter_config.json").read_text())
        assert config["r"] == 4 and (newest / "adapter" / "adapter_model.safetensors").stat().st_size > 1000
    assert (newest / "model" / "model.safetensors").exists() and (newest / "model" / "tokenizer.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_run_ends_in_order_and_engine_and_learner_agree(mode: str, tmp_path: Path, quickstart: None) -> None:
    run = run_in(tmp_path, mode)
    with running(run):
        code = run.wait()
    check(run, mode, code)


@pytest.mark.slow
def test_an_adapter_is_swapped_into_an_engine_exactly(tmp_path: Path, quickstart: None) -> None:
    quick = ("validation.at_end=false", "validation.at_start=false")
    run = run_in(tmp_path, "lora_hotswap", "weights.mode=sync", *quick, steps=4)
    with running(run):
        code = run.wait()
    check(run, "lora_hotswap", code)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lora_restart", "checkpoint_restart"])
def test_an_engine_may_let_its_answers_end_before_it_restarts(mode: str, tmp_path: Path, quickstart: None) -> None:
    run = run_in(tmp_path, mode, "weights.on_restart=finish", "weights.restart_every=2")
    with running(run):
        code = run.wait()
    check_end(run, code)
    assert [row["version"] for row in run.metrics()][-1] == 4


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "broadcast"])
def test_merged_weights_of_an_adapter_travel_as_tensors(transport: str, tmp_path: Path, quickstart: None) -> None:
    run = Run(tmp_path / "run", f"weights.transport={transport}", *LORA, steps=8)
    with running(run):
        code = run.wait()
    check_end(run, code)


def in_the_middle_of_a_publication(run: Run, mode: str) -> bool:
    return any(root_of(run, mode).glob(f"{folders.DRAFT}*"))


def newest(run: Run, mode: str) -> int:
    versions = folders.versions(root_of(run, mode))
    return versions[-1].version if versions else 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_learner_killed_in_the_middle_of_publications_costs_nothing(
    mode: str, tmp_path: Path, quickstart: None
) -> None:
    run = run_in(tmp_path, mode, "learner.checkpoint_every=7", steps=60)
    with running(run):
        for step in (5, 20):
            run.until_step(step)
            run.kill("learner", when=lambda process: in_the_middle_of_a_publication(run, mode))
        code = run.wait()
    check(run, mode, code)
    assert run.restarts("learner") == 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_rollout_killed_while_it_takes_a_version_costs_nothing(mode: str, tmp_path: Path, quickstart: None) -> None:
    run = run_in(tmp_path, mode, "process.rollout.count=2", steps=60)
    with running(run):
        for version in (5, 25):
            run.until("another version", lambda: newest(run, mode) >= version)  # noqa: B023
            run.kill("rollout/0")
        code = run.wait()
    check(run, mode, code)
    assert run.restarts("rollout/0") == 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_was_ended_goes_on_with_its_adapter(mode: str, tmp_path: Path, quickstart: None) -> None:
    first = run_in(tmp_path, mode, steps=5)
    with running(first):
        code = first.wait()
    check(first, mode, code)
    second = run_in(tmp_path, mode, steps=9)
    with running(second):
        code = second.wait()
    check(second, mode, code)


@pytest.mark.slow
def test_another_rank_or_none_is_refused_on_resume(tmp_path: Path, quickstart: None) -> None:
    first = run_in(tmp_path, "lora_hotswap", steps=3)
    with running(first):
        check(first, "lora_hotswap", first.wait())
    second = Run(tmp_path / "run", steps=6)
    with running(second):
        assert second.wait() != 0
    assert "was trained with lora {'rank': 4" in second.tail()


@pytest.mark.slow
def test_what_a_killed_launch_left_is_cleaned_by_the_next_start(tmp_path: Path, quickstart: None) -> None:
    run = run_in(tmp_path, "lora_hotswap", steps=10)
    with running(run):
        run.until_step(3)
        run.kill_launch()
        assert run.paths.adapters.is_dir()
        run.start()
        code = run.wait()
    check(run, "lora_hotswap", code)


@pytest.mark.slow
def test_a_spoilt_adapter_is_named_and_the_run_continues_afterwards(tmp_path: Path, quickstart: None) -> None:
    run = run_in(tmp_path, "lora_hotswap", "limits.progress_s=60", "weights.max_staleness=4", steps=30)
    with running(run):
        run.until("a version", lambda: newest(run, "lora_hotswap") >= 3)
        rollout = run.pid("rollout/0")
        os.kill(rollout, signal.SIGSTOP)
        seen = -1
        while newest(run, "lora_hotswap") > seen:  # the learner trains what there is, and then waits
            seen = newest(run, "lora_hotswap")
            run.let_pass(1.5)
        path = folders.versions(run.paths.adapters)[-1].path / "adapter_model.safetensors"
        path.write_bytes(path.read_bytes()[:-4] + b"\x01\x02\x03\x04")
        os.kill(rollout, signal.SIGCONT)
        code = run.wait()
    check_end(run, code)
    assert run.restarts("rollout/0") == 0
    assert f"version {seen} is not used: adapter_model.safetensors is not what was written" in run.tail()
