"""A run from Python: started from a map, read while it runs and afterwards, ended; and what is said of wrong input."""

from __future__ import annotations

import json
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
from busrl import api
from busrl.api import toml
from busrl.errors import NoSuchRun, PeerTimeout, RunFailed, TopologyError, UserError

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
    with pytest.warns(UserWarning, match="nothing is learnt"):
        run = busrl.launch(scripted(tmp_path, 6), run_dir="runs/book", overrides={"run.max_steps": 4})
    steps = [row["step"] for row in run.metrics(follow=True)]
    assert steps == [1, 2, 3, 4] and run.wait(WAIT_S)["outcome"] == "finished"
    assert run.status()["state"] == "finished" and not run.live and repr(run).endswith("runs/book: finished>")
    assert {row["step"] for row in run.samples()} == {1, 2, 3, 4} and run.topology["run"]["name"] == "book"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "trace.jsonl"]
    again = busrl.attach("runs/book")
    assert [row["step"] for row in again.metrics()] == steps and again.wait(0) == again.summary == run.summary
    with pytest.warns(UserWarning, match="max_steps"):
        busrl.launch(scripted(tmp_path, 4), run_dir="runs/book")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_a_run_is_found_and_ended_when_its_block_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyboardInterrupt), busrl.launch(scripted(tmp_path, 100_000), run_dir="run") as started:
        run = busrl.attach("run")
        assert next(iter(run.metrics(follow=True)))["step"] == 1 and run.live
        with pytest.raises(PeerTimeout, match="still runs after 0 s"):
            run.wait(0)
        raise KeyboardInterrupt
    assert started.child is not None and started.child.wait(WAIT_S) == 128 + signal.SIGTERM
    assert run.wait(WAIT_S)["outcome"] == "stopped" and not run.live
    run.stop()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_a_failed_run_raises_the_name_of_who_is_to_blame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    failing = scripted(tmp_path, 4)
    failing["process"].append({"role": "reward", "command": ["false"]})
    run = busrl.launch(failing, run_dir="run", overrides=["limits.restart_attempts=1"])
    with pytest.raises(RunFailed, match="reward"):
        list(run.metrics(follow=True))
    with pytest.raises(RunFailed, match="reward"):
        busrl.attach("run").wait(WAIT_S)
    assert list(run.metrics()) == [] and run.summary["outcome"] == "failed"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_a_run_whose_launch_was_killed_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with busrl.launch(scripted(tmp_path, 2), run_dir="run") as run:
        run.wait(WAIT_S)
    with busrl.launch(scripted(tmp_path, 100_000), run_dir="run") as run:
        next(row for row in run.metrics(follow=True) if row["step"] == 3)
        assert run.child is not None
        run.child.kill()
        with pytest.raises(RunFailed, match="its launch was killed"):
            run.wait(WAIT_S)
    dead = busrl.attach("run")
    assert dead.summary == {} and dead.status()["state"] != "finished"
    with pytest.raises(RunFailed, match="with this run_dir"):
        dead.wait(0)


@pytest.mark.long
@pytest.mark.filterwarnings("error::UserWarning")
def test_a_launch_that_gives_no_run_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserWarning, match="nothing is learnt"):
        busrl.launch(scripted(tmp_path, 100_000), run_dir="run")
    run = busrl.attach("run")
    assert not run.live and run.summary["outcome"] == "stopped"


def test_an_interrupt_during_a_start_ends_the_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pids = []

    def interrupted(pid: int) -> None:
        pids.append(pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "_await_end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        busrl.launch(scripted(tmp_path, 4), run_dir="run")
    [pid] = pids
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.long
def test_the_notebook_runs_from_its_first_cell_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "examples/first_run.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    try:
        for cell in cells:
            if cell["cell_type"] == "code":
                assert not cell["outputs"], "a notebook is kept without outputs"
                exec("".join(cell["source"]), names)
    finally:
        if "run" in names:
            names["run"].stop()
    printed = capsys.readouterr().out
    assert "learner.lr = -1" in printed and "False 30 steps\n31\nstopped\n" in printed


def test_a_topology_is_checked_from_a_file_and_from_a_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = scripted(tmp_path, 4)
    checked = busrl.check(settings, overrides={"learner.lr": 0.5})
    assert checked.settings.learner.lr == 0.5 and checked.settings.run.max_steps == 4
    assert any("nothing is learnt" in text for text in checked.warnings) and "learner.lr=0.5" in repr(checked)
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
    assert all(problem.rule and problem.remedy for problem in refused.value.problems)
    assert {problem.place for problem in refused.value.problems} == {"topology"}, "not the file that is gone by now"


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
    with pytest.raises(UserError, match=r"^topology: learner\.lr = -1: ") as launched:
        busrl.launch(wrong)
    with pytest.raises(TopologyError) as checked:
        busrl.check(wrong)
    assert str(checked.value) == str(launched.value)
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
