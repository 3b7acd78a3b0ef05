"""An episode in its slot: the tensors of one commit, what a reader checks, and the shorter form of the learner's log.

| name         | dtype        | holds                                                                              |
|--------------|--------------|------------------------------------------------------------------------------------|
| ids          | int32 [N]    | all sequences, one after another, as the model read and wrote them                 |
| seqs         | int32 [S]    | their lengths                                                                      |
| turns        | int32 [T, 8] | sequence, begin and end in it, finish, call number, ms waiting, ms generating,     |
|              |              | flags (1 = trained); sorted by sequence and begin                                  |
| logprobs     | float32 [M]  | of the sampled ids, turn after turn                                                |
| versions     | uint32 [M]   | of the weights that sampled them                                                   |
| turn_rewards | float32 [T]  | optional                                                                           |
| reward       | float64 [1+] | optional: what the episode returned, and the parts of it                           |
| messages     | uint8        | optional, JSON: the messages of each sequence                                      |
| context      | uint64 [5]   | optional, CONTEXT: ids that its calls read, how many of those were computed, calls |
|              |              | of tools that are none, calls with other sampling than the run's, refused calls    |
| text         | uint8        | the last turn's text                                                               |

All are of segment 0, beside the scheduler's `task`. Talks to the ring. Knows nothing of engines, templates or clients.

- A slot holds an episode if it has `turns`; it has no `prompt_ids` and no `tokens` then.
- Another program may have written it: what breaks a rule is a BadTensor with the rule, and costs the sample (fate M).
- A sample's reward is the sum of its turns' rewards and what the whole was worth: whoever commits a reward adds them.
- An episode of another host is checked whole before anything of it is written, also against the run's limits.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from busrl.agents.tree import Limits, Trajectory
from busrl.errors import BadTensor, NoSuchTensor, SlotTooSmall
from busrl.hosts import messages as g
from busrl.hosts.gateway import Refused, read_tensor, tensor
from busrl.protocol import messages as m
from busrl.ring import Ring, seq_of
from busrl.roles.answers import read_as
from busrl.states import Finish
from busrl.topology import Topology

Array = npt.NDArray[Any]
SEQUENCE, BEGIN, END, FINISH, CALL, WAITED, GENERATED, FLAGS = COLUMNS = range(8)
TRAINED = 1  # a flag
CONTEXT = ("read", "computed", "unparsed", "overridden", "refused")
TYPES: dict[str, tuple[npt.DTypeLike, int]] = {  # with the number of dimensions
    "ids": (np.int32, 1), "seqs": (np.int32, 1), "turns": (np.int32, 2), "logprobs": (np.float32, 1),
    "versions": (np.uint32, 1), "turn_rewards": (np.float32, 1), "reward": (np.float64, 1), "messages": (np.uint8, 1),
    "context": (np.uint64, 1),
}
NEEDED = ("ids", "seqs", "turns", "logprobs", "versions")
LEAST_MESSAGES = 2  # bytes: [] where agents.transcript_bytes leaves no room
FOR_PEOPLE = ("context", "messages")  # it is trained without them too


# -- writing -----


def write_episode(ring: Ring, slot: int, word: int, episode: Trajectory, reward: Mapping[str, float] | float | None,
                  messages: bytes = b"", context: Sequence[int] = ()) -> None:
    """Write what an episode read and wrote into the slot that we own by `word`; the caller commits. `reward`: what it
    returned, a number or named parts of it; `context`: the numbers of CONTEXT. SlotTooSmall where there is no room, but
    for the messages."""
    arrays = {name: np.ascontiguousarray(getattr(episode, name), TYPES[name][0]) for name in NEEDED}
    if episode.turn_rewards is not None:
        arrays["turn_rewards"] = np.asarray(episode.turn_rewards, np.float32)
    if reward is not None:
        values = list(reward.values()) if isinstance(reward, Mapping) else []
        arrays["reward"] = np.array([sum(values) if isinstance(reward, Mapping) else reward, *values], np.float64)
    if context:
        arrays["context"] = np.array(context, np.uint64)
    if messages:
        arrays["messages"] = np.frombuffer(messages, np.uint8)
    write_pieces(ring, slot, word, arrays, episode.text)


def write_pieces(ring: Ring, slot: int, word: int, arrays: Mapping[str, Array], text: str) -> None:
    """The same of tensors by their names."""
    for name in (one for one in arrays if one not in FOR_PEOPLE):
        ring.put(slot, word, name, arrays[name], 0)
    ring.put(slot, word, "text", np.frombuffer(text.encode(errors="replace") or b"\0", np.uint8), 0)
    with contextlib.suppress(SlotTooSmall):
        for name in (one for one in FOR_PEOPLE if one in arrays):
            ring.put(slot, word, name, arrays[name], 0)


def commit_episode(
    ring: Ring, slot: int, word: int, episode: Trajectory | StoredEpisode, made_by: int
) -> m.DataGenerated | None:
    """Commit what was written. Version and step, of which the sample's age counts, are those of its admission or of its
    oldest trained token, whose weights step `made_by` made. Returns the doorbell; None if the slot has moved."""
    line = ring.line(slot)
    version, step = int(line["version"]), int(line["step"])
    if (oldest := oldest_of(episode)) is not None and oldest < version:
        version, step = oldest, min(step, made_by)
    last = episode.turns[int(np.argmax(episode.turns[:, CALL]))]
    ring.set(
        slot, word, version=version, step=step, finish=int(last[FINISH]), response_tokens=len(episode.logprobs),
        prompt_tokens=int(episode.turns[0, BEGIN]),
    )
    done = ring.commit_segment(slot, word, True)
    if not done:
        return None
    return m.DataGenerated(slot_id=slot, seq=seq_of(done), uid=int(line["uid"]), version=int(episode.versions[-1]),
                           status="generated")


def oldest_of(episode: Trajectory | StoredEpisode) -> int | None:
    """The oldest version of a trained token; None if none is trained."""
    trained = episode.versions[trained_of(episode.turns)]
    return int(trained.min()) if len(trained) else None


# -- reading -----


@dataclass(frozen=True)
class StoredEpisode:
    """The arrays of the table, checked; copies."""

    ids: Array
    seqs: Array
    turns: Array
    logprobs: Array
    versions: Array
    turn_rewards: Array | None

    def logged(self) -> dict[str, Any]:
        """The fields of a record of the log (`busrl.ledger.wal.SampleRecord`)."""
        marks = 2 * self.turns[:, CALL].astype(np.int64) + (self.turns[:, FLAGS] & TRAINED)
        turns = np.column_stack([self.turns[:, [SEQUENCE, BEGIN, END]], marks])
        return {
            "prompt_ids": b"", "token_ids": self.ids.tobytes(), "logprobs": self.logprobs.tobytes(),
            "versions": self.versions.tobytes(), "seqs": self.seqs.tolist(), "turns": turns.ravel().tolist(),
            "turn_rewards": [] if self.turn_rewards is None else self.turn_rewards.tolist(),
        }


def read_episode(ring: Ring, slot: int) -> StoredEpisode | None:
    """The episode of a slot that we hold; None if it holds none. BadTensor or NoSuchTensor where it breaks a rule."""
    if (turns := _optional(ring, slot, "turns")) is None:
        return None
    arrays = {name: turns if name == "turns" else _read(ring, slot, name) for name in NEEDED}
    found = StoredEpisode(**arrays, turn_rewards=_optional(ring, slot, "turn_rewards"))
    if text := fault_of(found):
        raise BadTensor(f"slot {slot}: {text}")
    return found


def fault_of(episode: StoredEpisode) -> str:
    """Which rule it breaks; "" if none. Ids are compared with the vocabulary where that is known: by the learner."""
    ids, seqs, turns = episode.ids, episode.seqs.astype(np.int64), episode.turns.astype(np.int64)
    if not len(seqs) or not len(turns) or turns.shape[1] != len(COLUMNS):
        return f"{len(seqs)} sequences, turns {list(turns.shape)}: at least one of each, turns of 8 numbers"
    if seqs.min() < 1 or seqs.sum() != len(ids):
        return f"sequences of {_some(seqs)} ids, in all {seqs.sum()}: must be the {len(ids)} that there are"
    own = turns[:, SEQUENCE]
    if not np.array_equal(np.unique(own), np.arange(len(seqs))) or (np.diff(own) < 0).any():
        return f"turns are of the sequences {_some(own)}: each of the {len(seqs)} must have one, in their order"
    begin, end = turns[:, BEGIN], turns[:, END]
    least = np.where(np.diff(own, prepend=-1) == 0, np.roll(end, 1), 1)
    wrong = np.flatnonzero((begin < least) | (begin < 1) | (end <= begin) | (end > seqs[own]))
    if len(wrong):
        at = int(wrong[0])
        return (f"turn {at} is from {begin[at]} to {end[at]} of a sequence of {seqs[own[at]]}: must begin at "
                f"{max(1, int(least[at]))} or later, hold an id and end within it")
    count = int((end - begin).sum())
    if not count == len(episode.logprobs) == len(episode.versions):
        return f"{count} sampled ids, {len(episode.logprobs)} log-probs, {len(episode.versions)} versions"
    if not (np.isfinite(episode.logprobs) & (episode.logprobs <= 0)).all():
        return "a log-probability is above 0 or not a finite number"
    return _fault_of_rest(turns, episode.turn_rewards)


def _fault_of_rest(turns: Array, rewards: Array | None) -> str:
    calls = turns[:, CALL]
    if calls.min() < 0 or len(np.unique(calls)) < len(calls):
        return f"call numbers {_some(calls)}: each turn needs one of its own, from 0"
    if rewards is not None and (len(rewards) != len(turns) or not np.isfinite(rewards).all()):
        return f"turn_rewards {_some(rewards)} of {len(turns)} turns: one finite number for each"
    return ""


def trained_of(turns: Array) -> npt.NDArray[np.bool_]:
    """Of each sampled id whether its turn is trained."""
    return np.repeat((turns[:, FLAGS] & TRAINED) == TRAINED, turns[:, END] - turns[:, BEGIN])


def turn_rewards_of(ring: Ring, slot: int) -> float:
    """The sum of the rewards of a slot's turns; 0 where there are none."""
    try:
        found = _optional(ring, slot, "turn_rewards")
    except BadTensor:  # the learner reads it again, and drops the sample
        return 0.0
    total = 0.0 if found is None else float(found.sum(dtype=np.float64))
    return total if math.isfinite(total) else 0.0


