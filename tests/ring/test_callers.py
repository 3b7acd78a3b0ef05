"""The caller's side of model calls, against an engine that the test plays by hand."""

from __future__ import annotations

import asyncio
import os
import uuid
from pathlib import Path

import numpy as np
import pytest

from busrl.errors import CallUnanswered, SlotTooSmall
from busrl.protocol import messages as m
from busrl.ring import Fates, Ring, State
from busrl.ring.calls import AsyncCaller, Caller, ModelCall
from busrl.states import Finish
from busrl.status.reader import open_episodes

IDS = np.arange(10, 20, dtype=np.int32)
SEQ = (1 << 36) - 1


class Played:
    """A caller, and an engine that does what it is told."""

    def __init__(self) -> None:
        self.name = f"busrl.test.{os.getpid()}.{uuid.uuid4().hex[:8]}"
        self.ring = Ring.create(self.name, slots=4, slot_bytes=4096, processes=8, uuid=bytes(16), calls=True)
        self.ring.register("agent", "agent/0")
        self.engine = Ring.attach(self.name, calls=True)
        self.engine.register("rollout", "rollout/0")
        self.sent: list[tuple[m.Message, str]] = []
        self.caller = Caller(self.ring, lambda message, to: self.sent.append((message, to)))

    def call(self, number: int = 0, **more) -> ModelCall:
        return ModelCall(IDS + number, 8, uid=number, **more)

    def take(self) -> tuple[int, int]:
        [held] = self.engine.take(State.QUEUED, State.GENERATING, cls=None, limit=1, max_attempt=255)
        return held

    def answer(self, slot: int, word: int, ids=(1, 2, 3), versions=(5, 5, 6), logprobs=None, **names) -> None:
        put = {"tokens": np.array(ids, np.int32), "versions": np.array(versions, np.uint32), **names}
        put["logprobs"] = np.full(len(ids), -0.5, np.float32) if logprobs is None else logprobs
        for name, array in put.items():
            self.engine.put(slot, word, name, array, 0)
        self.engine.set(slot, word, finish=Finish.LENGTH)
        assert self.engine.commit_segment(slot, word, True)

    def states(self) -> dict[str, int]:
        return {name: n for name, n in self.ring.stats().occupancy.items() if n}

    def close(self) -> None:
        self.engine.close()
        self.ring.close()
        Ring.unlink(self.name)


@pytest.fixture
def played():
    played = Played()
    yield played
    played.close()


def test_an_answer_is_taken_whole_and_its_slot_is_free(played: Played) -> None:
    pending = played.caller.put(played.call())
    assert played.caller.poll() == [] and played.caller.open == 1
    slot, word = played.take()
    assert (played.engine.get(slot, "prompt_ids") == IDS).all()
    played.answer(slot, word)
    assert played.caller.wait(1.0) == [pending] and played.caller.open == 0
    answer = pending.result()
    assert answer.ids.tolist() == [1, 2, 3] and answer.versions.tolist() == [5, 5, 6] and answer.finish == Finish.LENGTH
    assert played.states() == {"FREE": 4}


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"ids": ()}, "malformed"),
        ({"versions": (1, 2)}, "malformed"),
        ({"tokens": np.zeros(3, np.float32)}, "malformed"),
        ({"logprobs": np.array([0, np.nan, 0], np.float32)}, "malformed"),
    ],
)
def test_what_an_engine_wrote_costs_the_call_and_nothing_else(played: Played, wrong: dict, code: str) -> None:
    pending = played.caller.put(played.call())
    played.answer(*played.take(), **wrong)
    assert played.caller.poll() == [pending] and pending.error is not None and pending.error.code == code
    assert played.states() == {"FREE": 4}


def test_the_reason_why_there_is_no_answer_is_told(played: Played) -> None:
    pending = played.caller.put(played.call())
    slot, word = played.take()
    played.engine.put(slot, word, "refused", np.frombuffer(b"too much", np.uint8), 0)
    assert played.engine.commit_segment(slot, word, True)
    assert played.caller.poll() == [pending] and (pending.error.code, str(pending.error)) == ("refused", "too much")


