"""examples/five-ways: one model and one task, brought into a run in every way of docs/five-ways.md."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from pathlib import Path

import pytest
from checks import check_end
from harness import Run, running

ROOT = Path(__file__).resolve().parents[2]
OWN = ROOT / "examples" / "five-ways"
WAYS = {"jsonl": "", "reasoning_gym": "reasoning_gym", "gymnasium": "gymnasium"}  # and the package that each needs


@pytest.fixture
def folder(tmp_path: Path, quickstart: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the example with its model and prompts made."""
    copy = tmp_path / "five-ways"
    shutil.copytree(OWN, copy, ignore=shutil.ignore_patterns("made", "__pycache__"))
    monkeypatch.syspath_prepend(str(copy))
    monkeypatch.delitem(sys.modules, "make_model", raising=False)
    importlib.import_module("make_model").main()
    return copy


def played(folder: Path, way: str, tmp_path: Path) -> None:
    if WAYS[way]:
        pytest.importorskip(WAYS[way])
    run = Run(tmp_path / "run", "learner.checkpoint_every=0", config=folder / f"{way}.toml", steps=3)
    with running(run):
        check_end(run, run.wait())
    rewards = [row["reward"] for row in run.metrics()]
    assert 0.15 < sum(rewards) / len(rewards) < 0.7, "the model's first answers, judged as in the quickstart"


def test_an_environment_of_gymnasium_is_trained_by_its_command(folder: Path, tmp_path: Path) -> None:
    played(folder, "gymnasium", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["jsonl", "reasoning_gym"])
def test_a_way_of_lines_is_trained_by_its_command(folder: Path, tmp_path: Path, way: str) -> None:
    played(folder, way, tmp_path)


def test_the_page_names_each_topology_that_there_is() -> None:
    page = (ROOT / "docs" / "five-ways.md").read_text()
    assert set(re.findall(r"busrl launch examples/five-ways/(\w+)\.toml", page)) == set(WAYS)
    assert {path.stem for path in OWN.glob("*.toml")} == set(WAYS)
