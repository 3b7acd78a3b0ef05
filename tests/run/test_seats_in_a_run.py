"""Self-play in one ring, in real runs: two seats of one model, each with groups and rewards of its own."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checks import check_end
from harness import ROOT, Run, beside, read_lines, running
from test_agents_in_a_run import children_of, slots_of_calls

from busrl.ledger.wal import SampleRecord, Wal
from busrl.ring import Fates
from busrl.states import Fate, draw_of, episode_of, seat_of, side_of

AGENTS, SERVE = ROOT / "configs" / "agents.toml", ROOT / "configs" / "serve.toml"
SEATS, SIZE = ("first", "second"), 4
GAME = '''
async def episode(task, llm):
    """Who draws the larger sum has won; where the first seat is sure of itself the second is not asked."""
    first = await llm.complete(task["prompt"], max_tokens=6)
    if sum(first.ids) % 7 == 0:
        return {"first": 1.0}
    second = await llm["second"].complete(task["prompt"], max_tokens=6)
    won = float(sum(first.ids) > sum(second.ids))
    return {"first": won, "second": {"won": 1 - won, "long": 0.125 * len(second.ids)}}
'''
CLIENT = '''
import json, sys, time, urllib.request
from pathlib import Path

run = Path(sys.argv[1])
while not (run / "serve-0.json").exists():
    time.sleep(0.05)
told = json.loads((run / "serve-0.json").read_text())
root, key = told["base_url"].removesuffix("/v1"), Path(told["key"]).read_text()

def post(path, key, body):
    head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(root + path, json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=60) as said:
        return json.load(said)

while True:
    for one in post("/busrl/v1/episodes", key, {"n": 8, "wait_s": 5}):
        ask = {"prompt": one["task"]["prompt"], "max_tokens": 4}
        post("/v1/completions", one["api_key"], {**ask, "model": "second"})
        post("/v1/completions", one["keys"]["first"], {**ask, "model": "anything"})
        rewards = {"first": one["uid"] % 4, "second": {"even": 1 - one["uid"] % 2}}
        post(f"/busrl/v1/episodes/{one['episode']}/end", key, {"rewards": rewards})
'''


def game_run(folder: Path, *settings: str, steps: int, config: Path = AGENTS, **more: Any) -> Run:
    (folder / "game.py").write_text(GAME)
    function = [f"process.agent.function={folder}/game.py:episode"] if config == AGENTS else []
    return Run(folder / "run", *function, f"model.seats={json.dumps(SEATS)}", f"groups.size={SIZE}",
               "learner.trigger.n_min=8", "agents.episodes=32", "learner.checkpoint_every=5",
               *settings, config=config, steps=steps, **more)


def drawn(sample: SampleRecord) -> int:
    """The sum of the ids of an episode's only turn."""
    ((_, begin, end, _),) = sample.turn_array().tolist()
    return int(np.frombuffer(sample.token_ids, "<i4")[begin:end].sum())


def fates_of(run: Run) -> Any:
    table = Fates(str(run.paths.fates), read_only=True)
    try:
        return table.view().copy()
    finally:
        table.close()


@pytest.mark.long
def test_each_seat_trains_on_its_own_turns_and_rewards(tmp_path: Path, quickstart: None) -> None:
    run = game_run(tmp_path, "validation.samples=8", "log.samples=all", steps=4)
    with running(run):
        check_end(run, run.wait())
    samples = [sample for record in Wal(run.paths.wal).records() for sample in record.samples]
    by_uid = {sample.uid: sample for sample in samples}
    assert {seat_of(sample.group, 2) for sample in samples} == {0, 1}
    pairs = [(by_uid[uid], by_uid[other]) for uid in by_uid if seat_of(by_uid[uid].group, 2) == 0
             and (other := side_of(episode_of(uid, SIZE, 2), 1, SIZE, 2)) in by_uid]
    assert pairs
    for first, second in pairs:
        assert draw_of(first.group, 2) == draw_of(second.group, 2) and len(first.seqs) == len(second.seqs) == 1
        assert first.reward == 1 - int(second.reward) and second.reward - int(second.reward) <= 0.75
        assert first.reward == (drawn(first) > drawn(second))
    shown = {row["uid"]: row for row in read_lines(run.paths.samples)}
    assert {row["seat"] for row in shown.values()} == {*SEATS}
    for uid, row in shown.items():
        (other, sibling), = row["siblings"].items()
        assert other != row["seat"] and episode_of(sibling, SIZE, 2) == episode_of(uid, SIZE, 2)
        assert set(row.get("reward_parts", {})) == ({"won", "long"} if row["seat"] == "second" else set())
    unused = (fates_of(run) == Fate.UNUSED).nonzero()[0].tolist()
    assert unused and {seat_of(uid // (2 * SIZE), 2) for uid in unused} == {1}, "the second seat was not always asked"
    validation = read_lines(run.paths.validation)
    assert validation and all("second" in row["val/parts"] for row in validation if row["samples"])


@pytest.mark.long
def test_clients_over_http_play_seats_by_name_and_by_key(tmp_path: Path, quickstart: None) -> None:
    (tmp_path / "client.py").write_text(CLIENT)
    run = game_run(tmp_path, "validation.data=", steps=2, config=SERVE)
    with running(run), beside("python3", tmp_path / "client.py", run.directory):
        check_end(run, run.wait())
    samples = [sample for record in Wal(run.paths.wal).records() for sample in record.samples]
    for sample in samples:
        number = episode_of(sample.uid, SIZE, 2)
        assert sample.reward == (1 - number % 2 if seat_of(sample.group, 2) else number % 4)


@pytest.mark.slow
def test_killed_agents_children_and_engines_cost_no_side_of_an_episode(tmp_path: Path, quickstart: None) -> None:
    run = game_run(tmp_path, "process.agent.count=2", "validation.data=", steps=30)
    with running(run):
        for step, name in ((2, "agent/0"), (5, "agent/1"), (8, "rollout/0"), (11, "scheduler"), (14, "agent/0"),
                           (17, "learner"), (20, "agent/1")):
            run.until_step(step)
            run.kill(name)
        run.until_step(23)
        for child in children_of(run.until("an agent is back", lambda: run.processes().get("agent/0")).pid):
            os.kill(child, signal.SIGKILL)
        run.until("all calls of dead callers are free", lambda: slots_of_calls(run).get("RESERVED", 0) == 0)
        code = run.wait()
    check_end(run, code)
    codes = fates_of(run)
    assert not {chr(code) for code in set(codes.tolist()) - {0}} - set("TufoieDR")
