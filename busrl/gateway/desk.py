"""The gateway's decisions: one request in, the ledger moved through a `RemoteLedger`, the answers out.

Talks to a `RemoteLedger` and to nothing else; the clock value comes with each call. `busrl.roles.keeper` feeds it from
the bus. Knows nothing of sockets, of arrays in shared memory, or of how answers travel.

**The wire is the bus itself**, not a socket of the keeper's own. A remote worker needs PUB and SUB to the broker anyway
(HELLO, HEARTBEAT, STOP, doorbells), so it needs nothing more; broker and keeper may be killed at any time without a
session to set up again; and what secures the bus secures this. PUB/SUB loses messages: so every request may be sent
again, and every answer is a function of the ledger, not of a conversation.

Invariants (ledger, section 3), held by `tests/gateway` under loss, doubling, reordering and death of the keeper:
- A claim is named for ever by (slot, seq, uid). Only the name that holds it can settle it, and only once; after that
  a copy is answered "already" (from `recent`, or from `last_commit_seq` by a later keeper), never done again.
- What a worker holds stands in the ledger. This class remembers only clocks and conveniences, so a keeper that is
  killed loses nothing: its successor finds entries and slots and grants every lease in full.
- Claims are idempotent without a memory of requests: a worker says what it knows of, and is sent what it holds beyond.
- A lease that ends gives its slot back with one attempt counted; a result that comes after that is refused as "late".
- A newer life of a name replaces the older one, whose claims go back; the older one is told to exit.
- Nothing is written before all of it was checked, and a refusal leaves the claim where it was.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from busrl.gateway import ledger
from busrl.gateway.ledger import AnswerLimits, BadAnswer, Claim, ClaimGone, NoRoom, RemoteLedger, RemoteWorker
from busrl.protocol import gateway as g
from busrl.protocol import messages as m
from busrl.protocol.gateway import Remote
from busrl.protocol.messages import Message, name_of
from busrl.states import Fate

# -- leases ----------------------------------------------


TICK_S = 0.5


class FairClock:
    """Time that may count against other processes: at most two ticks between two looks, since for the rest of the time
    the looking process was late itself. `time`: their sum."""

    def __init__(self, tick_s: float, now: float) -> None:
        self._longest_s = 2 * tick_s
        self._last = now
        self.time = 0.0

    def passed(self, now: float) -> float:
        """The seconds since the last call that count."""
        passed, self._last = min(max(0.0, now - self._last), self._longest_s), now
        self.time += passed
        return passed


@dataclass
class Lease:
    """One claim of one worker, until the clock says `until`."""

    name: str
    claim: Claim
    until: float


class Leases:
    """All leases; a slot has at most one. States of a lease: granted -> (settled | expired)."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._by_task: dict[str, Lease] = {}
        self._by_name: dict[str, dict[str, Lease]] = {}

    def grant(self, name: str, claim: Claim, now: float) -> Lease:
        lease = Lease(name, claim, now + self.lease_s)
        self._by_task[claim.task] = lease
        self._by_name.setdefault(name, {})[claim.task] = lease
        return lease

    def find(self, task: str) -> Lease | None:
        return self._by_task.get(task)

    def of(self, name: str) -> list[Lease]:
        """What a worker holds, oldest first."""
        return list(self._by_name.get(name, {}).values())

    def renew(self, name: str, tasks: Iterable[str], now: float) -> list[str]:
        """Extend the leases of these tasks; returns the tasks that this worker does not hold."""
        mine, tasks = self._by_name.get(name, {}), list(tasks)
        for task in mine.keys() & tasks:
            mine[task].until = now + self.lease_s
        return [task for task in tasks if task not in mine]

    def settle(self, lease: Lease) -> None:
        """The claim has ended, in whatever way."""
        task = lease.claim.task
        if self._by_task.pop(task, None) is not None:
            self._by_name[lease.name].pop(task)
            if not self._by_name[lease.name]:
                del self._by_name[lease.name]

    def over(self, now: float) -> list[Lease]:
        """Leases whose time is over."""
        return [lease for lease in self._by_task.values() if lease.until <= now]


