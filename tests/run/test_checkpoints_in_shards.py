"""Checkpoints in shards in whole runs: written while training goes on, exported, measured, begun with by others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checks import check_end
from harness import Run, running
from transformers import AutoModelForCausalLM

from busrl.cli import main
from busrl.training.shard_files import Shards


def counted(run: Run) -> float:
    """The updates that the optimiser of the run's newest checkpoint has counted."""
    newest = max(run.paths.checkpoints.glob("global_step_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    shards = Shards(newest)
    return {float(shards.whole(name)) for name in shards.shapes if name.endswith(".step")}.pop()


@pytest.mark.long
def test_a_run_continues_during_a_save_and_another_begins_from_it(
    tmp_path: Path, quickstart: None, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("validation.data=", "learner.checkpoint_mode=async")
    first = Run(tmp_path / "first", *more, "learner.checkpoint_every=1", steps=3)
    with running(first):
        check_end(first, first.wait())
    saved = first.paths.checkpoints / "global_step_3"
    assert {path.name for path in saved.parent.iterdir()} == {"global_step_2", "global_step_3"}
    assert counted(first) == 3 and not list((saved / "model").glob("*.safetensors"))
    assert main(["export", str(first.directory), "--out", str(tmp_path / "model")]) == 0
    named = dict(AutoModelForCausalLM.from_pretrained(str(tmp_path / "model"), dtype="auto").named_parameters())
    shards = Shards(saved)
    assert all(torch.equal(tensor, shards.whole(f"weights.{name}")) for name, tensor in named.items())
    capsys.readouterr()
    assert main(["evaluate", str(first.directory), "--samples", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] > 0

    second = Run(tmp_path / "second", *more, f"learner.start_from={saved}", steps=2)
    with running(second):
        check_end(second, second.wait())
    assert counted(second) == 5, "its optimiser goes on"
    assert second.metrics()[0]["step"] == 1 and second.metrics()[0]["version"] >= 2, "version 1 came before any sample"


@pytest.mark.slow
def test_the_optimiser_is_left_where_it_is_if_asked_for(tmp_path: Path, quickstart: None) -> None:
    more = ("validation.data=", "learner.checkpoint_mode=async")
    first = Run(tmp_path / "first", *more, steps=2)
    with running(first):
        check_end(first, first.wait())
    saved = first.paths.checkpoints / "global_step_2"
    second = Run(tmp_path / "second", *more, f"learner.start_from={saved}", "learner.start_optimizer=false", steps=2)
    with running(second):
        check_end(second, second.wait())
    assert counted(second) == 2