def reward_of(ring: Ring, slot: int) -> tuple[float, list[float]] | None:
    """What the episode of a slot returned and its parts; None if it left that to others. BadTensor if it is none."""
    found = _optional(ring, slot, "reward")
    if found is None:
        return None
    if not len(found) or not np.isfinite(found).all():
        raise BadTensor(f"slot {slot}: the reward is {_some(found)}: must be finite numbers, at least one")
    return float(found[0]), found[1:].tolist()


def messages_of(ring: Ring, slot: int) -> list[list[dict[str, Any]]]:
    """The messages of each sequence; none where there are none that can be read."""
    try:
        found = _optional(ring, slot, "messages")
        return [] if found is None else msgspec.json.decode(found.tobytes(), type=list[list[dict[str, Any]]])
    except (BadTensor, msgspec.DecodeError, RecursionError):  # the last: of brackets in brackets
        return []


def seen_by_reward(ring: Ring, slot: int) -> dict[str, Any] | None:
    """The argument `episode` of a reward function, as JSON has it; None where the slot holds no episode. BadTensor or
    NoSuchTensor where it breaks a rule."""
    episode = read_episode(ring, slot)
    if episode is None:
        return None
    order, given, rewards = np.argsort(episode.turns[:, CALL]), reward_of(ring, slot), episode.turn_rewards
    turns = [
        {"call": row[CALL], "sequence": row[SEQUENCE], "prompt_tokens": row[BEGIN], "tokens": row[END] - row[BEGIN],
         "finish": row[FINISH], "waited_ms": row[WAITED], "generated_ms": row[GENERATED],
         "trained": bool(row[FLAGS] & TRAINED)}
        for row in episode.turns[order].tolist()
    ]
    return {
        "turns": turns, "messages": messages_of(ring, slot), "reward": None if given is None else given[0],
        "turn_rewards": None if rewards is None else rewards[order].tolist(),
    }


