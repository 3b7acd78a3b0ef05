"""What the gateway answers to each request, and what it counts: one behaviour a test."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from in_memory import LEASE_S, RING, Ledger, Slot, answer_to, new_desk

from busrl.hosts import messages as g
from busrl.hosts.desk import DIGESTS, Desk, digest_of, tensor
from busrl.protocol import codec
from busrl.protocol import messages as m
from busrl.system.clocks import Tally


@pytest.fixture
def ledger() -> Ledger:
    return Ledger([Slot(uid) for uid in range(4)])


def ask(desk: Desk, message: g.Remote, now: float = 0.0, sender: str = "a") -> list[m.Message]:
    message.sender = sender
    return desk.handle(message, now)


def join(desk: Desk, name: str = "a", life: int = 1, role: str = "rollout", now: float = 0.0) -> m.Message:
    [answer] = ask(desk, g.RemoteJoin(life=life, role=role), now, name)
    return answer


def claim(desk: Desk, capacity: int = 1, now: float = 0.0, name: str = "a", req: int = 1, **fields) -> list[str]:
    """Names of the tasks that came."""
    answers = ask(desk, g.RemoteClaim(life=1, req=req, capacity=capacity, **fields), now, name)
    return [task.task for answer in answers for task in answer.tasks]


def code(answers: list[m.Message]) -> str:
    [answer] = answers
    assert isinstance(answer, g.GatewayAnswer)
    return answer.code


def test_a_worker_is_told_how_long_a_lease_is_and_its_entry(ledger: Ledger) -> None:
    answer = join(new_desk(ledger))
    assert isinstance(answer, g.GatewayWelcome)
    assert (answer.lease_s, answer.index, answer.max_prompt_tokens) == (LEASE_S, 1, 16)


def test_joining_again_changes_nothing(ledger: Ledger) -> None:
    desk = new_desk(ledger)
    join(desk)
    [task] = claim(desk)
    join(desk)
    assert [claim.task for _, claim in ledger.claims()] == [task]


def test_a_newer_life_takes_the_name_and_replaces_the_older(ledger: Ledger) -> None:
    desk = new_desk(ledger)
    join(desk)
    claim(desk, 2)
    join(desk, life=2)
    assert ledger.claims() == [] and [slot.attempt for slot in ledger.slots[:2]] == [1, 1]
    assert code(ask(desk, g.RemoteExtend(life=1))) == "replaced"
    assert join(desk, life=1).code == "replaced"


def test_a_life_with_claims_of_another_ring_does_not_join_this_one(ledger: Ledger) -> None:
    desk = new_desk(ledger)
    assert isinstance(ask(desk, g.RemoteJoin(life=1, role="rollout", ring=RING))[0], g.GatewayWelcome)
    other = g.RemoteJoin(life=2, role="rollout", ring="b2" * 16)
    assert code(ask(desk, other)) == "unknown" and code(ask(desk, g.RemoteClaim(life=2))) == "unknown"
    assert ledger.claims() == []


def test_who_has_not_joined_is_told_so(ledger: Ledger) -> None:
    assert code(ask(new_desk(ledger), g.RemoteClaim(life=1))) == "unknown"


def test_a_claim_that_is_repeated_sends_the_same_tasks_again(ledger: Ledger) -> None:
    desk = new_desk(ledger)
    join(desk)
    first = claim(desk, 2)
    assert len(first) == 2 and claim(desk, 2) == first
    assert claim(desk, 2, holding=first) == []


def test_a_claim_sends_what_the_worker_lost_and_fills_it_up(ledger: Ledger) -> None:
    desk = new_desk(ledger)
    join(desk)
    first = claim(desk, 2)
    assert claim(desk, 3, holding=first[:1], req=2)[0] == first[1] and len(ledger.claims()) == 3


def test_a_late_copy_of_a_claim_is_ignored(ledger: Ledger) -> None:
    desk = new_desk(ledger)
    join(desk)
    claim(desk, 1, req=5)
    assert ask(desk, g.RemoteClaim(life=1, req=4, capacity=4)) == [] and len(ledger.claims()) == 1


def test_only_what_a_request_names_is_leased_anew(ledger: Ledger) -> None:
    desk = new_desk(ledger)
    join(desk)
    first, second, third = claim(desk, 3)
    for now in range(1, 10):
        desk.tick(float(now))
    ask(desk, g.RemoteClaim(life=1, req=2, capacity=0, holding=[first]), 9.0)
    [answer] = ask(desk, g.RemoteExtend(life=1, holding=[second, "3.1.1"]), 9.0)
    assert answer.lost == ["3.1.1"]
    assert [lease.claim.task for lease in desk.tick(10.0)] == [third]
    assert code(ask(desk, answer_to(third), 10.0)) == "late"
    assert code(ask(desk, answer_to(first), 10.0)) == "done"


def test_a_result_counts_once_and_its_copies_are_told_already(ledger: Ledger) -> None:
    desk = new_desk(ledger)
    join(desk)
    [task] = claim(desk)
    assert [code(ask(desk, answer_to(task))) for _ in range(3)] == ["done", "already", "already"]
    desk = new_desk(ledger)  # another keeper: the slot's own mark answers
    join(desk)
    assert code(ask(desk, answer_to(task))) == "already"
    assert len(ledger.commits) == 1


def test_a_task_handed_back_is_as_if_it_had_never_been_claimed(ledger: Ledger) -> None:
    desk = new_desk(ledger)
    join(desk)
    [task] = claim(desk)
    assert code(ask(desk, g.RemoteFail(life=1, task=task))) == "done"
    assert ledger.claims() == [] and ledger.slots[0].attempt == 0
    assert code(ask(desk, g.RemoteFail(life=1, task=task))) == "already"


@pytest.mark.parametrize(("role", "drop", "fate"), [("rollout", "prompt", "X"), ("reward", "hung", "H")])
def test_a_task_given_up_ends_with_the_fate_of_its_reason(ledger: Ledger, role: str, drop: str, fate: str) -> None:
    desk = new_desk(ledger)
    join(desk, role=role)
    [task] = claim(desk)
    assert code(ask(desk, g.RemoteFail(life=1, task=task, drop="mood"))) == "refused"
    assert code(ask(desk, g.RemoteFail(life=1, task=task, drop=drop))) == "done"
    assert ledger.slots[0].ended == fate


def test_leaving_hands_everything_back_and_frees_the_entry(ledger: Ledger) -> None:
    desk = new_desk(ledger)
    join(desk)
    claim(desk, 3)
    assert code(ask(desk, g.RemoteLeave(life=1))) == "done"
    assert ledger.claims() == [] and ledger.entries == {} and ledger.slots[0].attempt == 0
    assert code(ask(desk, g.RemoteLeave(life=1))) == "unknown"


def test_a_silent_worker_loses_tasks_then_entry_a_heartbeat_keeps_the_entry(ledger: Ledger) -> None:
    desk = new_desk(ledger)
    join(desk, "a")
    join(desk, "b")
    claim(desk, 2)
    for now in range(1, 30):
        desk.heartbeat("b", float(now))
        desk.tick(float(now))
    assert ledger.claims() == [] and [member.name for member in ledger.members()] == ["b"]


def test_a_suspect_sample_is_given_alone(ledger: Ledger) -> None:
    for slot in ledger.slots:
        slot.attempt = 2
    ledger.slots[3].attempt = 0
    desk = new_desk(ledger)
    join(desk)
    assert claim(desk, 4) == ["3.2.3"]
    ask(desk, answer_to("3.2.3"))
    assert claim(desk, 4, req=2) == ["0.2.0"] and claim(desk, 4, req=3, holding=["0.2.0"]) == []


BROKEN = {
    "tokens says": {"tokens": g.Tensor("int32", [5], b"\0" * 8)},
    "dtype 'int64'": {"tokens": g.Tensor("int64", [3], b"\0" * 24)},
    "one dimension": {"tokens": g.Tensor("int32", [1, 3], b"\0" * 12)},
    "0 elements": {"tokens": g.Tensor("int32", [0], b"")},
    "1 to 8": {"tokens": tensor(np.zeros(9, np.int32))},
    "as many of each": {"logprobs": tensor(np.zeros(2, np.float32))},
    "not finite": {"logprobs": tensor(np.array([0, np.nan, 0], np.float32))},
    "at most 0": {"logprobs": tensor(np.array([0, 0.5, 0], np.float32))},
    "newest version": {"versions": tensor(np.full(3, 1, np.uint32))},
    "ids from -1": {"tokens": tensor(np.array([1, -1, 1], np.int32))},
    "prompt_ids is missing": {"prompt_ids": None},
    "1 to 16": {"prompt_ids": tensor(np.zeros(17, np.int32))},
    "finish = 7": {"finish": 7},
}


@pytest.mark.parametrize("rule", BROKEN)
def test_an_answer_that_breaks_a_rule_leaves_the_claim(ledger: Ledger, rule: str) -> None:
    desk = new_desk(ledger)
    join(desk)
    [task] = claim(desk)
    [answer] = ask(desk, answer_to(task, **BROKEN[rule]))
    assert answer.code == "refused" and rule in answer.text and answer.text.startswith("a: ")
    assert ledger.commits == [] and len(ledger.claims()) == 1
    assert code(ask(desk, answer_to(task))) == "done"
    assert desk.tally.workers["a"]["refused"] == 1


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused(ledger: Ledger, reward: float) -> None:
    desk = new_desk(ledger)
    join(desk, role="reward")
    [task] = claim(desk)
    assert code(ask(desk, g.RemoteRewarded(life=1, task=task, reward=reward))) == "refused"
    assert code(ask(desk, g.RemoteRewarded(life=1, task=task, reward=1.0, parts={"x": reward}))) == "refused"
    assert code(ask(desk, answer_to(task))) == "refused", "a reward worker has no answers to give"


def test_the_task_of_another_worker_is_refused_by_name(ledger: Ledger) -> None:
    desk = new_desk(ledger)
    join(desk, "a")
    join(desk, "thief")
    [task] = claim(desk)
    [answer] = ask(desk, answer_to(task), sender="thief")
    assert answer.code == "not_yours" and "held by a" in answer.text and answer.text.startswith("thief")
    ask(desk, answer_to(task))
    assert code(ask(desk, answer_to(task), sender="thief")) == "not_yours"
    assert desk.tally.workers["thief"]["not_yours"] == 2


@pytest.mark.parametrize("task", ["", "1.2", "x.1.1", "-1.1.1", "99999.1.1", "0.99999999999999999999.1", "1.1.1.1"])
def test_a_task_name_that_was_never_given_out_is_no_claim(ledger: Ledger, task: str) -> None:
    desk = new_desk(ledger)
    join(desk)
    assert code(ask(desk, answer_to(task))) in ("refused", "late")
    assert ledger.commits == []


@pytest.mark.parametrize("name", ["", "js/1", "a b", "x" * 40, "naïve"])
def test_a_name_that_no_topic_or_table_can_hold_is_refused(ledger: Ledger, name: str) -> None:
    assert join(new_desk(ledger), name).code == "refused"
    assert ledger.entries == {}


def test_reserved_names_and_unknown_roles_are_refused(ledger: Ledger) -> None:
    desk = new_desk(ledger, reserved=frozenset({"rollout-0"}))
    assert join(desk, "rollout-0").code == "refused" and join(desk, role="learner").code == "refused"


def test_without_a_free_entry_the_run_is_full(ledger: Ledger) -> None:
    ledger.most_entries = 1
    desk = new_desk(ledger)
    join(desk, "a")
    assert join(desk, "b").code == "full"


def test_workers_from_outside_leave_the_run_its_own_entries(ledger: Ledger) -> None:
    desk = new_desk(ledger, most_members=2)
    join(desk, "a")
    join(desk, "b")
    assert join(desk, "c").code == "full" and "ring.processes" in join(desk, "c").text
    assert isinstance(join(desk, "b", life=2), g.GatewayWelcome), "a new life takes the place of the old one"


def test_slots_larger_than_a_message_are_named_at_the_join(ledger: Ledger) -> None:
    answer = join(new_desk(ledger, biggest=2 << 20))
    assert answer.code == "too_large" and "bus.max_message_bytes" in answer.text


def test_unreadable_bytes_are_counted_and_answered_where_a_sender_is_known(ledger: Ledger) -> None:
    desk = new_desk(ledger)
    [answer] = desk.unreadable("a", "malformed", "REMOTE_CLAIM", "capacity is a map")
    assert (answer.code, answer.about, answer.life) == ("malformed", "REMOTE_CLAIM", 0)
    assert desk.unreadable("", "malformed", "REMOTE_CLAIM", "no map") == []
    assert desk.tally.workers["a"]["malformed"] == 1 and desk.tally.workers["(unnamed)"]["malformed"] == 1


def test_counts_survive_a_restart_and_names_are_bounded() -> None:
    tally = Tally()
    for number in range(400):
        tally.add(f"w{number}", "malformed", text="x")
    assert len(tally.workers) == 257 and tally.workers["(others)"]["malformed"] == 144
    again = Tally(tally.plain())
    again.add("w3", "malformed")
    assert again.workers["w3"]["malformed"] == 2 and Tally({"w": 3, "x": {"y": "z"}}).plain() == {"x": {}}


def test_a_long_list_of_tasks_travels_in_several_messages(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    big = g.Task("", 0, 0, 0, "x" * 300_000)
    monkeypatch.setattr(ledger, "task", lambda index, claim: big)
    desk = new_desk(ledger)
    join(desk)
    answers = ask(desk, g.RemoteClaim(life=1, capacity=4))
    assert [len(answer.tasks) for answer in answers] == [1, 1, 1, 1]


TEXTS = st.text(max_size=12) | st.sampled_from(["a", "rollout", "host", "0.2.0", "1.2.1"])
NUMBERS = st.integers(0, 3) | st.integers(0, 2**64 - 1)
TENSORS = st.builds(g.Tensor, TEXTS | st.just("int32"), st.lists(NUMBERS, max_size=4), st.binary(max_size=16))


@given(data=st.data())
def test_no_request_raises_or_moves_the_slot_of_another(data: st.DataObject) -> None:
    ledger = Ledger([Slot(uid) for uid in range(3)])
    desk = new_desk(ledger)
    join(desk, "victim")
    [task] = claim(desk, name="victim")
    for _ in range(8):
        kind = data.draw(st.sampled_from(g.REMOTE))
        sender = data.draw(TEXTS.filter(lambda name: name != "victim"))
        fields = {"sender": sender, "life": data.draw(NUMBERS), "req": data.draw(NUMBERS)}
        for name, strategy in {
            "role": TEXTS, "task": TEXTS | st.just(task), "capacity": NUMBERS, "holding": st.lists(TEXTS, max_size=3),
            "tokens": TENSORS, "logprobs": TENSORS, "versions": TENSORS, "prompt_ids": TENSORS | st.none(),
            "routes": TENSORS, "prompt_routes": TENSORS | st.none(),
            "text": TEXTS, "finish": NUMBERS, "done": st.booleans(), "reward": st.floats(), "drop": TEXTS,
        }.items():
            if name in kind.__struct_fields__:
                fields[name] = data.draw(strategy)
        if kind is g.RemoteBatch:
            count, fields["prompt_ids"] = data.draw(st.integers(0, 2)), data.draw(TENSORS)
            for name, item in {
                "tasks": TEXTS | st.just(task), "lengths": NUMBERS, "prompt_lengths": NUMBERS, "finishes": NUMBERS,
                "texts": TEXTS, "rewards": st.floats(), "parts": st.dictionaries(TEXTS, st.floats(), max_size=2),
            }.items():
                fields[name] = data.draw(st.lists(item, min_size=count, max_size=count) | st.lists(item, max_size=3))
        answers = desk.handle(kind(**fields), 0.0)
        assert all(codec.encode(answer) for answer in answers)
    assert task in [claim.task for _, claim in ledger.claims()] and all(slot != 0 for slot, _, _ in ledger.commits)


def test_an_equal_digest_renews_all_leases_and_another_none(ledger: Ledger) -> None:
    desk = new_desk(ledger)
    join(desk)
    tasks = claim(desk, 3)
    digest = sum(map(digest_of, tasks)) % DIGESTS
    now, req = 0.0, 2
    while now < 3 * LEASE_S:
        now, req = now + 0.5, req + 1
        [same] = ask(desk, g.RemoteClaim(life=1, req=req, capacity=3, digest=digest), now)
        assert not same.tasks and not same.differs and desk.tick(now) == []
    while len(desk.leases.by_task) == 3 and now < 5 * LEASE_S:
        now, req = now + 0.5, req + 1
        [other] = ask(desk, g.RemoteClaim(life=1, req=req, capacity=4, digest=digest + 1), now)
        assert not other.tasks and other.differs, "who does not know what it holds gets nothing new"
        desk.tick(now)
    assert not desk.leases.by_task and [slot.attempt for slot in ledger.slots] == [1, 1, 1, 0]


def test_a_copy_of_an_older_digest_renews_nothing(ledger: Ledger) -> None:
    desk = new_desk(ledger)
    join(desk)
    [task] = claim(desk, 1, req=5)
    assert ask(desk, g.RemoteClaim(life=1, req=4, capacity=1, digest=digest_of(task)), 1.0) == []
    assert desk.leases.by_task[task].until == LEASE_S


@pytest.mark.parametrize("end", ["settled", "expired", "handed back"])
def test_the_digest_at_home_is_that_of_the_claims_that_are_left(ledger: Ledger, end: str) -> None:
    desk = new_desk(ledger)
    join(desk)
    tasks = claim(desk, 2)
    if end == "settled":
        ask(desk, answer_to(tasks[0]))
    elif end == "handed back":
        ask(desk, g.RemoteFail(life=1, task=tasks[0]))
    else:
        desk.leases.by_task[tasks[0]].named_until = 0.0
        desk.tick(0.0)
    assert desk.leases.workers["a"].digest == digest_of(tasks[1]) == new_desk(ledger).leases.workers["a"].digest
