"""The contract of Atropos's environments over real sockets: what is refused says why, and nothing ends the door."""

from __future__ import annotations

import asyncio
import copy
import gzip
import json
import math
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import agent_worlds as worlds
import aiohttp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from busrl.agents.episode import EngineAnswer, Episode
from busrl.agents.renderer import Renderer
from busrl.agents.roles.atropos import GroupSlots, KeptGroups, SampledTurns, read_digests
from busrl.agents.samples import ClaimedSample
from busrl.agents.scored_groups import AtroposServer, Rules, RunProgress
from busrl.agents.tree import Trajectory
from busrl.algorithms.catalog import FEWER
from busrl.data.episodes import FINISH, EpisodeArrays, EpisodeLimits, fault_of
from busrl.errors import CallRefused, DiskFull
from busrl.states import Finish
from busrl.system.files import LineFile
from busrl.teachers.posted import Store, posted_rows

SIZE, KEY, TOKENS = 2, "k" * 32, 64
GOOD: dict[str, Any] = {
    "tokens": [[5, 6, 7, 8], [5, 6, 9]], "masks": [[-100, 6, -100, 8], [-100, 6, 9]], "scores": [0.0, 1.5],
    "inference_logprobs": [[1.0, -0.5, 1.0, -0.25], [1.0, 0.0, -3]], "env_id": None, "messages": None,
    "overrides": [{}, {}], "group_overrides": {}, "images": None, "ref_logprobs": None,
}


class RoomyTrainer:
    """A trainer with so much room."""

    def __init__(self, room: int = 100) -> None:
        self.room, self.groups = room, dict[bytes, tuple[Sequence[Trajectory], Sequence[float]]]()

    async def keep(self, digest: bytes, members: list[Trajectory], scores: list[float], env: int | None) -> bool:
        if len(self.groups) < self.room:
            self.groups[digest] = members, scores
        return digest in self.groups

    def has(self, digest: bytes) -> bool:
        return digest in self.groups

    def state(self) -> RunProgress:
        return RunProgress(3, 100, len(self.groups), 16, 7, 3)

    def unclaimed(self) -> Episode:
        raise AssertionError("no test calls the model here")


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return worlds.renderer(tmp_path_factory.mktemp("chat"), "qwen3")


Post = Callable[..., Any]


def with_door(chat: Renderer, work: Callable[[Post, RoomyTrainer], Any], room: int = 100, k: int = 0) -> RoomyTrainer:
    """`k`: groups bring a teacher, of whose tokens so many are kept."""
    async def run() -> RoomyTrainer:
        trainer, taught = RoomyTrainer(room), posted_rows if k else None
        rules = Rules(SIZE, chat.vocabulary, EpisodeLimits(TOKENS, 16, TOKENS, 3, 4), frozenset({8}), taught, k)
        door = AtroposServer(trainer, rules, chat, "override", "127.0.0.1", 0, "toy", KEY)
        async with door, aiohttp.ClientSession() as http:
            async def post(body: Any, path: str = "scored_data", method: str = "POST", **head: str) -> tuple[int, Any]:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                async with http.request(method, f"{door.url}/{path}", data=data, headers=head) as answer:
                    return answer.status, json.loads(await answer.text())

            await work(post, trainer)
        return trainer

    return asyncio.run(run())


def changed(**fields: Any) -> dict[str, Any]:
    return {**copy.deepcopy(GOOD), **fields}


def test_a_group_becomes_episodes_whose_turns_are_what_the_masks_train(chat: Renderer) -> None:
    async def work(post: Post, trainer: RoomyTrainer) -> None:
        assert await post(GOOD) == (200, {"status": "received"})
        zipped = gzip.compress(json.dumps(changed(scores=[2.0, 3.0])).encode())
        assert (await post(zipped, **{"Content-Encoding": "gzip"}))[0] == 200

    (first, scores), _ = with_door(chat, work).groups.values()
    longer, shorter = first
    assert scores == [0.0, 1.5] and longer.ids.tolist() == [5, 6, 7, 8] and shorter.ids.tolist() == [5, 6, 9]
    assert longer.turns[:, 1:5].tolist() == [[1, 2, Finish.EOS, 0], [3, 4, Finish.EOS, 1]]
    assert shorter.turns[:, 1:3].tolist() == [[1, 3]] and shorter.turns[0, FINISH] == Finish.LENGTH
    assert longer.logprobs.tolist() == [-0.5, -0.25] and longer.versions.tolist() == [7, 7] and longer.step == 3


