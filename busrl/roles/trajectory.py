"""The tensors of a trajectory in its slot: who writes which name, and how they are read back.

| name       | segment | dtype   | written by | meaning                                              |
|------------|---------|---------|------------|------------------------------------------------------|
| task       | -       | uint8   | scheduler  | the prompt's JSONL line, byte for byte                |
| prompt_ids | -       | int32   | rollout    | the rendered prompt as token ids                      |
| tokens     | k       | int32   | rollout    | generated ids of segment k, EOS included              |
| logprobs   | k       | float32 | rollout    | behaviour log-probability of each, as sampled         |
| versions   | k       | uint32  | rollout    | weight version that produced each                     |
| text       | last    | uint8   | rollout    | the whole completion as UTF-8, special tokens visible |

Talks to the ring only. Arrays come back as views of the slot: they are valid while the reader owns the slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from busrl.ring import Ring, segments_of, seq_of

__all__ = ["Generated", "read", "read_task", "read_text", "segments_of", "seq_of", "write_segment", "write_text"]


@dataclass(frozen=True)
class Generated:
    """One generated segment: int32 ids, float32 log-probabilities, uint32 versions, all of one length."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.uint32]


def write_segment(ring: Ring, slot: int, word: int, segment: int, part: Generated) -> None:
    """Append segment number `segment`; the commit that makes it count is the caller's CAS."""
    ring.put(slot, word, "tokens", part.token_ids, segment)
    ring.put(slot, word, "logprobs", part.logprobs, segment)
    ring.put(slot, word, "versions", part.versions, segment)


def write_text(ring: Ring, slot: int, word: int, segment: int, text: str) -> None:
    """The text belongs to its segment: a worker that dies before the commit leaves nothing behind."""
    ring.put(slot, word, "text", np.frombuffer(text.encode() or b"\0", np.uint8), segment)


def read_text(ring: Ring, slot: int, segments: int) -> str:
    return ring.get(slot, "text", segments - 1).tobytes().decode("utf-8", "replace").rstrip("\0")


def read_task(ring: Ring, slot: int) -> bytes:
    return ring.get(slot, "task").tobytes()


def read(ring: Ring, slot: int, name: str, segments: int) -> npt.NDArray[Any]:
    """A tensor of all committed segments; a view of the slot when there is one segment."""
    if segments == 1:
        return ring.get(slot, name, 0)
    return np.concatenate([ring.get(slot, name, k) for k in range(segments)])
