"""A ledger, workers and a network in memory: what the gateway's rules are tested with, without a socket or a ring."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from busrl.hosts import messages as g
from busrl.hosts.desk import AnswerLimits, ClaimedTask, Desk, Judged, Refused, RemoteAnswer, tensor
from busrl.states import Fate
from busrl.system.clocks import Tally

LEASE_S = 10.0
RING = "a1" * 16
MOST_TRIES = 3


class Killed(Exception):
    """The keeper dies at this point."""


class Member(NamedTuple):
    """An entry of a worker."""

    index: int
    role: str
    name: str
    life: int


@dataclass
class Slot:
    """One sample's slot: `owner` 0 = at rest. `ended` holds "" while it is open."""

    uid: int
    seq: int = 1
    owner: int = 0
    attempt: int = 0
    last_commit: int = 0
    alone: bool = False
    ended: str = ""


@dataclass
class Ledger:
    """A `RemoteLedger` in memory. It outlives every keeper; `kill_in_commit` ends one between its two stores."""

    slots: list[Slot]
    entries: dict[int, Member] = field(default_factory=dict)
    most_entries: int = 8
    kill_in_commit: bool = False
    commits: list[tuple[int, int, str]] = field(default_factory=list)  # slot, seq, name
    expired: list[tuple[int, int]] = field(default_factory=list)
    shown: dict[int, int] = field(default_factory=dict)

    def members(self) -> list[Member]:
        return list(self.entries.values())

    def claims(self) -> list[tuple[int, ClaimedTask]]:
        return [(slot.owner, self._claim(i)) for i, slot in enumerate(self.slots) if slot.owner and not slot.ended]

    def _claim(self, i: int) -> ClaimedTask:
        slot = self.slots[i]
        return ClaimedTask(i, slot.seq << 8 | slot.owner, slot.seq, slot.uid, slot.alone)

    def enter(self, role: str, name: str, life: int) -> int:
        free = next((i for i in range(1, self.most_entries + 1) if i not in self.entries), None)
        if free is None:
            raise Refused("all entries are taken", "full")
        assert all(member.name != name for member in self.entries.values()), "one entry for one name"
        self.entries[free] = Member(free, role, name, life)
        return free

    def leave(self, index: int) -> None:
        assert not any(slot.owner == index for slot in self.slots), "an entry is freed only when it holds nothing"
        del self.entries[index]

    def show(self, index: int, tasks: int) -> None:
        assert tasks == sum(slot.owner == index for slot in self.slots)
        self.shown[index] = tasks

    def take(self, index: int, role: str, limit: int, idle: bool) -> list[ClaimedTask]:
        assert index in self.entries and limit > 0
        free = [i for i, slot in enumerate(self.slots) if not slot.owner and not slot.ended]
        fresh = [i for i in free if self.slots[i].attempt <= 1]
        alone = not fresh and idle
        chosen = fresh[:limit] or (free[:1] if idle else [])
        for i in chosen:
            slot = self.slots[i]
            slot.owner, slot.seq, slot.attempt, slot.alone = index, slot.seq + 1, slot.attempt + 1, alone
        return [self._claim(i) for i in chosen]

    def tasks(self, index: int, claims: list[ClaimedTask]) -> list[g.Task | None]:
        return [self.task(index, claim) for claim in claims]

    def task(self, index: int, claim: ClaimedTask) -> g.Task | None:
        self._check(index, claim)
        return g.Task(claim.task, claim.slot, claim.seq, claim.uid, "{}", max_new_tokens=8)

    def limits(self, claims: list[ClaimedTask]) -> list[AnswerLimits]:
        return [AnswerLimits(8, 0, 16)] * len(claims)

    def commit_answer(
        self, index: int, claim: ClaimedTask, answer: RemoteAnswer, limits: AnswerLimits, judged: Judged | None = None
    ) -> None:
        self._commit(index, claim)

    def commit_reward(self, index: int, claim: ClaimedTask, reward: float, parts: dict[str, float]) -> None:
        self._commit(index, claim)

    def _commit(self, index: int, claim: ClaimedTask) -> None:
        self._check(index, claim)
        slot = self.slots[claim.slot]
        slot.last_commit = slot.seq
        if self.kill_in_commit:
            self.kill_in_commit = False
            raise Killed
        slot.owner, slot.ended = 0, "done"
        self.commits.append((claim.slot, claim.seq, self.entries[index].name))

    def give_back(self, index: int, claim: ClaimedTask) -> None:
        self._check(index, claim)
        slot = self.slots[claim.slot]
        slot.owner, slot.attempt, slot.alone = 0, slot.attempt - 1, False

    def expire(self, index: int, claim: ClaimedTask) -> bool:
        self._check(index, claim)
        slot = self.slots[claim.slot]
        slot.owner, slot.last_commit = 0, 0
        self.expired.append((claim.slot, claim.seq))
        return False

    def drop(self, index: int, claim: ClaimedTask, fate: Fate) -> None:
        self._check(index, claim)
        slot = self.slots[claim.slot]
        slot.owner, slot.ended = 0, fate.letter

    def committed(self, slot: int, seq: int, uid: int) -> bool:
        return slot < len(self.slots) and self.slots[slot].uid == uid and self.slots[slot].last_commit == seq

    def _check(self, index: int, claim: ClaimedTask) -> None:
        slot = self.slots[claim.slot]
        owned = slot.owner == index and slot.seq == claim.seq and not slot.ended
        assert owned, "written only under the claim's own word"


def settings(
    lease_s: float = LEASE_S, reserved: frozenset[str] = frozenset(), biggest: int = 4096, most_members: int = 8
) -> dict[str, Any]:
    welcome = g.GatewayWelcome(life=0, lease_s=lease_s, max_message_bytes=1 << 20, max_prompt_tokens=16)
    return {"welcome": welcome, "biggest": biggest, "most_members": most_members, "reserved": reserved, "ring": RING}


def new_desk(ledger: Ledger, now: float = 0.0, **changed: object) -> Desk:
    return Desk(ledger, Tally(), now, **settings(**changed))  # type: ignore[arg-type]


def answer_to(task: str, *, life: int = 1, sender: str = "a", count: int = 3, **changed: object) -> g.RemoteGenerated:
    """A sound answer of a rollout worker; `changed` breaks one field."""
    fields = {
        "tokens": tensor(np.arange(count, dtype=np.int32)),
        "logprobs": tensor(np.full(count, -0.5, np.float32)),
        "versions": tensor(np.zeros(count, np.uint32)),
        "prompt_ids": tensor(np.arange(4, dtype=np.int32)),
        "text": "abc",
    }
    return g.RemoteGenerated(life=life, task=task, sender=sender, **{**fields, **changed})


def batch_of(tasks: list[str], *, life: int = 1, sender: str = "a", **changed: object) -> g.RemoteBatch:
    """Sound answers of a host to these tasks; `changed` breaks a field."""
    count = len(tasks)
    fields = {
        "lengths": [3] * count, "prompt_lengths": [4] * count, "finishes": [1] * count, "texts": ["abc"] * count,
        "tokens": tensor(np.arange(3 * count, dtype=np.int32)),
        "logprobs": tensor(np.full(3 * count, -0.5, np.float32)),
        "versions": tensor(np.zeros(3 * count, np.uint32)),
        "prompt_ids": tensor(np.arange(4 * count, dtype=np.int32)),
    }
    return g.RemoteBatch(life=life, tasks=tasks, sender=sender, **{**fields, **changed})  # type: ignore[arg-type]
