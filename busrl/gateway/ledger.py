"""The ledger as the gateway needs it: remote workers, the slots that they hold, and what an answer of theirs must be.

`busrl.roles.keeper` has the `RemoteLedger` on a ring; tests have one in memory. Imports the protocol and NumPy. Knows
nothing of the routes of messages or of time.

- Each call that changes a slot is one compare-and-swap in the name of the entry that holds it.
- What a remote worker holds is in the ledger and nowhere else: `members` and `held` give it all to a new keeper.
- An answer is checked whole before anything of it is written: types, shapes, finite numbers, lengths. `BadAnswer` says
  the value, the rule and the place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from busrl.protocol import gateway as g
from busrl.states import Fate

EOS, LENGTH = 1, 2
CLOSE_TO_ZERO = 1e-4  # a log-probability may be this much above 0 from rounding


class ClaimGone(Exception):
    """The slot is no longer at the word of the claim. Only the keeper moves it, so this is not expected."""


class NoRoom(Exception):
    """The ledger has no room: no entry for a worker, or no bytes for an answer. The message says what to change."""


class Claim(NamedTuple):
    """One claim: the slot, the word that owns it, and the two numbers that name it for ever."""

    slot: int
    word: int
    seq: int
    uid: int
    alone: bool = False

    @property
    def task(self) -> str:
        """The name of the claim on the wire."""
        return f"{self.slot}.{self.seq}.{self.uid}"


@dataclass(frozen=True)
class RemoteWorker:
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


class RemoteLedger(Protocol):
    """The ledger as the keeper works on it for remote workers. `index` is always that of the worker's entry."""

    def members(self) -> list[RemoteWorker]:
        """All REMOTE entries."""

    def held(self) -> list[tuple[int, Claim]]:
        """All slots in a working state whose owner is a REMOTE entry, with its index."""

    def enter(self, role: str, name: str, life: int) -> int:
        """A new entry; `NoRoom` if there is none free."""

    def leave(self, index: int) -> None:
        """Free an entry that holds nothing."""

    def show(self, index: int, tasks: int) -> None:
        """Show in the process table that the worker lives and holds so many tasks."""

    def take(self, index: int, role: str, limit: int, idle: bool) -> list[Claim]:
        """Claim up to `limit` slots for a worker; `idle` says that it holds nothing, so it may take a suspect one."""

    def task(self, index: int, claim: Claim) -> g.Task | None:
        """The claim as it travels; None if its payload could not be read, and the sample was dropped for it."""

    def most_tokens(self, claim: Claim) -> tuple[int, int]:
        """Of a rollout claim: how many tokens may still be generated, and the number of its segment."""

    def commit_answer(self, index: int, claim: Claim, answer: Answer) -> None:
        """Write and commit a segment. `NoRoom`: it does not fit, nothing is committed. `ClaimGone`: the slot moved."""

    def commit_reward(self, index: int, claim: Claim, reward: float, parts: dict[str, float]) -> None:
        """Write and commit a reward; as above."""

    def give_back(self, index: int, claim: Claim) -> None:
        """Back to rest as if it had never been claimed."""

    def expire(self, index: int, claim: Claim) -> bool:
        """Back to rest with one attempt counted; True if that was one too many and the sample was dropped."""

    def drop(self, index: int, claim: Claim, fate: Fate) -> None:
        """End the sample for an accident or by rule."""

    def committed(self, slot: int, seq: int, uid: int) -> bool:
        """Whether the last commit in this slot was that of this claim."""


# -- what an answer must be ---------------------------------


class BadAnswer(Exception):
    """The content of a message breaks a rule."""


@dataclass(frozen=True)
class AnswerLimits:
    """`vocabulary` 0 = not known; `newest` is the newest version that was published."""

    prompt_tokens: int
    vocabulary: int
    newest: int = 0