# -- counts -----------------------------------------------


BAD = ("malformed", "version", "oversize", "refused", "not_yours", "full", "too_large")  # a person should look at these
MOST_NAMES = 256
OTHERS = "(others)"


class Tally:
    """`add` an event of a worker; `plain` is all of it as JSON can hold it."""

    def __init__(self, before: Any = None, most: int = MOST_NAMES) -> None:
        self._most = most
        self.workers: dict[str, Counter[str]] = {}
        self.latest: dict[str, str] = {}
        self.changed = False
        self._load(before)

    def add(self, name: str, event: str, count: int = 1, text: str = "") -> None:
        name = self.known(name)
        self.workers.setdefault(name, Counter())[event] += count
        if text:
            self.latest[name] = f"{event}: {text}"[:300]
        self.changed = True

    def plain(self) -> dict[str, Any]:
        return {
            name: {**dict(sorted(counts.items())), **({"latest": self.latest[name]} if name in self.latest else {})}
            for name, counts in sorted(self.workers.items())
        }

    def known(self, name: str) -> str:
        """The name that this one is counted under: beyond `most` names, all further ones are one."""
        name = name or "(unnamed)"
        return name if name in self.workers or len(self.workers) < self._most else OTHERS

    def _load(self, before: Any) -> None:
        """Continue from what an earlier keeper wrote; anything unexpected in it is left out."""
        for name, counts in (before if isinstance(before, dict) else {}).items():
            if isinstance(counts, dict):
                self.workers[str(name)] = Counter({k: v for k, v in counts.items() if isinstance(v, int)})
                if isinstance(counts.get("latest"), str):
                    self.latest[str(name)] = counts["latest"]


# -- decisions --------------------------------------------


MOST_HELD = 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,38}")  # it stands in a topic, and the process table keeps 39 bytes
RECENT = 8192
FORGOTTEN_LEASES = 2.0  # a worker that is silent for so many leases and holds nothing is removed
TASK_OVERHEAD = 512
FATES = {
    "rollout": {"prompt": Fate.UNRENDERED, "too_long": Fate.LONG, "malformed": Fate.MALFORMED},
    "reward": {"raised": Fate.REWARD_RAISED, "hung": Fate.REWARD_HUNG, "malformed": Fate.MALFORMED},
}


@dataclass(frozen=True)
class GatewaySettings:
    """What the topology says. `reserved` are names of the run's own processes; `biggest` bytes a task may have;
    `most_members` leaves the run its own entries in the process table.
    """

    lease_s: float
    max_message_bytes: int
    biggest: int
    most_members: int
    reserved: frozenset[str]
    welcome: g.GatewayWelcome  # its constant fields


@dataclass
class _Known:
    """A member, and what is remembered of it for as long as this keeper lives."""

    member: RemoteWorker
    seen: float
    claim_req: int = 0


