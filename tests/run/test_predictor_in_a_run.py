"""Predictors in real runs: one that fails costs order, not the run; what one knows is in checkpoints and in the log."""

from __future__ import annotations

from pathlib import Path

import pytest
from checks import check_end
from harness import Run, read_lines, running

from busrl.predict import kept as predictor_state

# Read by every Python of the run before anything else; only the scheduler asks a predictor.
BROKEN = """\
import sys
if any("scheduler" in argument for argument in sys.orig_argv):
    import numpy
    from busrl.predict.lengths import BlendPredictor
    def predict(self, candidates):
        {fault}
    BlendPredictor.predict = predict
"""
FAULTS = {
    "raises": ("raise KeyError('lost')", "predict raised KeyError"),
    "nan": ("return numpy.full(len(candidates), numpy.nan)", "not finite"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["raises", "nan"])
def test_a_run_whose_predictor_fails_goes_on_with_rules(tmp_path: Path, quickstart: None, kind: str) -> None:
    fault, named = FAULTS[kind]
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "sitecustomize.py").write_text(BROKEN.format(fault=fault))
    path = f"{tmp_path / 'broken'}:{Path(__file__).resolve().parents[2]}"
    settings = ("scheduler.policy=sjf", "scheduler.predictor=blend")
    run = Run(tmp_path / "run", *settings, steps=5, env={"PYTHONPATH": path})
    with running(run):
        code = run.wait()
    check_end(run, code)
    told = [line for line in read_lines(run.paths.errors) if "predictor blend" in line["text"]]
    assert len(told) == 1 and named in told[0]["text"] and "rules predict in its place" in told[0]["text"]
    log = run.paths.log("scheduler").read_text()
    (last,) = [line for line in log.splitlines() if "predictor blend: tau" in line]
    fallbacks = float(last.split("fallbacks ")[1].split(",")[0])
    assert fallbacks >= 40  # every prompt of the run: 5 steps of 8 groups and more


@pytest.mark.slow
def test_every_checkpoint_holds_the_predictor_and_the_scheduler_log_its_measures(
    tmp_path: Path, quickstart: None
) -> None:
    run = Run(
        tmp_path / "run", "scheduler.policy=sjf", "scheduler.predictor=blend", "learner.checkpoint_every=8",
        "learner.keep_last=9", steps=20,
    )
    with running(run):
        code = run.wait()
    check_end(run, code)
    copies = [run.paths.checkpoints / f"global_step_{step}" / "predictor.npz" for step in (8, 16, 20)]
    known = [(predictor_state.load_plain(path) or {})["inner"]["level"]["answers"] for path in copies]
    assert 0 < known[0] < known[1] <= known[2]
    told = read_lines(run.paths.scheduler_log)
    assert len(told) > 1 and -1 <= told[-1]["predictor_tau"] <= 1 and told[-1]["predictor_pairs"] > 0
    assert told[-1]["predictor_us_per_prompt"] > 0 and told[-1]["predictor_fallbacks"] == 0
    assert {"strength", "promoted", "wait_mean", "wait_max", "wait_bound"} <= set(told[-1])
