"""Agents and servers on other hosts: the same episodes as at home, each token trained once, whoever dies there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checks import check_end
from harness import ROOT, running
from hosts import Cable, Home, Host
from test_agents_in_a_run import AGENTS

from busrl.ledger.wal import SampleRecord, Wal

AWAY = ('process.agent.hosts=["gpu-0"]', "agents.episodes=24", "learner.checkpoint_every=0", "validation.data=")


@pytest.mark.long
def test_agents_on_a_host_train_a_run_whoever_dies_there(tmp_path: Path, quickstart: None) -> None:
    home = Home(tmp_path, *AWAY, config=AGENTS, steps=18)
    host = Host(home)
    with running(home), running(host):
        for number, name in enumerate(["satellite", "agent/0", "rollout/0", "keeper", "relay"]):
            home.until_step(2 + 3 * number)
            host.kill(name)
        assert home.wait() == 0, home.tail()
        assert host.wait(30) == 0, host.tail()
    check_end(home, 0)
    assert home.pid("agent/0") == home.pid("rollout/0") == 0