def answer(message: g.RemoteGenerated, limits: AnswerLimits, most_tokens: int, segment: int) -> Answer:
    """The arrays of an answer; `most_tokens` may still be generated in segment number `segment`."""
    tokens = _array(message.tokens, "tokens", np.int32, most_tokens)
    logprobs = _array(message.logprobs, "logprobs", np.float32, most_tokens)
    versions = _array(message.versions, "versions", np.uint32, most_tokens)
    if not len(tokens) == len(logprobs) == len(versions):
        raise BadAnswer(
            f"{len(tokens)} tokens, {len(logprobs)} logprobs, {len(versions)} versions: there must be as many of each"
        )
    _check_ids("tokens", tokens, limits.vocabulary)
    _check_logprobs(logprobs)
    if int(versions.max()) > limits.newest:
        raise BadAnswer(f"versions has {int(versions.max())}: the newest version that was published is {limits.newest}")
    if message.finish not in (EOS, LENGTH):
        raise BadAnswer(f"finish = {message.finish}: it must be {EOS} (ended by itself) or {LENGTH} (cut by a limit)")
    if message.finish == EOS and not message.done:
        raise BadAnswer(f"finish = {EOS} and done = false: an answer that ended by itself has no further segment")
    prompt_ids = None if segment else _prompt(message.prompt_ids, limits)
    return Answer(tokens, logprobs, versions, prompt_ids, message.text, message.finish, message.done)


def reward(message: g.RemoteRewarded) -> float:
    """The reward of a message; finite, as are its parts."""
    for name, value in {"reward": message.reward, **message.parts}.items():
        if not math.isfinite(value):
            raise BadAnswer(f"{name} = {value}: a reward must be finite")
    return float(message.reward)


def tensor(array: npt.NDArray[Any]) -> g.Tensor:
    """An array as it travels."""
    return g.Tensor(array.dtype.name, list(array.shape), np.ascontiguousarray(array).tobytes())


def _prompt(given: g.Tensor | None, limits: AnswerLimits) -> npt.NDArray[np.int32]:
    if given is None:
        raise BadAnswer("prompt_ids is missing: the first segment brings the token ids of its prompt")
    ids = _array(given, "prompt_ids", np.int32, limits.prompt_tokens)
    _check_ids("prompt_ids", ids, limits.vocabulary)
    return ids


def _array(given: g.Tensor, what: str, dtype: Any, most: int) -> npt.NDArray[Any]:
    wanted = np.dtype(dtype)
    if given.dtype != wanted.name:
        raise BadAnswer(f"{what} has dtype {given.dtype!r}: it must be {wanted.name}")
    if len(given.shape) != 1:
        raise BadAnswer(f"{what} has shape {given.shape}: it must have one dimension")
    count = given.shape[0]
    if count * wanted.itemsize != len(given.data):
        raise BadAnswer(f"{what} says shape {given.shape} of {wanted.name}, and has {len(given.data)} bytes")
    if not 1 <= count <= most:
        raise BadAnswer(f"{what} has {count} elements: there must be 1 to {most}")
    return np.frombuffer(given.data, wanted.newbyteorder("<")).astype(wanted)


def _check_ids(what: str, ids: npt.NDArray[np.int32], vocabulary: int) -> None:
    if int(ids.min()) < 0 or (vocabulary and int(ids.max()) >= vocabulary):
        bound = f"0 to {vocabulary - 1}" if vocabulary else "0 or more"
        raise BadAnswer(f"{what} has ids from {int(ids.min())} to {int(ids.max())}: an id is {bound}")


def _check_logprobs(logprobs: npt.NDArray[np.float32]) -> None:
    if not bool(np.isfinite(logprobs).all()):
        raise BadAnswer("logprobs has a value that is not finite")
    if float(logprobs.max()) > CLOSE_TO_ZERO:
        raise BadAnswer(f"logprobs has {float(logprobs.max()):g}: a log-probability is at most 0")