@pytest.mark.parametrize(("body", "field", "rule"), [
    (changed(inference_logprobs=None), "inference_logprobs", "is missing"),
    (changed(scores=[1.0]), "scores", r"has 1 entries: must be the 2 of a group \(groups.size\)"),
    (changed(tokens=[[5], [5, 6, 9]]), "tokens[0]", "has 1 tokens: must be 2 to 64"),
    (changed(tokens=[[5, 6, 7, 10**9], [5, 6, 9]]), "tokens[0][3]", "is 1000000000: must be 0 to"),
    (changed(tokens=[[5, 6, 7, -(2**63)], [5, 6, 9]]), "tokens", r"Expected `int` .* at `\$\.tokens\[0\]\[3\]`"),
    (changed(tokens=[[5, 6, 7, 10**30], [5, 6, 9]]), "", ""),
    (changed(masks=[[-100, 6, -100, 7], [-100, 6, 9]]), "masks[0][3]", "is 7: must be -100, or the token itself"),
    (changed(masks=[[5, 6, 7, 8], [-100, 6, 9]]), "masks[0]", "not the first, which nothing predicts"),
    (changed(masks=[[-100] * 4, [-100, 6, 9]]), "masks[0]", "must train some token"),
    (changed(masks=[[-100, 6, 7], [-100, 6, 9]]), "masks[0]", "has 3 entries: must be as many as tokens, 4"),
    (changed(inference_logprobs=[[1, 0.1, 1, 0], [1, 0, -3]]), "inference_logprobs[0][1]", "is 0.1: must be a finite"),
    (changed(inference_logprobs=[[1, -1e300, 1, 0], [1, 0, -3]]), "inference_logprobs[0][1]", "must be a finite"),
    (changed(scores=[math.nan, 1.0]), "", "JSON"),
    (changed(scores="x"), "scores", "Expected `array`"),
    (changed(advantages=[[0.0]]), "advantages", "cannot be used here"),
    (changed(overrides=[{"set_advantage_to_zero": True}, {}]), "overrides", "cannot be used here"),
    (changed(distill_token_ids=[[[1]], []]), "distill_token_ids", r"no \[\[learner.teacher\]\] with posted = true"),
    ({}, "", "tokens"),
    (b"[" * 200_000, "", ""),
])
def test_what_is_malformed_is_refused_with_its_field_and_the_rule(
    chat: Renderer, body: Any, field: str, rule: str
) -> None:
    async def work(post: Post, trainer: RoomyTrainer) -> None:
        status, reply = await post(body)
        assert status == 422 and reply["field"].startswith(field), reply
        assert re.search(rule, reply["detail"]), reply

    assert not with_door(chat, work).groups


def test_a_group_is_kept_once_and_no_list_with_a_malformed_one(chat: Renderer) -> None:
    async def work(post: Post, trainer: RoomyTrainer) -> None:
        assert (await post([GOOD, changed(scores=[0.0])], "scored_data_list"))[0] == 422
        assert not trainer.groups
        other = changed(scores=[4.0, 5.0])
        for _ in range(2):
            status, reply = await post([GOOD, other, GOOD], "scored_data_list")
            assert (status, reply["groups_processed"]) == (200, 3)

    assert len(with_door(chat, work).groups) == 2


def test_a_full_trainer_says_503_and_knows_what_it_kept_before(chat: Renderer) -> None:
    async def work(post: Post, trainer: RoomyTrainer) -> None:
        both = [GOOD, changed(scores=[4.0, 5.0])]
        assert (await post(both, "scored_data_list"))[0] == 503 and len(trainer.groups) == 1
        trainer.room = 2
        assert (await post(both, "scored_data_list"))[0] == 200

    assert len(with_door(chat, work, room=1).groups) == 2


