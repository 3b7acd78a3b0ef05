"""What the gateway needs of the ledger: its entries for remote workers, and the slots that they hold.

`busrl.roles.keeper` is the one on a ring; tests have one in memory. Knows nothing of messages' routes or time.

- Everything here that changes a slot is one compare-and-swap in the name of the entry that holds it.
- What a remote worker holds is in the ledger and nowhere else: `members` and `held` give it all back to a new keeper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from busrl.protocol import gateway as g
from busrl.states import Fate


class Gone(Exception):
    """The slot is no longer at the word of the claim. Nobody but the keeper moves it, so this is not expected."""


class Room(Exception):
    """The ledger has no room: no entry for a worker, or no bytes for an answer. The message says what to change."""


class Held(NamedTuple):
    """One claim: the slot, the word by which it is owned, and the two numbers that name it for ever."""

    slot: int
    word: int
    seq: int
    uid: int
    alone: bool = False

    @property
    def task(self) -> str:
        return task_id(self.slot, self.seq, self.uid)


def task_id(slot: int, seq: int, uid: int) -> str:
    """The name of a claim on the wire."""
    return f"{slot}.{seq}.{uid}"


@dataclass(frozen=True)
class Member:
    """A REMOTE entry of the process table: `life` says which start of that name it is."""

    index: int
    role: str
    name: str
    life: int


@dataclass(frozen=True)
class Answer:
    """A generated segment that was checked: arrays of one length, and what belongs to the whole completion."""

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.uint32]
    prompt_ids: npt.NDArray[np.int32] | None
    text: str
    finish: int
    done: bool


class Book(Protocol):
    """The ledger, as the keeper works on it for others. `index` is always that of the worker's entry."""

    def members(self) -> list[Member]:
        """All REMOTE entries."""

    def held(self) -> list[tuple[int, Held]]:
        """All slots in a working state whose owner is a REMOTE entry, with its index."""

    def enter(self, role: str, name: str, life: int) -> int:
        """A new entry; `Room` if there is none free."""

    def leave(self, index: int) -> None:
        """Free an entry that holds nothing."""

    def heard(self, index: int, tasks: int) -> None:
        """The worker was heard of and holds so many tasks: for whoever looks at the process table."""

    def take(self, index: int, role: str, limit: int, idle: bool) -> list[Held]:
        """Claim up to `limit` slots for a worker; `idle` says that it holds nothing, so it may take a suspect one."""

    def task(self, index: int, held: Held) -> g.Task | None:
        """The claim as it travels; None if its payload could not be read, and the sample was dropped for it."""

    def most_tokens(self, held: Held) -> tuple[int, int]:
        """Of a rollout claim: how many tokens may still be generated, and the number of its segment."""

    def commit_answer(self, index: int, held: Held, answer: Answer) -> None:
        """Write and commit a segment. `Room` if it does not fit (nothing is committed), `Gone` if the slot moved."""

    def commit_reward(self, index: int, held: Held, reward: float, parts: dict[str, float]) -> None:
        """Write and commit a reward; as above."""

    def give_back(self, index: int, held: Held) -> None:
        """Back to rest as if it had never been claimed."""

    def expire(self, index: int, held: Held) -> bool:
        """Back to rest, one attempt the poorer; True if that was one too many and the sample was dropped."""

    def drop(self, index: int, held: Held, fate: Fate) -> None:
        """End the sample for an accident or by rule."""

    def committed(self, slot: int, seq: int, uid: int) -> bool:
        """Whether the last commit in this slot was that of this claim."""
