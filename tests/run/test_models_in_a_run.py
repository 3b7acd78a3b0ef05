"""Several models in real runs: one that only serves beside one that learns, by its own files and at its own ring."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from checks import check_end
from harness import Run, read_lines, running

from busrl.cli import main
from busrl.quickstart.cache import ensure
from busrl.ring import Ring
from busrl.ring.calls import CallAnswer, Caller, ModelCall

TOPOLOGY = """\
[data]
train = "{train}"
[groups]
size = 4
[generation]
max_new_tokens = 8
[learner]
lr = 1e-3
[agents]
context = 64
[[model]]
tag = "solver"
path = "{model}"
[[model]]
tag = "judge"
path = "{copy}"
trained = false
[[process]]
role = "agent"
function = "episode.py:episode"
[[process]]
role = "rollout"
[[process]]
role = "rollout"
model = "judge"
"""
EPISODE = """\
async def episode(task, llm):
    answer = await llm.complete(task["prompt"])
    return float(len(answer.ids) % 3)
"""


def judged_run(folder: Path, steps: int) -> Run:
    files = ensure("tiny:sort")
    copy = Path(shutil.copytree(files.model, folder / "judge"))
    (folder / "episode.py").write_text(EPISODE)
    text = TOPOLOGY.format(train=files.train, model=files.model, copy=copy)
    (folder / "judged.toml").write_text(text)
    settings = "learner.trigger.n_min=4", "agents.episodes=16"
    run = Run(folder / "run", *settings, config=folder / "judged.toml", steps=steps)
    run.settings = [setting for setting in run.settings if not setting.startswith("validation")]
    return run


@contextmanager
def caller(run: Run) -> Iterator[Caller]:
    """A caller at the ring of calls of the model `judge`."""
    calls = run.paths.of_tag("judge").calls_name
    run.until("the ring of calls", lambda: Path("/dev/shm", calls).exists())
    ring = Ring.attach(calls, calls=True)
    try:
        ring.register("agent", "test/0")
        yield Caller(ring, lambda message, to: None)
    finally:
        ring.close()


def asked(run: Run, at: Caller, number: int) -> CallAnswer:
    call = at.put(ModelCall(np.arange(4, 9, dtype=np.int32), 6, uid=number, temperature=1.0))
    assert call is not None
    run.until("an answer of the judge", lambda: at.poll() or call.done)
    return call.result()


@pytest.mark.long
def test_a_model_that_only_serves_answers_through_deaths_of_its_engine(tmp_path: Path, quickstart: None) -> None:
    run = judged_run(tmp_path, steps=6)
    judge = run.paths.of_tag("judge")
    with running(run):
        with caller(run) as at:
            first = asked(run, at, 1)
            assert not first.versions.any() and len(first.ids)
            [pid] = [process.pid for process in at.ring.processes() if process.label == "rollout/1"]
            os.kill(pid, signal.SIGKILL)
            again = asked(run, at, 1)
            assert again.ids.tolist() == first.ids.tolist()  # the same weights, and the same random numbers
        check_end(run, run.wait())
    summary = run.summary()
    assert summary["models"]["judge"] == {"trained": False, "seats": ["judge"]}
    assert summary["models"]["solver"]["steps"] == 6 and summary["processes"]["rollout/1"]["restarts"] == 1
    assert {path.name for path in judge.root.iterdir()} <= {"run.json", "topology.json", "pace"}
    assert not judge.ring_file.exists() and not Path("/dev/shm", judge.calls_name).exists()
    assert not any("another model" in row["text"] or "ignored" in row["text"] for row in read_lines(run.paths.errors))


@pytest.mark.long
def test_verbs_show_one_model_of_a_run_by_its_tag(
    tmp_path: Path, quickstart: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = judged_run(tmp_path, steps=400)
    with running(run):
        run.until_step(1)
        assert main(["status", str(run.directory), "--model", "judge", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        names = {process["name"] for process in told["processes"]}
        assert "rollout/1" in names and "rollout/0" not in names and told["step"] == 0
        assert main(["status", str(run.directory), "--model", "solver", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["step"] >= 1
        assert main(["ring", "inspect", str(run.directory), "--model", "judge"]) == 0
        assert "rollout/1" in capsys.readouterr().out
        assert main(["status", str(run.directory), "--model", "none"]) == 2
        assert "its models are solver, judge" in capsys.readouterr().err
        assert main(["stop", str(run.directory)]) == 0