def test_environments_register_ask_and_leave(chat: Renderer) -> None:
    async def work(post: Post, trainer: RoomyTrainer) -> None:
        environment = {"desired_name": "toy", "group_size": SIZE, "max_token_length": 64, "weight": 1.0}
        assert (await post({**environment, "group_size": 3}, "register-env"))[1]["status"].startswith("group_size = 3")
        names = [(await post(environment, "register-env"))[1]["wandb_name"] for _ in range(2)]
        assert names == ["toy_0", "toy_1"]
        assert (await post({"env_id": 1}, "status-env", "GET"))[1]["env_weight"] == 0.5
        assert (await post({"env_id": 0}, "disconnect-env"))[1] == {"status": "success"}
        assert (await post({"env_id": 9}, "disconnect-env"))[1]["status"] == "failure"
        seen = (await post({"env_id": 1}, "status-env", "GET"))[1]
        assert seen["env_weight"] == 1.0 and seen["current_step"] == 3
        assert (await post(b"", "latest_example", "GET"))[1]["tokens"] == []
        assert (await post(GOOD))[0] == 200
        assert (await post(b"", "latest_example", "GET"))[1]["tokens"] == GOOD["tokens"]
        assert (await post(b"", "status", "GET"))[1] == {"current_step": 3, "queue_size": 1}
        assert (await post(b"", "info", "GET"))[1] == {"batch_size": 16, "max_token_len": TOKENS}
        assert (await post(b"", "wandb_info", "GET"))[1]["group"] == "toy"
        assert (await post({}, "register"))[1]["uuid"] > 0 and (await post(b"", "", "GET"))[0] == 200

    with_door(chat, work)


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just([]) | st.just({})
PLACES = st.lists(st.integers(0, 3), min_size=1, max_size=3)
CHANGES = st.lists(st.tuples(st.sampled_from(sorted(GOOD)), PLACES, VALUES, st.booleans()), min_size=1, max_size=3)


def mutated(changes: Any) -> dict[str, Any]:
    """The good body with some values, deep or not, replaced or taken out."""
    body = copy.deepcopy(GOOD)
    for name, path, shared, remove in changes:
        value = copy.deepcopy(shared)  # two changes may have the same list: put into itself it would be a circle
        at: Any = body
        steps = [name, *path]
        for step in steps[:-1]:
            if not isinstance(at, (dict, list)) or not isinstance(inner := _inner(at, step), (dict, list)):
                break
            at = inner
            steps = steps[1:]
        key = steps[0]
        if isinstance(at, dict):
            at[str(key)] = value
        elif at and remove:
            del at[int(key) % len(at)]
        elif at:
            at[int(key) % len(at)] = value
    return body


def _inner(at: Any, step: Any) -> Any:
    if isinstance(at, dict):
        return at.get(step)
    return at[int(step) % len(at)] if at else None


def test_whatever_is_posted_is_kept_whole_or_refused_with_a_reason(chat: Renderer) -> None:
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(bodies=st.lists(CHANGES, min_size=3, max_size=12), noise=st.binary(max_size=20))
    def check(bodies: Any, noise: bytes) -> None:
        async def work(post: Post, trainer: RoomyTrainer) -> None:
            for body in [mutated(change) for change in bodies]:
                before = len(trainer.groups)
                status, reply = await post(body)
                assert status == 200 or (status == 422 and reply["detail"] and len(trainer.groups) == before), reply
            assert (await post(noise))[0] == 422
            zipped = gzip.compress(json.dumps(GOOD).encode())
            assert (await post(noise + zipped, **{"Content-Encoding": "gzip"}))[0] in (200, 422)
            assert (await post(GOOD))[0] == 200

        for members, scores in with_door(chat, work).groups.values():
            assert len(members) == len(scores) == SIZE and all(map(math.isfinite, scores))
            for member in members:
                arrays = (member.ids, member.seqs, member.turns, member.logprobs, member.versions)
                assert not fault_of(EpisodeArrays(*map(np.asarray, arrays), None))
                assert ((member.ids >= 0) & (member.ids < chat.vocabulary)).all()

    check()


def test_a_body_that_unpacks_to_too_much_is_refused(chat: Renderer) -> None:
    async def work(post: Post, trainer: RoomyTrainer) -> None:
        assert (await post(gzip.compress(b" " * (65 << 20)), **{"Content-Encoding": "gzip"}))[0] == 413

    with_door(chat, work)


def test_another_key_is_401(chat: Renderer, tmp_path: Path) -> None:
    async def work(post: Post, trainer: RoomyTrainer) -> None:
        assert (await post(GOOD, f"../{'x' * 32}/scored_data"))[0] == 401

    assert not with_door(chat, work).groups


