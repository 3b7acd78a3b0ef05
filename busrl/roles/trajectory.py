"""The tensors of a trajectory in its slot: who writes which name, and how they are read back.

| name       | segment | dtype   | written by | meaning                                              |
|------------|---------|---------|------------|------------------------------------------------------|
| task       | -       | uint8   | scheduler  | the prompt's JSONL line, byte for byte                |
| prompt_ids | -       | int32   | rollout    | the rendered prompt as token ids                      |
| tokens     | k       | int32   | rollout    | generated ids of segment k, EOS included              |
| logprobs   | k       | float32 | rollout    | behaviour log-probability of each, as sampled         |
| versions   | k       | uint32  | rollout    | weight version that produced each                     |
| text       | last    | uint8   | rollout    | the whole completion as UTF-8, special tokens visible |
| reward_parts | -     | float32 | reward     | parts of the reward, where the function gives any     |
| part_names | -       | uint8   | reward     | their names, a newline between two; may be missing    |

Talks to the ring only. Arrays come back as views of the slot: they are valid while the reader owns the slot.

- Another program may have written a slot: a tensor that is missing, broken or of another type raises one of
  `UNREADABLE`, and costs its sample (fate M), never the reader.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from busrl.errors import BadTensor, NoSuchTensor, SlotTooSmall
from busrl.ring import NO_SEGMENT, Ring

Array = npt.NDArray[Any]
Ids = npt.NDArray[np.int32]
UNREADABLE = (BadTensor, NoSuchTensor)
DTYPES = {
    name: np.dtype(kind)
    for name, kind in (
        ("task", np.uint8), ("prompt_ids", np.int32), ("tokens", np.int32), ("logprobs", np.float32),
        ("versions", np.uint32), ("text", np.uint8), ("reward_parts", np.float32), ("part_names", np.uint8),
    )
}


def write_segment(ring: Ring, slot: int, word: int, segment: int, ids: Ids, logprobs: Array, versions: Array) -> None:
    """Append segment number `segment`: arrays of one length, in the table's types. The commit that makes it count is
    the caller's CAS."""
    ring.put(slot, word, "tokens", ids, segment)
    ring.put(slot, word, "logprobs", logprobs, segment)
    ring.put(slot, word, "versions", versions, segment)


def write_text(ring: Ring, slot: int, word: int, segment: int, text: str) -> None:
    """The text belongs to its segment: a worker that dies before the commit leaves nothing behind."""
    ring.put(slot, word, "text", np.frombuffer(text.encode() or b"\0", np.uint8), segment)


def read_text(ring: Ring, slot: int, segments: int) -> str:
    return text_of(read_segment(ring, slot, "text", segments - 1).tobytes())


def text_of(data: bytes) -> str:
    """The tensor `text` as a string; an empty text is stored as one zero byte."""
    return data.decode("utf-8", "replace").rstrip("\0")


def write_parts(ring: Ring, slot: int, word: int, parts: Mapping[str, float]) -> None:
    """Parts of the reward, for people. SlotTooSmall where there is no room for the values; names may be left out."""
    if not parts:
        return
    ring.put(slot, word, "reward_parts", np.array(list(parts.values()), np.float32))
    names = "\n".join(name.replace("\n", " ") for name in parts).encode()
    with contextlib.suppress(SlotTooSmall):
        ring.put(slot, word, "part_names", np.frombuffer(names or b" ", np.uint8))


def read_parts(ring: Ring, slot: int) -> dict[str, float]:
    """The parts of the reward, finite ones; by number where they have no names. Empty if there are none."""
    try:
        values = read_segment(ring, slot, "reward_parts", NO_SEGMENT).tolist()
    except UNREADABLE:
        return {}
    names = [f"part_{number}" for number in range(1, len(values) + 1)]
    with contextlib.suppress(*UNREADABLE):
        given = read_segment(ring, slot, "part_names", NO_SEGMENT).tobytes().decode("utf-8", "replace").split("\n")
        names = given if len(given) == len(values) else names
    return {name: value for name, value in zip(names, values) if math.isfinite(value)}


def read_task(ring: Ring, slot: int) -> bytes:
    return read_segment(ring, slot, "task", NO_SEGMENT).tobytes()


def read_prompt_ids(ring: Ring, slot: int) -> Ids:
    """The rendered prompt, a view of the slot."""
    return read_segment(ring, slot, "prompt_ids", NO_SEGMENT)


def read_generated(ring: Ring, slot: int, name: str, segments: int) -> Array:
    """A tensor of all committed segments; a view of the slot when there is one segment."""
    if segments == 1:
        return read_segment(ring, slot, name, 0)
    return np.concatenate([read_segment(ring, slot, name, k) for k in range(max(1, segments))])


def read_copies(ring: Ring, held: Sequence[tuple[int, int]], name: str) -> list[bytes]:
    """Copies of one tensor of each slot that we hold (of its last segment); `UNREADABLE` if any cannot be read."""
    last = name not in ("task", "prompt_ids")
    return ring.copies(held, name, DTYPES[name], last_segment=last)


def read_segment(ring: Ring, slot: int, name: str, segment: int) -> Array:
    """One tensor as a view of the slot, of the type and rank in the table above; `UNREADABLE` otherwise."""
    array: Array = ring.get(slot, name, max(0, segment))
    if array.dtype != DTYPES[name] or array.ndim != 1:
        raise BadTensor(
            f"slot {slot}: tensor {name} is {array.dtype} with {array.ndim} dimensions, expected {DTYPES[name]} with 1"
        )
    return array
