"""Two runs whose episodes a client outside joins: examples/several/joined_runs.py, as it is."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from checks import check_end
from harness import Run, running

from busrl.ledger.wal import Wal

STEPS = 6
SETTINGS = ("learner.checkpoint_every=0", "groups.size=4", "agents.episodes=64", "generation.max_batch=32")


def joined(folder: Path, where: Path, steps: int) -> tuple[Run, Run]:
    config = folder / "joined.toml"
    return (Run(where / "solver", *SETTINGS, config=config, steps=steps),
            Run(where / "judge", *SETTINGS, f"model.path={folder / 'made' / 'judge'}", config=config, steps=steps))


def trained(run: Run) -> dict[int, Any]:
    """The trained samples of a run by their number."""
    return {one.uid: one for record in Wal(run.paths.wal).records() for one in record.samples}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("killed", [False, True], ids=["undisturbed", "with its servers killed"])
def test_a_client_joins_the_episodes_of_two_runs_by_their_number(
    tmp_path: Path, several: Path, killed: bool
) -> None:
    runs = joined(several, tmp_path, STEPS)
    with ExitStack() as stack:
        for run in runs:
            stack.enter_context(running(run))
        client = stack.enter_context(subprocess.Popen(
            [sys.executable, several / "joined_runs.py", "--patience-s=100", *(run.directory for run in runs)],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
        stack.callback(client.kill)
        if killed:
            for step, run in enumerate(runs, 1):
                run.until_step(step)
                run.kill("serve/0")
        for run in runs:
            check_end(run, run.wait())
        said = client.communicate(timeout=100)[0]
    counts = {what: int(count) for count, what in re.findall(r"(\d+) (of both|of the \w+ alone)", said)}
    assert counts["of both"] > sum(counts.values()) / 2, said
    solver, judge = (trained(run) for run in runs)
    assert len(solver) == len(judge) == STEPS * 8 * 4
    assert len(solver.keys() & judge.keys()) > len(solver) / 2
