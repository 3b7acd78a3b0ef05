"""A run with scripted actors is a run like any other, without a model in its rollout processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from checks import check_end
from harness import ROOT, Run, running

from busrl.data import trace
from busrl.data.trace import TracedPrompt
from busrl.ledger.wal import Wal
from busrl.ring import Ring

SCRIPTED = [
    "process.rollout.count=4", "learner.trigger.n_min=8", "mock.token_s=0.0005", "mock.per_sequence_s=0.00005",
    "generation.max_new_tokens=128", "mock.learner_s_per_token=0.00005",
]


@pytest.mark.long
def test_scripted_actors_feed_a_real_learner_and_load_no_torch(tmp_path: Path, quickstart: None) -> None:
    run = Run(tmp_path / "run", *SCRIPTED, config=ROOT / "configs" / "scripted.toml", steps=12)
    run.cold = True  # processes of runs that share the session's imports have torch from the start
    with running(run):
        run.until_step(6)
        loaded = Path(f"/proc/{run.pid('rollout/2')}/maps").read_text()
        code = run.wait()
    check_end(run, code)
    assert "numpy" in loaded and "torch" not in loaded
    rows = run.metrics()
    assert max(row["age_max"] for row in rows) <= 4
    assert 0.3 < sum(row["reward"] for row in rows) / len(rows) < 0.7
    assert all(row["length_mean"] <= 128 for row in rows)
    assert len({row["version"] for row in rows}) == 12
    taught = sum(row["tokens"] for row in rows[1:])
    assert rows[-1]["time_s"] - rows[0]["time_s"] > 0.00005 * taught * 0.9  # the learner's pace is kept
    page = (ROOT / "docs" / "run-directory.md").read_text()
    names = {path.name for path in run.directory.iterdir() if path.suffix != ".lock"}
    assert {name for name in names if f"`{name}" not in page} == set()


@pytest.mark.slow
def test_segment_rounds_continue_with_the_late_dispatch_of_the_shipped_file(tmp_path: Path, quickstart: None) -> None:
    waves = ["weights.mode=sync", "segments.length=32", "segments.max_segments=4", "segments.rounds=segments"]
    run = Run(tmp_path / "run", *SCRIPTED, *waves, config=ROOT / "configs" / "scripted.toml", steps=6)
    with running(run):
        code = run.wait()
    check_end(run, code)
    assert '"ahead": 16' in run.paths.topology.read_text(), "the setting that once waited for the wave"
    rows = run.metrics()
    assert max(row["segments_max"] for row in rows) > 1 and max(row["age_max"] for row in rows) <= 3


@pytest.mark.slow
def test_scripted_episodes_are_played_call_by_call(tmp_path: Path, quickstart: None) -> None:
    turns = [((9, 0.02), (5, 0.0)), ((7, 0.0), (7, 0.05), (3, 0.0))]
    trace.write(tmp_path / "episodes.jsonl", [TracedPrompt("go", (), "", "", (0.0, 1.0), turns=tuple(turns))] * 8)
    text = (ROOT / "configs" / "scripted.toml").read_text()
    text = text.replace('[reward]\nkind = "exact_match"', "[agents]\nepisodes = 64")
    text += '[[process]]\nrole = "agent"\nfunction = "busrl.agents.scripted:episode"\n'
    (tmp_path / "t.toml").write_text(text)
    settings = [*SCRIPTED, f"data.train={tmp_path}/episodes.jsonl", "groups.size=2", "learner.checkpoint_every=0",
             "process.rollout.count=1"]
    run = Run(tmp_path / "run", *settings, config=tmp_path / "t.toml", steps=2)
    with running(run):
        code = run.wait()
    check_end(run, code)
    samples = [sample for record in Wal(run.paths.wal).records() for sample in record.samples]
    rewards = {tuple(sample.turn_lengths().tolist()): sample.reward for sample in samples}
    assert rewards == {(9, 5): 0.0, (7, 7, 3): 1.0} and {len(sample.seqs) for sample in samples} == {1}


def admitted(run: Run) -> int:
    """Groups that were opened so far."""
    ring = Ring.attach(run.paths.ring_name, read_only=True)
    try:
        return ring.header("next_admission")
    finally:
        ring.close()


@pytest.mark.long
def test_prompts_that_have_not_arrived_are_dispatched_by_no_scheduler(
    tmp_path: Path, quickstart: None
) -> None:
    there, later = 16, 3600.0
    arrivals = [0.0 if n < there else later for n in range(40)]
    tasks = [TracedPrompt(f"prompt {n}", (9, 5, 7, 20), "a", "", (1, 0, 1, 0), at) for n, at in enumerate(arrivals)]
    trace.write(tmp_path / "stream.jsonl", tasks)
    stream = [f"data.train={tmp_path / 'stream.jsonl'}", "data.arrivals=true", "scheduler.ahead=8"]
    run = Run(tmp_path / "run", *SCRIPTED, *stream, config=ROOT / "configs" / "scripted.toml", steps=3)
    with running(run):
        run.until_step(2)
        run.kill("scheduler")
        run.until("a new scheduler", lambda: run.processes().get("scheduler", None) is not None)
        run.let_pass(1.0)
        assert (admitted(run), run.step()) == (there, 2)
    assert run.audit().counts.lost == 0 and not run.audit().errors


@pytest.mark.slow
def test_a_learner_accumulating_beyond_the_silence_patience_is_not_killed(
    tmp_path: Path, quickstart: None
) -> None:
    slow = ["mock.learner_s_per_token=0.002", "learner.micro_batch_min_samples=64", "learner.trigger.n_min=24"]
    run = Run(
        tmp_path / "run", *SCRIPTED, *slow, "limits.progress_s=4", config=ROOT / "configs" / "scripted.toml", steps=2
    )
    with running(run):
        code = run.wait()
    check_end(run, code)
    learner = run.summary()["processes"]["learner"]
    assert learner["restarts"] == 0 and not learner.get("killed_for_silence"), run.tail()


@pytest.mark.slow
def test_a_bound_lowered_at_a_resume_ends_with_a_clean_audit(tmp_path: Path, quickstart: None) -> None:
    """What is in flight was admitted under the bound before; the ring that was left is larger than needed."""
    settings = [*SCRIPTED, "weights.max_staleness=4", "learner.checkpoint_every=0"]  # the log keeps all records
    run = Run(tmp_path / "run", *settings, config=ROOT / "configs" / "scripted.toml", steps=14)
    with running(run):
        for step, changed in ((5, "weights.max_staleness=1"), (9, "weights.mode=sync")):
            run.until_step(step)
            run.kill_launch()
            run.settings.append(changed)
            run.start()
        code = run.wait()
    check_end(run, code)
    assert {record.terms.bound for record in Wal(run.paths.wal).records() if record.terms} == {4, 1, 0}
