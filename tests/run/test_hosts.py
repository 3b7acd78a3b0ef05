"""Rollouts on other hosts: the same ledger and the same results, whoever dies there or at home."""

from __future__ import annotations

from pathlib import Path

from checks import check_end
from harness import running
from hosts import Home, Host



def test_rollouts_on_two_other_hosts_train_a_run_to_its_end(tmp_path: Path, quickstart: None) -> None:
    home = Home(tmp_path, names=("gpu-0", "gpu-1"), steps=8)
    hosts = [Host(home, name) for name in ("gpu-0", "gpu-1")]
    with running(home), running(hosts[0]), running(hosts[1]):
        assert home.wait() == 0, home.tail()
        assert [host.wait(30) for host in hosts] == [0, 0], hosts[0].tail()
    check_end(home, 0)
    assert all("the run is over" in host.text() for host in hosts)
    assert not [path for host in hosts for path in (host.paths.ring_file, host.paths.weights_file) if path.exists()]
