"""The gateway on a real ring: entries that no death removes, payloads that arrive whole, a keeper killed anywhere."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from in_memory import answer_to, batch_of
from on_a_ring import Keeper, play

from busrl.agents.tree import Tree
from busrl.errors import NotRegistered, RingError, RingFull
from busrl.hosts import messages as g
from busrl.hosts.desk import tensor
from busrl.ring import Ring, State
from busrl.roles.answers import read_generated, read_parts
from busrl.roles.episodes import commit_episode, write_episode
from busrl.weights.base import VersionSteps

HERE = Path(__file__).parent
SOME = ["remote.entered:1", "put.copied:1", "commit.before:1", "release.before:1", "remote.rested:1"]
OTHERS = [
    "remote.described:1", "claim.cas:1", "take.claimed:1", "put.stored:3", "commit.after:1", "remote.described:2",
    "claim.cas:2", "put.stored:6", "release.after:1", "remote.rested:2",
]
POINTS = [*SOME, *(pytest.param(point, marks=pytest.mark.slow) for point in OTHERS)]


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="busrl.test.", dir="/dev/shm"))
    ring = Ring.create(str(path / "ring"), slots=4, slot_bytes=4096, processes=8, uuid=bytes(16))
    yield path
    ring.close()
    shutil.rmtree(path)


@pytest.fixture
def keeper(folder: Path) -> Iterator[Keeper]:
    keeper = Keeper(folder)
    yield keeper
    keeper.close()


def dispatch(ring: Ring, uid: int, version: int = 0, step: int = 0) -> None:
    assert ring.dispatch(
        uid=uid, group=0, admission=0, member=uid, group_size=4, cls=0, task=b'{"prompt": "%d"}' % uid, prompt_crc=uid,
        max_new_tokens=8, temperature=1.0, version=version, step=step,
    )


def states(ring: Ring) -> dict[str, int]:
    return {name: count for name, count in ring.stats().occupancy.items() if count and name != "FREE"}


def killed_keeper(folder: Path, point: str, who: str = "workers") -> None:
    env = {**os.environ, "BUSRL_CRASH_POINT": point, "PYTHONPATH": f"{HERE.parents[1]}:{HERE}"}
    child = subprocess.run([sys.executable, str(HERE / "on_a_ring.py"), str(folder), who], env=env, timeout=60)
    assert child.returncode == -signal.SIGKILL, f"{point} was not reached"


def test_what_a_worker_sent_is_what_stands_in_the_slot(keeper: Keeper) -> None:
    dispatch(keeper.ring, 2)
    assert play(keeper) == ["done", "done"]
    line = keeper.ring.lines()[0]
    assert line["state"] == State.REWARDED and line["reward"] == 0.5 and line["finish"] == 1
    assert (line["prompt_tokens"], line["response_tokens"]) == (4, 3)
    assert keeper.ring.get(0, "tokens", 0).tolist() == [0, 1, 2]
    assert keeper.ring.get(0, "logprobs", 0).tolist() == [-0.5] * 3
    assert keeper.ring.get(0, "prompt_ids").tolist() == [0, 1, 2, 3]
    assert keeper.ring.get(0, "text", 0).tobytes() == b"abc"
    assert [type(bell).__name__ for bell in keeper.bells] == ["DataGenerated", "RewardComputed"]
    assert not [process for process in keeper.ring.processes() if process.remote]


def test_a_host_that_judges_settles_and_claims_in_one_message(keeper: Keeper) -> None:
    for uid in (2, 3, 4):
        dispatch(keeper.ring, uid)
    keeper.ask("gpu-0", g.RemoteJoin(life=1, role="host"))
    tasks = [task.task for task in keeper.claim("gpu-0", capacity=2)]
    rewards, parts = [0.5, -1.0], [{"half": 0.5}, {}]
    settled, more = keeper.ask("gpu-0", batch_of(tasks, rewards=rewards, parts=parts, capacity=2))
    assert settled.done == tasks and not settled.late and not settled.refused
    assert [task.uid for task in more.tasks] == [4], "two may be held when these are settled"
    lines = keeper.ring.lines()
    assert lines["state"][:2].tolist() == [State.REWARDED] * 2 and lines["reward"][:2].tolist() == rewards
    assert [read_parts(keeper.ring, slot) for slot in (0, 1)] == parts
    for slot in (0, 1):
        first, prompt = 3 * slot, 4 * slot
        assert keeper.ring.get(slot, "tokens", 0).tolist() == list(range(first, first + 3))
        assert keeper.ring.get(slot, "prompt_ids").tolist() == list(range(prompt, prompt + 4))
    assert [type(bell).__name__ for bell in keeper.bells] == ["RewardComputed"] * 2
    settled, _ = keeper.ask("gpu-0", batch_of(tasks, rewards=rewards, capacity=2))
    assert settled.done == tasks, "a copy counts once"


def test_one_bad_answer_of_a_batch_is_refused_by_itself(keeper: Keeper) -> None:
    for uid in (2, 3):
        dispatch(keeper.ring, uid)
    keeper.ask("gpu-0", g.RemoteJoin(life=1, role="host"))
    good, bad = (task.task for task in keeper.claim("gpu-0", capacity=2))
    logprobs = tensor(np.array([-1, -1, -1, -1, 0.5, -1], np.float32))
    [settled] = keeper.ask("gpu-0", batch_of([good, bad], logprobs=logprobs))
    assert settled.done == [good] and [refusal.task for refusal in settled.refused] == [bad]
    assert "a log-probability is at most 0" in settled.refused[0].text
    [settled] = keeper.ask("gpu-0", batch_of([bad], rewards=[float("nan")]))
    assert settled.refused[0].text == "reward = nan: a reward must be finite"
    [answer] = keeper.ask("gpu-0", batch_of([bad], lengths=[4]))
    assert answer.code == "refused" and "the lengths of the answers come to 4" in answer.text
    [answer] = keeper.ask("gpu-0", batch_of([bad], texts=[]))
    assert answer.code == "refused" and "one item for each" in answer.text
    assert states(keeper.ring) == {"GENERATED": 1, "GENERATING": 1}


@pytest.mark.parametrize("point", ["commit.after:1", "claim.cas:2", "release.before:1"])
def test_a_keeper_killed_between_answer_and_reward_leaves_both_to_the_next(
    point: str, folder: Path
) -> None:
    first = Keeper(folder)
    dispatch(first.ring, 2)
    killed_keeper(folder, point, "host")
    first.ring.reap()
    assert states(first.ring) == {"GENERATED": 1}
    first.ledger.finish_judged(first.ring.lines())
    assert states(first.ring) == {"REWARDED": 1} and first.ring.line(0)["reward"] == 0.5
    assert [type(bell).__name__ for bell in first.bells] == ["RewardComputed"]
    first.close()


def test_a_host_takes_no_sample_that_another_worker_has_begun(keeper: Keeper) -> None:
    for uid in (2, 3):
        dispatch(keeper.ring, uid)
    keeper.ask("gen", g.RemoteJoin(life=1, role="rollout"))
    [task] = keeper.claim("gen")
    keeper.ask("gen", answer_to(task.task, done=False, finish=2))
    assert states(keeper.ring) == {"QUEUED": 2}
    keeper.ask("gpu-0", g.RemoteJoin(life=1, role="host"))
    assert [task.uid for task in keeper.claim("gpu-0", capacity=4)] == [3]


def test_a_reward_worker_gets_the_whole_answer_inline(keeper: Keeper) -> None:
    dispatch(keeper.ring, 2)
    keeper.ask("gen", g.RemoteJoin(life=1, role="rollout"))
    [task] = keeper.claim("gen")
    assert (task.record, task.max_new_tokens, task.segment, task.tensors) == ('{"prompt": "2"}', 8, 0, {})
    keeper.ask("gen", answer_to(task.task, done=False, finish=2))
    [task] = keeper.claim("gen", req=2)
    assert (task.max_new_tokens, task.segment, sorted(task.tensors)) == (
        5, 1, ["logprobs", "prompt_ids", "tokens", "versions"],
    )
    assert keeper.ask("gen", answer_to(task.task, count=6))[0].code == "refused"
    keeper.ask("gen", answer_to(task.task, prompt_ids=None))
    keeper.ask("judge", g.RemoteJoin(life=1, role="reward"))
    [task] = keeper.claim("judge")
    assert task.completion == "abc" and task.tensors["tokens"] == tensor(np.array([0, 1, 2, 0, 1, 2], np.int32))
    assert task.tensors["logprobs"].dtype == "float32" and task.tensors["versions"].shape == [6]


def test_a_reward_worker_judges_the_last_call_and_turns_rewards_are_added(keeper: Keeper) -> None:
    dispatch(keeper.ring, 2)
    ((slot, word),) = keeper.ring.take(State.QUEUED, State.GENERATING, cls=None, limit=1)
    tree = Tree()
    first = tree.answer(tree.ask(None, [5, 6], 4), [7, 8], [-1.0, -2.0], [0, 0], 1, {}, "first")
    last = tree.answer(tree.ask(first, [9], 4), [3], [-0.5], [1], 1, {}, "last")
    first.delivered = last.delivered = True
    first.reward = -0.25
    episode = tree.trajectory()
    assert episode is not None
    write_episode(keeper.ring, slot, word, episode, episode.text, None)
    assert commit_episode(keeper.ring, slot, word, episode, episode.step) is not None
    keeper.ask("judge", g.RemoteJoin(life=1, role="reward"))
    [task] = keeper.claim("judge")
    assert task.completion == "last" and task.tensors["tokens"] == tensor(np.array([3], np.int32))
    assert task.tensors["prompt_ids"] == tensor(np.array([5, 6, 7, 8, 9], np.int32))
    assert keeper.ask("judge", g.RemoteRewarded(life=1, task=task.task, reward=1.0))[0].code == "done"
    line = keeper.ring.line(slot)
    assert line["state"] == State.REWARDED and line["reward"] == 0.75
    assert (line["prompt_tokens"], line["response_tokens"], line["version"]) == (2, 3, 0)


def test_a_remote_worker_gets_segments_and_continues_what_another_began(keeper: Keeper) -> None:
    dispatch(keeper.ring, 2)
    keeper.ask("gen", g.RemoteJoin(life=1, role="rollout"))
    keeper.ask("other", g.RemoteJoin(life=1, role="rollout"))
    [task] = keeper.claim("gen")
    assert (task.max_new_tokens, task.segment_tokens) == (8, 3)
    assert keeper.ask("gen", answer_to(task.task, done=False, finish=2))[0].code == "done"
    assert states(keeper.ring) == {"QUEUED": 1} and keeper.ring.line(0)["finish"] == 0
    assert [bell.status for bell in keeper.bells] == ["segment"]
    [task] = keeper.claim("other")
    assert (task.segment, task.max_new_tokens, task.segment_tokens) == (1, 5, 3)
    assert keeper.ask("other", answer_to(task.task, done=False, finish=2))[0].code == "done"
    [task] = keeper.claim("gen", req=2)
    assert (task.segment, task.max_new_tokens, task.segment_tokens) == (2, 2, 0), "the last: no further cut"
    [answer] = keeper.ask("gen", answer_to(task.task, count=1, done=False, finish=2))
    assert answer.code == "refused" and "segment 2 is the last" in answer.text and "done = true" in answer.text
    # The limit ends an answer, whatever its worker thinks.
    assert keeper.ask("gen", answer_to(task.task, count=2, done=False, finish=2))[0].code == "done"
    line = keeper.ring.lines()[0]
    assert (line["state"], line["segs"], line["finish"], line["response_tokens"]) == (State.GENERATED, 3, 2, 8)
    assert read_generated(keeper.ring, 0, "tokens", 3).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


def test_an_answer_that_ended_by_itself_and_is_not_done_is_refused(keeper: Keeper) -> None:
    dispatch(keeper.ring, 2)
    keeper.ask("gen", g.RemoteJoin(life=1, role="rollout"))
    [task] = keeper.claim("gen")
    [answer] = keeper.ask("gen", answer_to(task.task, done=False))
    assert answer.code == "refused" and "has no further segment" in answer.text
    assert states(keeper.ring) == {"GENERATING": 1}


def test_tokens_of_weights_older_than_the_dispatch_set_the_age(keeper: Keeper) -> None:
    keeper.ledger.steps.add(3, 30)
    keeper.ledger.steps.add(5, 50)
    keeper.ring.set_header("version", 6)
    dispatch(keeper.ring, 0, version=5, step=50)
    dispatch(keeper.ring, 1, version=5, step=50)
    keeper.ask("gen", g.RemoteJoin(life=1, role="rollout"))
    first, second = keeper.claim("gen", capacity=2)
    keeper.ask("gen", answer_to(first.task, versions=tensor(np.array([4, 5, 6], np.uint32))))
    keeper.ask("gen", answer_to(second.task, versions=tensor(np.array([5, 5, 6], np.uint32))))
    lines = keeper.ring.lines()
    assert (lines["version"][0], lines["step"][0]) == (4, 30), "version 4 was never seen: the newest older one counts"
    assert (lines["version"][1], lines["step"][1]) == (5, 50)


def test_a_young_keeper_takes_the_age_of_weights_from_its_host(keeper: Keeper) -> None:
    """And nobody else: without a step they look too old, and the group is above the bound on age."""
    keeper.ledger.steps = VersionSteps()
    keeper.ledger.steps.add(8, 80)
    keeper.ring.set_header("version", 8)
    for uid in range(2):
        dispatch(keeper.ring, uid, version=7, step=70)
    keeper.ask("gpu-0", g.RemoteJoin(life=1, role="host"))
    tasks = [task.task for task in keeper.claim("gpu-0", capacity=2)]
    six = tensor(np.full(3, 6, np.uint32))
    for task, steps in zip(tasks, ([60], [])):
        keeper.ask("gpu-0", batch_of([task], versions=six, steps=steps))
    lines = keeper.ring.lines()
    assert [(lines["version"][slot], lines["step"][slot]) for slot in range(2)] == [(6, 60), (6, 0)]


def test_an_answer_too_large_for_its_slot_leaves_the_claim(keeper: Keeper) -> None:
    dispatch(keeper.ring, 1)
    keeper.ask("gen", g.RemoteJoin(life=1, role="rollout"))
    [task] = keeper.claim("gen")
    [answer] = keeper.ask("gen", answer_to(task.task, text="x" * 5000))
    assert answer.code == "refused" and "ring.slot_bytes" in answer.text
    assert keeper.ask("gen", answer_to(task.task))[0].code == "done"


def test_answers_without_memory_stay_claimed_and_count_when_sent_again() -> None:
    command = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=2m t /dev/shm && exec "$@"', "sh"]
    if tried := subprocess.run([*command, "true"], capture_output=True, text=True).stderr:
        pytest.skip(f"no /dev/shm of its own here: {tried.strip()}")
    env = {**os.environ, "PYTHONPATH": f"{HERE.parents[1]}:{HERE}"}
    child = [*command, sys.executable, str(HERE / "on_a_ring.py"), "/dev/shm", "full"]
    ended = subprocess.run(child, env=env, timeout=60, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_an_ended_lease_counts_an_attempt_the_third_reward_is_an_accident(keeper: Keeper) -> None:
    dispatch(keeper.ring, 1)
    keeper.ask("gen", g.RemoteJoin(life=1, role="rollout"))
    keeper.claim("gen")
    keeper.pass_lease()
    assert states(keeper.ring) == {"QUEUED": 1} and keeper.ring.line(0)["attempt"] == 1
    keeper.ask("gen", g.RemoteJoin(life=1, role="rollout"))
    keeper.ask("gen", answer_to(keeper.claim("gen", req=2)[0].task))
    for attempt in (1, 2):
        keeper.ask("judge", g.RemoteJoin(life=1, role="reward"))
        [task] = keeper.claim("judge", req=attempt)
        keeper.pass_lease()
        assert keeper.ring.line(0)["attempt"] == attempt and states(keeper.ring) == {"GENERATED": 1}
        keeper.ask("judge", g.RemoteJoin(life=1, role="reward"))
        assert keeper.ask("judge", g.RemoteRewarded(life=1, task=task.task, reward=1.0))[0].code == "late"
    keeper.claim("judge", req=3)
    keeper.pass_lease()
    assert states(keeper.ring) == {} and chr(keeper.fates[0].get(1)) == "H"


def test_two_silent_ends_alone_make_a_sample_suspect_of_poison(keeper: Keeper) -> None:
    dispatch(keeper.ring, 1)
    for _ in range(4):
        keeper.ask("gen", g.RemoteJoin(life=1, role="rollout"))
        assert keeper.claim("gen", req=int(keeper.now))
        keeper.pass_lease()
    assert keeper.ring.line(0)["alone_deaths"] == 2, "the first two claims were not alone ones"


def test_no_reaper_takes_what_a_remote_worker_holds(folder: Path) -> None:
    maker = Keeper(folder)
    dispatch(maker.ring, 1)
    maker.close()
    killed_keeper(folder, "take.claimed:1")
    other = Ring.attach(str(folder / "ring"))
    other.register("x", "x")
    other.reap()
    [entry] = [process for process in other.processes() if process.remote]
    assert (entry.label, entry.role, entry.life, entry.pid) == ("gen", "rollout", 1, 0)
    assert states(other) == {"GENERATING": 1} and not other.is_dead(entry.index)
    other.close()


def test_an_entry_without_a_lock_is_not_taken_by_those_who_register(keeper: Keeper, folder: Path) -> None:
    index = keeper.ring.enter_remote("reward", "far", life=9)
    rings = []
    with pytest.raises(RingFull):
        for _ in range(8):
            rings.append(Ring.attach(str(folder / "ring")))
            assert rings[-1].register("x", "x") != index
    for ring in rings:
        ring.close()


def test_a_stand_in_acts_only_while_its_worker_has_the_entry(keeper: Keeper) -> None:
    dispatch(keeper.ring, 1)
    index = keeper.ring.enter_remote("rollout", "far", life=1)
    hand = keeper.ring.stand_in(index)
    [(slot, word)] = hand.take(State.QUEUED, State.GENERATING, cls=None, limit=1)
    with pytest.raises(RingError):
        keeper.ring.release(slot, word, State.QUEUED)  # not its own
    keeper.ring.leave_remote(index)
    assert states(keeper.ring) == {"QUEUED": 1} and keeper.ring.enter_remote("rollout", "near", life=2) == index
    with pytest.raises(NotRegistered):
        hand.take(State.QUEUED, State.GENERATING, cls=None, limit=1)
    with pytest.raises(NotRegistered):
        keeper.ring.stand_in(keeper.ring.index)
    keeper.ring.leave_remote(index)


@pytest.mark.parametrize("point", POINTS)
def test_the_successor_of_a_killed_keeper_ends_the_sample_once(folder: Path, point: str) -> None:
    maker = Keeper(folder)
    dispatch(maker.ring, 1)
    maker.close()
    killed_keeper(folder, point)
    keeper = Keeper(folder)
    keeper.ring.reap()
    play(keeper)
    line = keeper.ring.lines()[0]
    assert line["state"] == State.REWARDED and line["reward"] == 0.5
    assert keeper.ring.get(0, "tokens", 0).tolist() == [0, 1, 2]
    assert [process.label for process in keeper.ring.processes()] == ["keeper"]
    keeper.close()


def test_a_commit_cut_by_death_is_not_done_after_its_lease(folder: Path) -> None:
    maker = Keeper(folder)
    dispatch(maker.ring, 1)
    maker.close()
    killed_keeper(folder, "commit.before:1")
    keeper = Keeper(folder)
    [task] = keeper.pass_lease()
    keeper.ask("gen", g.RemoteJoin(life=1, role="rollout"))
    assert keeper.ask("gen", answer_to(task))[0].code == "late" and states(keeper.ring) == {"QUEUED": 1}
    keeper.close()
