"""Whole runs whose prompts are chats: trained is what the model's own chat template writes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_run import check_samples, expected_ids, make_all
from checks import check_end
from harness import Run, read_lines, running

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engines"))
from endpoint_process import Endpoint

Folder = Callable[..., Path]


# The runs by an endpoint below are of a model whose template writes a BOS.
@pytest.mark.long
@pytest.mark.parametrize("template", ["chatml", pytest.param("bos", marks=pytest.mark.slow)])
def test_a_run_of_chats_trains_on_ids_from_the_model_template(
    chat_folder: Folder, tmp_path: Path, template: str
) -> None:
    model = chat_folder(template)
    settings = ["learner.checkpoint_every=100", "log.samples=all"]
    run = Run(tmp_path / "run", *settings, config=make_all(tmp_path / "mine", model), steps=5)
    with running(run):
        check_end(run, run.wait())
    assert run.audit().counts.trained >= 5 * 8 * 4
    check_samples(run, model)
    rows = read_lines(run.paths.samples)
    assert len(rows) == run.audit().counts.trained and {row["step"] for row in rows} == set(range(1, 6))
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    texts = {tokenizer.decode(ids) for ids in expected_ids(model)}
    assert {row["prompt"] for row in rows} <= texts and rows[0]["record"] == {"answer": 1}


@pytest.mark.long
@pytest.mark.parametrize("endpoint", [pytest.param("completions", marks=pytest.mark.slow), "chat"])
def test_an_endpoint_gives_the_same_and_is_cut_at_unknown_end_ids(
    chat_folder: Folder, tmp_path: Path, endpoint: str
) -> None:
    """The server renders chats with its own tokenizer, and goes on behind the end of a turn."""
    model = chat_folder("bos")
    server = Endpoint(tmp_path, token_s=0.0, tokenizer=model)
    settings = [
        "process.rollout.engine=openai", f"openai.base_url={server.url}", f"openai.endpoint={endpoint}",
        "weights.mode=fully-async", "learner.mismatch_limit=0", "learner.checkpoint_every=100",
    ]
    run = Run(tmp_path / "run", *settings, config=make_all(tmp_path / "mine", model), steps=4)
    try:
        with running(run):
            check_end(run, run.wait())
    finally:
        server.kill()
    check_samples(run, model)
