"""A reward function that breaks on a sample costs that sample, not the run, and is told once, not a thousand times."""

from __future__ import annotations

import re
from pathlib import Path

import own
import pytest
from harness import Run, read_lines, running

COUNTED = '''
import os
import time
from pathlib import Path


def call_number(record):
    """How often this record was judged, this time included; it outlives the process."""
    with open(Path(__file__).parent / f"calls-{record['id']}", "ab") as file:
        file.write(b".")
        return file.tell()
'''
BREAKS = own.REWARD + COUNTED + '''

whole = score


def score(record, completion, token_ids):
    number, call = record["id"], call_number(record)
    if number == 3 and call in (1, 5):
        raise ValueError("broken on purpose")
    if number == 11 and call == 1:
        time.sleep(3600)
    if number == 17 and call == 1:
        return float("nan")
    if number == 23 and call <= 2:
        os.kill(os.getpid(), 9)
    return whole(record, completion, token_ids)
'''
OFTEN = own.REWARD + '''

whole = score


def score(record, completion, token_ids):
    if record["id"] % 4 == 1:  # not the first, which is tried before the start
        raise ValueError(f"no idea about {record['id']}")
    return {"share": whole(record, completion, token_ids)}
'''

HOSTILE = own.REWARD + """
import os
import subprocess

whole = score


def score(record, completion, token_ids):
    what = record["id"] % 16
    if what == 1:
        os.fork()
    if what == 2:
        subprocess.Popen(["sleep", "4321"])
        subprocess.Popen(["sleep", "4322"], start_new_session=True)
    if what == 3:
        bytearray(3 << 30)
    if what == 4:
        print("x" * (64 << 20))
    if what == 5:
        os.closerange(3, 60)
    if what == 6:
        for number in range(3, 12):
            try:
                os.write(number, b"garbage")
            except OSError:
                pass
    return whole(record, completion, token_ids)
"""


def reward_run(tmp_path: Path, reward: str, steps: int, *settings: str) -> Run:
    topology = own.make_all(tmp_path / "mine", "llama", reward)
    run = Run(tmp_path / "run", "reward.timeout_s=1", *settings, config=topology, steps=steps)
    with running(run):
        code = run.wait(400)  # some of them cost a new process, and a second, for each of their samples
    assert code == 0, run.tail()
    report = run.audit()
    assert not report.errors and report.counts.lost == 0 and report.counts.trained_twice == 0, report
    assert run.leftovers() == []
    return run


@pytest.mark.long
def test_a_reward_that_raises_hangs_lies_or_dies_costs_its_sample_alone(tmp_path: Path) -> None:
    run = reward_run(tmp_path, BREAKS, steps=14)
    accidents = run.audit().accidents
    # Raised at the 1st and 5th call for one record, and by a process that died on one sample twice.
    assert sorted(accidents.values()) == [1, 1, 3] and sum(accidents.values()) == 5, accidents
    told = [line["text"] for line in read_lines(run.paths.errors) if line["where"] == "reward"]
    for text in ("broken on purpose", "no result after 1 s", "must be finite", "died on this sample twice"):
        assert any(text in line for line in told), told
    assert run.summary()["processes"]["reward/0"]["restarts"] == 0


@pytest.mark.slow
def test_a_reward_that_always_breaks_does_not_flood_and_is_counted(tmp_path: Path) -> None:
    run = reward_run(tmp_path, OFTEN, steps=12)
    row, sample = run.metrics()[-1], read_lines(run.paths.samples)[-1]
    assert abs(row["reward_parts"]["share"] - row["reward"]) < 1e-6 and list(sample["reward_parts"]) == ["share"]
    accidents = sum(run.audit().accidents.values())
    told = [line for line in read_lines(run.paths.errors) if line["where"] == "reward"]
    assert accidents > 40
    assert len(told) <= 3 + run.summary()["seconds"] / 5, told
    more = [re.match(r"(\d+) more like this", line["text"]) for line in told]
    assert sum(int(match[1]) if match else 1 for match in more) >= accidents - 8, told


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_reward_that_forks_and_eats_memory_costs_its_samples_alone(tmp_path: Path) -> None:
    run = reward_run(tmp_path, HOSTILE, 10, "reward.memory_mb=1000")
    told = [line["text"] for line in read_lines(run.paths.errors) if line["where"] == "reward"]
    for text in ("MemoryError", "died on this sample twice"):
        assert any(text in line for line in told), told
    assert run.audit().accidents and run.summary()["processes"]["reward/0"]["restarts"] == 0
    assert (run.paths.logs / "reward-0.log").stat().st_size < 100 << 20
    assert not any(command_line(path) in ("sleep 4321", "sleep 4322") for path in Path("/proc").glob("[0-9]*"))


def command_line(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""