class Desk:
    """`handle` for every request, `tick` at least once a second, `goodbye` at an orderly end."""

    def __init__(self, book: RemoteLedger, settings: GatewaySettings, tally: Tally, now: float) -> None:
        self.book, self.settings, self.tally = book, settings, tally
        self.limits = AnswerLimits(settings.welcome.max_prompt_tokens, 0)
        self.clock = FairClock(TICK_S, now)
        self.leases = Leases(settings.lease_s)
        self.known: dict[str, _Known] = {}
        self._recent: OrderedDict[str, str] = OrderedDict()  # settled task -> who did it
        self._adopt()

    def _adopt(self) -> None:
        """Take over what an earlier keeper worked on, every lease in full."""
        names = {}
        for member in self.book.members():
            self.known[member.name] = _Known(member, self.clock.time)
            names[member.index] = member.name
        for index, claim in self.book.held():
            self.leases.grant(names[index], claim, self.clock.time)

    # -- what comes in --------------------------------------------------------------------------------------------

    def handle(self, message: Remote, now: float) -> list[Message]:
        """Do what a request asks; the answers go to its sender."""
        self.clock.passed(now)
        if isinstance(message, g.RemoteJoin):
            return [self._join(message)]
        known = self.known.get(message.sender)
        if known is None or message.life > known.member.life:
            # Not counted: every worker with a new keeper or a new name gets this answer.
            return [_answer(message, "unknown", "this keeper does not know you: send REMOTE_JOIN, then this again")]
        if message.life < known.member.life:
            return [self._replaced(message)]
        self._seen(known)
        if isinstance(message, g.RemoteClaim):
            return self._claim(known, message)
        return [self._other(known, message)]

    def _other(self, known: _Known, message: Remote) -> Message:
        if isinstance(message, g.RemoteExtend):
            lost = self.leases.renew(message.sender, message.holding, self.clock.time)
            return _answer(message, "done", lost=lost)
        if isinstance(message, g.RemoteGenerated):
            return self._settle(known, message, message.task, self._generated(known, message))
        if isinstance(message, g.RemoteRewarded):
            return self._settle(known, message, message.task, self._rewarded(known, message))
        if isinstance(message, g.RemoteFail):
            return self._settle(known, message, message.task, self._failed(known, message))
        self._remove(known, self.book.give_back)
        return _answer(message, "done")

    def heartbeat(self, name: str, now: float) -> None:
        """A sign of life: it keeps the worker's entry, not its leases."""
        self.clock.passed(now)
        if name in self.known:
            self._seen(self.known[name])

    def unreadable(self, sender: str, code: str, about: str, detail: str) -> list[Message]:
        """The answer to bytes that were no message of this protocol, from a sender that could still be read."""
        self.tally.add(sender, code, text=f"{about}: {detail}")
        return [g.GatewayAnswer(code=code, about=about[: m.MAX_NAME], text=detail)] if sender else []

    def tick(self, now: float) -> list[Lease]:
        """End the leases that are over and remove silent workers. Returns the leases that ended."""
        self.clock.passed(now)
        over = self.leases.over(self.clock.time)
        for lease in over:
            self._expire(lease)
        silent = FORGOTTEN_LEASES * self.settings.lease_s
        for known in list(self.known.values()):
            if self.clock.time - known.seen > silent and not self.leases.of(known.member.name):
                self._remove(known, self.book.give_back)
        return over

    def goodbye(self) -> None:
        """An orderly end of the run: take every claim back."""
        for known in list(self.known.values()):
            self._remove(known, self.book.give_back)

    # -- workers --------------------------------------------------------------------------------------------------

    def _join(self, message: g.RemoteJoin) -> Message:
        known = self.known.get(message.sender)
        if known is not None and message.life < known.member.life:
            return self._replaced(message)
        problem = self._refusal(message)
        if problem is not None:
            return problem
        if known is not None and (message.life > known.member.life or message.role != known.member.role):
            self._remove(known, self.book.expire)  # its work ended with it, as in any death
            known = None
        try:
            known = known or self._enter(message)
        except NoRoom as full:
            return self._refuse(message, "full", str(full))
        self._seen(known)
        return self._welcome(message, known.member.index)

    def _enter(self, message: g.RemoteJoin) -> _Known:
        most = self.settings.most_members
        if len(self.known) >= most:
            raise NoRoom(f"the process table has {most} entries for workers from outside; raise ring.processes")
        index = self.book.enter(message.role, message.sender, message.life)
        made = _Known(RemoteWorker(index, message.role, message.sender, message.life), self.clock.time)
        self.known[message.sender] = made
        self.tally.add(message.sender, "joined")
        return made

    def _refusal(self, message: g.RemoteJoin) -> Message | None:
        settings, name = self.settings, message.sender
        if message.role not in FATES:
            return self._refuse(message, "refused", f"role {message.role!r}: it must be rollout or reward")
        if not _NAME.fullmatch(name):
            rule = "a worker's name has 1 to 39 letters, digits, dots, dashes or underscores"
            return self._refuse(message, "refused", f"sender {name!r}: {rule}")
        if name in settings.reserved:
            return self._refuse(message, "refused", f"{name!r} is a process of this run: choose another name")
        if settings.biggest > settings.max_message_bytes:
            rule = f"a task may have {settings.biggest} bytes, a message {settings.max_message_bytes}"
            remedy = f"set bus.max_message_bytes to {settings.biggest} or more"
            return self._refuse(message, "too_large", f"{rule}: {remedy}")
        return None

    def _welcome(self, message: g.RemoteJoin, index: int) -> Message:
        made = self.settings.welcome
        return g.GatewayWelcome(
            life=message.life, req=message.req, index=index, lease_s=self.settings.lease_s, max_capacity=MOST_HELD,
            max_message_bytes=self.settings.max_message_bytes, max_prompt_tokens=made.max_prompt_tokens,
            seed=made.seed, model=made.model, prompt_key=made.prompt_key, answer_key=made.answer_key,
            template=made.template,
        )

    def _replaced(self, message: Remote) -> Message:
        return _answer(message, "replaced", "a newer life of this name has joined: exit, or take another name")

    def _seen(self, known: _Known) -> None:
        known.seen = self.clock.time
        self.book.show(known.member.index, len(self.leases.of(known.member.name)))

    def _remove(self, known: _Known, end: Callable[[int, Claim], object]) -> None:
        index, name = known.member.index, known.member.name
        for lease in self.leases.of(name):
            self.leases.settle(lease)
            end(index, lease.claim)
        self.book.leave(index)
        del self.known[name]

    # -- claims ---------------------------------------------------------------------------------------------------

    def _claim(self, known: _Known, message: g.RemoteClaim) -> list[Message]:
        if message.req < known.claim_req:
            return []  # a late copy: its capacity and its tasks are out of date
        known.claim_req = message.req
        name, member = message.sender, known.member
        self.leases.renew(name, message.holding, self.clock.time)
        named = set(message.holding)
        to_send = [lease for lease in self.leases.of(name) if lease.claim.task not in named]
        to_send += self._take(member, min(message.capacity, MOST_HELD))
        self._seen(known)
        return self._tasks(message, member, to_send)

    def _take(self, member: RemoteWorker, capacity: int) -> list[Lease]:
        holding = self.leases.of(member.name)
        room = capacity - len(holding)
        if room <= 0 or any(lease.claim.alone for lease in holding):
            return []
        taken = self.book.take(member.index, member.role, room, not holding)
        if taken:
            self.tally.add(member.name, "claimed", len(taken))
        return [self.leases.grant(member.name, claim, self.clock.time) for claim in taken]

    def _tasks(self, message: g.RemoteClaim, member: RemoteWorker, leases: list[Lease]) -> list[Message]:
        """The claims in as few messages as their size allows; at least one message."""
        packs: list[list[g.Task]] = [[]]
        size = 0
        for lease in leases:
            task = self.book.task(member.index, lease.claim)
            if task is None:
                self.leases.settle(lease)
                continue
            weight = _weight(task)
            if packs[-1] and size + weight > self.settings.max_message_bytes // 2:
                packs.append([])
                size = 0
            packs[-1].append(task)
            size += weight
        return [g.GatewayTasks(life=message.life, req=message.req, tasks=pack) for pack in packs]

    def _expire(self, lease: Lease) -> None:
        self.leases.settle(lease)
        dropped = self.book.expire(self.known[lease.name].member.index, lease.claim)
        self.tally.add(lease.name, "dropped" if dropped else "expired")

    # -- results --------------------------------------------------------------------------------------------------

    def _generated(self, known: _Known, message: g.RemoteGenerated) -> Callable[[Claim], str]:
        def act(claim: Claim) -> str:
            if known.member.role != "rollout":
                raise BadAnswer(f"{message.sender} is a {known.member.role} worker: it has no answers to give")
            most, segment = self.book.most_tokens(claim)
            answer = ledger.answer(message, self.limits, most, segment)
            self.book.commit_answer(known.member.index, claim, answer)
            return "answered"

        return act

    def _rewarded(self, known: _Known, message: g.RemoteRewarded) -> Callable[[Claim], str]:
        def act(claim: Claim) -> str:
            if known.member.role != "reward":
                raise BadAnswer(f"{message.sender} is a {known.member.role} worker: it has no rewards to give")
            self.book.commit_reward(known.member.index, claim, ledger.reward(message), message.parts)
            return "rewarded"

        return act

    def _failed(self, known: _Known, message: g.RemoteFail) -> Callable[[Claim], str]:
        def act(claim: Claim) -> str:
            if not message.drop:
                self.book.give_back(known.member.index, claim)
                return "handed_back"
            fates = FATES[known.member.role]
            if message.drop not in fates:
                raise BadAnswer(f"drop = {message.drop!r}: a {known.member.role} worker drops for {sorted(fates)}")
            self.book.drop(known.member.index, claim, fates[message.drop])
            return "dropped"

        return act

    def _settle(self, known: _Known, message: Remote, task: str, act: Callable[[Claim], str]) -> Message:
        """End a claim by `act`, which gives the word for the tally; or say why not."""
        lease = self.leases.find(task)
        if lease is None:
            return self._settled_before(message, task)
        if lease.name != message.sender:
            return self._refuse(message, "not_yours", f"task {task} is held by {lease.name}", task)
        try:
            event = act(lease.claim)
        except (BadAnswer, NoRoom) as problem:
            return self._refuse(message, "refused", str(problem), task)
        except ClaimGone:
            self.leases.settle(lease)
            return _answer(message, "late", task=task)
        self.leases.settle(lease)
        self._remember(task, message.sender)
        self.tally.add(message.sender, event)
        return _answer(message, "done", task=task)

    def _settled_before(self, message: Remote, task: str) -> Message:
        by = self._recent.get(task)
        if by is not None and by != message.sender:
            return self._refuse(message, "not_yours", f"task {task} was {by}'s", task)
        claim = _parse(task)
        if claim is None:
            return self._refuse(message, "refused", f"task {task!r}: no claim has such a name (slot.seq.uid)", task)
        if by is not None or self.book.committed(*claim):
            return _answer(message, "already", task=task)
        self.tally.add(message.sender, "late")
        return _answer(message, "late", "this claim has ended: its lease was over, or it was handed back", task)

    def _remember(self, task: str, name: str) -> None:
        self._recent[task] = name
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)

    def _refuse(self, message: Remote, code: str, text: str, task: str = "") -> Message:
        self.tally.add(message.sender, code, text=text)
        return _answer(message, code, f"{message.sender}: {text}", task)


def _answer(message: Remote, code: str, text: str = "", task: str = "", lost: list[str] | None = None) -> Message:
    return g.GatewayAnswer(
        code=code, life=message.life, req=message.req, about=name_of(type(message)), task=task, text=text,
        lost=lost or [],
    )


def _parse(task: str) -> tuple[int, int, int] | None:
    """(slot, seq, uid) of a claim's name."""
    parts = task.split(".")
    if len(parts) != 3 or not all(part.isascii() and part.isdecimal() and len(part) <= 20 for part in parts):
        return None
    slot, seq, uid = map(int, parts)
    return slot, seq, uid


def _weight(task: g.Task) -> int:
    """An upper bound of a task's bytes on the wire."""
    arrays = sum(len(tensor.data) + 64 for tensor in task.tensors.values())
    return len(task.record.encode()) + len(task.completion.encode()) + arrays + TASK_OVERHEAD
