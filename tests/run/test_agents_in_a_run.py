"""Agents in real runs: episodes in children, model calls through their ring, every end that an episode can have."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from chat_run import make_all
from checks import check_end
from harness import ROOT, Run, read_lines, running

from busrl.ledger.trained import newest_checkpoint
from busrl.ledger.wal import Wal
from busrl.ring import Ring

AGENTS = ROOT / "configs" / "agents.toml"
TALK = '''
from busrl.agents.llm import Again, Failed

async def episode(task, llm):
    """Three turns about one prompt; their history is echoed as it came."""
    prompt = task["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    for turn in range(3):
        reply = await llm.chat(messages, max_tokens=6)
        await llm.reward(0.125 * (reply.completion_tokens % 2))
        messages += [reply, {"role": "user", "content": f"go on {turn}"}]
    return {"length": float(sum(len(one["content"] or "") for one in messages) % 7)}
'''
PARTS = """[[reward.part]]
kind = "agent"
[[reward.part]]
kind = "python"
name = "odd"
function = "judge.py:score"
weight = 0.5
"""
KEYED = '''
async def episode(task, llm):
    """The first answer decides what the second one is for."""
    plan = await llm.complete(task["prompt"], max_tokens=3, key="plan")
    answer = await llm.complete(task["prompt"], key="odd" if plan.ids[0] % 2 else "even")
    return float(answer.text.rpartition("|")[2] == task["answer"]) + sum(plan.ids) % 2
'''
ENDS = '''
import asyncio
import os
import random

from busrl.agents.llm import Again, Failed

async def episode(task, llm):
    """What becomes of it depends on the prompt's first digit."""
    kind = int(task["prompt"][0]) if random.random() < 0.5 else 0  # else all of a group are alike, and not trained
    if kind == 1:
        return 1.0  # without a call
    answer = await llm.complete(task["prompt"], max_tokens=4)
    if kind == 2:
        raise RuntimeError("a fault of the user's")
    if kind == 3:
        raise Failed(0.25, "given up")
    if kind == 4:
        raise Again("another time")
    if kind == 5:
        os._exit(3)
    if kind == 6:
        await asyncio.sleep(3600)
    if kind == 7:
        while True:
            await llm.complete(task["prompt"])  # until its budget is used up
    return float(sum(answer.ids) % 2)
