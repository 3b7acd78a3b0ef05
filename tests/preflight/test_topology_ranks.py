"""A learner of several ranks: its processes, and what is refused with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from busrl import curve
from busrl.errors import UserError
from busrl.hosts.membership import of_host
from busrl.paths import RunPaths
from busrl.preflight import machine
from busrl.preflight.explain import report
from busrl.ranks.builder import TeamSettings
from busrl.topology import Topology

Loaded = Callable[..., Topology]
Refused = Callable[..., list[str]]
TWO = "process.learner.ranks=2"


def test_each_rank_but_the_first_is_a_process_on_the_learners_device(loaded: Loaded) -> None:
    t = loaded("", TWO, 'process.learner.devices=["0", "1"]', "model.device=cuda")
    ranks = {process.name: process for process in t.processes() if process.role in ("learner", "rank")}
    assert list(ranks) == ["learner", "rank/1"] and t.ranks == 2
    assert [process.devices for process in ranks.values()] == ["0", "1"] and t.device_of("rank/1") == "cuda"


OVER = ("process.learner.ranks=6", 'process.learner.hosts=["gpu-1", "gpu-0"]', 'bus.endpoint="tcp://127.0.0.1:5600"')


@pytest.fixture
def with_keys(tmp_path: Path) -> str:
    curve.init(tmp_path / "keys")
    return f'bus.keys="{tmp_path}/keys"'


def ranks_of(t: Topology) -> list[tuple[str, str]]:
    """Names and devices of the learner's processes there."""
    return [(process.name, process.devices) for process in t.processes() if process.role in ("learner", "rank")]


def test_ranks_are_dealt_out_over_home_and_the_hosts_in_their_order(loaded: Loaded, with_keys: str) -> None:
    t = loaded("", *OVER, with_keys, 'process.learner.devices=["0", "1"]', "model.device=cuda")
    places = {host: ranks_of(of_host(t, host)) for host in t.host_names}
    at_home = ranks_of(t)
    assert at_home == [("learner", "0"), ("rank/1", "1")] and t.rank_hosts == ("gpu-1", "gpu-0")
    assert places == {"gpu-1": [("rank/2", "0"), ("rank/3", "1")], "gpu-0": [("rank/4", "0"), ("rank/5", "1")]}
    assert not {"rollout", "reward", "scheduler"} & {process.role for process in of_host(t, "gpu-0").processes()}
    team = TeamSettings.of(t, RunPaths.of("/nowhere"), torch.device("cpu"), lambda _: "the same")
    assert [team.host_of(rank) for rank in range(6)] == ["", "", "gpu-1", "gpu-1", "gpu-0", "gpu-0"]
    there = TeamSettings.of(of_host(t, "gpu-0"), RunPaths.of("/elsewhere"), torch.device("cpu"), lambda _: "the same")
    assert there.facts == team.facts and team.address == "127.0.0.1"


def test_check_says_which_ranks_a_host_has_and_what_memory_they_need(loaded: Loaded, with_keys: str) -> None:
    lines = report(loaded("", *OVER, with_keys, "model.device=cpu"))
    assert "rank/2 to rank/3 of the learner" in lines and "memory of its ranks: " in lines


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((TWO, 'process.learner.devices=["0"]', "model.device=cuda"), "1 items for 2 ranks"),
        (("process.rollout.ranks=2",), "a rollout trains none"),
        ((*OVER, "process.learner.ranks=4"), "4 ranks cannot be dealt out evenly over home and 2 other hosts"),
        ((*OVER, "learner.parallel.tensor=3"), "2 ranks of a host are no groups of 3"),
        ((*OVER, 'bus.endpoint="tcp://*:5600"'), "which has to be one of IPv4"),
        ((*OVER, "learner.checkpoint_mode=async"), "home alone has the folder of checkpoints"),
        ((*OVER, 'process.learner.devices=["0"]', "model.device=cuda"), "1 items for 2 ranks on each host"),
        ((TWO, "learner.parallel.tensor=3"), "1 x 3 does not divide 2"),
        ((TWO, "learner.parallel.expert=2", "learner.parallel.replicate=2"), "a replica, which has 1 ranks"),
        ((TWO, "learner.parallel.tensor=2", "lora.rank=4", "lora.dropout=0.1"), "would each drop other values"),
    ],
)
def test_what_several_ranks_cannot_do_is_refused(refused: Refused, settings: tuple[str, ...], expected: str) -> None:
    assert any(expected in problem for problem in refused("", *settings))


def test_heads_and_experts_that_cannot_be_dealt_out_evenly_are_named(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 6, "num_key_value_heads": 3}))
    monkeypatch.setattr(machine.pretrained, "model_at", lambda path: tmp_path)
    machine.require_axes(loaded("", "process.learner.ranks=3", "learner.parallel.tensor=3"))
    with pytest.raises(UserError, match=r"learner.parallel.tensor = 2: .* num_key_value_heads = 3"):
        machine.require_axes(loaded("", TWO, "learner.parallel.tensor=2"))
    with pytest.raises(UserError, match=r"num_experts = 0, .*; set 1"):
        machine.require_axes(loaded("", TWO, "learner.parallel.expert=2"))