def test_the_engine_cancels_a_working_call_and_a_waiting_one_ends_immediately(played: Played) -> None:
    first, second = played.caller.put(played.call(0)), played.caller.put(played.call(1))
    slot, word = played.take()
    assert slot == first.slot
    played.caller.cancel(second)
    assert second.error.code == "cancelled" and played.states() == {"GENERATING": 1, "FREE": 3}
    played.caller.cancel(first)
    [(bell, to)] = played.sent
    assert (bell.slot_id, bell.seq, to) == (slot, word & SEQ, "rollout-0") and not first.done
    assert played.engine.free_call(slot, word)
    assert played.caller.poll() == [first] and first.error.code == "cancelled"


def test_a_cancelled_call_without_its_message_is_freed_with_answer_or_return(played: Played) -> None:
    first, second = played.caller.put(played.call(0)), played.caller.put(played.call(1))
    slots = [played.take(), played.take()]
    for each in (first, second):
        played.caller.cancel(each)
    played.answer(*slots[0])
    assert played.engine.release(*slots[1], State.QUEUED)
    assert set(played.caller.poll()) == {first, second} and played.states() == {"FREE": 4}


def test_a_cancelled_slot_with_a_new_call_answers_that_one_alone(played: Played) -> None:
    pending = played.caller.put(played.call(0))
    slot, word = played.take()
    played.caller.cancel(pending)
    played.engine.free_call(slot, word)
    rest = [played.caller.put(played.call(number)) for number in range(1, 5)]
    assert pending.done and {each.slot for each in rest} == {0, 1, 2, 3}
    for _ in rest:
        played.answer(*played.take())
    assert set(played.caller.poll()) == set(rest) and all(each.answer for each in rest)


def test_a_call_that_two_engines_died_of_alone_is_given_up(played: Played) -> None:
    pending = played.caller.put(played.call())
    for _ in range(2):
        engine = Ring.attach(played.name, calls=True)
        engine.register("rollout", "rollout/1")
        [(slot, word)] = engine.take(State.QUEUED, State.GENERATING, cls=None, limit=1, max_attempt=255)
        engine.mark_alone(slot, word)
        deaths = int(engine.line(slot)["alone_deaths"])
        engine.close()  # hands back: a death keeps its count
        [(slot, word)] = played.engine.take(State.QUEUED, State.GENERATING, cls=None, limit=1, max_attempt=255)
        played.engine.set(slot, word, alone_deaths=deaths)
        played.engine.release(slot, word, State.QUEUED)
    assert played.caller.poll() == [pending] and pending.error.code == "poison" and played.states() == {"FREE": 4}


def test_streamed_tokens_drop_late_doubled_and_foreign_ones_and_keep_order(played: Played) -> None:
    pending = played.caller.put(played.call(streams=True))
    slot, word = played.take()

    def tokens(at: int, ids: list[int], seq: int = word & SEQ) -> None:
        played.caller.tokens(m.CallTokens(slot_id=slot, seq=seq, at=at, ids=ids))

    tokens(0, [1, 2])
    tokens(3, [9])  # one before it was lost
    tokens(1, [2, 3])
    tokens(0, [1, 2])
    tokens(3, [7], seq=(word & SEQ) - 1)
    assert pending.sampled == [1, 2, 3]


def test_whoever_waits_in_vain_is_told_who_has_the_call(played: Played) -> None:
    first, second = played.caller.put(played.call(0)), played.caller.put(played.call(1))
    played.take()
    assert f"in the hands of rollout/0 (pid {os.getpid()})" in played.caller.whose(first)
    assert "one of 1 that wait for an engine; there is rollout/0" in played.caller.whose(second)
    assert played.caller.wait(0.01) == []


def test_a_slot_that_another_program_took_is_told_and_ends_the_wait(played: Played) -> None:
    pending = played.caller.put(played.call())
    assert played.ring.free_call(pending.slot, pending.word)
    assert played.caller.poll() == [pending] and pending.error.code == "lost"


