"""A run with sinks: one that works, one that fails and one that hangs; and what `busrl check` says of wrong ones."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
from checks import check_end
from harness import Run, read_lines, running

from busrl.errors import TopologyError
from busrl.preflight.load import load

ROOT = Path(__file__).resolve().parents[2]
TABLE = f"{ROOT}/examples/extending/sink.py:Table"
OTHERS = """
import threading

class Fails:
    def __init__(self, card):
        raise ConnectionRefusedError("its key is not accepted")

class Hangs:
    def __init__(self, card):
        threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ('["wand"]', 'file.py:name, got "wand"; one of tensorboard, wandb'),
        ('["wandb", "wandb"]', "a sink is named twice"),
        ('["tensorboard:"]', "expected a function"),
    ],
)
def test_an_unknown_sink_is_refused_with_the_existing_ones(to: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        load(ROOT / "configs" / "quickstart.toml", [f"sinks.to={to}"])


def test_without_sinks_there_is_no_process_for_them() -> None:
    topology = load(ROOT / "configs" / "quickstart.toml", [])
    assert "sinks" not in [process.name for process in topology.processes()]
    topology = load(ROOT / "configs" / "quickstart.toml", [f'sinks.to=["{TABLE}"]'])
    assert "sinks" in [process.name for process in topology.processes()]


@pytest.mark.long
def test_every_step_of_a_run_reaches_a_sink_whatever_happens_to_others(
    quickstart: None, tmp_path: Path
) -> None:
    """The feeding process is killed in the middle; a sink that fails is told of, one that hangs is named at the end."""
    other = tmp_path / "others.py"
    other.write_text(OTHERS)
    sinks = json.dumps([TABLE, f"{other}:Fails", f"{other}:Hangs"])
    run = Run(tmp_path / "run", f"sinks.to={sinks}", steps=12)
    with running(run):
        run.until("four steps", lambda: len(run.metrics()) >= 4)
        run.kill("sinks")
        check_end(run, run.wait())
    (file,) = (run.directory / "sinks").glob("*/long.csv")
    rows = list(csv.reader(file.open()))
    assert {int(step) for step, name, _ in rows if name == "reward"} == set(range(1, 13))
    assert any(name == "sample" for _, name, _ in rows) and any(name.startswith("val/") for _, name, _ in rows)
    texts = [row["text"] for row in read_lines(run.paths.errors) if row["process"] == "sinks"]
    assert any("its key is not accepted" in text for text in texts)
    assert any("Hangs has not taken the last numbers" in text for text in texts)


@pytest.mark.long
def test_every_number_of_a_run_stands_in_the_docs(quickstart: None, tmp_path: Path) -> None:
    """And every number of the dashboard is one of those."""
    run = Run(tmp_path / "run", steps=3)
    with running(run):
        run.wait()
    page = (ROOT / "docs" / "metrics.md").read_text()
    named = set(re.findall(r"`/?([a-z0-9_]+)[/`@*]", page))
    names = {name for row in run.metrics() for name in row if "kind" not in row}
    families = ("length_ks_",)
    assert not {name for name in names - named if not name.startswith(families)}
    shown = set(re.findall(r"busrl_([a-z0-9_]+)\{", (ROOT / "configs" / "grafana.json").read_text()))
    live = set(re.findall(r"busrl_([a-z_]+)", page))
    known = {name.replace("/", "_") for name in names} | live | {"val_reward", "wait_s_groups"}
    assert shown and shown <= known
