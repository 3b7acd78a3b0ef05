"""A learner with ranks on other hosts: it trains as it does at home, and outlives whatever dies or is cut off there."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from checks import check_end
from harness import Run, read_lines, running
from host_scene import Cable, Home, Host

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
            assert run.restarts("learner") == 0 and not run.paths.log("rank/1").exists()
            assert "the run is over" in host.text() and "ended with" not in host.text(), host.tail()
        rows.append(run.metrics())
    alone, two = ([[row[name] for name in ("tokens", "loss", "grad_norm")] for row in of_run] for of_run in rows)
    # Float sums are those of the order in which samples came, which is mostly the same, and then to the bit.
    assert [row[0] for row in alone] == [row[0] for row in two]
    assert np.allclose(alone, two, rtol=1e-5, atol=1e-7), (alone, two)


AGAIN = ("validation.data=", "learner.checkpoint_every=3", "learner.parallel.collective_timeout_s=10")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_whatever_dies_of_a_learner_over_hosts_each_sample_is_trained_once(tmp_path: Path, quickstart: None) -> None:
    home = Home(tmp_path, *AGAIN, ranks=2, steps=16)
    with running(home), running(host := Host(home)):
        for number, (run, name) in enumerate([(host, "rank/1"), (home, "learner"), (host, "relay"), (host, "rank/1")]):
            home.until_step(2 + 2 * number)
            pid = run.pid(name)
            run.kill(name)
            if name == "rank/1":
                title = f"rank 1 on gpu-0 (pid {pid})"
                home.until("its name", lambda title=title: any(title in text for text in said(home)))
        home.until_step(10)
        pid = host.pid("rank/1")
        host.kill_launch()  # and with it all of its processes
        home.until("its name", lambda: any(f"rank 1 on gpu-0 (pid {pid})" in text for text in said(home)))
        host.start()
        home.until_step(13)
        host.kill_launch()
        host.paths.ring_file.unlink(missing_ok=True)
        shutil.rmtree(host.directory)
        with running(other := Host(home, place="elsewhere")):
            assert home.wait(300) == 0, home.tail()
            assert other.wait(60) == 0, other.tail()
    check_end(home, 0)
    assert home.restarts("learner") == 5, "once for each death of a rank"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_cut_between_ranks_is_named_in_time_and_the_run_continues(
    tmp_path: Path, quickstart: None
) -> None:
    with Cable() as cable:
        home = Home(tmp_path, *AGAIN, ranks=2, steps=6, cable=cable)
        with running(home), running(host := Host(home, cable=cable)):
            home.until_step(2)
            cable.plug("down")
            home.until("its name", lambda: any("rank 1 on gpu-0 (pid " in text for text in said(home)))
            cable.plug("up")
            assert home.wait(300) == 0, home.tail()
            assert host.wait(60) == 0, host.tail()
    check_end(home, 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_host_with_ranks_that_stays_away_ends_the_run_by_name(tmp_path: Path, quickstart: None) -> None:
    home = Home(tmp_path, *AGAIN, "learner.parallel.host_timeout_s=60", ranks=2, steps=400)
    with running(home):
        with running(host := Host(home)):
            home.until_step(2)
            host.kill_launch()
        assert home.wait(300) == 1, home.tail()
    assert "rank 1 on gpu-0 did not come within 60 s" in home.text(), home.tail()
    assert home.audit().counts.trained_twice == 0 and home.step() >= 2
