"""The ring's programs from Python: each says the time of a round trip and its CPU time, spinning or asleep."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.ring import run

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [(["busrl_ring.py", "--fill"], "busrl"), (["busrl_ring.py", "--fill", "--blocking"], "busrl blocking"),
     (["busrl_batch.py", "--batch", "4"], "busrl"), (["mp_queue.py"], "mp.Queue")],
)
def test_a_program_says_the_time_and_the_cpu_time_of_a_trip(arguments: list[str], name: str) -> None:
    command = [sys.executable, *arguments, "--count", "20", "--size", "4096"]
    done = subprocess.run(
        command, cwd=run.HERE / "rivals", env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=120)
    assert done.returncode == 0, done.stderr
    said = {line["name"]: line["us"] for line in map(json.loads, done.stdout.splitlines())}
    assert list(said) == [name, f"{name} cpu"] and min(said.values()) > 0


def test_each_rival_stands_beside_a_busrl_that_sleeps_as_well() -> None:
    beside = {(bar.ours, bar.rival) for bar in run.BARS}
    for rival in ("mp.Queue", "faster-fifo", "ray put+get"):
        assert {(f"array:{rival}", "array:busrl"), (f"array:{rival}", "array:busrl blocking"),
                (f"array:{rival} cpu", "array:busrl blocking cpu")} <= beside
