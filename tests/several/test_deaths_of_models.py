"""What happens to a run of several models when one stands still, gives up, has no room on its disk or has made its
steps: rows of the table in docs/several-models.md. Kills are in tests/run/test_models_in_a_run.py and in the storm
beside this, starts without a ring in test_lost_files.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT, running
from model_runs import check_models, process_of, sides_alone, status, step_of, three_models
from small_disk import why_no_mounts

STEPS = 10
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def test_a_learner_that_stands_still_holds_the_others_back_by_name(tmp_path: Path, several: Path) -> None:
    run = three_models(several, tmp_path, "limits.progress_s=300", steps=STEPS)
    with running(run):
        run.until("the judge learns", lambda: step_of(run, "judge") >= 2)
        pid = run.until("its learner is there", lambda: process_of(run, "learner/judge")).pid
        os.kill(pid, signal.SIGSTOP)
        try:
            run.until("the wait is named", lambda: "(judge)" in status(run))
            ahead = step_of(run, "") - step_of(run, "judge")
        finally:
            os.kill(pid, signal.SIGCONT)
        code = run.wait()
    assert ahead <= 4, "the solver's learner was held back"
    check_models(run, code)


def test_engines_of_a_model_that_stand_still_are_named_as_the_wait(tmp_path: Path, several: Path) -> None:
    run = three_models(several, tmp_path, "limits.progress_s=300", steps=STEPS)
    with running(run):
        run.until("the judge learns", lambda: step_of(run, "judge") >= 2)
        engine = run.until("its engine is there", lambda: process_of(run, "rollout/1")).pid
        os.kill(engine, signal.SIGSTOP)
        try:
            run.until("the wait is named", lambda: f"rollout/1 is stopped (pid {engine}" in status(run))
        finally:
            os.kill(engine, signal.SIGCONT)
        code = run.wait()
    check_models(run, code)


BROKEN = """import os

def loss(inputs, settings):
    if "BUSRL_RUN_DIR" in os.environ:  # check makes a step with it too
        raise RuntimeError("this loss is broken")
    return -inputs.advantages * inputs.trainer_logprobs
"""


def test_a_learner_that_gives_up_ends_the_run_and_is_named(tmp_path: Path, several: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    run = three_models(several, tmp_path, f"model.judge.learner.loss={tmp_path}/broken.py:loss",
                       "limits.crash_attempts=1", steps=STEPS)
    with running(run):
        code = run.wait()
    assert code != 0 and "learner/judge" in run.summary()["why"], run.tail()


def test_a_model_whose_steps_are_made_only_serves(tmp_path: Path, several: Path) -> None:
    run = three_models(several, tmp_path, "model.judge.max_steps=3", steps=STEPS)
    with running(run):
        code = run.wait()
    check_models(run, code, "")
    models = run.summary()["models"]
    assert step_of(run, "judge") == models["judge"]["steps"] == 3 and models["judge"]["audit"]["clean"], models


PLAYED = """async def episode(task, llm):
    answer = await llm["solver"].complete(task["prompt"], max_tokens=1)
    await llm["judge"].complete(f"{task['prompt']}{answer.text}=", max_tokens=1)
    return {"solver": float(llm.uid % 4), "judge": float(llm.uid % 2) if llm.uid < 150 else 1.0}
"""


def test_a_model_with_nothing_left_to_learn_only_serves(tmp_path: Path, several: Path) -> None:
    run = three_models(several, tmp_path, "limits.idle_groups=12", steps=30)
    (tmp_path / "rounds.py").write_text(PLAYED)
    with running(run):
        code = run.wait()
    check_models(run, code, "")
    judge = run.summary()["models"]["judge"]
    assert 0 < step_of(run, "judge") == judge["steps"] < 30 and judge["audit"]["clean"], judge
    ended = f"finished, judge: after {judge['steps']} of 30 steps all answers get the best reward"
    assert ended in run.text(), run.text()


def test_a_run_goes_on_with_the_models_that_it_has(tmp_path: Path, several: Path) -> None:
    run = three_models(several, tmp_path, steps=STEPS)
    with running(run):
        run.until("both learn", lambda: min(step_of(run, ""), step_of(run, "judge")) >= 2)
        run.kill_launch(limit_s=30)
        text = run.config.read_text()
        run.config.write_text(text.replace('tag = "hint"', 'tag = "other"').replace('["hint"]', '["other"]'))
        run.start()
        code = run.wait()
    assert code == 2 and "hint" in run.text(), run.tail()


FAILS = """async def episode(task, llm):
    answer = await llm["solver"].complete(task["prompt"], max_tokens=1)
    verdict = await llm["judge"].complete(f"{task['prompt']}{answer.text}=", max_tokens=1)
    if llm.uid // 4 % 2 == 0 and llm.uid % 3 == 0:  # a third of the first tries
        raise RuntimeError("the tool is not there")
    return {"solver": float(llm.uid % 4), "judge": float(verdict.text == "|")}
"""


def test_an_episode_that_failed_is_played_again_with_all_its_sides(tmp_path: Path, several: Path) -> None:
    run = three_models(several, tmp_path, 'learner.advantage="reward"', steps=STEPS)
    (tmp_path / "rounds.py").write_text(FAILS)
    with running(run):
        code = run.wait()
    reports = check_models(run, code)
    assert min(sum(report.accidents.values()) for report in reports.values()) > 30, reports
    assert sum(sides_alone(run, tag) for tag in reports) == 0
    assert "is played without some of its sides" not in run.paths.errors.read_text()


WHY_NOT = why_no_mounts()


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_a_full_disk_of_one_model_holds_all_back_by_name(tmp_path: Path, several: Path) -> None:
    here = Path(__file__).parent
    command = ["unshare", "-m", sys.executable, str(here / "model_disk.py"), str(tmp_path), str(several)]
    paths = [str(path) for path in (ROOT, here, here.parent / "run")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
