"""Workers from outside that answer model calls: on both rings of a run with agents; leases, deaths and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from in_memory import answer_to, settings
from on_a_ring import CUTS, LEASE_S, Keeper
from test_gateway_ring import dispatch, folder  # noqa: F401

from busrl.errors import CallUnanswered
from busrl.hosts import messages as g
from busrl.hosts.desk import Desk, tensor
from busrl.hosts.ledgers import BothLedgers, CallLedger, RingLedger
from busrl.ring import Ring, State
from busrl.ring.calls import Caller, ModelCall
from busrl.system.clocks import Tally

IDS = np.arange(5, dtype=np.int32)


class CallKeeper(Keeper):
    """A keeper of a run with agents, and a caller beside it."""

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self.calls = Ring.attach(str(place / "calls"), calls=True)
        self.calls.register("keeper", "keeper")
        samples = RingLedger(self.ring, self.bells.append, CUTS, 16, 100)
        self.books = BothLedgers(samples, CallLedger(self.calls, samples))
        self.desk = Desk(self.books, Tally(), 0.0, **settings(LEASE_S))

    def close(self) -> None:
        self.calls.close()
        super().close()


@pytest.fixture
def caller(folder: Path) -> Iterator[Caller]:  # noqa: F811
    path = str(folder / "calls")
    ring = Ring.create(path, slots=4, slot_bytes=4096, processes=8, uuid=bytes(16), calls=True)
    ring.register("agent", "agent/0")
    yield Caller(ring, lambda message, to: None)
    ring.close()


@pytest.fixture
def keeper(caller: Caller, folder: Path) -> Iterator[CallKeeper]:  # noqa: F811
    keeper = CallKeeper(folder)
    keeper.ask("gen", g.RemoteJoin(life=1, role="rollout"))
    yield keeper
    keeper.close()


def bare_answer(task: str, **more: object) -> g.RemoteGenerated:
    """An answer without text and without the ids of its prompt."""
    answer = answer_to(task, **more)
    answer.text, answer.prompt_ids = "", None
    return answer


def test_a_call_travels_with_its_ids_and_its_answer_without_text(keeper: CallKeeper, caller: Caller) -> None:
    call = caller.put(ModelCall(IDS, 8, uid=7, stream=(1 << 64) - 1, stop=(3, 4), temperature=0.5))
    [task] = keeper.claim("gen")
    assert (task.kind, task.uid, task.stream, task.stop, task.record) == ("call", 7, (1 << 64) - 1, [3, 4], "")
    assert (task.max_new_tokens, task.temperature) == (8, 0.5)
    assert task.tensors == {"prompt_ids": tensor(IDS)} and task.slot_id == keeper.ring.n_slots + call.slot
    [done] = keeper.ask("gen", bare_answer(task.task))
    assert done.code == "done" and caller.poll() == [call] and call.result().ids.tolist() == [0, 1, 2]
    [again] = keeper.ask("gen", bare_answer(task.task))
    assert again.code == "already" and keeper.bells == []
    assert keeper.calls.stats().occupancy["FREE"] == 4


def test_rollouts_get_calls_rewards_get_samples_under_two_claims(
    keeper: CallKeeper, caller: Caller
) -> None:
    dispatch(keeper.ring, 2)
    [(slot, word)] = keeper.ring.take(State.QUEUED, State.GENERATING, cls=None, limit=1)
    for name, array in (("tokens", IDS), ("logprobs", np.zeros(5, np.float32)), ("versions", np.zeros(5, np.uint32))):
        keeper.ring.put(slot, word, name, array, 0)
    keeper.ring.put(slot, word, "text", np.frombuffer(b"abc", np.uint8), 0)
    keeper.ring.put(slot, word, "prompt_ids", IDS)
    keeper.ring.commit_segment(slot, word, True)
    caller.put(ModelCall(IDS, 8, uid=2))
    keeper.ask("judge", g.RemoteJoin(life=1, role="reward"))
    [judged], [called] = keeper.claim("judge"), keeper.claim("gen")
    assert judged.kind == "" and called.kind == "call" and judged.task != called.task
    [answer] = keeper.ask("judge", g.RemoteRewarded(life=1, task=judged.task, reward=1.0))
    assert answer.code == "done" and keeper.ring.line(slot)["state"] == State.REWARDED


def test_an_ended_lease_gives_the_call_to_the_next_worker(keeper: CallKeeper, caller: Caller) -> None:
    call = caller.put(ModelCall(IDS, 8))
    [task] = keeper.claim("gen")
    assert keeper.pass_lease() == [task.task]
    [late] = keeper.ask("gen", bare_answer(task.task))
    assert late.code in ("late", "unknown") and keeper.calls.line(call.slot)["state"] == State.QUEUED
    keeper.ask("gen", g.RemoteJoin(life=1, role="rollout"))
    [task] = keeper.claim("gen", req=2)
    keeper.ask("gen", g.RemoteLeave(life=1))
    assert keeper.calls.line(call.slot)["state"] == State.QUEUED
    assert not [process for process in keeper.calls.processes() if process.remote]


def test_the_next_keeper_knows_the_claims_and_grants_them_in_full(
    keeper: CallKeeper, caller: Caller, folder: Path  # noqa: F811
) -> None:
    call = caller.put(ModelCall(IDS, 8))
    [task] = keeper.claim("gen")
    later = CallKeeper(folder)
    [done] = later.ask("gen", bare_answer(task.task))
    assert done.code == "done" and caller.poll() == [call] and call.answer
    later.close()


def test_a_broken_rule_leaves_the_claim_a_failure_reaches_the_caller(
    keeper: CallKeeper, caller: Caller
) -> None:
    call = caller.put(ModelCall(IDS, 8))
    [task] = keeper.claim("gen")
    [refused] = keeper.ask("gen", bare_answer(task.task, done=False, finish=2))
    assert refused.code == "refused" and "sent whole" in refused.text
    [refused] = keeper.ask("gen", bare_answer(task.task, tokens=tensor(np.array([1, 2, 100], np.int32))))
    assert refused.code == "refused" and "0 to 99" in refused.text
    [done] = keeper.ask("gen", g.RemoteFail(life=1, task=task.task, drop="too_long"))
    assert done.code == "done" and caller.poll() == [call]
    with pytest.raises(CallUnanswered, match="a worker from outside gave it up: prompt too long"):
        call.result()
    assert keeper.calls.stats().occupancy["FREE"] == 4
