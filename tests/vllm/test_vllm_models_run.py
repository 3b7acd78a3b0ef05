"""Runs whose models share one vLLM: both learn, a third is the base itself, and the engine may die."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from pathlib import Path

import pytest
from checks import check_end
from harness import Run, read_lines, running
from test_models_in_a_run import judged_run
from test_vllm_run import LIMIT_S, core_of

from busrl.ledger.audit import audit
from busrl.ledger.wal import Wal
from busrl.paths import RunPaths
from busrl.ring import Ring

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
SETTINGS = (
    "limits.ready_s=420", "limits.progress_s=120", "vllm.start_s=400", "vllm.rpc_s=60", "generation.max_batch=32",
    "lora.rank=4", "learner.lr=2e-3", 'weights.transport="lora_hotswap"', "learner.parity.every=1",
    "learner.parity.wait_s=20", "model.judge.lora.rank=8",
)
THIRD = '[[model]]\ntag = "old"\npath = "{model}"\ntrained = false\n'
EPISODE = '''
async def episode(task, llm):
    """The solver draws, the judge reads what it drew, and so does the base."""
    answer = await llm["solver"].complete(task["prompt"], max_tokens=6)
    verdict = await llm["judge"].complete([*answer.ids, 1], max_tokens=4)
    older = await llm["old"].complete([*answer.ids, 1], max_tokens=4)
    assert llm["old"].version == 0 and older.ids
    return {"solver": float(llm.uid % 4), "judge": float(llm.uid % 2) + len(verdict.ids) / 4}
'''


def shared_run(folder: Path, steps: int) -> Run:
    """A solver and a judge that learn, and their base, in one vLLM."""
    run = judged_run(folder, steps, ("trained = false\n", ""), code=EPISODE)
    text = run.config.read_text()
    model = text.partition('path = "')[2].partition('"')[0]
    text = text.replace(str(folder / "judge"), model).replace('[[process]]\nrole = "rollout"\nmodel = "judge"\n', "")
    shared = 'role = "rollout"\nengine = "vllm"\nmodel = ["solver", "judge", "old"]\n'
    assert text.count('role = "rollout"\n') == 1
    run.config.write_text(text.replace('role = "rollout"\n', shared) + THIRD.format(model=model))
    run.settings += [*SETTINGS, "learner.checkpoint_every=100"]  # so that the log has every record
    return run


def step_of(paths: RunPaths) -> int:
    return max((row["step"] for row in read_lines(paths.train_log)), default=0) if paths.train_log.exists() else 0


def check_both(run: Run, code: int) -> None:
    """Both models made their steps of tokens that their own adapters drew, and lost nothing."""
    check_end(run, code)
    for paths in (run.paths, run.paths.of_tag("judge")):
        report = audit(paths.root)
        assert report.counts.lost == report.counts.trained_twice == 0 and not report.errors, (paths, report)
        assert step_of(paths) == run.steps
        rows = [row for row in read_lines(paths.metrics) if "kind" not in row]
        measured = [row["mismatch"] for row in rows if row.get("mismatch") is not None]
        assert measured and max(measured) < 1e-3, f"what was trained is not what was drawn: {paths} {measured}"
        samples = [one for record in Wal(paths.wal).records() for one in record.samples]
        versions = {int(version) for one in samples for version in one.version_array()}
        assert len(versions) >= 3, f"new versions reach the engine: {versions}"


def test_two_models_learn_by_the_adapters_of_one_engine(tmp_path: Path, quickstart: None) -> None:
    run = shared_run(tmp_path, steps=5)
    with running(run):
        check_both(run, run.wait(LIMIT_S))
    assert run.restarts("rollout/0") == 0, run.tail()
    for paths in (run.paths, run.paths.of_tag("judge")):
        compared = [row["parity"] for row in read_lines(paths.metrics) if row.get("parity_engines")]
        assert compared and max(compared) < 1e-3, "each learner compares itself with the one engine"
    assert not [row["text"] for row in read_lines(run.paths.errors) if "refused" in row["text"]]


def test_the_death_of_a_shared_engine_costs_both_models_calls_alone(tmp_path: Path, quickstart: None) -> None:
    run = shared_run(tmp_path, steps=8)
    judge = run.paths.of_tag("judge")
    with running(run):
        run.until("a step of both", lambda: min(step_of(run.paths), step_of(judge)) >= 1, LIMIT_S)
        os.kill(core_of(run), signal.SIGKILL)
        run.until("steps after it", lambda: min(step_of(run.paths), step_of(judge)) >= 3, LIMIT_S)
        with closing(Ring.attach(judge.ring_name, read_only=True)) as ring:
            [pid] = {process.pid for process in ring.processes() if process.label == "rollout/0"
                     and not ring.is_dead(process.index)}
        os.kill(pid, signal.SIGKILL)
        run.until("steps after that", lambda: min(step_of(run.paths), step_of(judge)) >= 5, LIMIT_S)
        check_both(run, run.wait(LIMIT_S))
    assert run.restarts("rollout/0") == 2, run.tail()


def test_one_engine_and_one_learner_of_two_models_survive_the_learner(tmp_path: Path, quickstart: None) -> None:
    run = shared_run(tmp_path, steps=6)
    run.config.write_text(run.config.read_text() + '[[process]]\nrole = "learner"\nmodel = ["solver", "judge"]\n')
    judge = run.paths.of_tag("judge")
    with running(run):
        run.until("steps of both", lambda: min(step_of(run.paths), step_of(judge)) >= 3, LIMIT_S)
        os.kill(run.pid("learner"), signal.SIGKILL)
        check_both(run, run.wait(LIMIT_S))
    assert (run.restarts("learner"), run.restarts("rollout/0")) == (1, 0), run.tail()
