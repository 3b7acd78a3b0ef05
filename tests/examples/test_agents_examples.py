"""examples/agents: the environment of verifiers that has a tool server and takes two turns."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import pytest
from checks import check_end
from harness import Run, running

ROOT = Path(__file__).resolve().parents[2]
AGENTS_PYTHON = ROOT / ".venv" / "agents" / "bin" / "python"  # of `make agents-env`


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
