"""A worker at the gateway has only messages: it gets its work done while many of them are lost in both directions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from checks import check_end
from harness import Run, running
from outside import EXAMPLES, words_of, workers

LOSSY = 'faults.bus=[{roles=["keeper"], drop=0.3}, {roles=["keeper"], at="sender", drop=0.3}]'


@pytest.mark.slow
def test_every_sample_is_judged_once_despite_thirty_percent_gateway_message_loss(
    quickstart: None, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run", "process.reward.count=0", "limits.lease_s=5", LOSSY, "faults.seed=1", steps=12)
    actor = [sys.executable, str(EXAMPLES / "python-actor" / "actor.py")]
    with running(run):
        run.until("there was a broker", lambda: run.pid("bus"))
        with workers([*actor, str(run.directory), "far"]) as [child]:
            check_end(run, run.wait())
            said = words_of(child)
    log = run.paths.log("keeper").read_text()
    assert "leaving: STOP" in said, said
    assert "faults on its messages: " in log and " lost" in log and " unsent" in log, log
