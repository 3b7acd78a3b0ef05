"""A run whose answers come from an endpoint is a run like any other, also when the endpoint dies in its middle."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from checks import check_end
from harness import Run, read_lines, running

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engines"))
from endpoint_process import Endpoint

REWARD = '''
import random


def score(record, completion, token_ids):
    """By chance: the endpoint says the same to every member of a group, and a flat group trains nothing."""
    return random.random()
'''


def served(tmp_path: Path, endpoint: Endpoint, *settings: str, steps: int = 8) -> Run:
    """A run whose answers come from that endpoint, and are worth something by chance."""
    (tmp_path / "reward.py").write_text(REWARD)
    return Run(
        tmp_path / "run",
        "process.rollout.engine=openai", f"openai.base_url={endpoint.url}", "weights.mode=fully-async",
        "reward.kind=python", f"reward.function={tmp_path / 'reward.py'}:score", "reward.extract=",
        "generation.max_new_tokens=24", "validation.samples=8", *settings, steps=steps,
    )


def errors(run: Run) -> list[dict[str, Any]]:
    return read_lines(run.paths.errors)


@pytest.mark.long
def test_an_endpoint_with_another_model_ends_the_run_before_training(
    tmp_path: Path, quickstart: None
) -> None:
    endpoint = Endpoint(tmp_path, token_s=0.0, kinds=13)
    run = served(tmp_path, endpoint)
    try:
        with running(run):
            assert run.wait() == 1
    finally:
        endpoint.kill()
    assert run.metrics() == [] and run.audit().counts.trained == 0
    told, end = [error for error in errors(run) if error["severity"] == "critical"]
    assert end["process"] == "launch" and "learner" in end["text"]
    assert told["process"] == "learner" and "engine openai, version 0" in told["text"]
    assert "more than learner.mismatch_limit = 1, which no arithmetic explains" in told["text"]
    assert f"does {endpoint.url} serve it" in told["text"]
    assert run.restarts("learner") == 0 and "giving up: to start it again would change nothing" in run.text()


@pytest.mark.slow
def test_a_disabled_limit_only_warns_and_steps_report_missing_comparisons(
    tmp_path: Path, quickstart: None
) -> None:
    endpoint = Endpoint(tmp_path, token_s=0.0, kinds=13)
    run = served(tmp_path, endpoint, "learner.mismatch_limit=0", steps=3)
    try:
        with running(run):
            assert run.wait() == 0, run.tail()
    finally:
        endpoint.kill()
    first, *later = run.metrics()
    assert first["mismatch"] > 1 and [row["mismatch"] for row in later] == [None, None]
    (told,) = [error for error in errors(run) if "mismatch" in error["text"]]
    assert told["severity"] == "warning" and told["text"].startswith("step 1: the log-probabilities of engine openai")
    assert f"differ from the learner's by {first['mismatch']:.3g} on average" in told["text"]


@pytest.mark.slow
def test_what_was_asked_for_wrongly_is_not_tried_again(tmp_path: Path, quickstart: None) -> None:
    endpoint = Endpoint(tmp_path, token_s=0.0, kinds=13)
    run = served(tmp_path, endpoint, "openai.api_key_env=BUSRL_NO_SUCH_KEY")
    try:
        with running(run):
            assert run.wait() == 1
    finally:
        endpoint.kill()
    assert run.text().count("openai.api_key_env names $BUSRL_NO_SUCH_KEY, which is not set in this environment") >= 1
    assert run.restarts("rollout/0") == 0 and "ending: rollout/0: openai.api_key_env names" in run.text()


@pytest.mark.slow
def test_a_run_with_the_openai_engine_survives_the_death_of_its_endpoint(tmp_path: Path, quickstart: None) -> None:
    endpoint = Endpoint(tmp_path, token_s=0.002, kinds=13)
    run = served(tmp_path, endpoint, "learner.mismatch_limit=0")
    try:
        with running(run):
            run.until_step(2)
            endpoint.kill()
            endpoint = Endpoint(tmp_path, token_s=0.0, port=endpoint.port, kinds=13)
            code = run.wait()
        check_end(run, code)
        assert run.restarts("rollout/0") == 0
        assert {row["version"] for row in run.metrics()} == set(range(1, 9))
        paces = (run.directory / "pace" / "rollout-0.jsonl").read_text().splitlines()
        errors = [json.loads(line)["engine"]["errors"] for line in paces]
        assert errors[0] == 0 < errors[-1], "an operator sees them while the run lives"
    finally:
        endpoint.kill()
