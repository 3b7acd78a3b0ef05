"""examples/five-ways: one model and one task, brought into a run in every way of docs/five-ways.md."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checks import check_end
from harness import Run, running

ROOT = Path(__file__).resolve().parents[2]
OWN = ROOT / "examples" / "five-ways"
WAYS = {  # and the package that each needs
    "jsonl": "", "reasoning_gym": "reasoning_gym", "gymnasium": "gymnasium", "openai_client": "aiohttp",
    "verifiers": "",
}
AGENTS_PYTHON = ROOT / ".venv" / "agents" / "bin" / "python"  # of `make agents-env`
in_its_own = pytest.mark.skipif(not AGENTS_PYTHON.exists(), reason="make agents-env")


@pytest.fixture
def folder(tmp_path: Path, quickstart: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the example with its model and prompts made."""
    copy = tmp_path / "five-ways"
    shutil.copytree(OWN, copy, ignore=shutil.ignore_patterns("made", "__pycache__"))
    monkeypatch.syspath_prepend(str(copy))
    monkeypatch.delitem(sys.modules, "make_model", raising=False)
    importlib.import_module("make_model").main()
    return copy


def played(folder: Path, way: str, tmp_path: Path, *settings: str, client: str = "", limit_s: float = 150) -> None:
    if WAYS[way]:
        pytest.importorskip(WAYS[way])
    given = ["learner.checkpoint_every=0", *settings]
    run = Run(tmp_path / "run", *given, config=folder / f"{way}.toml", steps=3)
    with running(run):
        if client:
            command = [str(AGENTS_PYTHON), client, str(run.directory)]
            assert subprocess.run(command, cwd=folder, timeout=150).returncode == 0
        check_end(run, run.wait(limit_s))
    rewards = [row["reward"] for row in run.metrics()]
    assert 0.15 < sum(rewards) / len(rewards) < 0.7, "the model's first answers, judged as in the quickstart"


@pytest.mark.long
def test_an_environment_of_gymnasium_is_trained_by_its_command(folder: Path, tmp_path: Path) -> None:
    played(folder, "gymnasium", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["jsonl", "reasoning_gym"])
def test_a_way_of_lines_is_trained_by_its_command(folder: Path, tmp_path: Path, way: str) -> None:
    played(folder, way, tmp_path)


@pytest.mark.slow
@in_its_own
def test_a_program_that_knows_only_openais_client_trains(folder: Path, tmp_path: Path) -> None:
    played(folder, "openai_client", tmp_path, client="client.py")


@pytest.mark.slow
@pytest.mark.timeout(600)
@in_its_own
def test_an_environment_of_verifiers_is_trained_by_its_command(folder: Path, tmp_path: Path) -> None:
    given = (f"process.agent.python={AGENTS_PYTHON}", "agents.episodes=32", "groups.size=4", "learner.trigger.n_min=6")
    played(folder, "verifiers", tmp_path, *given, limit_s=400)


def test_the_page_names_each_topology_that_there_is() -> None:
    page = (ROOT / "docs" / "five-ways.md").read_text()
    assert set(re.findall(r"busrl launch examples/five-ways/(\w+)\.toml", page)) == set(WAYS)
    assert {path.stem for path in OWN.glob("*.toml")} == set(WAYS)
