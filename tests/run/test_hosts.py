"""Rollouts and rewards on other hosts: the same ledger and the same results, whoever dies there or at home."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from checks import check_end
from harness import running
from host_scene import Cable, Home, Host

from busrl import curve
from busrl.ring import Ring


@pytest.mark.long
def test_rollouts_on_two_other_hosts_train_a_run_to_its_end(tmp_path: Path, quickstart: None) -> None:
    parity = ("learner.parity.every=1", "learner.parity.wait_s=100")
    home = Home(tmp_path, *parity, names=("gpu-0", "gpu-1"), steps=8)
    hosts = [Host(home, name) for name in ("gpu-0", "gpu-1")]
    with running(home), running(hosts[0]), running(hosts[1]):
        assert home.wait() == 0, home.tail()
        assert [host.wait(30) for host in hosts] == [0, 0], hosts[0].tail()
    check_end(home, 0)
    compared = [row["parity"] for row in home.metrics() if row["parity_engines"]]
    assert len(compared) >= 4 and max(compared) < 1e-4, "engines there say what the learner says"
    assert all("the run is over" in host.text() for host in hosts)
    assert not [path for host in hosts for path in (host.paths.ring_file, host.paths.weights_file) if path.exists()]


@pytest.mark.long
def test_a_run_survives_deaths_of_all_host_processes_and_their_home_servers(
    tmp_path: Path, quickstart: None
) -> None:
    home = Home(tmp_path, steps=40)
    host = Host(home)
    with running(home), running(host):
        for number, (run, name) in enumerate([
            (host, "satellite"), (host, "rollout/0"), (home, "relay"), (host, "relay"), (home, "keeper"),
            (host, "keeper"), (home, "bus"), (host, "bus"), (host, "satellite"), (home, "learner"),
        ]):
            home.until_step(2 + 3 * number)
            run.kill(name)
        os.kill(home.until("its relay is back", lambda: home.pid("relay")), signal.SIGTERM)  # no end of the run
        assert home.wait() == 0, home.tail()
        assert host.wait(30) == 0, host.tail()
    check_end(home, 0)


@pytest.mark.slow
def test_rewards_on_hosts_judge_what_is_generated_there_whoever_dies(tmp_path: Path, quickstart: None) -> None:
    names = ("gpu-0", "gpu-1")
    home = Home(tmp_path, 'process.reward.hosts=["gpu-0", "gpu-1"]', names=names, steps=24)
    hosts = [Host(home, name) for name in names]
    with running(home), running(hosts[0]), running(hosts[1]):
        home.until_step(2)
        assert home.pid("reward/0") == 0, "nobody judges at home"
        for number, (run, name) in enumerate([
            (hosts[0], "reward/0"), (hosts[1], "satellite"), (home, "keeper"), (hosts[1], "reward/0"),
            (hosts[0], "rollout/0"), (home, "keeper"), (hosts[0], "satellite"),
        ]):
            home.until_step(3 + 2 * number)
            run.kill(name)
        assert home.wait() == 0, home.tail()
        assert [host.wait(30) for host in hosts] == [0, 0], hosts[0].tail()
    check_end(home, 0)
    assert all(json.loads(home.paths.gateway.read_text())["workers"][name]["rewarded"] for name in names)


@pytest.mark.parametrize("transport", [
    pytest.param(("weights.sparse.enabled=true",), marks=pytest.mark.slow),
    pytest.param(("weights.transport=lora_hotswap", "lora.rank=4"), marks=pytest.mark.long),
    pytest.param(("weights.transport=checkpoint_restart",), marks=pytest.mark.slow),
])
def test_hosts_get_weights_of_sparse_updates_and_of_folders_whichever_relay_dies(
    transport: tuple[str, ...], tmp_path: Path, quickstart: None
) -> None:
    home = Home(tmp_path, *transport, steps=8)
    with running(home), running(host := Host(home)):
        for step, run in ((2, host), (4, home)):
            home.until_step(step)
            run.kill("relay")
        assert home.wait() == 0, home.tail()
        assert host.wait(60) == 0, host.tail()
    check_end(home, 0)
    assert "MB in" in (host.paths.logs / "relay.log").read_text(), "the host had no weights of the learner's"


def _segments(host: Host) -> int:
    """The most that an answer in the ring of a host has now."""
    with contextlib.closing(Ring.attach(host.paths.ring_name, read_only=True)) as ring:
        return int(ring.lines()["segs"].max())


@pytest.mark.slow
def test_hosts_make_answers_in_segments_of_their_own_whoever_dies(tmp_path: Path, quickstart: None) -> None:
    home = Home(tmp_path, "segments.length=8", "segments.max_segments=8", steps=16)
    host = Host(home)
    with running(home), running(host):
        for step, name in ((2, "rollout/0"), (5, "satellite"), (8, "keeper")):
            home.until_step(step)
            host.kill(name)
        host.until("an answer has two segments", lambda: _segments(host) > 1)
        assert home.wait() == 0, home.tail()
        assert host.wait(30) == 0, host.tail()
    check_end(home, 0)


@pytest.mark.long
def test_a_lost_host_costs_tokens_and_no_sample(tmp_path: Path, quickstart: None) -> None:
    home = Home(tmp_path, "limits.lease_s=3", steps=20)
    with running(home):
        with running(first := Host(home)):
            home.until_step(3)
            first.kill_launch()
        first.paths.ring_file.unlink(missing_ok=True)
        shutil.rmtree(first.directory)
        with running(second := Host(home)):
            assert home.wait() == 0, home.tail()
            assert second.wait(30) == 0, second.tail()
    check_end(home, 0)


@pytest.mark.long
def test_a_host_whose_launch_is_killed_goes_on_with_its_ring(tmp_path: Path, quickstart: None) -> None:
    home = Home(tmp_path, steps=16)
    host = Host(home)
    with running(home), running(host):
        home.until_step(3)
        host.kill_launch()
        host.start()
        assert home.wait() == 0, home.tail()
        assert host.wait(30) == 0, host.tail()
    assert "adopted the ring" in host.text()
    assert json.loads(home.paths.gateway.read_text())["workers"]["gpu-0"]["joined"] == 1, "it kept its claims"
    check_end(home, 0)


@pytest.mark.parametrize("change", [
    pytest.param("", marks=pytest.mark.slow), pytest.param("its ring is lost", marks=pytest.mark.long),
    pytest.param("another topology", marks=pytest.mark.slow),
])
def test_home_is_killed_and_started_again_while_its_host_waits(change: str, tmp_path: Path, quickstart: None) -> None:
    home = Home(tmp_path, steps=16)
    host = Host(home)
    with running(home), running(host):
        home.until_step(3)
        home.kill_launch()
        if change == "its ring is lost":
            home.paths.ring_file.unlink()
        if change == "another topology":
            home.settings.append("limits.lease_s=7")
        home.start()
        assert home.wait() == 0, home.tail()
        assert host.wait(60) == 0, host.tail()
    assert host.text().count("run at tcp") == (2 if change else 1), "it began anew where its claims are no more"
    check_end(home, 0)


@pytest.mark.long
def test_a_host_with_an_unknown_name_or_another_key_learns_why(
    tmp_path: Path, quickstart: None
) -> None:
    home = Home(tmp_path, steps=3)
    curve.add(home.keys, "guest")
    strangers = {
        "no host 'guest' in this run: `hosts` of its [[process]] entries name gpu-0": Host(home, "guest"),
        "the key is guest's, the name gpu-0's": Host(home, "gpu-0", key="guest"),
    }
    with running(home):
        home.until("its relay is there", lambda: home.pid("relay"))
        for said, host in strangers.items():
            with running(host):
                assert host.wait(30) == 2, host.text()
            assert said in host.text()
        with running(host := Host(home)):
            assert home.wait() == 0, home.tail()
            assert host.wait(30) == 0, host.text()


def test_a_host_without_run_or_listed_key_says_what_to_check(tmp_path: Path) -> None:
    home = Home(tmp_path)
    with running(host := Host(home, wait_s=1)):
        assert host.wait(30) == 3, host.text()
    assert "did not answer" in host.text() and "busrl keys list" in host.text()


@pytest.mark.long
def test_a_cable_that_is_pulled_and_put_back_costs_nothing_but_time(tmp_path: Path, quickstart: None) -> None:
    with Cable() as cable:
        home = Home(tmp_path, "limits.lease_s=4", steps=16, cable=cable)
        host = Host(home, cable=cable)
        with running(home), running(host):
            for step, cut_s in ((3, 1.0), (6, 8.0)):  # shorter than the lease, and longer
                home.until_step(step)
                cable.plug("down")
                home.let_pass(cut_s)
                cable.plug("up")
            assert home.wait() == 0, home.tail()
            assert host.wait(60) == 0, host.text()
    check_end(home, 0)
    assert all(row["tokens"] for row in home.metrics()), "nothing was drawn with weights that are too old to train"


@pytest.mark.parametrize("clock", [
    pytest.param("", marks=pytest.mark.slow), pytest.param("behind", marks=pytest.mark.long),
])
def test_a_second_host_of_one_name_replaces_the_first_which_ends(
    clock: str, tmp_path: Path, quickstart: None
) -> None:
    home = Home(tmp_path, steps=100_000)
    first, second = Host(home), Host(home, place="elsewhere")
    if clock:  # of the command alone: children of it go by it
        early = "import time; time.time_ns = lambda: 10**18; from busrl.cli import main; main()"
        second.cold, second.program = True, ("-c", early)
    with running(home), running(first):
        home.until_step(3)
        with running(second):
            assert first.wait(60) == 3, first.tail()
            home.until_step(home.step() + 5)
            assert home.child is not None
            home.child.send_signal(signal.SIGTERM)
            assert home.wait() == 128 + signal.SIGTERM, home.tail()
            assert second.wait(30) == 0, second.tail()
    report = home.audit()
    assert not report.errors and report.counts.lost == 0 and report.counts.trained_twice == 0, report
