"""An episode of one call and a plain answer are the same sample: same ids, same loss, bit for bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, Run, running

ONE_TURN = '''
async def episode(task, llm):
    await llm.complete(task["prompt"])
    return 0.0  # another judges it
'''
SAME = ("reward", "tokens", "samples", "loss", "grad_norm", "entropy", "mismatch", "ratio_mean", "clip_fraction")


def lines_of(folder: Path, more: str = "") -> list[dict[str, Any]]:
    """The metrics of a run whose engine works on one row, so that no sum depends on who decodes beside whom."""
    program = str(Path(__file__).with_name("one_stream_rollout.py"))
    folder.mkdir()
    (folder / "run.toml").write_text((ROOT / "configs" / "quickstart.toml").read_text() + more)
    run = Run(
        folder / "run", f"process.rollout.command={json.dumps([sys.executable, program])}",
        f"process.rollout.env={{PYTHONPATH='{ROOT}'}}", "weights.mode=sync", "learner.deterministic=true",
        "weights.max_staleness=0", "generation.max_batch=1",
        "learner.trigger.n_min=4", "validation.data=",
        "learner.checkpoint_every=0", config=folder / "run.toml", steps=4,
    )
    with running(run):
        assert run.wait() == 0, run.tail()
    report = run.audit()
    assert not report.errors and report.accidents == {} and report.counts.lost == report.counts.trained_twice == 0
    return run.metrics()


@pytest.mark.slow
def test_episodes_of_one_call_have_the_losses_of_plain_answers(
    tmp_path: Path, quickstart: None
) -> None:
    (tmp_path / "one.py").write_text(ONE_TURN)
    plain = lines_of(tmp_path / "plain")
    agents = lines_of(tmp_path / "agents", f'\n[[process]]\nrole = "agent"\nfunction = "{tmp_path}/one.py:episode"\n')
    names = [name for name in SAME if name in plain[0]]
    assert {"loss", "grad_norm", "reward"} <= {*names}
    assert [[row[name] for name in names] for row in agents] == [[row[name] for name in names] for row in plain]
    assert len({row["loss"] for row in plain}) > 1, "the loss is no constant"
