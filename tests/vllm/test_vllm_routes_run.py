"""Whole runs of a mixture of experts with vLLM: routes in the log are those of a plain forward pass."""

from __future__ import annotations

import os
import signal
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
from checks import check_end
from harness import Run, running
from moe_models import moe_folder
from test_segments import logged
from test_vllm_routes import forward, unlike
from test_vllm_run import LIMIT_S, SETTINGS, core_of
from transformers import AutoModelForCausalLM

from busrl.ledger.wal import SampleRecord

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
STILL = ("learner.lr=1e-12", "model.dtype=float32")  # versions that are not told apart by what they choose
SEGMENTS = ("segments.length=8", "segments.global_max_length=24", "generation.max_new_tokens=24")


def check_routes(samples: list[SampleRecord], folder: Path) -> None:
    """Every position but the last has its experts, once and in its place."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert samples
    for sample in samples:
        packed = {"routes": sample.routes, "prompt_routes": sample.prompt_routes}
        whole = {name: zlib.decompress(text) for name, text in packed.items()}
        routes, prompt = msgspec.structs.replace(sample, **whole).route_arrays()
        assert routes is not None and prompt is not None
        plain, _ = forward(model, [*sample.prompt_array().tolist(), *sample.token_array().tolist()])
        assert not unlike(np.concatenate([prompt, routes]), plain).any()


def test_a_core_that_dies_between_segments_costs_no_row_and_doubles_none(tmp_path: Path) -> None:
    folder = moe_folder(tmp_path / "model", layers=3)
    run = Run(
        tmp_path / "run", *SETTINGS, *STILL, *SEGMENTS, f"model.path={folder}", "learner.routes=replay",
        "learner.checkpoint_every=0", steps=8,
    )
    with running(run):
        run.until("a step", lambda: run.step() >= 2, LIMIT_S)
        os.kill(core_of(run), signal.SIGKILL)
        run.until("steps after it", lambda: run.step() >= 6, LIMIT_S)
        samples = logged(run)
        code = run.wait(LIMIT_S)
    check_end(run, code)
    assert run.restarts("rollout/0") == 1, run.tail()
    assert max(len(sample.segments) for sample in samples) > 1
    check_routes(samples, folder)
