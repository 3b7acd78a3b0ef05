"""Rollouts on other hosts in a topology: which process runs where, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from busrl import curve
from busrl.errors import TopologyError
from busrl.hosts.membership import ahead_of, of_host
from busrl.preflight import explain
from busrl.preflight.load import load, materialise
from busrl.topology import Topology

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.toml"


@pytest.fixture
def over_hosts(tmp_path: Path) -> Callable[..., Topology]:
    curve.init(tmp_path / "keys")
    always = ['bus.endpoint="tcp://127.0.0.1:5600"', f'bus.keys="{tmp_path}/keys"', 'process.rollout.hosts=["b", "a"]']
    return lambda *settings: load(QUICKSTART, [*always, *settings])


def names(topology: Topology) -> list[str]:
    return [process.name for process in topology.processes()]


def test_each_host_has_its_own_processes_and_home_the_ledger(over_hosts: Callable[..., Topology]) -> None:
    home = over_hosts("process.rollout.count=2")
    assert home.host_names == ("a", "b")
    assert names(home) == ["bus", "keeper", "relay", "scheduler", "learner", "reward/0", "validator"]
    away = of_host(home, "a")
    assert names(away) == ["bus", "keeper", "relay", "satellite", "rollout/0", "rollout/1"]
    assert Topology.from_json(away.to_json()) == away and away.bus.endpoint == "ipc"


def test_a_run_of_one_host_has_no_relay() -> None:
    assert names(load(QUICKSTART))[:3] == ["bus", "keeper", "scheduler"]


def test_a_host_has_slots_for_running_waiting_and_answered_samples(over_hosts: Callable[..., Topology]) -> None:
    home = over_hosts("process.rollout.count=2", "generation.max_batch=40")
    assert of_host(home, "a").derived.slots == 2 * (80 + 8)  # a group ahead
    assert ahead_of(home, 1600) == 100 and ahead_of(over_hosts("hosts.ahead=3"), 1600) == 3
    assert of_host(home, "a").derived.limits == home.derived.limits


@pytest.mark.parametrize("setting, expected", [
    ("bus.endpoint=ipc", "other hosts reach the bus over TCP"),
    ("bus.endpoint=tcp://127.0.0.1:65534", "and one more for other hosts"),
    ("weights.transport=broadcast", "other hosts get what lies in shared memory"),
    ("bus.max_message_bytes=5000", "comes in one message"),
    ("segments.loss=last_segment", "an answer of another host comes whole"),
    ("segments.rounds=segments", "a round of segments needs every answer at home"),
    ('process.rollout.hosts=["a", "a"]', "a host is named twice"),
    ('process.rollout.hosts=["-a"]', "'-a' is no name of a host"),
    ('hosts.start=["true", "busrl host -"]', "{host} is nowhere in it"),
    ('hosts.start=["true", "{name}", "{host}"]', "{name} is not filled in, {host} is"),
    ('hosts.start=["no-such-program", "{host}"]', "no-such-program is not an executable program"),
    ('process.validator.hosts=["a"]', "only busrl's own rollouts, rewards, agents, servers and ranks of"),
    ('process.reward.hosts=["a", "b", "c"]', "c has none"),
    ('process.reward.hosts=["a"]', "nobody judges what is generated on b"),
])
def test_what_hosts_cannot_do_is_refused_with_its_remedy(
    setting: str, expected: str, over_hosts: Callable[..., Topology]
) -> None:
    with pytest.raises(TopologyError) as refused:
        over_hosts(setting, *(("segments.length=16", "weights.mode=sync") if "segments" in setting else ()))
    problem = next(problem for problem in refused.value.problems if expected in problem.rule)
    assert problem.remedy


def test_rewards_may_be_where_rollouts_are_and_segments_too(over_hosts: Callable[..., Topology]) -> None:
    home = over_hosts('process.reward.hosts=["a", "b"]', "process.reward.count=3", "segments.length=16")
    assert "reward/0" not in names(home)
    assert names(of_host(home, "b"))[-4:] == ["reward/0", "reward/1", "reward/2", "rollout/0"]
    assert of_host(home, "b").derived.slots == of_host(over_hosts(), "b").derived.slots, "rewards run no sequences"
    page = explain.report(materialise(home))
    assert "on a, by `busrl host` there: 1 x rollout (torch), 3 x reward, which judge what is generated there\n" in page


AGENTS, BOTH = QUICKSTART.with_name("agents.toml"), ['process.agent.hosts=["a"]', 'process.rollout.hosts=["a"]']


@pytest.fixture
def with_agents(tmp_path: Path) -> Callable[..., Topology]:
    curve.init(tmp_path / "keys")
    always = ['bus.endpoint="tcp://127.0.0.1:5600"', f'bus.keys="{tmp_path}/keys"']
    return lambda *settings: load(AGENTS, [*always, *settings])


def test_a_host_with_agents_has_call_ring_and_slots(
    with_agents: Callable[..., Topology]
) -> None:
    home = with_agents(*BOTH, "process.agent.count=2", "agents.episodes=40", "generation.max_batch=16")
    assert "agent/0" not in names(home) and home.reward.kind == "agent"
    away = of_host(home, "a")
    assert names(away) == ["bus", "keeper", "relay", "satellite", "rollout/0", "agent/0", "agent/1"]
    assert away.derived.slots == 2 * (2 * 40 + 8) and away.derived.call_slots == 16 + 4 + 16
    assert away.derived.call_slot_bytes == home.derived.call_slot_bytes > 0
    assert "1 x rollout (torch), 2 x agent\n" in explain.report(materialise(home))


@pytest.mark.parametrize("settings, expected", [
    (['process.agent.hosts=["a"]'], "a has no rollout"),
    (['process.rollout.hosts=["a"]'], "a has nobody who plays episodes"),
    (['process.agent.hosts=["a", "b"]', 'process.rollout.hosts=["a"]'], "b has no rollout"),
    (['process.agent.hosts=["a"]', 'process.rollout.hosts=["a", "b"]'], "b has nobody who plays episodes"),
])
def test_engines_and_episodes_go_together_on_each_host(
    settings: list[str], expected: str, with_agents: Callable[..., Topology]
) -> None:
    with pytest.raises(TopologyError) as refused:
        with_agents(*settings)
    rule = "model calls do not travel between hosts"
    problems = [problem for problem in refused.value.problems if rule in problem.rule]
    assert any(expected in problem.rule for problem in problems) and all(problem.remedy for problem in problems)
    assert all(".hosts" in problem.place or ".hosts" in str(problem) for problem in problems)


def test_groups_of_atropos_are_posted_at_home(over_hosts: Callable[..., Topology], tmp_path: Path) -> None:
    settings = ['bus.endpoint="tcp://127.0.0.1:5600"', f'bus.keys="{tmp_path}/keys"']
    with pytest.raises(TopologyError) as refused:
        load(QUICKSTART.with_name("atropos.toml"), [*settings, 'process.atropos.hosts=["a"]'])
    assert any("only busrl's own rollouts, rewards, agents" in problem.rule for problem in refused.value.problems)


def test_check_names_each_host_what_it_needs_and_who_has_no_key(over_hosts: Callable[..., Topology]) -> None:
    topology = over_hosts("process.rollout.count=2", "generation.max_batch=40")
    curve.add(Path(topology.bus.keys), "a")
    page = explain.report(materialise(topology))
    assert "on b, by `busrl host` there: 2 x rollout (torch)\n  176 slots, " in page
    assert "b has no key yet" in page and "a has no key yet" not in page
    started = explain.report(materialise(over_hosts('hosts.start=["env", "{host}"]')))
    assert "on a, by env a: 1 x rollout" in started and "has no key yet" not in started
