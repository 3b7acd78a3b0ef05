"""Several models in real runs: one that only serves beside one that learns, by its own files and at its own ring."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from checks import check_end
from harness import Run, read_lines, running

from busrl.cli import main
from busrl.errors import RingError
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


BOTH = """\
import random

async def episode(task, llm):
    answer = await llm["solver"].complete(task["prompt"])
    verdict = await llm["judge"].complete(task["prompt"])
    await llm["old"].complete(task["prompt"])
    return {"solver": random.random() + len(answer.ids), "judge": random.random() + len(verdict.ids)}
"""


def judged_run(folder: Path, steps: int, *changes: tuple[str, str], code: str = EPISODE) -> Run:
    files = ensure("tiny:sort")
    copy = Path(shutil.copytree(files.model, folder / "judge"))
    (folder / "episode.py").write_text(code)
    text = TOPOLOGY.format(train=files.train, model=files.model, copy=copy)
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
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


OLD = '[[model]]\ntag = "old"\npath = "tiny:sort"\ntrained = false\n'


def two_runs(folder: Path, steps: int, judge_steps: int) -> Run:
    """A run in which solver and judge are trained, and a third model is only asked."""
    changed = f"max_steps = {judge_steps}\n[model.learner.trigger]\nn_min = 6\n{OLD}"
    return judged_run(folder, steps, ("trained = false\n", changed), code=BOTH)


def pid_of(run: Run, name: str, tag: str) -> int:
    """The process of that name in the ring of this model; 0 if it is not there."""
    with suppress(RingError), closing(Ring.attach(run.paths.of_tag(tag).ring_name, read_only=True)) as ring:
        return next((process.pid for process in ring.processes()
                     if process.label == name and process.state == "ready" and not ring.is_dead(process.index)), 0)
    return 0


def kill(run: Run, name: str, tag: str = "") -> None:
    os.kill(run.until(f"{name} of {tag or 'the lead'}", lambda: pid_of(run, name, tag)), signal.SIGKILL)


def step_of(run: Run, tag: str) -> int:
    return len(read_lines(run.paths.of_tag(tag).train_log))


def check_models(run: Run, steps: dict[str, int]) -> None:
    """Every trained model has made its steps, and its audit is clean."""
    models = run.summary()["models"]
    for tag, wanted in steps.items():
        assert models[tag]["steps"] == wanted, models[tag]
        paths = run.paths if tag == "solver" else run.paths.of_tag(tag)
        assert sorted({line["step"] for line in read_lines(paths.train_log)}) == list(range(1, wanted + 1))
        assert not paths.ring_file.exists() and not Path("/dev/shm", paths.calls_name).exists()
    for told in (models[tag]["audit"] for tag in steps if tag != "solver"):
        assert told["clean"] and told["counts"]["lost"] == told["counts"]["trained_twice"] == 0, told


@pytest.mark.long
def test_two_models_learn_and_the_slower_one_ends_the_run(tmp_path: Path, quickstart: None) -> None:
    run = two_runs(tmp_path, steps=4, judge_steps=7)
    with running(run):
        check_end(run, run.wait())
    check_models(run, {"solver": 4, "judge": 7})
    judge = run.paths.of_tag("judge")
    log = run.paths.log("learner/judge").read_text()
    assert "Traceback" not in log and (judge.checkpoints / "global_step_7").is_dir()
    assert {row["step"] for row in read_lines(judge.metrics) if "step" in row} == set(range(1, 8))
    rates = {read_lines(run.paths.metrics)[0]["lr"], read_lines(judge.metrics)[0]["lr"]}
    assert len(rates) == 2 or rates == {1e-3}
    assert main(["audit", str(run.directory)]) == 0
    assert main(["export", str(run.directory), "--model", "judge", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.long
def test_deaths_of_every_kind_lose_nothing_of_any_model(tmp_path: Path, quickstart: None) -> None:
    """Learners and engines of both models, the episodes' players, scheduler, keeper, broker, and then launch itself."""
    run = two_runs(tmp_path, steps=10, judge_steps=8)
    with running(run):
        for at, (name, tag) in enumerate([
            ("learner/judge", "judge"), ("rollout/2", "old"), ("agent/0", ""), ("rollout/1", "judge"), ("learner", ""),
            ("scheduler", ""), ("keeper", ""), ("bus", ""),
        ], 1):
            run.until(f"{at} steps", lambda at=at: step_of(run, "") + step_of(run, "judge") >= at)
            kill(run, name, tag)
        run.kill_launch()
        assert run.paths.ring_file.exists() and run.paths.of_tag("judge").ring_file.exists()
        run.start()
        check_end(run, run.wait(), accidents=1000)
    assert "judge: adopted the ring" in run.text()
    check_models(run, {"solver": 10, "judge": 8})


@pytest.mark.long
def test_a_ring_that_is_lost_is_put_back_by_its_files(tmp_path: Path, quickstart: None) -> None:
    run = two_runs(tmp_path, steps=6, judge_steps=6)
    with running(run):
        run.until("steps of both", lambda: step_of(run, "") >= 2 and step_of(run, "judge") >= 2)
        run.kill_launch()
        run.paths.of_tag("judge").ring_file.unlink()
        run.start()
        check_end(run, run.wait(), accidents=1000)
    text = run.text()
    assert "judge: adopted" not in text and "adopted the ring that an earlier launch left" in text
    check_models(run, {"solver": 6, "judge": 6})


@pytest.mark.long
def test_a_model_with_all_its_steps_is_frozen_while_others_learn(tmp_path: Path, quickstart: None) -> None:
    """Its learner ends at once in the next start, and its seat is played by its last version."""
    run = two_runs(tmp_path, steps=8, judge_steps=50)
    with running(run):
        run.until("steps of both", lambda: step_of(run, "") >= 1 and step_of(run, "judge") >= 2)
        run.kill_launch()
        done = max(line["step"] for line in read_lines(run.paths.of_tag("judge").train_log))
        run.settings.append(f"model.judge.max_steps={done}")
        run.start()
        check_end(run, run.wait(), accidents=1000)
    check_models(run, {"solver": 8, "judge": done})
    assert run.summary()["processes"]["rollout/1"]["restarts"] == 0
