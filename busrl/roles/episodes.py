"""An episode in its slot: its tensors are written, committed and read back here.

The tensors are those of `busrl.data.episodes`, and `text` (uint8), the last turn's text: all of segment 0, beside the
scheduler's `task`. Talks to the ring. Knows nothing of engines, templates or clients.

- A slot holds an episode if it has `turns`; it has no `prompt_ids` and no `tokens` then.
- Another program may have written it: what breaks a rule is a BadTensor with the rule, and costs the sample (fate M).
- A sample's reward is the sum of its turns' rewards and what the whole was worth: whoever commits a reward adds them.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from busrl.data.episodes import (
    BEGIN,
    CALL,
    CONTEXT,
    END,
    FINISH,
    FLAGS,
    GENERATED,
    NEEDED,
    OF_SEATS,
    SEQUENCE,
    TRAINED,
    TYPES,
    WAITED,
    Array,
    EpisodeArrays,
    fault_of,
    joined_keys,
    listed,
    split_keys,
)
from busrl.errors import BadTensor, NoSuchTensor, SlotTooSmall
from busrl.protocol import messages as m
from busrl.ring import Ring, seq_of
from busrl.roles.answers import read_as

FOR_PEOPLE = ("context", "messages")  # an episode is trained without them too


# -- writing -----


def write_episode(ring: Ring, slot: int, word: int, episode: EpisodeArrays, text: str,
                  reward: Mapping[str, float] | float | None, messages: bytes = b"",
                  context: Sequence[int] = ()) -> None:
    """Write what an episode read and wrote into the slot that we own by `word`; the caller commits. `reward`: what it
    returned, a number or named parts of it; `context`: the numbers of CONTEXT. SlotTooSmall where there is no room, but
    for the messages."""
    arrays = {name: np.ascontiguousarray(getattr(episode, name), TYPES[name][0]) for name in NEEDED}
    if episode.turn_rewards is not None:
        arrays["turn_rewards"] = np.asarray(episode.turn_rewards, np.float32)
    if episode.keys:
        arrays["keys"] = joined_keys(episode.keys)
    if episode.routes is not None:
        arrays["routes"] = episode.routes
    if reward is not None:
        values = list(reward.values()) if isinstance(reward, Mapping) else []
        arrays["reward"] = np.array([sum(values) if isinstance(reward, Mapping) else reward, *values], np.float64)
    if context:
        arrays["context"] = np.array(context, np.uint64)
    if messages:
        arrays["messages"] = np.frombuffer(messages, np.uint8)
    write_arrays(ring, slot, word, arrays, text)


def write_arrays(ring: Ring, slot: int, word: int, arrays: Mapping[str, Array], text: str) -> None:
    """Write the tensors of an episode, by their names; SlotTooSmall where those that are trained have no room."""
    for name in (name for name in arrays if name not in FOR_PEOPLE):
        ring.put(slot, word, name, arrays[name], 0)
    ring.put(slot, word, "text", np.frombuffer(text.encode(errors="replace") or b"\0", np.uint8), 0)
    with contextlib.suppress(SlotTooSmall):
        for name in (name for name in FOR_PEOPLE if name in arrays):
            ring.put(slot, word, name, arrays[name], 0)


def commit_episode(ring: Ring, slot: int, word: int, episode: EpisodeArrays, made_by: int) -> m.DataGenerated | None:
    """Commit what was written. Version and step, of which the sample's age counts, are those of its admission or of its
    oldest trained token, whose weights step `made_by` made. Returns the doorbell; None if the slot has moved."""
    line = ring.line(slot)
    version, step = int(line["version"]), int(line["step"])
    if (oldest := episode.oldest()) is not None and oldest < version:
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


def write_partners(ring: Ring, slot: int, word: int, versions: Mapping[str, Sequence[int]]) -> None:
    """Write the versions of other models that answered in an episode of validation, by their tags, for people."""
    with contextlib.suppress(SlotTooSmall):
        ring.put(slot, word, "partners", np.frombuffer(msgspec.json.encode(versions), np.uint8), 0)


# -- reading -----


def read_episode(ring: Ring, slot: int) -> EpisodeArrays | None:
    """Copies of the arrays of a slot that we hold, checked; None if it holds no episode. BadTensor or NoSuchTensor
    where it breaks a rule."""
    if (turns := _optional(ring, slot, "turns")) is None:
        return None
    arrays = {name: turns if name == "turns" else _read(ring, slot, name) for name in NEEDED}
    keys = split_keys(_optional(ring, slot, "keys"))
    episode = EpisodeArrays(**arrays, turn_rewards=_optional(ring, slot, "turn_rewards"), keys=keys)
    if fault := fault_of(episode):
        raise BadTensor(f"slot {slot}: {fault}")
    return episode


def turn_rewards_of(ring: Ring, slot: int) -> float:
    """The sum of the rewards of a slot's turns; 0 where there are none."""
    try:
        rewards = _optional(ring, slot, "turn_rewards")
    except BadTensor:  # the learner reads it again, and drops the sample
        return 0.0
    total = 0.0 if rewards is None else float(rewards.sum(dtype=np.float64))
    return total if math.isfinite(total) else 0.0