async def serve(played: Played, count: int, seen: list[int]) -> None:
    """Answer so many calls, one at a time, with their uid."""
    while len(seen) < count:
        for slot, word in played.engine.take(State.QUEUED, State.GENERATING, cls=None, limit=1):
            number = int(played.engine.line(slot)["uid"])
            seen.append(number)
            played.answer(slot, word, ids=(number,), versions=(1,))
        await asyncio.sleep(0)


def test_calls_beyond_the_slots_wait_by_priority_and_all_are_answered(played: Played) -> None:
    async def many() -> tuple[list[int], list[int]]:
        seen: list[int] = []
        async with AsyncCaller(played.ring, lambda message, to: None) as caller:
            calls = [played.call(number, priority=number) for number in range(30)]
            asks = [asyncio.ensure_future(caller.ask(call, 30.0)) for call in calls]
            await asyncio.sleep(0)
            await serve(played, 30, seen)
            return [int(answer.ids[0]) for answer in await asyncio.gather(*asks)], seen

    answers, seen = asyncio.run(many())
    assert answers == list(range(30))
    waited = [number for number in seen if number >= 4]  # the first four had slots before the others came
    assert waited == sorted(waited, reverse=True)
    assert played.states() == {"FREE": 4}


def test_a_coroutine_that_is_cancelled_or_late_leaves_no_call_behind(played: Played) -> None:
    async def gone() -> None:
        async with AsyncCaller(played.ring, lambda message, to: None) as caller:
            asks = [asyncio.ensure_future(caller.ask(played.call(number), 30.0)) for number in range(6)]
            await asyncio.sleep(0.01)
            for ask in asks:
                ask.cancel()
            await asyncio.gather(*asks, return_exceptions=True)
            assert played.states() == {"FREE": 4}
            with pytest.raises(CallUnanswered, match=r"no answer within 0.05 s: slot . is one of 1"):
                await caller.ask(played.call(), 0.05)
            with pytest.raises(SlotTooSmall):
                await caller.ask(ModelCall(IDS, 4096), 1.0)

    asyncio.run(gone())
    assert played.states() == {"FREE": 4}


def test_a_stream_that_was_begun_again_and_became_another_answer_is_refused(played: Played) -> None:
    async def broken() -> None:
        async with AsyncCaller(played.ring, lambda message, to: None) as caller:
            stream = caller.stream(played.call(), 30.0)
            first = asyncio.ensure_future(anext(stream))
            while not caller.caller.open:
                await asyncio.sleep(0)
            slot, word = played.take()
            caller.tokens(m.CallTokens(slot_id=slot, seq=word & SEQ, at=0, ids=[1, 2]))
            assert await first == [1, 2]
            played.engine.release(slot, word, State.QUEUED)
            played.answer(*played.take(), ids=(1, 9, 3))
            with pytest.raises(CallUnanswered, match="became another one"):
                await anext(stream)

    asyncio.run(broken())


def test_open_episodes_are_counted_by_what_they_do(played: Played, tmp_path: Path) -> None:
    samples = Ring.create(f"{played.name}.s", slots=6, slot_bytes=4096, processes=4, uuid=bytes(16))
    try:
        samples.register("agent", "agent/0")
        samples.bind_fates(Fates(str(tmp_path / "fates.bin"), create=True), None)
        for uid in range(4):
            samples.dispatch(uid=uid, group=0, admission=0, member=uid, group_size=4, cls=0, task=b"{}", prompt_crc=1,
                             max_new_tokens=8, temperature=1.0)
        samples.take(State.QUEUED, State.GENERATING, cls=None, limit=3)
        [first, second] = samples.lines()["uid"][samples.lines()["state"] == State.GENERATING].tolist()[:2]
        for uid in (first, second, second):
            played.caller.put(played.call(uid))
        played.take()
        now = int(samples.lines()["changed_ns"].max()) + 2_000_000_000
        episodes = open_episodes(samples.lines(), played.ring.lines(), now)
        assert {name: count for name, (count, _) in episodes.items()} == {"thinking": 1, "waiting": 1, "tool": 1}
        assert all(2.0 <= age < 60.0 for _, age in episodes.values())
    finally:
        samples.close()
        Ring.unlink(f"{played.name}.s")
