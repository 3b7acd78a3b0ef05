"""Answers in segments in real runs: any rollout continues them, a death costs a segment at most, the log has all."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from checks import check_end
from harness import ROOT, Run, running
from own import make_all

from busrl.ledger.wal import Record, SampleRecord, frames

LENGTH, LIMIT = 8, 24
CUT_BY_LIMIT = 2
SHORT = (f"segments.length={LENGTH}", f"segments.global_max_length={LIMIT}", f"generation.max_new_tokens={LIMIT}")


def logged(run: Run) -> list[SampleRecord]:
    """Every sample of the write-ahead log of a run that was killed before it could write a checkpoint."""
    decode = msgspec.msgpack.Decoder(Record).decode
    paths = sorted(run.paths.wal.glob("*.wal"))
    records = [decode(payload) for path in paths for payload, _ in frames(path.read_bytes())]
    return [sample for record in records for sample in record.samples]


def check_bounds(samples: list[SampleRecord]) -> None:
    """Each segment but the last is full, the answer ends by itself or at the limit, and versions only grow."""
    for sample in samples:
        tokens, parts = len(sample.token_array()), sample.segments or [len(sample.token_array())]
        assert sum(parts) == tokens <= LIMIT and all(part == LENGTH for part in parts[:-1]) and parts[-1] >= 1
        assert (sample.finish == CUT_BY_LIMIT) <= (tokens == LIMIT)
        assert len(sample.logprob_array()) == len(sample.version_array()) == tokens
        assert (np.diff(sample.version_array().astype(np.int64)) >= 0).all() or len(parts) > 1
        assert (sample.logprob_array() <= 0).all()
    counts = {len(sample.segments) for sample in samples}
    assert counts == {0, 2, 3}, counts


def killed_in_segments(tmp_path: Path) -> Path:
    """The quickstart with two rollouts, one of which dies at its commits, the other while it writes a segment."""
    text = (ROOT / "configs" / "quickstart.toml").read_text()
    assert "[[process]]" not in text  # the one rollout is implied; the two below stand in its place
    deadly = "".join(
        f'[[process]]\nrole = "rollout"\nenv = {{ BUSRL_CRASH_POINT = "{point}" }}\n'
        for point in ("commit.after:250", "put.copied:900")
    )
    path = tmp_path / "deadly.toml"
    path.write_text(f"{text}\n{deadly}")
    return path


@pytest.mark.long
def test_a_segment_run_survives_a_rollout_death_and_logs_every_bound(
    tmp_path: Path, quickstart: None
) -> None:
    run = Run(
        tmp_path / "run", *SHORT, "learner.checkpoint_every=0", "validation.at_start=false", "validation.samples=8",
        "process.rollout.count=2", steps=8,
    )
    with running(run):
        run.until_step(2)
        run.kill("rollout/0")
        run.until_step(5)
        check_bounds(logged(run))
        code = run.wait()
    check_end(run, code)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [(), ("weights.mode=sync", "segments.rounds=segments")], ids=["async", "waves"])
def test_rollouts_killed_between_segments_lose_nothing_and_log_every_bound(
    settings: tuple[str, ...], tmp_path: Path, quickstart: None
) -> None:
    run = Run(
        tmp_path / "run", *SHORT, *settings, "learner.checkpoint_every=0", "validation.at_start=false", steps=14,
        config=killed_in_segments(tmp_path),
    )
    with running(run):
        run.until_step(9)
        run.kill_launch()
        check_bounds(logged(run))
        run.start()
        code = run.wait()
    check_end(run, code)
    assert run.restarts("rollout/0") + run.restarts("rollout/1") > 0, run.summary()["processes"]
    assert max(row.get("segments_max", 1) for row in run.metrics()) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("segments.loss=last_segment",),
        ("segments.loss=pois", "weights.mode=sync"),
        ("segments.loss=pois", "weights.mode=sync", "segments.rounds=segments"),
        ("weights.mode=fully-async", "reward.truncated=-1"),
        ("weights.over_age=drop", "weights.max_staleness=1", "reward.truncated_penalty=0.5"),
    ],
    ids=["last_segment", "pois", "waves", "truncated", "drop"],
)
def test_every_loss_and_mode_runs_to_its_end_in_segments(
    settings: tuple[str, ...], tmp_path: Path, quickstart: None
) -> None:
    run = Run(tmp_path / "run", *SHORT, *settings, "process.rollout.count=2", steps=12)
    with running(run):
        code = run.wait()
    assert code == 0, run.tail()
    report = run.audit()
    assert report.counts.lost == 0 and report.counts.trained_twice == 0 and not report.errors, report
    rows = run.metrics()
    assert max(row["segments_max"] for row in rows) == 3 and all(row["k3"] > -1e-6 for row in rows)
    masked = sum(row["masked"]["earlier_segments"] for row in rows)
    assert (masked > 0) == ("segments.loss=last_segment" in settings)
    in_waves = LIMIT // LENGTH - 1 if "segments.rounds=segments" in settings else 0
    bound = {"weights.mode=sync": in_waves, "weights.mode=fully-async": 99, "weights.max_staleness=1": 1}
    assert max(row["age_max"] for row in rows) <= next((bound[s] for s in settings if s in bound), 2)
    if "reward.truncated=-1" in settings:
        assert min(row["reward_trained"] for row in rows) < 0.5 and any(row["cut_share"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("length", [0, 32, 16, 8, "auto"])
def test_the_quickstart_learns_in_one_two_four_or_eight_segments(
    length: int | str, tmp_path: Path, quickstart: None
) -> None:
    run = Run(tmp_path / "run", f"segments.length={length}", steps=60)
    with running(run):
        code = run.wait()
    check_end(run, code)
    rows = run.metrics()
    assert np.mean([row["reward"] for row in rows[-10:]]) > np.mean([row["reward"] for row in rows[:5]]) + 0.2


DECIDED_BY_THE_FIRST = '''
def score(record, completion, token_ids):
    """The first character decides; an answer that ends within its first segment is worth nothing."""
    return float(completion[:1] in set("abcdefghijklm") and len(token_ids) > 4)
'''


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_last_segment_alone_never_learns_what_the_first_decides(
    seed: int, tmp_path: Path
) -> None:
    last = {}
    for loss in ("behaviour", "pois", "last_segment"):
        config = make_all(tmp_path / f"{loss}-own", "llama", DECIDED_BY_THE_FIRST)
        run = Run(
            tmp_path / loss, "segments.length=4", f"segments.loss={loss}", "weights.mode=sync", "learner.lr=5e-3",
            "generation.max_new_tokens=8", "learner.trigger.n_min=16", f"run.seed={seed}", config=config, steps=50,
        )
        with running(run):
            code = run.wait()
        assert code == 0, run.tail()
        last[loss] = float(np.mean([row["reward"] for row in run.metrics()[-5:]]))
    assert min(last["behaviour"], last["pois"]) > 0.85 and last["last_segment"] < 0.6, json.dumps(last)
