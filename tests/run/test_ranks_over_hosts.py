"""A learner with ranks on other hosts: it trains as it does at home, and outlives whatever dies or is cut off there."""

from __future__ import annotations

from pathlib import Path

import pytest
from checks import check_end
from harness import Run, read_lines, running
from hosts import Home, Host

FIRST = ("learner.deterministic=true", "weights.mode=sync", "validation.data=", "learner.checkpoint_every=2")


def said(run: Run) -> list[str]:
    return [line["text"] for line in read_lines(run.paths.errors)] if run.paths.errors.exists() else []


@pytest.mark.long
def test_ranks_of_two_hosts_take_the_steps_of_two_at_home(tmp_path: Path, quickstart: None) -> None:
    rows = []
    for place in ("home", "hosts"):
        (folder := tmp_path / place).mkdir()
        if place == "home":
            run = Run(folder / "run", "process.learner.ranks=2", *FIRST, steps=3)
            with running(run):
                check_end(run, run.wait())
        else:
            run = Home(folder, *FIRST, ranks=2, steps=3)
            with running(run), running(host := Host(run)):
                assert run.wait() == 0, run.tail()
                assert host.wait(30) == 0, host.tail()
            check_end(run, 0)
            assert run.restarts("learner") == host.restarts("rank/1") == 0 and not run.paths.log("rank/1").exists()
        rows.append(run.metrics())
    (one, two), names = zip(*rows, strict=True), ("tokens", "loss", "grad_norm")
    print([[row[name] for name in names] for row in (*rows[0], *rows[1])])
    assert [one[name] for name in names] == [two[name] for name in names]
