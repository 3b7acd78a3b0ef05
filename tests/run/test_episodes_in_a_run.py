"""Episodes of three turns in a real run: claimed, committed, judged, logged, trained, and again from the log."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from harness import ROOT, Run, read_lines, running

from busrl.ledger.wal import HEAD, Wal
from tools.oracle.check import check

JUDGE = '''
def score(record, completion, token_ids, episode):
    """The share of odd ids among those of the last call; the turns' own rewards are added to it."""
    if episode is None:  # the trial before the start
        return 0.0
    assert completion == str(token_ids), (completion, token_ids)
    assert [(one["call"], one["tokens"]) for one in episode["turns"]] == [(0, 4), (1, 4), (2, 4)]
    assert len(episode["messages"]) == 2 and episode["reward"] is None and episode["turn_rewards"][2] == -0.25
    return {"odd": sum(one % 2 for one in token_ids) / len(token_ids)}
'''


@pytest.mark.slow
def test_a_run_trains_each_episode_once_and_replays_after_a_kill(tmp_path: Path, quickstart: None) -> None:
    (tmp_path / "judge.py").write_text(JUDGE)
    command = [sys.executable, str(Path(__file__).with_name("episode_actor.py"))]
    run = Run(
        tmp_path / "run", f"process.rollout.command={json.dumps(command)}",
        f"process.rollout.env={{PYTHONPATH='{ROOT}'}}",
        "ring.slot_bytes=16384", "learner.trigger.n_min=4", "groups.size=4", "weights.max_staleness=8",
        "learner.credit=turn", "learner.gamma=0.9", "reward.kind=python", f"reward.function={tmp_path}/judge.py:score",
        "log.samples=3", "learner.lr=1e-5", "learner.checkpoint_every=0", "validation.samples=8", steps=5,
    )
    with running(run):
        run.until_step(2)
        run.kill("learner")
        code = run.wait()
    assert code == 0, run.tail()
    report = run.audit()
    assert not report.errors and report.counts.lost == 0 and report.counts.trained_twice == 0, report
    assert sum(report.accidents.values()) == 0 and run.restarts("learner") == 1
    rows = {row["step"]: row for row in run.metrics() if "lr" in row}
    assert sorted(rows) == [1, 2, 3, 4, 5] and rows[1]["mismatch"] < 1e-4, "the actor drew with the very weights"
    assert all(row["episodes"]["turns_mean"] == 3 and row["episodes"]["sequences_mean"] == 2 for row in rows.values())
    for line in read_lines(run.paths.samples):
        assert (line["turns"], line["sequences"], line["tokens"]) == (3, 2, 12) and len(line["messages"]) == 2
        assert line["reward"] == pytest.approx(line["reward_parts"]["odd"] + sum(line["turn_rewards"]))
    with_untrained(run)
    again = check(run.directory)
    # Of validation it draws the answers anew, as busrl's own engine would.
    assert set(again.kinds) <= {"validation"} and again.done["weights"], again


def with_untrained(run: Run) -> None:
    """The log: layout 3, and a line of metrics that counts what is trained."""
    assert all(path.read_bytes().startswith(HEAD) for path in run.paths.wal.glob("*.wal"))
    rows = {row["step"]: row for row in run.metrics() if "lr" in row}
    for record in Wal(run.paths.wal).records():
        turns = np.concatenate([sample.turn_array() for sample in record.samples])
        trained = int((turns[:, 2] - turns[:, 1])[turns[:, 3] % 2 == 1].sum())
        assert rows[record.step]["tokens"] == trained
        drawn = sum(sample.tokens for sample in record.samples)
        assert rows[record.step]["masked"].get("untrained", 0) == drawn - trained
