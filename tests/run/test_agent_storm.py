"""A storm of SIGKILLs over a run of episodes: agents, their children, servers, engines, keeper and learner, at seeded
moments. The clients of the servers are the example's program, which is killed by nobody.

Who is killed and how long it is calm before follow from the seed, not when exactly. Only processes that are ready are
killed, so that a slow machine is not a run that never gets anywhere. BUSRL_STORM_KILLS sets how many: 60 took four
minutes on two busy cores, in 98 steps; the task is learned, which ends a run, after some 440.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from checks import check_end
from harness import ROOT, Run, running
from test_agents_in_a_run import AGENTS, children_of

from busrl.ring import Ring

KILLS = int(os.environ.get("BUSRL_STORM_KILLS", "20"))
STEPS, LIMIT_S = 4 * KILLS, max(1500.0, 60.0 * KILLS)
CALM_STEPS = 80  # of the undisturbed run: its tokens for each one of a sample that ended do not depend on its length
MOST_TOKENS = 1.3  # of an undisturbed run's, for each token of a sample that ended
VICTIMS = ["agent/0", "agent/1", "child", "child", "serve/0", "serve/1", "rollout/0", "rollout/1", "keeper", "learner"]
SETTINGS = (
    "process.agent.count=2", "process.rollout.count=2", "agents.episodes=24",  # so few that servers get theirs
    "validation.data=", "learner.checkpoint_every=20",
    "limits.crash_attempts=0",  # on a slow machine one may be killed eight times before it has done any work
)  # fmt: skip
CLIENT = ROOT / "examples" / "agents" / "http_client.py"


def blow(run: Run, seed: int) -> Counter[str]:
    """Kill KILLS times; whom, and how often."""
    chance, killed = random.Random(seed), Counter[str]()
    while sum(killed.values()) < KILLS:
        name, pids = next_victim(run, chance, VICTIMS)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed[name] += 1
    return killed


def next_victim(run: Run, chance: random.Random, victims: list[str]) -> tuple[str, list[int]]:
    """A name after a moment of calm, and its pid as soon as it is ready; of "child" those of an agent's children."""
    run.let_pass(chance.uniform(0.05, 1.2))
    name = chance.choice(victims)
    owner = chance.choice(["agent/0", "agent/1"]) if name == "child" else name
    pids = [run.until(f"{owner} is ready", lambda: ready(run, owner), LIMIT_S).pid]
    if name == "child":
        with suppress(OSError):
            pids = children_of(pids[0])
    return name, pids


def ready(run: Run, name: str):
    process = run.processes().get(name)
    return process if process is not None and process.state == "ready" else None


def drawn_per_ended(run: Run) -> float:
    """Tokens drawn for each one of a sample that ended. (In all, runs differ by how many groups are flat.)"""
    rows = [row for row in run.metrics() if row.get("length_ended")]
    return run.summary()["generated_tokens"] / sum(row["samples_ended"] * row["length_ended"] for row in rows)


@contextmanager
def clients(run: Run) -> Iterator[list[subprocess.Popen[str]]]:
    """One of each server, to the end of the block."""
    commands = [[sys.executable, str(CLIENT), str(run.directory), "--server", str(number)] for number in range(2)]
    with ExitStack() as stack:
        quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        started = [stack.enter_context(subprocess.Popen(command, **quiet)) for command in commands]
        for player in started:
            stack.callback(player.kill)
        yield started


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_a_storm_of_kills_costs_a_run_of_episodes_nothing_but_time(tmp_path: Path, quickstart: None) -> None:
    served = tmp_path / "served.toml"
    text = AGENTS.read_text().replace("../examples", str(ROOT / "examples"))
    served.write_text(text + '\n[[process]]\nrole = "serve"\ncount = 2\n')
    calm = Run(tmp_path / "calm", *SETTINGS, config=served, steps=CALM_STEPS)
    with running(calm), clients(calm):
        assert calm.wait(LIMIT_S) == 0, calm.tail()
    run = Run(tmp_path / "storm", *SETTINGS, config=served, steps=STEPS)
    with running(run), clients(run) as played:
        killed = blow(run, seed=15)
        assert run.step() < STEPS, "the run was too short for the storm"
        calls = Ring.attach(run.paths.calls_name, calls=True)  # stays mapped past the end
        calls.register("agent", "the test")
        code = run.wait(LIMIT_S)
        said = [player.communicate(timeout=LIMIT_S)[0].split()[0] for player in played]
    check_end(run, code)
    calls.reap()  # what the last agent left in its last moment: the keeper had ended
    states, slots = {name: n for name, n in calls.stats().occupancy.items() if n}, calls.n_slots
    calls.close()
    share = drawn_per_ended(run) / drawn_per_ended(calm)
    print(f"killed {dict(killed)}; {share:.3f} times the tokens; calls at the end {states}; clients ended {said}")
    assert "0" not in said, "a server had no client"
    assert states == {"FREE": slots}, "calls are left at the end"
    assert 0 < share <= MOST_TOKENS