'''


def slots_of_calls(run: Run) -> dict[str, int]:
    ring = Ring.attach(run.paths.calls_name, read_only=True, calls=True)
    try:
        return {state: count for state, count in ring.stats().occupancy.items() if count}
    finally:
        ring.close()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.long
def test_a_run_of_conversations_trains_each_as_one_sequence_of_exact_ids(
    chat_folder: Callable[..., Path], tmp_path: Path
) -> None:
    config = make_all(tmp_path / "mine", chat_folder("chatml"))
    (tmp_path / "mine" / "talk.py").write_text(TALK)
    text = config.read_text().replace('[reward]\nkind = "python"\nfunction = "judge.py:score"\n', "")
    text = text.replace('role = "reward"\n', 'role = "agent"\nfunction = "talk.py:episode"\n')
    config.write_text(f"{text}[agents]\ncontext = 256\n")
    run = Run(tmp_path / "run", "learner.checkpoint_every=0", "validation.samples=0", "generation.on_update=recompute",
              config=config, steps=3)
    with running(run):
        check_end(run, run.wait())
    samples = [sample for record in Wal(run.paths.wal).records() for sample in record.samples]
    assert len(samples) >= 3 * 8 * 4 and {len(sample.seqs) for sample in samples} == {1}
    assert {len(sample.turn_array()) for sample in samples} == {3}
    measured = [row["mismatch"] for row in run.metrics() if row["mismatch"] is not None]
    assert measured and max(measured) < 1e-4, "what was trained is not what was drawn"
    shown = [line for line in read_lines(run.paths.samples) if line["versions"] == [line["step"] - 1]]
    assert shown and all(line["logprob_gap"]["most"] < 1e-4 for line in shown), "of every turn of what people see"
    for row in run.metrics():
        assert row["episodes"]["prefix_hit_share"] > 0.1, "no row was continued"
        assert 0 < row["episodes"]["computed_per_trained"] < row["episodes"]["context_tokens_mean"]
        assert row["episodes"]["unparsed"] == row["episodes"]["overridden"] == row["episodes"]["refused"] == 0
    assert {0.0} != {sum(sample.turn_rewards) for sample in samples}


@pytest.mark.long
def test_an_episodes_return_is_a_part_and_its_turns_rewards_are_added(
    chat_folder: Callable[..., Path], tmp_path: Path
) -> None:
    config = make_all(tmp_path / "mine", chat_folder("chatml"))
    (tmp_path / "mine" / "talk.py").write_text(TALK)
    (tmp_path / "mine" / "judge.py").write_text("def score(record, completion, ids, episode): return len(ids) % 3\n")
    text = config.read_text().replace('[reward]\nkind = "python"\nfunction = "judge.py:score"\n', PARTS)
    text += '[[process]]\nrole = "agent"\nfunction = "talk.py:episode"\n[agents]\ncontext = 256\n'
    config.write_text(text)
    run = Run(tmp_path / "run", "learner.checkpoint_every=0", "validation.samples=0", "log.samples=all", config=config,
              steps=2)
    with running(run):
        check_end(run, run.wait())
    kept = {row["uid"]: row for row in read_lines(run.paths.samples)}
    samples = [sample for record in Wal(run.paths.wal).records() for sample in record.samples]
    assert samples and any(sample.reward != samples[0].reward for sample in samples)
    for sample in samples:
        parts = kept[sample.uid]["reward_parts"]
        assert set(parts) >= {"agent", "odd"} and parts["agent"] == int(parts["agent"]) < 7
        assert sample.reward == pytest.approx(parts["agent"] + 0.5 * parts["odd"] + sum(sample.turn_rewards))
    assert all({"agent", "odd"} <= row["reward_parts"].keys() for row in run.metrics())


@pytest.mark.long
@pytest.mark.parametrize("advantage", ["group_mean", "ema"])
def test_a_learner_that_dies_trains_the_same_keys_again(
    advantage: str, tmp_path: Path, quickstart: None
) -> None:
    (tmp_path / "keyed.py").write_text(KEYED)
    credit = "turn" if advantage == "group_mean" else "episode"
    run = Run(
        tmp_path / "run", f"process.agent.function={tmp_path}/keyed.py:episode", f"learner.advantage={advantage}",
        f"learner.credit={credit}", "learner.checkpoint_every=3", "validation.samples=0", "log.samples=1",
        config=AGENTS, steps=5,
    )
    with running(run):
        run.until_step(2)
        run.kill("learner")
        check_end(run, run.wait())
    samples = [sample for record in Wal(run.paths.wal).records() for sample in record.samples]
    assert samples and {len(sample.keys) for sample in samples} == {2}
    assert {key for sample in samples for key in sample.keys} == {"plan", "odd", "even"}
    assert {path.read_bytes()[8] for path in run.paths.wal.glob("*.wal")} == {4}
    assert all(len(row["keys"]) == row["turns"] == 2 for row in read_lines(run.paths.samples))
    means = json.loads((newest_checkpoint(run.paths) / "meta.json").read_text()).get("reward_means", [])
    assert len(means) == (advantage == "ema"), "one for the only seat"


@pytest.mark.slow
def test_what_an_episode_does_decides_what_becomes_of_its_sample(tmp_path: Path, quickstart: None) -> None:
    (tmp_path / "ends.py").write_text(ENDS)
    run = Run(
        tmp_path / "run", f"process.agent.function={tmp_path}/ends.py:episode", "agents.episode_s=2",
        "agents.episodes=24", "agents.failure_reward=-1.0", "learner.checkpoint_every=0", config=AGENTS, steps=3,
    )
    with running(run):
        assert run.wait() == 0, run.tail()
    report = run.audit()
    assert not report.errors and report.counts.lost == 0 and report.counts.trained_twice == 0, report
    assert {"reward raised", "reward hung", "poison", "malformed"} == set(report.accidents), report.accidents
    told = " ".join(line["text"] for line in read_lines(run.paths.errors))
    for words in ("a fault of the user's", "agents.episode_s", "without a model call", "with this episode alone"):
        assert words in told, words
    rewards = {sample.reward for record in Wal(run.paths.wal).records() for sample in record.samples}
    assert {0.25, -1.0} <= rewards, "Failed, and a budget that was used up, are trained"
    assert run.restarts("agent/0") == 0


@pytest.mark.slow
def test_a_run_of_episodes_survives_the_deaths_of_all_its_processes(
    tmp_path: Path, quickstart: None
) -> None:
    run = Run(tmp_path / "run", "process.agent.count=2", "validation.every=10", config=AGENTS, steps=40)
    with running(run):
        for step, name in ((3, "agent/0"), (7, "rollout/0"), (11, "keeper"), (15, "learner"), (19, "agent/0")):
            run.until_step(step)
            run.kill(name)
        run.until_step(21)
        assert run.child is not None
        run.child.send_signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM and not run.audit().errors, run.tail()
        run.start()
        run.until_step(24)
        for child in children_of(run.until("an agent is back", lambda: run.processes().get("agent/0")).pid):
            os.kill(child, signal.SIGKILL)
        run.until_step(30)
        run.until("all calls of dead callers are free", lambda: slots_of_calls(run).get("RESERVED", 0) == 0)
        code = run.wait()
    check_end(run, code)
    assert len(read_lines(run.paths.validation)) >= 5
    rewards = [row["reward"] for row in run.metrics()]
    assert sum(rewards[-8:]) > sum(rewards[:8]), "it learns all the same"
