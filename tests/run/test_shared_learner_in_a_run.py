"""A run in which one learner process trains the adapters of two models, which have an engine each; and its death."""

from __future__ import annotations

import importlib.util
import os
import signal
from contextlib import closing
from pathlib import Path

import pytest
from checks import check_end
from harness import Run, read_lines, running
from role_parts import held
from test_models_in_a_run import judged_run

from busrl.ledger.audit import audit
from busrl.paths import RunPaths
from busrl.ring import Ring
from busrl.states import HeaderWord

# Not imported where tests are only collected: it takes seconds.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="pip install peft")
EPISODE = '''
async def episode(task, llm):
    answer = await llm["solver"].complete(task["prompt"], max_tokens=6)
    verdict = await llm["judge"].complete([*answer.ids, 1], max_tokens=4)
    return {"solver": float(llm.uid % 4), "judge": float(llm.uid % 2) + len(verdict.ids) / 4}
'''
SHARED = '[[process]]\nrole = "learner"\nmodel = ["solver", "judge"]\n'
LORA = ("lora.rank=4", "model.judge.lora.rank=8", "learner.lr=2e-3", 'weights.transport="lora_hotswap"')


def shared_run(folder: Path, steps: int, judge_steps: int = 0) -> Run:
    own = f"max_steps = {judge_steps}\n" if judge_steps else ""
    run = judged_run(folder, steps, ("trained = false\n", own), code=EPISODE)
    text = run.config.read_text()
    model = text.partition('path = "')[2].partition('"')[0]
    run.config.write_text(text.replace(str(folder / "judge"), model) + SHARED)
    run.settings += [*LORA, "learner.checkpoint_every=2", "generation.on_update=recompute"]
    return run


def steps_of(paths: RunPaths) -> list[int]:
    return [row["step"] for row in read_lines(paths.train_log)] if paths.train_log.exists() else []


def both(run: Run) -> tuple[RunPaths, RunPaths]:
    return run.paths, run.paths.of_tag("judge")


def check_both(run: Run, code: int, judge_steps: int = 0) -> None:
    """Each model made its steps once, in its own log, and the other's numbers did not get into its own."""
    check_end(run, code)
    for paths, steps in zip(both(run), (run.steps, judge_steps or run.steps)):
        report = audit(paths.root)
        assert report.counts.lost == report.counts.trained_twice == 0 and not report.errors, (paths, report)
        assert sorted({*steps_of(paths)}) == list(range(1, steps + 1))
        rows = [row for row in read_lines(paths.metrics) if "kind" not in row]
        measured = [row["mismatch"] for row in rows if row.get("mismatch") is not None]
        assert measured and max(measured) < 1e-3, f"what was trained is not what was drawn: {paths} {measured}"
    assert not [row["text"] for row in read_lines(run.paths.errors) if "ignored" in row["text"]]


@pytest.mark.long
def test_a_killed_learner_of_two_models_replays_the_log_of_each(tmp_path: Path, quickstart: None) -> None:
    run = shared_run(tmp_path, steps=8)
    lead, judge = both(run)
    with running(run):
        for done in (1, 4):
            run.until("steps of both", lambda done=done: done in steps_of(lead) and done in steps_of(judge))
            os.kill(run.pid("learner"), signal.SIGKILL)
        check_both(run, run.wait())
    summary = run.summary()
    assert run.restarts("learner") == 2 and "learner/judge" not in summary["processes"]
    assert summary["models"]["judge"]["steps"] == 8 and summary["models"]["solver"]["steps"] == 8


@pytest.mark.long
def test_a_held_version_of_one_model_lets_the_other_go_on(tmp_path: Path, quickstart: None) -> None:
    run = shared_run(tmp_path, steps=16)
    run.settings.append("weights.max_staleness=12")  # about so many steps may the other be ahead, which is so already
    lead, judge = both(run)
    with running(run):
        run.until("steps of both", lambda: 2 in steps_of(lead) and 2 in steps_of(judge))
        with held(judge), closing(Ring.attach(judge.ring_name, read_only=True)) as ring:
            run.until("a version that is kept back",
                      lambda: "held by validation" in {process.activity for process in ring.processes()})
            version, before = ring.header(HeaderWord.VERSION), max(steps_of(lead))
            run.until("steps of the other", lambda: max(steps_of(lead)) >= before + 2)
            assert ring.header(HeaderWord.VERSION) == version
        check_both(run, run.wait())
    assert run.restarts("learner") == 0, run.tail()


@pytest.mark.long
@pytest.mark.parametrize("judge_steps", [2, 8])
def test_a_model_that_is_done_leaves_the_process_to_the_other(
    tmp_path: Path, quickstart: None, judge_steps: int
) -> None:
    run = shared_run(tmp_path, steps=5, judge_steps=judge_steps)
    with running(run):
        check_both(run, run.wait(), judge_steps)
    assert run.restarts("learner") == 0, run.tail()


@pytest.mark.long
def test_a_learner_that_is_ended_goes_on_with_the_unfinished_model(tmp_path: Path, quickstart: None) -> None:
    run = shared_run(tmp_path, steps=2, judge_steps=12)
    with running(run):
        run.until("the last step of the solver", lambda: (run.paths.checkpoints / "global_step_2").exists())
        os.kill(run.pid("learner"), signal.SIGTERM)
        check_both(run, run.wait(), judge_steps=12)
    assert run.restarts("learner") == 1 and len(steps_of(run.paths)) == 2, run.tail()