def last_call(ring: Ring, slot: int) -> dict[str, Array] | None:
    """What the last call of a slot's episode read and sampled, by the names that an answer has; None where it holds no
    episode. BadTensor or NoSuchTensor where it breaks a rule."""
    episode = read_episode(ring, slot)
    if episode is None:
        return None
    at = int(np.argmax(episode.turns[:, CALL]))
    lengths = episode.turns[:, END] - episode.turns[:, BEGIN]
    row, first = episode.turns[at].tolist(), int(lengths[:at].sum())
    sampled = slice(first, first + int(lengths[at]))
    path = episode.ids[int(episode.seqs[: row[SEQUENCE]].sum()) :][: row[END]]
    return {
        "prompt_ids": path[: row[BEGIN]], "tokens": path[row[BEGIN] :], "logprobs": episode.logprobs[sampled],
        "versions": episode.versions[sampled],
    }


def context_of(ring: Ring, slot: int) -> Counter[str]:
    """The numbers of CONTEXT of a slot's episode, as far as it says them."""
    with contextlib.suppress(BadTensor):
        found = _optional(ring, slot, "context")
        if found is not None:
            return Counter(dict(zip(CONTEXT, map(int, found))))
    return Counter()


# -- from another host -----


@dataclass(frozen=True)
class Bounds:
    """What an episode of another host may be. `vocabulary` 0: not known."""

    limits: Limits
    transcript_bytes: int
    vocabulary: int

    @classmethod
    def of(cls, topology: Topology, vocabulary: int) -> Bounds | None:
        """None in a run whose samples are answers of one call."""
        own = topology.agents
        limits = Limits(*topology.episode_limits, own.max_turns, own.max_sequences)
        return cls(limits, own.transcript_bytes, vocabulary) if topology.has_callers else None


