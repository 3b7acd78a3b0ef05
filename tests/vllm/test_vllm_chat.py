"""Chats with engine = "vllm": the ids of the model's own template, and every end id of generation_config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from chat_run import check_samples, make_all
from checks import check_end
from harness import Run, running
from test_vllm_run import LIMIT_S, SETTINGS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def test_a_run_of_chats_trains_on_ids_from_the_model_template(
    chat_folder: Callable[..., Path], tmp_path: Path
) -> None:
    model = chat_folder("bos")
    settings = [one for one in SETTINGS if not one.startswith(("validation.", "run.validate"))]
    run = Run(tmp_path / "run", *settings, "learner.checkpoint_every=100",
              config=make_all(tmp_path / "mine", model), steps=5)
    with running(run):
        check_end(run, run.wait(LIMIT_S))
    check_samples(run, model)
