"""Takes whole groups out of the ring for the learner, and gives them back or ends them.

Talks to the ring and makes the write-ahead log's sample records. Knows nothing of losses, weights or the trigger.

Invariants:
- All members of a group are claimed, or none: a compare-and-swap that fails gives back what was taken.
- A record is a copy: it stays good after its slot was freed.
- A sample whose payload is malformed (counts that differ, a log-probability above 0, NaN, an unknown id) is dropped
  with fate M; the rest of its group goes back and is looked at again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from busrl.ledger.wal import SampleRecord
from busrl.ring import Ring, State
from busrl.roles.trajectory import UNREADABLE, read, read_prompt_ids, read_task, read_text, segments_of


@dataclass(frozen=True)
class Claimed:
    """One group in the learner's hands: slots with the words that own them, and a record of each sample."""

    group: int
    admission: int
    slots: tuple[tuple[int, int], ...]
    records: tuple[SampleRecord, ...]

    @property
    def rewards(self) -> npt.NDArray[np.float64]:
        return np.array([record.reward for record in self.records], np.float64)

    @property
    def step(self) -> int:
        """Learner step of the oldest admission version among the members: what age is counted from."""
        return min(record.step for record in self.records)


class Malformed(Exception):
    """A sample's payload breaks the rules of the ledger."""


def claim_group(
    ring: Ring, slots: list[int], words: list[int], fault: Callable[[SampleRecord], str | None]
) -> Claimed | str | None:
    """Claim the REWARDED `slots` of one group.

    `fault` says why a sample can not be trained. Returns the group; None when a slot moved meanwhile; or the text of
    what is malformed, with that sample dropped.
    """
    owned: list[tuple[int, int]] = []
    for slot, word in zip(slots, words):
        taken = ring.claim(slot, word, State.TRAINING)
        if not taken:
            give_back(ring, owned)
            return None
        owned.append((slot, taken))
    records = []
    for position, (slot, word) in enumerate(owned):
        try:
            records.append(make_record(ring, slot, word))
            if (text := fault(records[-1])) is not None:
                raise Malformed(f"sample {records[-1].uid}: {text}")
        except (Malformed, *UNREADABLE) as problem:
            give_back(ring, owned[:position] + owned[position + 1 :])
            ring.drop(slot, word, "M")
            return str(problem) if isinstance(problem, Malformed) else f"sample {_uid(ring, slot)}: {problem}"
    first = ring.line(slots[0])
    return Claimed(int(first["group"]), int(first["admission"]), tuple(owned), tuple(records))


def _uid(ring: Ring, slot: int) -> int:
    return int(ring.line(slot)["uid"])


def make_record(ring: Ring, slot: int, word: int) -> SampleRecord:
    """Copy one sample out of its slot, checked."""
    line = ring.line(slot)
    segments = segments_of(word)
    tokens = read(ring, slot, "tokens", segments)
    logprobs = read(ring, slot, "logprobs", segments)
    versions = read(ring, slot, "versions", segments)
    uid = int(line["uid"])
    if not len(tokens) == len(logprobs) == len(versions) > 0:
        raise Malformed(f"sample {uid}: {len(tokens)} tokens, {len(logprobs)} log-probs, {len(versions)} versions")
    return SampleRecord(
        uid=uid,
        group=int(line["group"]),
        admission=int(line["admission"]),
        member=int(line["member"]),
        attempt=int(line["attempt"]),
        prompt_crc=int(line["prompt_crc"]),
        reward=float(line["reward"]),
        temperature=float(line["temperature"]),
        version=int(line["version"]),
        step=int(line["step"]),
        finish=int(line["finish"]),
        prompt_ids=read_prompt_ids(ring, slot).tobytes(),
        token_ids=tokens.tobytes(),
        logprobs=logprobs.tobytes(),
        versions=versions.tobytes(),
    )


def give_back(ring: Ring, owned: list[tuple[int, int]] | tuple[tuple[int, int], ...]) -> None:
    """Return claimed slots to rest: anybody may look at them again."""
    for slot, word in owned:
        ring.release(slot, word, State.REWARDED)


def end(ring: Ring, claimed: Claimed, fate: str) -> None:
    """Store the fate of every sample of a claimed group and free its slots."""
    for slot, word in claimed.slots:
        ring.finish(slot, word, fate)


def excerpt(ring: Ring, claimed: Claimed) -> dict[str, object]:
    """One sample of the group as a person reads it, for samples.jsonl."""
    slot, word = claimed.slots[0]
    record = claimed.records[0]
    return {
        "uid": record.uid,
        "group": record.group,
        "prompt": _for_people(lambda: read_task(ring, slot).decode("utf-8", "replace")),
        "completion": _for_people(lambda: read_text(ring, slot, segments_of(word))),
        "reward": record.reward,
        "version": record.version,
        "versions": sorted(set(np.frombuffer(record.versions, np.uint32).tolist())),
        "rewards_of_group": claimed.rewards.tolist(),
    }


def _for_people(read_it: Callable[[], str]) -> str:
    """A text that training does not need: a sample without it is trained all the same."""
    try:
        return read_it()
    except UNREADABLE as problem:
        return f"({problem})"
