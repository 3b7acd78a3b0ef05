"""An episode of several model calls as arrays: their shapes, the rules that they keep, and their form in the log.

| name         | dtype        | holds                                                                              |
|--------------|--------------|------------------------------------------------------------------------------------|
| ids          | int32 [N]    | all sequences, one after another, as the model read and wrote them                 |
| seqs         | int32 [S]    | their lengths                                                                      |
| turns        | int32 [T, 8] | sequence, begin and end in it, finish, call number, ms waiting, ms generating,     |
|              |              | flags (1 = trained); sorted by sequence and begin                                  |
| logprobs     | float32 [M]  | of the sampled ids, turn after turn                                                |
| versions     | uint32 [M]   | of the weights that sampled them                                                   |
| turn_rewards | float32 [T]  | optional                                                                           |
| keys         | uint8        | optional: the key of each turn as UTF-8, "" for none, a newline between two        |
| reward       | float64 [1+] | optional: what the episode returned, and the parts of it                           |
| messages     | uint8        | optional, JSON: the messages of each sequence                                      |
| context      | uint64 [5+]  | optional, CONTEXT: ids that its calls read, ids of those that were computed, calls |
|              |              | of unknown tools, calls with other sampling than the run's, refused calls; OF_SEATS |
| routes       | [R, L, K]    | of a mixture of experts: ids of experts (uint8, or uint16), a row for each id of a |
|              |              | sequence before the last one that a turn of it sampled, sequence after sequence    |
| text         | uint8        | the last turn's text                                                               |

Pure: talks to nothing, and knows nothing of slots, engines, templates or clients.

- Another program may have written an episode: `fault_of` says which rule it breaks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from busrl.topology import Topology

Array = npt.NDArray[Any]
SEQUENCE, BEGIN, END, FINISH, CALL, WAITED, GENERATED, FLAGS = COLUMNS = range(8)
TRAINED = 1  # a flag
CONTEXT = ("read", "computed", "unparsed", "overridden", "refused")
# Of an episode of several seats these follow: whether sides are played without this one or it without them, ids that
# the other seats drew, the steps that their learners had made since the weights of each, in sum, and, where there were
# any, calls that another engine of a pool answered than the one that the episode had begun with.
OF_SEATS = ("alone", "partner_tokens", "partner_age", "opponent_switched")
TYPES: dict[str, tuple[npt.DTypeLike, int]] = {  # with the number of dimensions
    "ids": (np.int32, 1), "seqs": (np.int32, 1), "turns": (np.int32, 2), "logprobs": (np.float32, 1),
    "versions": (np.uint32, 1), "turn_rewards": (np.float32, 1), "reward": (np.float64, 1), "messages": (np.uint8, 1),
    "context": (np.uint64, 1), "keys": (np.uint8, 1),
}
NEEDED = ("ids", "seqs", "turns", "logprobs", "versions")
UNLIMITED = 1 << 30
KEY_BYTES = 64  # of a turn's key, at most
LARGEST_REWARD = float(np.finfo(np.float32).max)  # of a turn


@dataclass(frozen=True)
class EpisodeLimits:
    """Bounds of one episode. `context`: ids of the longest path; `sampled`: of all calls; `tokens`: of all
    training sequences; `turns`; `sequences`."""

    context: int = UNLIMITED
    sampled: int = UNLIMITED
    tokens: int = UNLIMITED
    turns: int = UNLIMITED
    sequences: int = UNLIMITED

    @classmethod
    def of(cls, topology: Topology) -> EpisodeLimits:
        agents = topology.agents
        return cls(*topology.episode_limits, agents.max_turns, agents.max_sequences)


@dataclass(frozen=True)
class EpisodeArrays:
    """N ids of S sequences, T turns and M sampled ids; `turn_rewards` is None where no turn has a reward, `keys` empty
    where none has a key."""

    ids: Array
    seqs: Array
    turns: Array
    logprobs: Array
    versions: Array
    turn_rewards: Array | None
    keys: tuple[str, ...] = field(default=(), kw_only=True)
    routes: Array | None = field(default=None, kw_only=True)

    def logged(self) -> dict[str, Any]:
        """The fields of a record of the log (`busrl.ledger.wal.SampleRecord`)."""
        marks = 2 * self.turns[:, CALL].astype(np.int64) + (self.turns[:, FLAGS] & TRAINED)
        turns = np.column_stack([self.turns[:, [SEQUENCE, BEGIN, END]], marks])
        return {
            "prompt_ids": b"", "token_ids": self.ids.tobytes(), "logprobs": self.logprobs.tobytes(),
            "versions": self.versions.tobytes(), "seqs": self.seqs.tolist(), "turns": turns.ravel().tolist(),
            "turn_rewards": [] if self.turn_rewards is None else self.turn_rewards.tolist(), "keys": list(self.keys),
        }

    def trained(self) -> npt.NDArray[np.bool_]:
        """A mask of the sampled ids: those of trained turns."""
        return np.repeat((self.turns[:, FLAGS] & TRAINED) == TRAINED, self.turns[:, END] - self.turns[:, BEGIN])

    def oldest(self) -> int | None:
        """The oldest version of a trained token; None if none is trained."""
        versions = self.versions[self.trained()]
        return int(versions.min()) if len(versions) else None


def routed_rows(turns: Array) -> int:
    """The number of rows that the routes of an episode have; turns as in the slot or as in the log."""
    last = np.append(np.diff(turns[:, SEQUENCE]) != 0, True)
    return int((turns[last, END].astype(np.int64) - 1).sum())


def fault_of(episode: EpisodeArrays) -> str:
    """The rule that an episode breaks; "" if none. The learner checks the ids against the vocabulary."""

    ids, seqs, turns = episode.ids, episode.seqs.astype(np.int64), episode.turns.astype(np.int64)
    if not len(seqs) or not len(turns) or turns.shape[1] != len(COLUMNS):
        return f"{len(seqs)} sequences, turns {list(turns.shape)}: at least one of each, turns of 8 numbers"
    if seqs.min() < 1 or seqs.sum() != len(ids):
        return f"sequences of {listed(seqs)} ids, in all {seqs.sum()}: must be the {len(ids)} that there are"
    sequence = turns[:, SEQUENCE]
    if not np.array_equal(np.unique(sequence), np.arange(len(seqs))) or (np.diff(sequence) < 0).any():
        return f"turns are of the sequences {listed(sequence)}: each of the {len(seqs)} must have one, in their order"
    begin, end = turns[:, BEGIN], turns[:, END]
    least = np.where(np.diff(sequence, prepend=-1) == 0, np.roll(end, 1), 1)
    wrong = np.flatnonzero((begin < least) | (begin < 1) | (end <= begin) | (end > seqs[sequence]))
    if len(wrong):
        at = int(wrong[0])
        return (f"turn {at} is from {begin[at]} to {end[at]} of a sequence of {seqs[sequence[at]]}: must begin at "
                f"{max(1, int(least[at]))} or later, hold an id and end within it")
    count = int((end - begin).sum())
    if not count == len(episode.logprobs) == len(episode.versions):
        return f"{count} sampled ids, {len(episode.logprobs)} log-probs, {len(episode.versions)} versions"
    if not (np.isfinite(episode.logprobs) & (episode.logprobs <= 0)).all():
        return "a log-probability is above 0 or not a finite number"
    return _fault_of_rest(turns, episode.turn_rewards) or _fault_of_keys(episode)


def _fault_of_rest(turns: Array, rewards: Array | None) -> str:
    calls = turns[:, CALL]
    if calls.min() < 0 or len(np.unique(calls)) < len(calls):
        return f"call numbers {listed(calls)}: each turn needs one of its own, from 0"
    if rewards is not None and (len(rewards) != len(turns) or not np.isfinite(rewards).all()):
        return f"turn_rewards {listed(rewards)} of {len(turns)} turns: one finite number for each"
    return ""


def _fault_of_keys(episode: EpisodeArrays) -> str:
    if episode.keys and len(episode.keys) != len(episode.turns):
        return f"{len(episode.keys)} keys of {len(episode.turns)} turns: one for each"
    return next(filter(None, map(fault_of_key, episode.keys)), "")


def fault_of_key(key: str) -> str:
    """The rule that the key of a turn breaks; "" if none, as for no key."""
    size = len(key.encode(errors="replace"))
    if size > KEY_BYTES or not key.isprintable():
        return f"a turn's key of {size} bytes, {key[:KEY_BYTES]!r}: at most {KEY_BYTES}, of printable text"
    return ""


def joined_keys(keys: tuple[str, ...]) -> Array:
    """Keys as their tensor has them; empty where no turn has a key."""
    return np.frombuffer("\n".join(keys).encode(), np.uint8)


def split_keys(tensor: Array | None) -> tuple[str, ...]:
    """The keys that a tensor has; what is no UTF-8 becomes what no key may hold."""
    return () if tensor is None else tuple(tensor.tobytes().decode(errors="surrogateescape").split("\n"))


def listed(values: Array) -> str:
    """The first values as text."""
    text = ", ".join(map(str, values[:8].tolist()))
    return f"{text}, ..." if len(values) > 8 else text
