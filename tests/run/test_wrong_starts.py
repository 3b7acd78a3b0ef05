"""A run that can not learn anything ends by itself, with the cause and a remedy, and with what it did on record."""

from __future__ import annotations

from pathlib import Path

import own
import pytest
from harness import Run, read_lines, running

ZERO = "def score(record, completion, token_ids):\n    return 0.0\n"
RAISES = "def score(record, completion, token_ids):\n    return record['answer']\n"
SETTINGS = ["learner.trigger.n_min=4"]


def ended_idle(tmp_path: Path, *settings: str, reward: str = own.REWARD) -> Run:
    """Launch it; it ends as a run does that had nothing to train."""
    topology = own.make_all(tmp_path / "mine", "llama", reward)
    run = Run(tmp_path / "run", *SETTINGS, *settings, config=topology, steps=1000)
    with running(run):
        assert run.wait() == 1, run.tail()
    assert run.leftovers() == [] and run.summary()["outcome"] == "failed", run.tail()
    report = run.audit()
    assert not report.errors and report.counts.lost == 0 and report.counts.trained == 0, report
    rows = run.metrics()
    assert {row["kind"] for row in rows} == {"idle"} and rows[-1]["idle_groups"] >= 32
    told = [line for line in read_lines(run.paths.errors) if line["where"] == "learner"]
    assert "The run ends after 32 (limits.idle_groups)" in told[0]["text"], told
    assert told[-1]["severity"] == "critical" and "nothing to train (limits.idle_groups = 32)" in told[-1]["text"], told
    assert run.restarts("learner") == 0
    return run


def test_a_reward_that_is_always_zero(tmp_path: Path) -> None:
    run = ended_idle(tmp_path, reward=ZERO)
    text = run.text()
    assert "had the fate f (flat group); every reward was 0" in text and "was answered" in text, text
    assert run.metrics()[-1]["reward"] == 0.0 and run.metrics()[-1]["flat_share"] == 1.0
    assert read_lines(run.paths.samples)[-1]["kind"] == "idle"


@pytest.mark.slow
def test_a_reward_that_raises_on_every_sample(tmp_path: Path) -> None:
    run = ended_idle(tmp_path, reward=RAISES)
    text = run.text()
    assert "had the fate R (reward raised)" in text and "KeyError: 'answer'" in text and "mend the reward" in text, text


@pytest.mark.slow
def test_prompts_that_are_all_too_long(tmp_path: Path) -> None:
    run = ended_idle(tmp_path, "generation.max_prompt_tokens=2")
    text = run.text()
    assert "had the fate l (prompt too long)" in text and "generation.max_prompt_tokens is 2" in text, text
