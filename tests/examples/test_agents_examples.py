"""examples/agents: environments of verifiers and atroposlib, by the Python of virtual environments of their own."""

from __future__ import annotations

import importlib
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checks import check_end
from harness import ROOT, Run, beside, read_lines, running

from busrl.ledger.wal import Wal
from busrl.quickstart import ensure

AGENTS_PYTHON = ROOT / ".venv" / "agents" / "bin" / "python"  # of `make agents-env`
ATROPOS_PYTHON = ROOT / ".venv" / "atropos" / "bin" / "python"  # of `make atropos-env`


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not AGENTS_PYTHON.exists(), reason="make agents-env")
def test_an_environment_of_verifiers_trains_what_its_model_says_around_the_calls_of_a_tool(
    tmp_path: Path, quickstart: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "agents"
    shutil.copytree(ROOT / "examples" / "agents", folder, ignore=shutil.ignore_patterns("made", "__pycache__"))
    monkeypatch.syspath_prepend(str(folder))
    importlib.import_module("make_games").main(folder / "made")
    given = (f"process.agent.python={AGENTS_PYTHON}", "groups.size=4", "learner.trigger.n_min=4")
    run = Run(tmp_path / "run", *given, "learner.checkpoint_every=0", config=folder / "calculator.toml", steps=3)
    with running(run):
        check_end(run, run.wait(400))
    for row in run.metrics():
        assert row["episodes"]["turns_mean"] > 1.5 and row["episodes"]["sequences_mean"] == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not ATROPOS_PYTHON.exists(), reason="make atropos-env")
def test_each_group_that_is_trained_was_posted_once_by_an_environment_of_atroposlib(
    tmp_path: Path, quickstart: None
) -> None:
    groups = tmp_path / "groups.jsonl"
    run = Run(tmp_path / "run", "learner.checkpoint_every=0", config=ROOT / "configs" / "atropos.toml", steps=4)
    with running(run):
        run.told("atropos")
        environment = ROOT / "examples" / "agents" / "atropos_environment.py"
        with beside(ATROPOS_PYTHON, environment, run.directory, ensure("tiny:sort").model, "--groups", groups):
            check_end(run, run.wait(400))
    posted = [posted_group(one) for one in read_lines(groups)]
    trained = trained_groups(run)
    assert len(trained) == 4 * 8, "each step took its groups"
    assert all(posted.count(one) == 1 == trained.count(one) for one in trained)


def posted_group(group: dict[str, Any]) -> list[Any]:
    """Ids, log-probabilities of the trained ones, and score of each member."""
    members = zip(group["tokens"], group["masks"], group["inference_logprobs"], group["scores"])
    return sorted([ids, [np.float32(one) for one, trained in zip(logprobs, mask) if trained != -100], score]
                  for ids, mask, logprobs, score in members)


def trained_groups(run: Run) -> list[list[Any]]:
    found: dict[int, list[Any]] = defaultdict(list)
    for one in (sample for record in Wal(run.paths.wal).records() for sample in record.samples):
        ids, logprobs = np.frombuffer(one.token_ids, np.int32), np.frombuffer(one.logprobs, np.float32)
        found[one.group].append([ids.tolist(), list(logprobs), one.reward])
    return [sorted(members) for members in found.values()]