def posted_turns(ids: list[int], turns: list[list[int]], logprobs: list[float], version: int) -> Trajectory:
    return Trajectory(
        np.array(ids, np.int32), np.array([len(ids)], np.int32), np.array(turns, np.int32),
        np.array(logprobs, np.float32), np.full(len(logprobs), version, np.uint32), None, "", 3, 0,
    )


def test_a_turn_that_the_run_drew_has_its_own_numbers() -> None:
    drawn = SampledTurns()
    drawn.add(np.array([5, 6], np.int32), EngineAnswer(
        np.array([6], np.int32), np.array([-0.75], np.float32), np.array([4], np.uint32), Finish.EOS, step=2))
    posted = posted_turns([5, 6, 7, 8], [[0, 1, 2, 1, 0, 0, 0, 1], [0, 3, 4, 1, 1, 0, 0, 1]], [-0.5, -0.25], 7)
    numbered = drawn.numbered(posted)
    assert numbered.logprobs.tolist() == [-0.75, -0.25] and numbered.versions.tolist() == [4, 7] and numbered.step == 2
    assert posted.versions.tolist() == [7, 7]


def test_of_two_draws_of_the_same_ids_the_posted_one_counts() -> None:
    drawn, ids = SampledTurns(), np.array([5, 6], np.int32)
    for version, logprob in ((4, -0.75), (5, -0.5)):
        numbers = np.array([logprob], np.float32), np.array([version], np.uint32)
        drawn.add(ids, EngineAnswer(ids[1:], *numbers, Finish.EOS))
    posted = posted_turns([5, 6], [[0, 1, 2, 1, 0, 0, 0, 1]], [-0.75], 9)
    assert drawn.numbered(posted).versions.tolist() == [4]


