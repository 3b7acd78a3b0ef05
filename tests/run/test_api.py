"""A run from Python: started from a map, read while it runs and afterwards, ended; and what is said of wrong input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import busrl
from busrl.api import toml
from busrl.errors import NoSuchRun, PeerTimeout, TopologyError, UserError

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 300.0
WORDS = st.text(max_size=8).filter(lambda text: text.isprintable() or "\x7f" in text or "\n" in text)
VALUES = st.recursive(
    st.one_of(WORDS, st.booleans(), st.integers(-(1 << 62), 1 << 62), st.floats(allow_nan=False)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=3)), max_leaves=8,
)


def scripted(folder: Path, steps: int) -> dict[str, Any]:
    trace = folder / "trace.jsonl"
    lines = ({"prompt": f"{n}=", "answer": f"{n}", "lengths": [5, 9]} for n in range(64))
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {
        "run": {"name": "book", "max_steps": steps}, "model": {"path": "tiny:sort"},
        "data": {"train": "trace.jsonl"}, "groups": {"size": 4},
        "generation": {"max_new_tokens": 16, "max_prompt_tokens": 16}, "reward": {"kind": "exact_match"},
        "learner": {"lr": 1e-5, "trigger": {"n_min": 2}}, "log": {"samples": 2},
        "process": [{"role": "rollout", "engine": "mock"}],
    }


@given(st.dictionaries(WORDS, VALUES, max_size=4))
def test_a_map_is_the_same_as_toml(settings: dict[str, Any]) -> None:
    assert tomllib.loads(toml(settings)) == settings


def test_a_value_that_toml_has_not_is_named() -> None:
    with pytest.raises(UserError, match="no None"):
        toml({"run": {"seed": None}})


@pytest.mark.long
def test_a_run_of_a_map_is_followed_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = busrl.launch(scripted(tmp_path, 6), run_dir="runs/book", overrides=["run.max_steps=4"])
    steps = [row["step"] for row in run.metrics(follow=True)]
    assert steps == [1, 2, 3, 4] and run.wait(WAIT_S) == 0
    assert run.status()["state"] == "finished" and run.summary["outcome"] == "finished" and not run.live
    assert {row["step"] for row in run.samples()} == {1, 2, 3, 4} and run.topology["run"]["name"] == "book"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "trace.jsonl"]
    again = busrl.attach("runs/book")
    assert [row["step"] for row in again.metrics()] == steps and again.wait(0) == -1


@pytest.mark.long
def test_a_run_that_goes_on_is_found_and_ended_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    started = busrl.launch(scripted(tmp_path, 100_000), run_dir="run")
    try:
        run = busrl.attach("run")
        assert next(iter(run.metrics(follow=True)))["step"] == 1 and run.live
        with pytest.raises(PeerTimeout, match="still runs it after 0 s"):
            run.wait(0)
        run.stop()
        assert not run.live and started.wait(WAIT_S) == 128 + signal.SIGTERM
    finally:
        assert started.child is not None
        if started.child.poll() is None:
            os.kill(started.child.pid, signal.SIGKILL)


@pytest.mark.long
def test_the_notebook_runs_from_its_first_cell_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "examples/first_run.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "a notebook is kept without outputs"
            exec("".join(cell["source"]), names)
    printed = capsys.readouterr().out
    assert "learner.lr = -1" in printed and "0 finished" in printed and "False 30 steps\n31" in printed


def test_a_topology_is_checked_from_a_file_and_from_a_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = scripted(tmp_path, 4)
    checked = busrl.check(settings, overrides=["learner.lr=0.5"])
    assert checked.settings.learner.lr == 0.5 and checked.settings.run.max_steps == 4
    assert any("nothing is learnt" in text for text in checked.warnings) and "learner.lr=0.5" in str(checked)
    (tmp_path / "own.toml").write_text(toml(settings))
    assert busrl.check("own.toml").settings.learner.lr == 1e-5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own.toml", "trace.jsonl"]


def test_every_problem_of_a_checked_topology_is_an_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = scripted(tmp_path, 4)
    wrong["learner"]["lr"], wrong["groups"]["size"] = -1, 0
    with pytest.raises(TopologyError) as refused:
        busrl.check(wrong)
    assert [problem.value for problem in refused.value.problems] == ["groups.size = 0", "learner.lr = -1"]
    assert all(problem.place and problem.rule and problem.remedy for problem in refused.value.problems)


def test_the_package_has_the_three_names_and_loads_nothing_for_them() -> None:
    code = (
        "import sys, busrl\n"
        "assert not [name for name in sys.modules if name.startswith('busrl.')]\n"
        "assert {'launch', 'attach', 'check'} <= set(dir(busrl)) and not hasattr(busrl, 'start')\n"
        "assert callable(busrl.launch) and 'torch' not in sys.modules\n"
        "import busrl.launcher.run\n"
        "assert busrl.launch is busrl.api.launch"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_launch_says_against_a_topology_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = scripted(tmp_path, 4)
    wrong["learner"]["lr"] = -1
    with pytest.raises(UserError, match=r"learner\.lr"):
        busrl.launch(wrong)
    assert not Path("runs").exists() and [path.name for path in tmp_path.iterdir()] == ["trace.jsonl"]


@pytest.mark.parametrize(("key", "said"), [({"name": "../a/b"}, "run.name"), (3, "run = 3")])
def test_a_name_that_no_run_may_have_makes_no_file_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: Any, said: str
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UserError, match=said):
        busrl.launch({**scripted(tmp_path / "here", 4), "run": key})
    assert [path.name for path in tmp_path.rglob("*")] == ["here", "trace.jsonl"]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoSuchRun, match="no run directory"):
        busrl.attach(tmp_path)
