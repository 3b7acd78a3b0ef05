"""The comparison with another trainer: what both are given, and what our side reports. The rival is not needed."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import trainers

ROOT = Path(__file__).resolve().parents[2]

OPTIONS = argparse.Namespace(
    groups=2, steps=1, prompt=5, median=9.0, longest=12, at_once=4, threads=1, name="trainers", rounds=1)


def test_both_are_given_the_same_groups_with_rewards_that_differ() -> None:
    work = trainers.made_work("tiny", OPTIONS)
    assert work == trainers.made_work("tiny", OPTIONS) and len(work["steps"]) == 2
    for group in (group for step in work["steps"] for group in step):
        assert sorted(group["rewards"]) == [0.0] * 4 + [1.0] * 4
        assert all(4 <= len(row) <= OPTIONS.longest for row in group["completions"])
    samples = trainers.samples_of(1, 3, work["steps"][0][1])
    fields = [(sample.group, sample.member, sample.fault()) for sample in samples]
    assert fields == [(1, k, "") for k in range(trainers.GROUP)]
    assert {int(version) for sample in samples for version in sample.policy_versions} == {3}


@pytest.mark.slow
def test_without_trl_busrl_and_the_plain_loop_are_measured_and_agree(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "trainers", "--shapes", "tiny", "--rivals", "plain", "trl",
               "--rounds", "1", "--steps", "1", "--groups", "1", "--longest", "12", "--median", "6", "--threads", "1",
               "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    results = json.loads(next(tmp_path.glob("trainers_*.json")).read_text())
    assert not results["failures"] and results["medians"]["tiny:busrl:tokens_per_s"]["value"] > 0
    by_rival = {rival: [bar for bar in results["bars"] if f":{rival}:" in bar["rival"]] for rival in ("plain", "trl")}
    assert {bar["met"] for bar in by_rival["trl"]} == {None}, "TRL was not started"
    figures = {bar["ours"].rpartition(":")[2]: bar["ratio"] for bar in by_rival["plain"]}
    assert figures["first_norm"] == pytest.approx(1.0, abs=2e-3)
    assert figures["tokens_per_s"] > 0 and results["programs"]["tiny:plain"][0]["cpu_seconds"] > 0
