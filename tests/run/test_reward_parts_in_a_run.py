"""A run whose reward has several parts: each is told by name, their sum is trained, what fails is drawn again."""

from __future__ import annotations

from pathlib import Path

import own
import pytest
from harness import Run, read_lines, running

FUNCTIONS = own.REWARD + '''

failed = set()


async def briefly(record, completion, token_ids):
    if record["id"] % 7 == 3 and record["id"] not in failed:
        failed.add(record["id"])
        raise ValueError("not this time")
    return -0.01 * len(token_ids)


def many(records, completions, token_ids):
    return [float(len(set(text)) > 2) for text in completions]
'''
PARTS = """
[reward]
timeout_s = 5.0
overlong_tokens = 8
overlong_penalty = 0.5
[[reward.part]]
kind = "python"
name = "share"
weight = 2.0
function = "judge.py:score"
[[reward.part]]
kind = "python"
name = "brief"
function = "judge.py:briefly"
[[reward.part]]
kind = "python"
name = "varied"
weight = 0.25
batch = true
function = "judge.py:many"
[[reward.part]]
kind = "regex"
weight = 0.0
pattern = "[a-z]"
"""


@pytest.mark.slow
def test_parts_are_told_by_name_and_their_weighted_sum_is_trained(tmp_path: Path) -> None:
    topology = own.make_all(tmp_path / "mine", "llama", FUNCTIONS)
    topology.write_text(topology.read_text().partition("[reward]")[0] + PARTS)
    run = Run(tmp_path / "run", "log.samples=all", config=topology, steps=6)
    with running(run):
        code = run.wait()
    assert code == 0, run.tail()
    report = run.audit()
    assert not report.errors and report.counts.lost == 0 and report.counts.trained_twice == 0, report
    assert run.leftovers() == []
    rows, samples = run.metrics(), read_lines(run.paths.samples)
    assert all(list(row["reward_parts"]) == ["share", "brief", "varied", "regex"] for row in rows)
    for sample in samples:
        parts, over = sample["reward_parts"], max(0, sample["tokens"] - 8) / 8
        judged = 2.0 * parts["share"] + parts["brief"] + 0.25 * parts["varied"]
        assert sample["reward"] == pytest.approx(judged - 0.5 * over, abs=1e-5), sample
        assert parts["regex"] == float(any(letter.islower() for letter in sample["completion"]))
        gap = sample["logprob_gap"]
        assert len(gap["each"]) == sample["tokens"]
        assert gap["most"] == pytest.approx(abs(gap["each"][gap["at"]]), abs=1e-5)
        assert gap["most"] < 1e-4 or sample["versions"][0] < sample["step"] - 1, "of the present weights it is rounding"
    assert len({sample["tokens"] for sample in samples}) > 2 and any(sample["tokens"] > 8 for sample in samples)
    told = [line["text"] for line in read_lines(run.paths.errors) if line["where"] == "reward"]
    assert any("part brief: ValueError: not this time" in text for text in told), told
    assert len(report.accidents) == 1 and sum(report.accidents.values()) >= 1, report.accidents