def test_a_group_whose_digest_cannot_be_written_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client gets a 503 and posts it again: 200 must mean that it is kept."""
    samples = SimpleNamespace(ring=None, returned=[])
    samples.give_back = samples.returned.append
    groups, warned = KeptGroups(tmp_path / "seen"), []
    monkeypatch.setattr(LineFile, "append", full_disk)
    monkeypatch.setattr("busrl.agents.roles.atropos.write_episode", lambda *_: None)
    slots = GroupSlots(samples, groups, 2, lambda text, *_, **__: warned.append(text))  # type: ignore[arg-type]
    claimed = [ClaimedSample(slot, 0, {"group": 3}) for slot in range(2)]
    member = posted_turns([5, 6], [[0, 1, 2, 1, 0, 0, 0, 1]], [-0.75], 9)
    with pytest.raises(CallRefused, match="no room for a group now") as refused:
        slots.commit(b"d" * 16, claimed, [member, member], [0.0, 1.0], "env_id 0")
    assert refused.value.code == "no_room" and samples.returned == claimed
    assert b"d" * 16 not in groups and "no space" in warned[0]
    groups.close()


def full_disk(file: LineFile, line: bytes) -> None:
    raise DiskFull("atropos.seen: no space left on device")


def test_the_newest_groups_are_known_and_neither_memory_nor_file_grows(tmp_path: Path) -> None:
    path = tmp_path / "seen"
    groups = KeptGroups(path, most=10)
    digests = [bytes([n]) * 16 for n in range(95)]
    for draw, digest in enumerate(digests):
        groups.write(digest, draw)
        groups.remember(digest, draw)
        assert path.read_bytes().count(b"\n") <= 20 and sum(known_digest in groups for known_digest in digests) <= 20
        assert all(known_digest in groups for known_digest in digests[max(0, draw - 9) : draw + 1])
    assert read_digests(path, 10) == [(digests[draw], draw) for draw in range(85, 95)]
    groups.close()


def test_a_group_beyond_what_the_context_allows_is_refused_with_the_bound(chat: Renderer) -> None:
    async def work(post: Post, trainer: RoomyTrainer) -> None:
        status, reply = await post(changed(tokens=[[5] * (1 << 20), [5, 6, 9]]))
        assert status == 413 and "64 tokens" in reply["error"]["message"]
        assert (await post(GOOD))[0] == 200, "the connection of the next one is whole"

    assert len(with_door(chat, work).groups) == 1


def test_a_long_group_is_looked_at_while_others_are_answered(chat: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, answered, members = threading.Event(), threading.Event(), Rules.members

    def waiting(*arguments: Any) -> Any:
        begun.set()
        assert answered.wait(20), "nobody else was answered meanwhile"
        return members(*arguments)

    monkeypatch.setattr(Rules, "members", waiting)
    long = {**GOOD, "messages": ["what its environment keeps " * 1000]}

    async def work(post: Post, trainer: RoomyTrainer) -> None:
        posting = asyncio.ensure_future(post(long))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        assert (await post(b"", "status", "GET"))[0] == 200
        answered.set()
        assert (await posting)[0] == 200

    assert len(with_door(chat, work).groups) == 1


# -- a teacher whose probabilities are posted -----------------------------------------------------------------

IDS = [[[], [6, 3], [9], [8, 2, 4]], [[], [6], [9, 1, 2]]]
LOGPROBS = [[[], [-0.3, -2.0], [-0.1], [-1.5, -0.5, -3.0]], [[], [-0.2], [-1.0, -1.5, -2.5]]]


def with_teacher(**fields: Any) -> dict[str, Any]:
    return changed(distill_token_ids=copy.deepcopy(IDS), distill_logprobs=copy.deepcopy(LOGPROBS), **fields)


def test_a_posted_teacher_is_kept_for_the_tokens_that_are_trained(chat: Renderer, tmp_path: Path) -> None:
    async def work(post: Post, trainer: RoomyTrainer) -> None:
        assert (await post(with_teacher()))[0] == 200
        other = with_teacher()
        other["distill_logprobs"][0][1][0] = -0.4
        assert (await post(other))[0] == 200, "another teacher, another group"
        assert len(trainer.groups) == 2

    members = next(iter(with_door(chat, work, k=2).groups.values()))[0]
    store = Store(tmp_path / "taught")
    store.write(7, [member.taught for member in members])
    ids, logprobs = Store(tmp_path / "taught").read(7, 0).arrays()
    assert ids.tolist() == [[6, 3], [2, 8]] and logprobs.tolist() == [[np.float32(-0.3), -2.0], [-0.5, -1.5]]
    ids, logprobs = store.read(7, 1).arrays()
    assert ids.tolist() == [[6, 0], [9, 1]] and logprobs.tolist() == [[np.float32(-0.2), FEWER], [-1.0, -1.5]]
    store.remove([7])
    assert not list((tmp_path / "taught").iterdir())


def spoilt(name: str, value: Any, *at: int) -> dict[str, Any]:
    group = with_teacher()
    place = group[name]
    for step in at[:-1]:
        place = place[step]
    place[at[-1]] = value
    return group


@pytest.mark.parametrize(("body", "rule"), [
    (GOOD, "distill_token_ids must have 2 entries.*its teacher is posted"),
    (changed(distill_token_ids=IDS), "distill_logprobs must have 2 entries"),
    (spoilt("distill_token_ids", IDS[0][:3], 0), r"\[0\].* has 3 positions: must be as many as tokens, 4"),
    (spoilt("distill_token_ids", [], 0, 1), r"\[1\] must be at least one token"),
    (spoilt("distill_logprobs", [-1.0], 0, 1), r"\[1\] must be at least one token, with a log-probability of each"),
    (spoilt("distill_token_ids", [6, 10**7], 0, 1), r"\[1\] has 10000000: must be 0 to"),
    (spoilt("distill_token_ids", [6, 6], 0, 1), r"\[1\] has a token twice"),
    (spoilt("distill_logprobs", [-0.3, 0.2], 0, 1), r"\[1\] has 0.2: must be a log-probability"),
    (spoilt("distill_logprobs", [-0.1, -0.1], 0, 1), r"\[1\] has probabilities whose sum is above 1"),
    (spoilt("distill_logprobs", "x", 0, 1), r"\[1\] must be"),
])
def test_a_posted_teacher_that_breaks_a_rule_is_refused_whole(chat: Renderer, body: Any, rule: str) -> None:
    async def work(post: Post, trainer: RoomyTrainer) -> None:
        status, reply = await post(body)
        assert status == 422 and re.search(rule, reply["detail"]), reply

    assert not with_door(chat, work, k=2).groups
