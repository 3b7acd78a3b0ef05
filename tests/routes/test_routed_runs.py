"""Whole runs whose routes are those of one uncached forward pass: of segments, episodes and hosts, through deaths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checks import check_end
from harness import ROOT, Run, running
from host_scene import Home, Host
from moe_models import moe_folder, routes_of

from busrl.ledger.wal import SampleRecord, Wal
from busrl.roles.learner.samples import to_sample

EXPERTS = ("model.dtype=float32", "learner.routes=replay", "limits.idle_groups=0", "learner.lr=1e-3", "groups.size=4")
REWARD = "def score(record, completion, token_ids):\n    return float(completion.count('3') - completion.count('4'))\n"
TWO_TURNS = '''
async def episode(task, llm):
    """An answer, one that continues it, and a fork of the same prompt; what they are worth."""
    first = await llm.complete(task["prompt"], max_tokens=5)
    more = await llm.complete(task["prompt"] + first.text + "3", max_tokens=5)
    fork = await llm.complete(task["prompt"] + "1", max_tokens=4)
    return float(sum(one.ids[0] % 3 for one in (first, more, fork)))
'''


def settings(folder: Path, *more: str) -> list[str]:
    (folder / "reward.py").write_text(REWARD)
    model = moe_folder(folder / "model", layers=3)
    return [f"model.path={model}", *EXPERTS, *more]


def first_weights(run: Run) -> list[SampleRecord]:
    """The logged samples that the first weights drew; each sample once."""
    with Wal(run.paths.wal) as wal:
        samples = [sample for record in wal.records() for sample in record.samples]
    assert len({sample.uid for sample in samples}) == len(samples)
    return [sample for sample in samples if not sample.version_array().any()]


def check_routes(folder: Path, records: list[SampleRecord]) -> int:
    """Compare the experts of every position with those of one forward pass over its sequence; how many there are."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype="float32")
    compared = 0
    for record in records:
        sample = to_sample(record)
        assert sample.routes is not None
        parts = [sample.routes] if sample.prompt_routes is None else [sample.prompt_routes, sample.routes]
        expected = [routes_of(model, piece.ids)[:-1] for piece in sample.pieces]
        given, wanted = (np.sort(np.concatenate(rows), axis=-1) for rows in (parts, expected))
        assert given.shape == wanted.shape, f"sample {record.uid}"
        assert np.array_equal(given, wanted), f"sample {record.uid}"
        compared += given.shape[0] * given.shape[1]
    return compared


@pytest.mark.long
def test_segments_lose_and_double_no_row_when_engines_die(tmp_path: Path) -> None:
    run = Run(
        tmp_path / "run", *settings(tmp_path), "reward.kind=python", f"reward.function={tmp_path / 'reward.py'}:score",
        "generation.max_new_tokens=24", "segments.length=6", "segments.max_segments=4", "process.rollout.count=2",
        "learner.checkpoint_every=100", steps=5,
    )
    with running(run):
        for step in (1, 2, 3):
            run.until_step(step)
            run.kill(f"rollout/{step % 2}")
        code = run.wait()
    check_end(run, code, accidents=2)
    records = first_weights(run)
    assert any(len(record.segments) > 2 for record in records)
    assert check_routes(tmp_path, records) > 1000


@pytest.mark.long
def test_routes_of_episodes_are_those_of_their_sequences(tmp_path: Path) -> None:
    (tmp_path / "play.py").write_text(TWO_TURNS)
    run = Run(
        tmp_path / "run", *settings(tmp_path), f"process.agent.function={tmp_path / 'play.py'}:episode",
        "generation.max_new_tokens=8", "generation.max_prompt_tokens=32", "agents.episodes=32",
        "learner.checkpoint_every=100", config=ROOT / "configs" / "agents.toml", steps=3,
    )
    with running(run):
        run.until_step(1)
        run.kill("rollout/0")
        code = run.wait()
    check_end(run, code, accidents=2)
    records = first_weights(run)
    assert any(len(record.seqs) > 1 for record in records), "forks"
    assert any(len(record.turns) > 4 * len(record.seqs) for record in records), "turns that continue others"
    assert check_routes(tmp_path, records) > 1000


@pytest.mark.long
def test_routes_of_another_host_arrive_at_home(tmp_path: Path) -> None:
    home = Home(
        tmp_path, *settings(tmp_path), "reward.kind=python", f"reward.function={tmp_path / 'reward.py'}:score",
        "generation.max_new_tokens=12", "learner.checkpoint_every=100", "hosts.compress=true", steps=3,
    )
    host = Host(home)
    with running(home), running(host):
        assert home.wait() == 0, home.tail()
        assert host.wait(30) == 0, host.tail()
    check_end(home, 0)
    assert check_routes(tmp_path, first_weights(home)) > 500


@pytest.mark.long
def test_a_log_without_routes_says_what_was_trained_by_own_choice(tmp_path: Path) -> None:
    run = Run(
        tmp_path / "run", *settings(tmp_path), "reward.kind=python", f"reward.function={tmp_path / 'reward.py'}:score",
        "generation.max_new_tokens=12", "learner.log_routes=off", "learner.checkpoint_every=100", steps=5,
    )
    with running(run):
        run.until_step(2)
        run.kill("learner")
        code = run.wait()
    check_end(run, code, accidents=1)
    assert "trained again with the experts that the learner chose" in run.paths.errors.read_text()
    with Wal(run.paths.wal) as wal:
        samples = [sample for record in wal.records() for sample in record.samples]
    assert samples and all(not sample.routes and sample.routes_shape for sample in samples)
