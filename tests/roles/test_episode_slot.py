"""Episodes in their slots: what a tree holds comes back from the ring as the learner's record; broken ones cost
themselves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busrl.agents.tree import Trajectory, Tree, Turn
from busrl.data.episodes import CALL, CONTEXT
from busrl.errors import BadTensor
from busrl.preflight.derive import episode_bytes
from busrl.ring import Fates, Ring, State
from busrl.roles.episodes import (
    commit_episode,
    context_of,
    last_call,
    messages_of,
    read_episode,
    reward_of,
    seen_by_reward,
    turn_rewards_of,
    write_episode,
)
from busrl.roles.learner.groups import Claimed, Malformed, claim_groups
from busrl.states import Fate, Finish


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    name = f"busrl.test.{os.getpid()}.episodes"
    ring = Ring.create(name, slots=4, slot_bytes=8192, processes=8, uuid=b"e" * 16)
    ring.register("learner", "test")
    ring.bind_fates(Fates(str(tmp_path_factory.mktemp("fates") / "fates.bin"), create=True), None)
    yield ring
    ring.close()
    Ring.unlink(name)


UIDS = iter(range(10**6))


def claimed_for_generation(ring: Ring) -> tuple[int, int]:
    uid = next(UIDS) * 2
    ring.dispatch(uid=uid, group=uid, admission=uid, member=0, group_size=1, cls=0, task=b'{"prompt": "ab"}',
                  prompt_crc=1, max_new_tokens=64, temperature=0.5, version=4, step=14)
    ((slot, word),) = ring.take(State.QUEUED, State.GENERATING, cls=None, limit=1)
    return slot, word


def rewarded(ring: Ring, episode: Trajectory, **more: Any) -> int:
    """The slot of an episode that went through generation and reward."""
    slot, word = claimed_for_generation(ring)
    write_episode(ring, slot, word, episode, episode.text, more.get("reward"), more.get("messages", b""),
                  more.get("context", ()))
    for name, array in more.get("lies", {}).items():
        ring.put(slot, word, name, array, 0)
    assert commit_episode(ring, slot, word, episode, episode.step) is not None
    ((slot, word),) = ring.take(State.GENERATED, State.REWARDING, cls=None, limit=1)
    ring.commit_rewards([(slot, word)], [1.5])
    return slot


def claim(ring: Ring, slot: int) -> Any:
    groups = claim_groups(ring, ring.lines(), [[slot]], lambda records: None)
    assert groups is not None
    return groups[0] if isinstance(groups, list) else groups


def freed(ring: Ring, slot: int) -> None:
    for held, word in enumerate(ring.words().tolist()):
        if held == slot and word >> 58 == State.TRAINING:
            ring.finish(slot, word, Fate.TRAINED)


# -- trees ------------------------------------------------

calls = st.tuples(
    st.integers(0, 9), st.lists(st.integers(0, 99), min_size=1, max_size=4), st.lists(st.integers(0, 99), min_size=1,
    max_size=4), st.booleans(), st.one_of(st.none(), st.sampled_from([0.5, -1.0])),
)


def grown(plan: list[Any]) -> Tree:
    """A tree of the calls of a plan: number of the parent, ids read, ids sampled, whether trained, reward."""
    tree, turns = Tree(), list[Turn]()
    for number, (parent, read, drawn, trained, reward) in enumerate(plan):
        before = turns[parent % (len(turns) + 1) - 1] if turns and parent % (len(turns) + 1) else None
        asked = tree.ask(before, read, 8, None, None, trained)
        versions = [min(5, 2 + number)] * len(drawn)
        scores = [-0.1 * token - 0.5 for token in drawn]
        turn = tree.answer(asked, drawn, scores, versions, Finish.EOS, {}, f"turn {number}", step=10 + versions[0])
        turn.delivered, turn.reward = True, reward
        turns.append(turn)
    return tree


@settings(max_examples=40)
@given(plan=st.lists(calls, min_size=1, max_size=6))
def test_a_tree_comes_back_from_its_slot_as_the_learners_record(ring: Ring, plan: list[Any]) -> None:
    tree = grown(plan)
    episode = tree.trajectory()
    assert episode is not None
    slot = rewarded(ring, episode, reward=0.25, messages=tree.transcript(1000))
    claims = claim(ring, slot)
    assert isinstance(claims, Claimed)
    (record,) = claims.records
    expected = []  # each turn: what was before it, what it sampled, its log-probs and versions, call, trained
    for turn in tree.turns:
        expected.append((turn.path_ids[: turn.begin].tolist(), turn.ids.tolist(), turn.logprobs.tolist(),
                         turn.versions.tolist(), turn.number, turn.call.trained))
    ids, at, turns = record.token_array(), 0, []
    for sequence, begin, end, mark in record.turn_array().tolist():
        path = ids[sum(record.seqs[:sequence]) :]
        part = slice(at, at + end - begin)
        turns.append((path[:begin].tolist(), path[begin:end].tolist(), record.logprob_array()[part].tolist(),
                      record.version_array()[part].tolist(), mark // 2, bool(mark % 2)))
        at = part.stop
    assert sorted(turns, key=lambda turn: turn[4]) == expected and at == record.tokens
    trained = [version for _, _, _, versions, _, kept in expected if kept for version in versions]
    oldest = min([4, *trained])
    assert (record.version, record.step, record.finish, record.reward) == (oldest, min(14, 10 + oldest), 1, 1.5)
    rewards = [turn.reward for turn in tree.turns]
    order = np.argsort(record.turn_array()[:, 3] // 2)
    assert [record.turn_rewards[i] for i in order] == [reward or 0.0 for reward in rewards] if any(
        reward is not None for reward in rewards) else record.turn_rewards == []
    freed(ring, slot)


# -- what readers see -------------------------------------


def three_turns() -> Trajectory:
    """Calls 0 and 1 in one sequence, call 2 forked from call 0."""
    tree = grown([(0, [7, 8], [1, 2, 3], True, 0.5), (1, [9], [4], True, None), (1, [6, 6], [5, 6], False, -2.0)])
    trajectory = tree.trajectory()
    assert trajectory is not None and trajectory.seqs.tolist() == [7, 9]
    return trajectory


def test_reward_functions_see_turns_in_call_order_and_the_last_ids(ring: Ring) -> None:
    messages = b'[[{"role": "user", "content": "a"}], []]'
    slot = rewarded(ring, three_turns(), reward={"right": 1.0, "short": -0.25}, messages=messages)
    seen = seen_by_reward(ring, slot)
    assert seen is not None
    names = ("call", "sequence", "prompt_tokens", "tokens", "trained")
    turns = [tuple(turn[name] for name in names) for turn in seen["turns"]]
    assert turns == [(0, 0, 2, 3, True), (1, 0, 6, 1, True), (2, 1, 7, 2, False)]
    assert seen["turn_rewards"] == [0.5, 0.0, -2.0] and seen["reward"] == 0.75
    assert seen["messages"] == [[{"role": "user", "content": "a"}], []] == messages_of(ring, slot)
    assert reward_of(ring, slot) == (0.75, [1.0, -0.25]) and turn_rewards_of(ring, slot) == -1.5
    last = last_call(ring, slot)
    assert last is not None and {name: array.tolist() for name, array in last.items()} == {
        "prompt_ids": [7, 8, 1, 2, 3, 6, 6], "tokens": [5, 6], "versions": [4, 4],
        "logprobs": pytest.approx([-1.0, -1.1]),
    }
    freed(ring, slot) if claim(ring, slot) else None


def test_keys_of_turns_reach_the_record_and_reward_functions(ring: Ring) -> None:
    keys = ("plan", "", "ausführen")
    slot = rewarded(ring, replace(three_turns(), keys=keys))
    episode, seen = read_episode(ring, slot), seen_by_reward(ring, slot)
    assert episode is not None and episode.keys == keys
    assert seen is not None and [turn["key"] for turn in seen["turns"]] == list(keys)
    claims = claim(ring, slot)
    assert isinstance(claims, Claimed) and claims.records[0].keys == list(keys)
    freed(ring, slot)


def test_an_episode_without_keys_has_no_such_tensor(ring: Ring) -> None:
    slot = rewarded(ring, three_turns())
    seen = seen_by_reward(ring, slot)
    assert "keys" not in {name for name, _ in ring.tensors(slot)}
    assert seen is not None and not any("key" in turn for turn in seen["turns"])
    claims = claim(ring, slot)
    assert isinstance(claims, Claimed) and claims.records[0].keys == []
    freed(ring, slot)


def test_a_slot_with_an_answer_holds_no_episode(ring: Ring) -> None:
    slot, word = claimed_for_generation(ring)
    ring.put(slot, word, "tokens", np.arange(3, dtype=np.int32), 0)
    assert read_episode(ring, slot) is None and last_call(ring, slot) is None and seen_by_reward(ring, slot) is None
    assert turn_rewards_of(ring, slot) == 0.0 and reward_of(ring, slot) is None and messages_of(ring, slot) == []
    ring.drop(slot, word, Fate.MALFORMED)


def turns_with(*changes: tuple[int, int, int]) -> np.ndarray[Any, Any]:
    turns = three_turns().turns.copy()
    for row, column, value in changes:
        turns[row, column] = value
    return turns


def text(data: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, np.uint8)


LIES: dict[str, tuple[dict[str, Any], str]] = {
    "no turn": ({"turns": np.zeros((0, 8), np.int32)}, r"2 sequences, turns \[0, 8\]: at least one of each"),
    "turns of seven numbers": ({"turns": turns_with()[:, :7].copy()}, r"turns \[3, 7\]: .* turns of 8 numbers"),
    "turns of another type": ({"turns": turns_with().astype(np.int64)}, "tensor turns is int64 with 2 dimensions, exp"),
    "turns in one row": ({"turns": turns_with().ravel()}, "tensor turns is int32 with 1 dimensions, expected int32 w"),
    "ids that no sequence has": ({"seqs": np.array([7, 8], np.int32)}, "7, 8 ids, in all 15: must be the 16 that"),
    "an empty sequence": ({"seqs": np.array([16, 0], np.int32)}, "16, 0 ids"),
    "a sequence without a turn": ({"turns": turns_with((2, 0, 0))}, "each of the 2 must have one, in their order"),
    "turns of later sequences first": ({"turns": turns_with()[[2, 0, 1]].copy()}, "in their order"),
    "nothing before a turn": ({"turns": turns_with((0, 1, 0), (0, 2, 3))}, "turn 0 is from 0 to 3 .* begin at 1 or la"),
    "a turn in the one before": ({"turns": turns_with((1, 1, 4))}, "turn 1 is from 4 to 7 .* must begin at 5 or later"),
    "a turn of nothing": ({"turns": turns_with((1, 2, 6))}, "turn 1 is from 6 to 6"),
    "a turn beyond its sequence": ({"turns": turns_with((1, 2, 8))}, "turn 1 is from 6 to 8 of a sequence of 7"),
    "a log-prob missing": ({"logprobs": np.full(5, -1, np.float32)}, "6 sampled ids, 5 log-probs, 6 versions"),
    "a log-prob above 0": ({"logprobs": np.full(6, 0.1, np.float32)}, "log-probability is above 0 or not a finite"),
    "a log-prob that is none": ({"logprobs": np.full(6, np.nan, np.float32)}, "above 0 or not a finite number"),
    "two turns of one call": ({"turns": turns_with((1, CALL, 0))}, "call numbers 0, 0, 2: each turn needs one of its"),
    "a turn reward missing": ({"turn_rewards": np.zeros(2, np.float32)}, "turn_rewards 0.0, 0.0 of 3 turns: one fin"),
    "a turn reward that is none": ({"turn_rewards": np.full(3, np.inf, np.float32)}, "turn_rewards inf"),
    "a key missing": ({"keys": text(b"a\nb")}, "2 keys of 3 turns: one for each"),
    "a key too long": ({"keys": text(b"a\n\n" + b"b" * 65)}, "a turn's key of 65 bytes, 'bbb.*at most 64"),
    "a key that is no text": ({"keys": text(b"a\n\xff\nb")}, "of printable text"),
    "a key with a control character": ({"keys": text(b"a\n\0\nb")}, "of printable text"),
}


@pytest.mark.parametrize("name", LIES)
def test_an_episode_that_breaks_a_rule_is_dropped_with_the_rule(ring: Ring, name: str) -> None:
    lies, rule = LIES[name]
    slot = rewarded(ring, three_turns(), lies=lies)
    uid = int(ring.line(slot)["uid"])
    with pytest.raises(BadTensor, match=rule):
        read_episode(ring, slot)
    claims = claim(ring, slot)
    assert isinstance(claims, Malformed)
    assert claims.args[0].startswith(f"sample {uid}: slot {slot}: ")
    assert State(int(ring.lines()["state"][slot])) == State.FREE


def test_an_episode_without_a_needed_tensor_is_dropped_by_its_name(ring: Ring) -> None:
    slot, word = claimed_for_generation(ring)
    episode = three_turns()
    for name in ("ids", "turns", "logprobs", "versions"):
        ring.put(slot, word, name, getattr(episode, name), 0)
    commit_episode(ring, slot, word, episode, episode.step)
    ((slot, word),) = ring.take(State.GENERATED, State.REWARDING, cls=None, limit=1)
    ring.commit_rewards([(slot, word)], [0.0])
    claims = claim(ring, slot)
    assert isinstance(claims, Malformed) and "seqs" in str(claims)


def test_the_messages_are_left_out_where_they_have_no_room(ring: Ring) -> None:
    slot = rewarded(ring, three_turns(), messages=b"[" + b" " * 8000 + b"]")
    assert messages_of(ring, slot) == [] and isinstance(claim(ring, slot), Claimed)
    freed(ring, slot)


@pytest.mark.parametrize("numbers", [[7, 3, 2, 1, 4], [7, 3], []])  # two in slots that an older program wrote
def test_what_an_episode_counts_is_read_as_far_as_it_says(ring: Ring, numbers: list[int]) -> None:
    slot = rewarded(ring, three_turns(), context=numbers)
    assert context_of(ring, slot) == dict(zip(CONTEXT, numbers))
    claim(ring, slot)
    freed(ring, slot)


def test_the_bytes_of_an_episode_are_what_its_slot_needs(tmp_path: Path) -> None:
    episode = replace(three_turns(), text="t" * 20)
    needed = episode_bytes(tokens=16, sampled=6, turns=3, sequences=2, transcript=40, text=20)
    assert needed["counts"] == np.dtype(np.uint64).itemsize * len(CONTEXT)
    name = f"busrl.test.{os.getpid()}.bytes"
    ring = Ring.create(name, slots=1, slot_bytes=sum(needed.values()) + 16 + 8, processes=2, uuid=b"b" * 16)
    try:
        ring.register("learner", "test")
        ring.bind_fates(Fates(str(tmp_path / "fates.bin"), create=True), None)
        slot, word = claimed_for_generation(ring)
        write_episode(ring, slot, word, episode, episode.text, 1.0, b"[" + b" " * 38 + b"]", range(len(CONTEXT)))
        assert read_episode(ring, slot) is not None and "messages" in {name for name, _ in ring.tensors(slot)}
    finally:
        ring.close()
        Ring.unlink(name)
