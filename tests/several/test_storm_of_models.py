"""A storm of SIGKILLs over a run of three models, two of them trained: agents, their children, both learners (or the
one of both), engines, scheduler, keeper and broker at seeded moments, and the whole launch now and then.

BUSRL_STORM_KILLS sets how many of the processes die; of the launch one in twelve of that. Only processes that are ready
are killed, so that a slow machine is not a run that never gets anywhere.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from harness import Run, running
from model_runs import EPISODES, TAGS, check_models, paths_of, process_of, sides_alone, step_of, three_models
from test_agent_storm import drawn_per_ended
from test_agents_in_a_run import children_of

from busrl.ring import Ring

KILLS = int(os.environ.get("BUSRL_STORM_KILLS", "24"))
STEPS, LIMIT_S = 4 * KILLS, max(1500.0, 60.0 * KILLS)
CALM_STEPS, MOST_TOKENS = 40, 1.3
VICTIMS = ["agent/0", "agent/1", "child", "child", "learner", "learner/judge", "rollout/0", "rollout/1", "rollout/2",
           "scheduler", "keeper", "bus"]
# A policy that has learnt the task would have groups that teach nothing: here each group is trained.
SETTINGS = ("process.agent.count=2", "limits.crash_attempts=0", 'learner.advantage="reward"')


def blow(run: Run, seed: int, victims: list[str]) -> Counter[str]:
    """Kill KILLS times, and the launch after every twelfth; whom, and how often."""
    chance, killed = random.Random(seed), Counter[str]()
    for number in range(1, KILLS + 1):
        run.let_pass(chance.uniform(0.05, 1.2))
        name = chance.choice(victims)
        owner = chance.choice(["agent/0", "agent/1"]) if name == "child" else name
        process = run.until(f"{owner} is ready", partial(process_of, run, owner), LIMIT_S)
        pids = children_of(process.pid) if name == "child" else [process.pid]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        killed[name] += 1
        if number % 12 == 0:
            run.kill_launch(limit_s=30)
            run.start()
            killed["launch"] += 1
    return killed


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("shared", [False, True], ids=["a learner each", "one learner"])
def test_a_storm_over_several_models_costs_nothing_but_time(tmp_path: Path, several: Path, shared: bool) -> None:
    if shared:
        pytest.importorskip("peft")
    calm = three_models(several, tmp_path / "calm", *SETTINGS, steps=CALM_STEPS, shared=shared)
    with running(calm):
        check_models(calm, calm.wait(LIMIT_S))
    run = three_models(several, tmp_path / "storm", *SETTINGS, steps=STEPS, shared=shared)
    with running(run):
        killed = blow(run, 37, [name for name in VICTIMS if not (shared and name == "learner/judge")])
        assert min(step_of(run, tag) for tag in ("", "judge")) < STEPS, "the run was too short for the storm"
        rings = {tag: Ring.attach(paths_of(run, tag).calls_name, calls=True) for tag in TAGS}  # mapped past the end
        for ring in rings.values():
            ring.register("agent", "the test")
        code = run.wait(LIMIT_S)
    reports = check_models(run, code)
    accidents = sum(sum(report.accidents.values()) for report in reports.values())
    alone = sum(sides_alone(run, tag) for tag in reports)
    deaths = killed["agent/0"] + killed["agent/1"] + 2 * killed["launch"]
    assert alone <= deaths * EPISODES + accidents, (alone, deaths, accidents)
    for tag, ring in rings.items():
        ring.reap()  # what the last agent left in its last moment: the keeper had ended
        left = {state: count for state, count in ring.stats().occupancy.items() if count}
        assert left == {"FREE": ring.n_slots}, tag
        ring.close()
    share = drawn_per_ended(run) / drawn_per_ended(calm)
    print(f"killed {dict(killed)}; {alone} sides alone; {share:.3f} times the tokens; {reports}")
    assert share <= MOST_TOKENS