def pieces_of(ring: Ring, slot: int) -> dict[str, g.Tensor]:
    """The tensors of the episode in a slot that we hold, as they travel; whoever gets them checks them."""
    found = {name: ring.get(slot, name, 0) for name in NEEDED}
    for name in TYPES.keys() - found.keys():
        with contextlib.suppress(NoSuchTensor):
            found[name] = ring.get(slot, name, 0)
    return {name: tensor(array) for name, array in found.items()}


def received(pieces: Mapping[str, g.Tensor], bounds: Bounds, newest: int) -> tuple[StoredEpisode, dict[str, Array]]:
    """An episode that another host sent, and all its tensors; `Refused` if it breaks a rule. `newest`: the version."""
    if unknown := sorted(pieces.keys() - TYPES.keys()):
        raise Refused(f"tensor {unknown[0]!r}: an episode has {', '.join(TYPES)}")
    if missing := [name for name in NEEDED if name not in pieces]:
        raise Refused(f"tensor {missing[0]} is missing: an episode has {', '.join(NEEDED)}")
    arrays = {name: read_tensor(pieces[name], name, *TYPES[name]) for name in TYPES if name in pieces}
    episode = StoredEpisode(**{name: arrays[name] for name in NEEDED}, turn_rewards=arrays.get("turn_rewards"))
    if text := fault_of(episode) or _over(episode, bounds, newest) or _fault_of_pieces(arrays, bounds):
        raise Refused(text)
    return episode, arrays


def _over(episode: StoredEpisode, bounds: Bounds, newest: int) -> str:
    """Which bound of the run a sound episode is beyond; "" if none."""
    limits, turns = bounds.limits, episode.turns
    for what, value, most in (
        ("ids in its longest sequence", int(episode.seqs.max()), limits.context),
        ("sampled ids", len(episode.logprobs), limits.sampled), ("ids", len(episode.ids), limits.tokens),
        ("turns", len(turns), limits.turns), ("sequences", len(episode.seqs), limits.sequences),
    ):
        if value > most:
            return f"{value} {what}: [agents] allows {most}"
    low, high = int(episode.ids.min()), int(episode.ids.max())
    if low < 0 or (bounds.vocabulary and high >= bounds.vocabulary):
        return f"ids from {low} to {high}: the model knows {bounds.vocabulary or 'none below 0'}"
    if int(episode.versions.max()) > newest:
        return f"versions has {int(episode.versions.max())}: the newest version that was published is {newest}"
    if not np.isin(turns[:, FINISH], (Finish.EOS, Finish.LENGTH)).all():
        return f"turns end by {_some(turns[:, FINISH])}: {Finish.EOS:d} (by itself) or {Finish.LENGTH:d} (a limit)"
    if int(turns[:, [WAITED, GENERATED]].min()) < 0:
        return "a turn has a time below 0"
    return ""


def _fault_of_pieces(arrays: Mapping[str, Array], bounds: Bounds) -> str:
    """What is wrong with the tensors that an episode need not have; "" if nothing."""
    reward, context, messages = (arrays.get(name) for name in ("reward", "context", "messages"))
    if reward is not None and (not len(reward) or not np.isfinite(reward).all()):
        return f"the reward is {_some(reward)}: must be finite numbers, at least one"
    if context is not None and len(context) != len(CONTEXT):
        return f"context has {len(context)} numbers: must be {len(CONTEXT)}"
    if messages is not None and not 1 <= len(messages) <= max(LEAST_MESSAGES, bounds.transcript_bytes):
        return f"messages has {len(messages)} bytes: agents.transcript_bytes allows {bounds.transcript_bytes}"
    return ""


def _read(ring: Ring, slot: int, name: str) -> Array:
    dtype, dimensions = TYPES[name]
    found: Array = read_as(ring, slot, name, 0, np.dtype(dtype), dimensions).copy()
    return found


def _optional(ring: Ring, slot: int, name: str) -> Array | None:
    try:
        return _read(ring, slot, name)
    except NoSuchTensor:
        return None


def _some(values: Array) -> str:
    text = ", ".join(map(str, values[:8].tolist()))
    return f"{text}, ..." if len(values) > 8 else text
