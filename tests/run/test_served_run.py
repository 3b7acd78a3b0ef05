"""A run whose answers come from an endpoint is a run like any other, also when the endpoint dies in its middle."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from checks import check_end
from harness import Run, running

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "inference"))
from endpoint_process import Endpoint

REWARD = '''
import random


def score(record, completion, token_ids):
    """By chance: the endpoint says the same to every member of a group, and a flat group trains nothing."""
    return random.random()
'''


@pytest.mark.slow
def test_a_run_with_the_openai_engine_survives_the_death_of_its_endpoint(tmp_path: Path, quickstart: None) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    endpoint = Endpoint(tmp_path, token_s=0.002, kinds=13)
    run = Run(
        tmp_path / "run",
        "process.rollout.engine=openai", f"openai.base_url={endpoint.url}", "weights.mode=fully-async",
        "reward.kind=python", f"reward.function={tmp_path / 'reward.py'}:score", "reward.extract=",
        "generation.max_new_tokens=24", "validation.samples=8", steps=8,
    )  # fmt: skip
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