def reward_of(ring: Ring, slot: int) -> tuple[float, list[float]] | None:
    """The reward that the episode of a slot returned, and its parts; None if it left that to others. BadTensor if it
    is none."""
    values = _optional(ring, slot, "reward")
    if values is None:
        return None
    if not len(values) or not np.isfinite(values).all():
        raise BadTensor(f"slot {slot}: the reward is {listed(values)}: must be finite numbers, at least one")
    return float(values[0]), values[1:].tolist()


def messages_of(ring: Ring, slot: int) -> list[list[dict[str, Any]]]:
    """The messages of each sequence; none where there are none that can be read."""
    try:
        data = _optional(ring, slot, "messages")
        return [] if data is None else msgspec.json.decode(data.tobytes(), type=list[list[dict[str, Any]]])
    except (BadTensor, msgspec.DecodeError, RecursionError):  # the last: of brackets in brackets
        return []


def seen_by_reward(ring: Ring, slot: int) -> dict[str, Any] | None:
    """The argument `episode` of a reward function, as JSON has it; None where the slot holds no episode. BadTensor or
    NoSuchTensor where it breaks a rule."""
    episode = read_episode(ring, slot)
    if episode is None:
        return None
    order, returned, rewards = np.argsort(episode.turns[:, CALL]), reward_of(ring, slot), episode.turn_rewards
    turns = [
        {"call": row[CALL], "sequence": row[SEQUENCE], "prompt_tokens": row[BEGIN], "tokens": row[END] - row[BEGIN],
         "finish": row[FINISH], "waited_ms": row[WAITED], "generated_ms": row[GENERATED],
         "trained": bool(row[FLAGS] & TRAINED), **({"key": episode.keys[at]} if episode.keys else {})}
        for at, row in zip(order.tolist(), episode.turns[order].tolist(), strict=True)
    ]
    return {
        "turns": turns, "messages": messages_of(ring, slot), "reward": None if returned is None else returned[0],
        "turn_rewards": None if rewards is None else rewards[order].tolist(),
    }


def last_call(ring: Ring, slot: int) -> dict[str, Array] | None:
    """Arrays that the last call of a slot's episode read and sampled, by the names that an answer has; None where it
    holds no episode. BadTensor or NoSuchTensor where it breaks a rule."""
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


def partners_of(ring: Ring, slot: int) -> dict[str, list[int]]:
    """The versions of other models, by their tags; empty where there are none that can be read."""
    with contextlib.suppress(BadTensor, NoSuchTensor, msgspec.DecodeError):
        data = read_as(ring, slot, "partners", 0, np.dtype(np.uint8))
        return msgspec.json.decode(data.tobytes(), type=dict[str, list[int]])
    return {}


def context_of(ring: Ring, slot: int) -> Counter[str]:
    """The numbers of CONTEXT of a slot's episode, as far as it has them."""
    with contextlib.suppress(BadTensor):
        numbers = _optional(ring, slot, "context")
        if numbers is not None:
            return Counter(dict(zip((*CONTEXT, *OF_SEATS), map(int, numbers))))
    return Counter()


def _read(ring: Ring, slot: int, name: str) -> Array:
    dtype, dimensions = TYPES[name]
    array: Array = read_as(ring, slot, name, 0, np.dtype(dtype), dimensions).copy()
    return array


def _optional(ring: Ring, slot: int, name: str) -> Array | None:
    try:
        return _read(ring, slot, name)
    except NoSuchTensor:
        return None
