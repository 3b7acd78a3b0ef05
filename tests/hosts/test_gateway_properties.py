"""The gateway under everything a bus can do: loss, doubling, reordering, death of keeper and workers, time."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from in_memory import LEASE_S, Killed, Ledger, Slot, batch_of, new_desk

from busrl.hosts import desk as rules
from busrl.hosts import messages as g
from busrl.protocol import messages as m

NAMES = ("a", "b")
CAPACITY = 3
FINAL = ("done", "already", "late")


class Worker:
    """A reward worker by the documentation. It may be a zombie: an old life to which no message of the new has come."""

    role = "reward"

    def __init__(self, name: str, life: int) -> None:
        self.name, self.life, self.req = name, life, 0
        self.joined = self.replaced = False
        self.tasks: dict[str, bool] = {}  # by task: whether its result is ready
        self.outcomes: dict[str, str] = {}

    def ask(self, message: g.Remote) -> g.Remote:
        self.req += 1
        message.sender, message.req = self.name, self.req
        return message

    def send_due(self) -> list[g.Remote]:
        """The messages of a turn of its timers."""
        if self.replaced:
            return []
        if not self.joined:
            return [self.ask(g.RemoteJoin(life=self.life, role=self.role))]
        results = self.results([task for task, ready in self.tasks.items() if ready])
        claim = g.RemoteClaim(life=self.life, capacity=CAPACITY, holding=list(self.tasks))
        return [self.ask(message) for message in (*results, claim)]

    def results(self, ready: list[str]) -> list[g.Remote]:
        return [g.RemoteRewarded(life=self.life, task=task, reward=1.0) for task in ready]

    def work(self) -> None:
        self.tasks = dict.fromkeys(self.tasks, True)

    def receive(self, message: m.Message) -> None:
        if message.life != self.life:  # type: ignore[attr-defined]
            return
        if isinstance(message, g.GatewayWelcome):
            self.joined = True
        elif isinstance(message, g.GatewayTasks):
            for task in message.tasks:
                if task.task not in self.outcomes:
                    self.tasks.setdefault(task.task, False)
        elif isinstance(message, g.GatewaySettled):
            assert not message.refused, message
            for code, tasks in (("done", message.done), ("late", message.late)):
                self._ended(code, tasks)
        elif isinstance(message, g.GatewayAnswer):
            self._answered(message)

    def _ended(self, code: str, tasks: list[str]) -> None:
        for task in tasks:
            self.tasks.pop(task, None)
            self.outcomes[task] = code

    def _answered(self, message: g.GatewayAnswer) -> None:
        if message.code == "unknown":
            self.joined = False
        elif message.code == "replaced":
            self.replaced = True
        elif message.task:
            assert message.code in FINAL, message
            self._ended(message.code, [message.task])


class Host(Worker):
    """A host: its results come in one message, which is a claim too; it names its tasks where the digest differs."""

    role = "host"
    differs = True

    def send_due(self) -> list[g.Remote]:
        messages = super().send_due()
        if self.differs or not self.joined or not messages:
            return messages
        digest = sum(map(rules.digest_of, self.tasks)) % rules.DIGESTS
        messages[-1] = msgspec.structs.replace(messages[-1], holding=[], digest=digest)  # type: ignore[type-var]
        return messages

    def receive(self, message: m.Message) -> None:
        super().receive(message)
        if isinstance(message, g.GatewayTasks) and message.life == self.life:
            self.differs = message.differs

    def results(self, ready: list[str]) -> list[g.Remote]:
        return [batch_of(ready, life=self.life, capacity=CAPACITY)] if ready else []


class Gateway(RuleBasedStateMachine):
    kind: type[Worker] = Worker

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger([Slot(uid) for uid in range(6)])
        self.now = 0.0
        self.desk = new_desk(self.ledger)
        self.born = 0.0
        self.lives = Counter(NAMES)
        self.workers = [self.kind(name, 1) for name in NAMES]
        self.requests: list[g.Remote] = []
        self.answers: list[tuple[str, m.Message]] = []

    # -- what workers do

    @rule(which=st.integers(0, 5))
    def a_worker_sends(self, which: int) -> None:
        self.requests += self.workers[which % len(self.workers)].send_due()

    @rule(which=st.integers(0, 5))
    def a_worker_works(self, which: int) -> None:
        self.workers[which % len(self.workers)].work()

    @rule(name=st.sampled_from(NAMES), zombie=st.booleans())
    def a_worker_is_started_again(self, name: str, zombie: bool) -> None:
        self.lives[name] += 1
        if not zombie:
            self.workers = [worker for worker in self.workers if worker.name != name]
        elif sum(worker.name == name for worker in self.workers) > 2:
            return
        self.workers.append(self.kind(name, self.lives[name]))

    @rule(which=st.integers(0, 5), copies=st.booleans())
    def a_worker_gets_on_undisturbed(self, which: int, copies: bool) -> None:
        """One turn in which nothing is lost; copies of what it sent may come again at any time."""
        worker = self.workers[which % len(self.workers)]
        for request in worker.send_due():
            if copies:
                self.requests.append(copy.deepcopy(request))
            before = len(self.answers)
            self._deliver(request)
            for _, answer in self.answers[before:]:
                worker.receive(answer)
            del self.answers[before:]
        worker.work()

    @precondition(lambda self: self.ledger.claims())
    @rule(thief=st.sampled_from(NAMES), data=st.data())
    def a_worker_answers_a_task_that_may_be_anothers(self, thief: str, data: st.DataObject) -> None:
        index, claim = data.draw(st.sampled_from(self.ledger.claims()))
        if self.ledger.entries[index].name != thief and thief in self.desk.leases.workers:
            message = g.RemoteRewarded(life=self.desk.leases.workers[thief].life, task=claim.task, reward=0.0)
            message.sender = thief
            [answer] = self.desk.handle(message, self.now)
            assert isinstance(answer, g.GatewayAnswer) and answer.code == "not_yours"
            assert (index, claim) in self.ledger.claims()

    # -- what the bus does

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), keep=st.booleans())
    def a_request_arrives(self, data: st.DataObject, keep: bool) -> None:
        """Any of them, in any order; kept, it will come again."""
        at = data.draw(st.integers(0, len(self.requests) - 1))
        message = self.requests[at] if keep else self.requests.pop(at)
        self._deliver(copy.deepcopy(message))

    @precondition(lambda self: self.answers)
    @rule(data=st.data(), keep=st.booleans())
    def an_answer_arrives(self, data: st.DataObject, keep: bool) -> None:
        at = data.draw(st.integers(0, len(self.answers) - 1))
        name, message = self.answers[at] if keep else self.answers.pop(at)
        for worker in self.workers:
            if worker.name == name:
                worker.receive(message)

    @rule(what=st.integers(0, 3))
    def messages_are_lost(self, what: int) -> None:
        self.requests, self.answers = self.requests[what:], self.answers[what:]

    # -- what the keeper does

    @rule(seconds=st.floats(0.01, LEASE_S * 0.6))
    def time_passes(self, seconds: float) -> None:
        """The keeper looks every now and then while it passes."""
        while seconds > 0:
            self.now += min(seconds, 0.5)
            seconds -= 0.5
            self._tick()

    @rule(seconds=st.floats(LEASE_S, 1000.0))
    def the_machine_is_suspended(self, seconds: float) -> None:
        before = len(self.ledger.expired)
        claims = len(self.ledger.claims())
        ages = [lease.until - self.desk.leases.clock.time for lease in self.desk.leases.by_task.values()]
        self.now += seconds
        self._tick()
        assert len(self.ledger.expired) - before == sum(age <= 1.0 for age in ages) <= claims

    @rule()
    def the_keeper_is_killed(self) -> None:
        self._restart()

    @rule()
    def the_keeper_will_be_killed_inside_its_next_commit(self) -> None:
        self.ledger.kill_in_commit = True

    def _deliver(self, message: g.Remote) -> None:
        worker = self.desk.leases.workers.get(message.sender)
        if worker is not None and message.life < worker.life:
            before = copy.deepcopy(self.ledger)
            [answer] = self.desk.handle(message, self.now)
            assert isinstance(answer, g.GatewayAnswer) and answer.code == "replaced" and self.ledger == before
            self.answers.append((message.sender, answer))
            return
        try:
            answers = self.desk.handle(message, self.now)
        except Killed:
            self._restart()
            return
        self.answers += [(message.sender, answer) for answer in answers]
        for answer in answers:
            if isinstance(answer, g.GatewayAnswer) and answer.task:
                self._check(answer.task, answer.code)
            elif isinstance(answer, g.GatewaySettled):
                for code, tasks in (("done", answer.done), ("late", answer.late)):
                    for task in tasks:
                        self._check(task, code)

    def _check(self, task: str, code: str) -> None:
        """Check that the answer to a worker is true."""
        slot, seq, _ = map(int, task.split("."))
        done = any(commit[:2] == (slot, seq) for commit in self.ledger.commits)
        if code in ("done", "already"):
            assert done
        elif code == "late":
            assert not done
            now = self.ledger.slots[slot]
            assert not (now.owner and now.seq == seq), "no claim that is still held is late"

    def _restart(self) -> None:
        before = {(claim.slot, claim.seq) for _, claim in self.ledger.claims()}
        self.desk = new_desk(self.ledger, self.now)
        self.born = self.now
        after = {(lease.claim.slot, lease.claim.seq) for lease in self.desk.leases.by_task.values()}
        assert after == before, "a new keeper knows every claim"
        assert all(lease.until - self.desk.leases.clock.time == LEASE_S for lease in self.desk.leases.by_task.values())

    def _tick(self) -> None:
        before = len(self.ledger.expired)
        self.desk.tick(self.now)
        if len(self.ledger.expired) > before:
            assert self.now - self.born >= LEASE_S, "a new keeper grants every lease in full"

    # -- what always holds

    @invariant()
    def no_claim_is_committed_twice(self) -> None:
        assert len(self.ledger.commits) == len({commit[:2] for commit in self.ledger.commits})
        assert len({commit[0] for commit in self.ledger.commits}) == len(self.ledger.commits)

    @invariant()
    def what_is_held_is_leased_to_its_owner(self) -> None:
        leases = {(lease.claim.slot, lease.claim.seq): lease.worker.name for lease in self.desk.leases.by_task.values()}
        claims = {(claim.slot, claim.seq): self.ledger.entries[index].name for index, claim in self.ledger.claims()}
        assert leases == claims

    def teardown(self) -> None:
        """Once the bus is sound, every sample ends: nothing that happened before can hold it for ever."""
        self.ledger.kill_in_commit = False
        self.requests, self.answers = [], []
        newest = {worker.name: worker for worker in self.workers}
        for worker in self.workers:
            newest[worker.name] = max(newest[worker.name], worker, key=lambda start: start.life)
        for _ in range(200):
            if all(slot.ended for slot in self.ledger.slots):
                return
            for worker in newest.values():
                worker.replaced = False
                for request in worker.send_due():
                    for answer in self.desk.handle(request, self.now):
                        worker.receive(answer)
                worker.work()
            self.now += 0.5
            self._tick()
        raise AssertionError([slot for slot in self.ledger.slots if not slot.ended])


class GatewayOfHosts(Gateway):
    kind = Host


def by_slot(task: str) -> int:
    """A digest that does not know which claim of the slot it is."""
    return int(task.partition(".")[0]) + 1


@pytest.mark.parametrize("digest", [rules.digest_of, by_slot])
def test_only_a_digest_of_whole_names_finds_a_lost_task(
    digest: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim of a silent host ends and its slot is given to the same host again, in a message that is lost."""
    monkeypatch.setattr(rules, "digest_of", digest)
    ledger = Ledger([Slot(0)])
    desk, host, now = new_desk(ledger), Host("a", 1), 0.0

    def rounds(count: int) -> None:
        nonlocal now
        for _ in range(count):
            for request in host.send_due():
                for answer in desk.handle(request, now):
                    host.receive(answer)
            now += 0.5
            desk.tick(now)

    rounds(4)
    [old] = host.tasks
    while not ledger.expired:
        now += 0.5
        desk.tick(now)
    desk.handle(host.ask(g.RemoteClaim(life=1, capacity=1)), now)
    rounds(4 * int(LEASE_S))
    is_found = [old] != list(host.tasks)
    assert is_found == (digest is not by_slot), "with the other digest the lease is renewed for ever, and nobody works"


SHORT = settings(max_examples=80, stateful_step_count=60, suppress_health_check=list(HealthCheck))
TestGateway = Gateway.TestCase
TestGateway.settings = SHORT
TestGatewayOfHosts = GatewayOfHosts.TestCase
TestGatewayOfHosts.settings = SHORT


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestGatewayAtLength(Gateway.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(SHORT, max_examples=3000, stateful_step_count=100)


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestGatewayOfHostsAtLength(GatewayOfHosts.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(SHORT, max_examples=3000, stateful_step_count=100)
