"""The quickstart with engine = "vllm": one key, real processes, a clean audit, also when its engine core is killed."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from checks import check_end
from harness import Run, read_lines, running

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
SETTINGS = (
    "process.rollout.engine=vllm", "limits.ready_s=420", "limits.progress_s=120", "vllm.start_s=400", "vllm.rpc_s=60",
    "validation.samples=8", "validation.every=0", "validation.at_start=false", "generation.max_batch=32",
)
PARITY = ("learner.parity.every=1", "learner.parity.wait_s=100")  # each version's answer is waited for
LIMIT_S = 600.0


def core_of(run: Run) -> int:
    """Pid of vLLM's engine core, as the rollout process has told it."""
    return int(re.findall(r"engine pids \[(\d+)", run.paths.log("rollout/0").read_text())[-1])


@pytest.fixture(scope="module", autouse=True)
def model() -> None:
    from busrl.quickstart import ensure

    ensure("tiny:sort")


@pytest.mark.parametrize("transport", ["shm", "broadcast"])
def test_the_quickstart_trains_with_vllm_and_its_audit_is_clean(tmp_path: Path, transport: str) -> None:
    run = Run(tmp_path / "run", *SETTINGS, *PARITY, f'weights.transport="{transport}"', steps=4)
    with running(run):
        check_end(run, run.wait(LIMIT_S))
    assert run.restarts("rollout/0") == 0, run.tail()
    compared = [row["parity"] for row in run.metrics() if row["parity_engines"]]
    assert len(compared) >= 3 and max(compared) < 1e-3
    assert not [row["text"] for row in read_lines(run.paths.errors) if row["text"].startswith("engine vllm of")]
    log = run.paths.log("rollout/0").read_text()
    assert "log-probabilities differ by at most" in log and "updates=" in log, log
    assert "workers did not leave" not in log, log


@pytest.mark.parametrize("transport", ["shm", "lora_hotswap", "lora_restart"])
def test_an_adapter_is_trained_and_every_version_gets_into_vllm(tmp_path: Path, transport: str) -> None:
    pytest.importorskip("peft")
    lora = ("lora.rank=8", "learner.lr=2e-3", f'weights.transport="{transport}"')
    run = Run(tmp_path / "run", *SETTINGS, *lora, steps=3)
    with running(run):
        check_end(run, run.wait(LIMIT_S))
    assert run.restarts("rollout/0") == 0, run.tail()
    assert "version=3," in run.paths.log("rollout/0").read_text()


def test_a_killed_engine_core_costs_a_restart_and_nothing_else(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", *SETTINGS, steps=40)
    with running(run):
        run.until("a step", lambda: run.step() >= 2, LIMIT_S)
        core = core_of(run)
        os.kill(core, signal.SIGKILL)
        check_end(run, run.wait(LIMIT_S))
    assert run.restarts("rollout/0") == 1, run.tail()
    assert f"vLLM's engine died: pid {core} ended" in run.paths.log("rollout/0").read_text()
