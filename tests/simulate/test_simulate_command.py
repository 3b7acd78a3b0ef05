"""`busrl simulate` as a user types it."""

from __future__ import annotations

import json
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

from busrl.cli import main
from busrl.data import trace

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = str(ROOT / "configs" / "quickstart.toml")


def test_the_quickstart_gives_a_useful_answer_and_names_what_was_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", QUICKSTART, "--steps", "10"]) == 0
    text = capsys.readouterr().out
    for word in ("samples/s", "busy", "age", "waiting", "skew", "bottleneck", "assumed", "--fit RUN_DIR"):
        assert word in text


def test_json_holds_every_figure_and_where_each_time_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", QUICKSTART, "--steps", "5", "--json", "--seed", "7", "--actors", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["actors"] == 2 and found["seed"] == 7 and found["figures"]["steps"] == 5
    assert sum(found["figures"]["ages"].values()) == pytest.approx(1.0)
    assert found["times"]["step_s"]["source"].startswith("assumed")


def test_a_sweep_writes_a_table_a_page_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    sweeps = ["--sweep", "learner.trigger.n_min=8,16", "--sweep", "simulate.actors=1,2,3"]
    assert main(["simulate", QUICKSTART, "--steps", "3", "--out", str(out), *sweeps]) == 0
    rows = (out / "sweep.csv").read_text().splitlines()
    assert len(rows) == 7 and rows[0].startswith("learner.trigger.n_min,simulate.actors,samples/s")
    assert [row.split(",")[:2] for row in rows[1:3]] == [["8", "1"], ["8", "2"]]
    assert (out / "sweep.md").read_text() in capsys.readouterr().out
    picture = xml.parse(out / "sweep.svg").getroot()
    assert picture.tag.endswith("svg") and len(list(picture.iter("{http://www.w3.org/2000/svg}circle"))) == 6 * 7


def test_a_generated_trace_can_be_simulated_and_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    for path in (one, two):
        assert main(["simulate", "--generate", str(path), "--prompts", "40", "--group-size", "4", "--seed", "3",
                     "--median", "20", "--limit", "60", "--arrivals", "50"]) == 0  # fmt: skip
    assert one.read_bytes() == two.read_bytes()
    tasks = trace.read(one)
    assert len(tasks) == 40 and all(len(task.lengths) == 4 and max(task.lengths) <= 60 for task in tasks)
    assert main(["simulate", QUICKSTART, "--trace", str(one), "--set", "groups.size=4"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--actors", "0"], "--actors 0: must be 1 to"),
        (["--actors", "-3"], "--actors -3: must be 1 to"),
        (["--steps", "0"], "--steps 0: must be >= 1"),
        (["--seed", "-1"], "--seed -1: must be >= 0"),
        (["--sweep", "learner.trigger.n_mim=1,2"], "--sweep learner.trigger.n_mim: n_mim: unknown key"),
        (["--sweep", "learner.trigger.n_min=8,lots"], '--sweep learner.trigger.n_min: learner.trigger.n_min = "lots"'),
        (["--sweep", "n_min"], "--sweep n_min: must be key=a,b,c"),
        (["--sweep", "run.seed=1,,2"], "must be key=a,b,c"),
        (["--sweep", "run.seed=1,2", "--sweep", "run.seed=3"], "given twice"),
        (["--sweep", "simulate.actors=1,2", "--actors", "4"], "contradict each other"),
        (["--fit", "/nowhere"], "/nowhere: not a run directory"),
        (["--trace", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--set", "simulate.step_s=0", "--set", "simulate.row_s=0"], "a decoding step must take some time"),
        (["--set", "simulate.step_s=-1"], "simulate.step_s"),
        (["--generate", "/nowhere/trace.jsonl"], "can not be written"),
        (["--generate", "x", "--prompts", "0"], "--prompts 0: must be >= 1"),
        (["--generate", "x", "--median", "900", "--limit", "100"], "--median 900: must be 1 to --limit"),
    ],
)
def test_what_can_not_be_simulated_is_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", QUICKSTART, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_a_trace_with_a_negative_length_is_refused_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a", "lengths": [3, 4]}\n{"prompt": "b", "lengths": [3, -4]}\n')
    assert main(["simulate", QUICKSTART, "--trace", str(path)]) == 2
    error = capsys.readouterr().err
    assert f"{path}:2" in error and "-4" in error


def test_a_topology_without_a_file_asks_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate"]) == 2
    assert "give a topology file" in capsys.readouterr().err
