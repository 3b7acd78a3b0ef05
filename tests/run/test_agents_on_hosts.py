"""Agents and servers on other hosts: the same episodes as at home, each token trained once, whoever dies there."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from checks import check_end
from harness import ROOT, Run, beside, read_lines, running
from host_scene import Home, Host
from test_agents_in_a_run import AGENTS
from test_serve_in_a_run import CLIENT, SERVE, claim

from busrl.ledger.wal import SampleRecord, Wal

TWO_CALLS = '''
async def episode(task, llm):
    """Two sequences, the second of which is continued; a reward for a turn."""
    await llm.complete(task["prompt"], max_tokens=8)
    await llm.reward(0.25 * (sum((await llm.complete(task["prompt"], max_tokens=6)).ids) % 3))
    return {"length": float(sum((await llm.complete("2=", max_tokens=4)).ids) % 5)}
'''
JUDGE = '''
def score(record, completion, token_ids, episode):
    return len(episode["turns"] if episode else ()) + len(token_ids) % 5
'''
BOTH = '''
[[process]]
role = "rollout"
[[process]]
role = "agent"
function = "%s/configs/two_tries.py:episode"
[[process]]
role = "rollout"
hosts = ["gpu-0"]
[[process]]
role = "serve"
hosts = ["gpu-0"]
'''
EXACT = (
    "weights.mode=sync", "weights.max_staleness=0", "learner.deterministic=true", "generation.max_batch=1",
    "groups.size=4", "learner.trigger.n_min=3", "learner.credit=turn", "agents.episodes=4", "validation.data=",
    "learner.checkpoint_every=0", "log.samples=all",
)  # fmt: skip
AWAY = ('process.agent.hosts=["gpu-0"]', "agents.episodes=24", "learner.checkpoint_every=0", "validation.data=")


@pytest.mark.slow
def test_agents_on_a_host_train_a_run_whoever_dies_there(tmp_path: Path, quickstart: None) -> None:
    home = Home(tmp_path, *AWAY, "validation.data=tiny:sort", "validation.samples=16", config=AGENTS, steps=14)
    host = Host(home)
    with running(home), running(host):
        for number, name in enumerate(["satellite", "agent/0", "rollout/0", "keeper", "relay"]):
            home.until_step(1 + 2 * number)
            host.kill(name)
        assert home.wait() == 0, home.tail()
        assert host.wait(30) == 0, host.tail()
    check_end(home, 0)
    rounds = read_lines(home.paths.validation)
    assert rounds and {row["samples"] for row in rounds} == {16}


def samples_of(run: Run) -> dict[int, SampleRecord]:
    samples = [sample for record in Wal(run.paths.wal).records() for sample in record.samples]
    assert len({sample.uid for sample in samples}) == len(samples), "one is trained twice"
    return {sample.uid: sample for sample in samples}


@pytest.mark.long
def test_episodes_on_another_host_are_trained_bit_for_bit_alike(
    tmp_path: Path, quickstart: None
) -> None:
    (tmp_path / "two.py").write_text(TWO_CALLS)
    settings = (f"process.agent.function={tmp_path}/two.py:episode", *EXACT)
    alone = Run(tmp_path / "alone", *settings, config=AGENTS, steps=2)
    with running(alone):
        check_end(alone, alone.wait())
    home = Home(tmp_path, 'process.agent.hosts=["gpu-0"]', *settings, config=AGENTS, steps=2)
    with running(home), running(host := Host(home)):
        assert home.wait() == 0, home.tail()
        assert host.wait(30) == 0, host.tail()
    check_end(home, 0)
    there, here = samples_of(home), samples_of(alone)
    assert there == here and {len(sample.seqs) for sample in here.values()} == {3}
    assert len({sum(sample.turn_rewards) for sample in here.values()}) > 1
    assert len({sample.reward for sample in here.values()}) > 1
    kept = [{row["uid"]: row for row in read_lines(run.paths.samples)} for run in (home, alone)]
    assert kept[0].keys() == kept[1].keys()
    for uid, row in kept[0].items():
        assert (row["messages"], row["reward_parts"]) == (kept[1][uid]["messages"], kept[1][uid]["reward_parts"])
    assert [row["loss"] for row in home.metrics()] == [row["loss"] for row in alone.metrics()]


@pytest.mark.slow
def test_a_lost_host_of_agents_costs_tokens_and_no_sample(
    tmp_path: Path, quickstart: None
) -> None:
    (tmp_path / "judge.py").write_text(JUDGE)  # rewards of that host judge its episodes
    home = Home(tmp_path, "limits.lease_s=3", *AWAY, f"reward.function={tmp_path}/judge.py:score",
                'process.reward.hosts=["gpu-0"]', config=AGENTS, steps=8)
    with running(home):
        with running(first := Host(home)):
            home.until_step(3)
            first.kill_launch()  # and all of its children
        for file in (first.paths.ring_file, Path("/dev/shm") / first.paths.calls_name.lstrip("/")):
            file.unlink(missing_ok=True)
        shutil.rmtree(first.directory)
        with running(second := Host(home)):
            assert home.wait() == 0, home.tail()
            assert second.wait(30) == 0, second.tail()
    check_end(home, 0)
    for sample in samples_of(home).values():
        _, begin, end, _ = max(sample.turn_array().tolist(), key=lambda turn: turn[3])
        assert sample.reward == len(sample.turn_array()) + (end - begin) % 5, "a reward of that host judged it"


@pytest.mark.slow
def test_clients_of_a_hosts_server_train_a_run_whoever_dies(tmp_path: Path, quickstart: None) -> None:
    home = Home(tmp_path, 'process.serve.hosts=["gpu-0"]', "validation.data=", "learner.checkpoint_every=0",
                config=SERVE, steps=9)
    host = Host(home)
    with running(home), running(host), beside(sys.executable, CLIENT, host.directory):
        for step, name in ((1, "serve/0"), (3, "satellite"), (5, "rollout/0"), (7, "serve/0")):
            home.until_step(step)
            host.kill(name)
        assert home.wait() == 0, home.tail()
        assert host.wait(30) == 0, host.tail()
    check_end(home, 0)


@pytest.mark.slow
def test_samples_that_a_hosts_clients_leave_are_played_at_home(
    tmp_path: Path, quickstart: None
) -> None:
    config = tmp_path / "both.toml"
    kept, played = SERVE.read_text().split('[[process]]\nrole = "serve"\n')
    config.write_text(kept + BOTH % ROOT + played)
    home = Home(tmp_path, "limits.lease_s=3", "validation.data=", "learner.checkpoint_every=0", "agents.episodes=16",
                config=config, placed=True, steps=12)
    host = Host(home)
    with running(home), running(host):
        told = host.told("serve-0")
        root, key = told["base_url"].removesuffix("/v1"), Path(told["key"]).read_text()
        claimed = [task["episode"] for task in claim(root, key, 4)]
        assert home.wait() == 0, home.tail()  # with the silent client's samples, in the order of their draws
        assert host.wait(30) == 0, host.tail()
    check_end(home, 0)
    assert f"episode {claimed[0]} goes back" in host.paths.errors.read_text()
