"""A run whose files for people have a tiny bound, with deaths in it: what it keeps, and what its readers saw."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from checks import check_end
from harness import ROOT, Run, read_lines, running

from busrl.cli.command import main
from busrl.observe.report.files import read
from busrl.status.runfiles import RunFiles, run_of_files
from busrl.system.files import PARTS, dropped, parts

STEPS, KEEP_MB = 24, 0.1
REWARD = """
import itertools
counter = itertools.count()

def right(prompt, completion, answer, **_):
    n = next(counter)
    print("told", n, "x" * 3000, flush=True)
    return float(n % 3 == 0)
"""
SETTINGS = [
    "process.rollout.count=2", "learner.trigger.n_min=8", "mock.token_s=0.0005", "mock.per_sequence_s=0.00005",
    "generation.max_new_tokens=128", "mock.learner_s_per_token=0.00005", "log.samples=32", f"log.keep_mb={KEEP_MB}",
    "learner.checkpoint_every=8", "reward.kind=python",
]


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in (path, *(file for _, file in parts(path))))


@pytest.mark.long
def test_a_run_keeps_a_tiny_bound_and_its_readers_survive_deaths(
    quickstart: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "words.py").write_text(REWARD)
    sinks = json.dumps([f"{ROOT}/examples/extending/sink.py:Table"])
    settings = [f"reward.function={tmp_path}/words.py:right", f"sinks.to={sinks}"]
    run = Run(tmp_path / "run", *SETTINGS, *settings, config=ROOT / "configs" / "scripted.toml", steps=STEPS)
    followed = tmp_path / "followed"
    with running(run), open(followed, "wb") as out:
        run.until("the reward's log", (run.paths.logs / "reward-0.log").exists)
        command = [sys.executable, "-m", "busrl.cli", "logs", str(run.directory), "reward/0", "-f"]
        with subprocess.Popen(command, stdout=out) as follower:
            for step, name in ((6, "rollout/0"), (12, "learner"), (18, "sinks")):
                run.until_step(step)
                run.kill(name)
            check_end(run, run.wait())
            assert follower.wait(60) == 0
    paths, keep = run.paths, KEEP_MB * 1e6
    assert size_of(paths.metrics) < keep and size_of(paths.samples) <= keep and dropped(paths.samples)
    for path in (paths.samples, paths.metrics, *paths.logs.glob("*.log")):
        assert len(parts(path)) < PARTS
    assert dropped(paths.logs / "reward-0.log") and not [*paths.root.rglob("*.cut")]
    # Who followed the log saw each line once, though most of them are not kept.
    told = [int(line.split()[1]) for line in followed.read_bytes().splitlines() if line.startswith(b"told ")]
    assert told == list(range(len(told))) and len(told) >= 8 * 4 * STEPS
    (table,) = paths.sinks.glob("*/long.csv")
    assert {int(step) for step, name, _ in csv.reader(table.open()) if name == "reward"} == set(range(1, STEPS + 1))
    assert [row["step"] for row in run.metrics()] == list(range(1, STEPS + 1)) and parts(paths.metrics)
    samples = [row["step"] for row in read_lines(paths.samples)]
    assert samples == sorted(samples) and samples[-1] == STEPS
    assert run_of_files(RunFiles(paths)).at_step == STEPS
    assert main(["report", str(run.directory), "-o", str(tmp_path / "report.html")]) == 0
    assert main(["audit", str(run.directory), "--waste"]) == 0
    assert len(read(run.directory).steps) == STEPS
    assert main(["logs", str(run.directory)]) == 0
    assert "told" in capsys.readouterr().out
