"""Takes whole groups out of the ring for the learner, and gives them back or ends them.

Talks to the ring and makes the write-ahead log's sample records. Knows nothing of losses, weights or the trigger.

Invariants:
- All members of a group are claimed, or none: a compare-and-swap that fails gives back what was taken.
- A record is a copy: it stays good after its slot was freed.
- A sample whose payload is malformed (counts that differ, a log-probability above 0, NaN, an unknown id) is dropped
  with fate M; the rest of its group goes back and is looked at again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from busrl.ledger.wal import SampleRecord
from busrl.ring import Ring, State
from busrl.roles.trajectory import (
    UNREADABLE,
    read_many,
    read_parts,
    read_prompt_ids,
    read_segment,
    segments_of,
)


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


Lines = npt.NDArray[Any]
Fault = Callable[[Sequence[SampleRecord]], "tuple[int, str] | None"]
FIELDS = (
    "uid", "group", "admission", "member", "attempt", "prompt_crc", "reward", "temperature", "version", "step", "finish"
)  # fmt: skip
TENSORS = ("prompt_ids", "token_ids", "logprobs", "versions")
SEGMENTED = ("tokens", "logprobs", "versions")


class Malformed(Exception):
    """The payload of the sample at `position` of its group breaks the rules of the ledger."""

    def __init__(self, position: int, text: str) -> None:
        super().__init__(text)
        self.position = position


def claim_group(ring: Ring, lines: Lines, slots: Sequence[int], fault: Fault) -> Claimed | str | None:
    """Claim the REWARDED `slots` of one group, as `lines` (a copy of all control lines) shows them.

    `fault` says which of the records can not be trained, and why. Returns the group; None when a slot moved meanwhile;
    or the text of what is malformed, with that sample dropped.
    """
    own = lines[list(slots)]  # what they say holds: a claim succeeds only while the word is the one read with them
    owned: list[tuple[int, int]] = []
    for slot, word in zip(slots, own["word"].tolist()):
        taken = ring.claim(slot, word, State.TRAINING)
        if not taken:
            give_back(ring, owned)
            return None
        owned.append((slot, taken))
    try:
        records = make_records(ring, owned, own)
        if (found := fault(records)) is not None:
            raise Malformed(found[0], f"sample {records[found[0]].uid}: {found[1]}")
    except Malformed as problem:
        position = problem.position
        give_back(ring, owned[:position] + owned[position + 1 :])
        ring.drop(*owned[position], "M")
        return str(problem)
    return Claimed(records[0].group, records[0].admission, tuple(owned), tuple(records))


def claim_groups(ring: Ring, lines: Lines, groups: Sequence[Sequence[int]], fault: Fault) -> list[Claimed] | None:
    """Claim several groups at once, each given by its slots: much cheaper than one by one.

    None if anything is in the way: all is given back then, and `claim_group` finds out what it is, with new lines.
    """
    slots = [slot for group in groups for slot in group]
    own = lines[slots]
    owned: list[tuple[int, int]] = []
    for slot, word in zip(slots, own["word"].tolist()):
        if not (taken := ring.claim(slot, word, State.TRAINING)):
            break
        owned.append((slot, taken))
    records: list[SampleRecord] = []
    if slots and len(owned) == len(slots):
        with contextlib.suppress(Malformed):
            records = make_records(ring, owned, own)
    if not records or fault(records) is not None:
        give_back(ring, owned)
        return None
    held = iter(zip(owned, records))
    return [_claimed([next(held) for _ in group]) for group in groups]


def _claimed(held: Sequence[tuple[tuple[int, int], SampleRecord]]) -> Claimed:
    first = held[0][1]
    return Claimed(first.group, first.admission, tuple(own for own, _ in held), tuple(record for _, record in held))


def make_records(ring: Ring, owned: Sequence[tuple[int, int]], own: Lines) -> list[SampleRecord]:
    """Copy samples out of their slots, checked."""
    fields = zip(*(own[name].tolist() for name in FIELDS))
    records = []
    for position, (values, (payload, segments)) in enumerate(zip(fields, _payloads(ring, owned))):
        counts = [len(part) // 4 for part in payload[1:]]
        if not counts[0] == counts[1] == counts[2] > 0:
            text = "{} tokens, {} log-probs, {} versions".format(*counts)
            raise Malformed(position, f"sample {values[0]}: {text}")
        found: dict[str, Any] = dict(zip((*FIELDS, *TENSORS), (*values, *payload)))
        records.append(SampleRecord(**found, segments=segments))
    return records


Payload = tuple[tuple[bytes, ...], list[int]]


def _payloads(ring: Ring, owned: Sequence[tuple[int, int]]) -> Iterable[Payload]:
    """For each slot the bytes of its prompt, tokens, log-probabilities and versions, and the tokens of its segments if
    there are several."""
    if all(segments_of(word) == 1 for _, word in owned):
        with contextlib.suppress(*UNREADABLE):  # which slot it is, is found one by one below
            whole = zip(*(read_many(ring, owned, name) for name in ("prompt_ids", *SEGMENTED)))
            return [(payload, []) for payload in whole]
    return [_payload(ring, position, slot, segments_of(word)) for position, (slot, word) in enumerate(owned)]


def _payload(ring: Ring, position: int, slot: int, segments: int) -> Payload:
    try:
        parts = [[read_segment(ring, slot, name, k) for k in range(max(1, segments))] for name in SEGMENTED]
        prompt = read_prompt_ids(ring, slot).tobytes()
    except UNREADABLE as problem:
        raise Malformed(position, f"sample {int(ring.line(slot)['uid'])}: {problem}") from None
    sizes = [[len(part) for part in name] for name in parts]
    if segments > 1 and not (sizes[0] == sizes[1] == sizes[2] and all(sizes[0])):
        text = "its segments have {} tokens, {} log-probs, {} versions".format(*sizes)
        raise Malformed(position, f"sample {int(ring.line(slot)['uid'])}: {text}")
    return (prompt, *(np.concatenate(name).tobytes() for name in parts)), sizes[0] if segments > 1 else []


def give_back(ring: Ring, owned: list[tuple[int, int]] | tuple[tuple[int, int], ...]) -> None:
    """Return claimed slots to rest: anybody may look at them again."""
    for slot, word in owned:
        ring.release(slot, word, State.REWARDED)


def end(ring: Ring, claimed: Claimed, fate: str) -> None:
    """Store the fate of every sample of a claimed group and free its slots."""
    for slot, word in claimed.slots:
        ring.finish(slot, word, fate)


def parts_of(ring: Ring, slots: Iterable[int]) -> list[dict[str, float]]:
    """The parts of the rewards in these slots; nothing is looked for where the first has none."""
    found: list[dict[str, float]] = []
    for slot in slots:
        parts = read_parts(ring, slot)
        if not parts and not found:
            return []
        found.append(parts)
    return found
