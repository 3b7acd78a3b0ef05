"""A whole run of a mixture of experts with vLLM: its learner would have chosen what the engine chose."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from checks import check_end
from harness import Run, running
from moe_models import moe_folder
from test_vllm_routes import forward, unlike
from test_vllm_run import LIMIT_S, SETTINGS, core_of
from transformers import AutoModelForCausalLM

from busrl.ledger.wal import Wal

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
STILL = ("model.dtype=float32", "learner.lr=1e-12")  # versions differ by less than what turns a choice
SEGMENTS = ("segments.length=8", "segments.global_max_length=24", "generation.max_new_tokens=24")
WORTH = ("limits.idle_groups=0", "reward.kind=python", "groups.size=4")
REWARD = "def score(record, completion, token_ids):\n    return float(completion.count('3') - completion.count('4'))\n"


def test_a_core_that_dies_between_segments_costs_no_row_and_doubles_none(tmp_path: Path) -> None:
    folder = moe_folder(tmp_path / "model", layers=3)
    (tmp_path / "reward.py").write_text(REWARD)
    run = Run(
        tmp_path / "run", *SETTINGS, *STILL, *SEGMENTS, *WORTH, f"reward.function={tmp_path / 'reward.py'}:score",
        f"model.path={folder}", "learner.routes=replay", "learner.checkpoint_every=100", steps=8,
    )
    with running(run):
        run.until("a step", lambda: run.step() >= 2, LIMIT_S)
        os.kill(core_of(run), signal.SIGKILL)
        code = run.wait(LIMIT_S)
    check_end(run, code)
    assert run.restarts("rollout/0") == 1, run.tail()
    for row in run.metrics():
        assert row["routes"]["changed"] == row["routes"]["rows"] == row["routes"]["own_tokens"] == 0
    check_log(run, folder)


def check_log(run: Run, folder: Path) -> None:
    """Every position but the last has its experts, once and in its place."""
    model, segments = AutoModelForCausalLM.from_pretrained(folder).eval(), set[int]()
    for sample in (sample for record in Wal(run.paths.wal).records() for sample in record.samples):
        routes, prompt = sample.route_arrays()
        assert routes is not None and prompt is not None
        plain, _ = forward(model, [*sample.prompt_array().tolist(), *sample.token_array().tolist()])
        assert not unlike(np.concatenate([prompt, routes]), plain).any()
        segments.add(len(sample.segments))
    assert max(segments) > 1
