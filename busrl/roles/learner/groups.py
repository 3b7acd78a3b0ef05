"""Whole groups out of the ring: claimed for training, given back or ended.

Talks to the ring, and makes the write-ahead log's sample records. Knows nothing of losses, weights or the trigger;
imports no torch.

- All members of a group are claimed, or none: a compare-and-swap that fails gives back what was taken.
- A record is a copy: it stays good after its slot was freed.
- A sample whose payload is malformed (counts that differ, a log-probability above 0, NaN, an unknown id, in a run with
  routes one without them or with an id of no expert) is dropped with fate M; the rest of its group goes back to rest.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from busrl.data.episodes import routed_rows
from busrl.data.figures import tag_of
from busrl.data.routing import Routed, first_fault
from busrl.ledger.trained import TrainedSet
from busrl.ledger.wal import TURN, SampleRecord
from busrl.ring import NO_SEGMENT, Ring, State, segments_of
from busrl.roles import answers
from busrl.roles.answers import UNREADABLE
from busrl.roles.episodes import context_of, read_episode
from busrl.scheduling.groups import GroupView
from busrl.states import Fate, Finish, SampleClass
from busrl.topology import Topology
from busrl.topology.rewards import Reward

# -- claimed groups ------------------------------------------------------------


@dataclass(frozen=True)
class Claimed:
    """A claimed group: slots with the words that own them, and a record of each sample."""

    slots: tuple[tuple[int, int], ...]
    records: tuple[SampleRecord, ...]

    @property
    def group(self) -> int:
        return self.records[0].group


Lines = npt.NDArray[Any]
Owned = Sequence[tuple[int, int]]  # slots, with the words that own them
Fault = Callable[[Sequence[SampleRecord]], "tuple[int, str] | None"]
FIELDS = (
    "uid", "group", "admission", "member", "attempt", "prompt_crc", "reward", "temperature", "version", "step", "finish"
)
TENSORS = ("prompt_ids", "token_ids", "logprobs", "versions")
SEGMENTED = ("tokens", "logprobs", "versions")


class Malformed(Exception):
    """The payload of the sample at `position` breaks the rules of the ledger."""

    def __init__(self, position: int, text: str) -> None:
        super().__init__(text)
        self.position = position


def claim_groups(
    ring: Ring, lines: Lines, groups: Sequence[Sequence[int]], fault: Fault, routed: Routed | None = None
) -> list[Claimed] | Malformed | None:
    """Claim the REWARDED slots of whole groups, all or none, as `lines` (a copy of all control lines) shows them.

    `fault` names a record that cannot be trained, and why. Returns the groups; None when a slot moved meanwhile;
    Malformed with that sample dropped. After either of the last two look again, with new lines.
    """
    slots = [slot for group in groups for slot in group]
    rows = lines[slots]  # still valid after the claim, which succeeds only while the slot has the word of its row
    owned: list[tuple[int, int]] = []
    for slot, word in zip(slots, rows["word"].tolist()):
        if not (owner := ring.claim(slot, word, State.TRAINING)):
            give_back(ring, owned)
            return None
        owned.append((slot, owner))
    try:
        records = make_records(ring, owned, rows, routed)
        if (refusal := fault(records)) is not None:
            raise Malformed(*refusal)
    except Malformed as problem:
        ring.drop(*owned.pop(problem.position), Fate.MALFORMED)
        give_back(ring, owned)
        return Malformed(problem.position, f"sample {rows['uid'][problem.position]}: {problem}")
    members = iter(zip(owned, records))
    return [Claimed(*zip(*(next(members) for _ in group))) for group in groups]


def make_records(ring: Ring, owned: Owned, rows: Lines, routed: Routed | None = None) -> list[SampleRecord]:
    """Copy samples out of their slots, checked."""
    fields = zip(*(rows[name].tolist() for name in FIELDS))
    records = []
    for position, (values, payload) in enumerate(zip(fields, _payloads(ring, owned))):
        counts = [len(payload[name]) // 4 for name in TENSORS[1:]]
        if "turns" not in payload and not counts[0] == counts[1] == counts[2] > 0:
            raise Malformed(position, "{} tokens, {} log-probs, {} versions".format(*counts))
        if routed is not None:
            payload |= _routes(ring, position, owned[position][0], payload, routed)
        records.append(SampleRecord(**dict(zip(FIELDS, values)), **payload))
    return records


Payload = dict[str, Any]  # fields of a record


def _payloads(ring: Ring, owned: Owned) -> Iterable[Payload]:
    """Per slot: bytes of prompt, tokens, log-probabilities, versions, and with several segments the tokens of each; or
    the fields of an episode, checked."""
    if all(segments_of(word) == 1 for _, word in owned):
        with contextlib.suppress(*UNREADABLE):  # the unreadable slot is found one by one below
            payloads = zip(*(answers.read_copies(ring, owned, name) for name in ("prompt_ids", *SEGMENTED)))
            return [dict(zip(TENSORS, payload)) for payload in payloads]
    return [_payload(ring, position, slot, segments_of(word)) for position, (slot, word) in enumerate(owned)]


def _payload(ring: Ring, position: int, slot: int, segments: int) -> Payload:
    try:
        if segments == 1 and (episode := read_episode(ring, slot)) is not None:
            return episode.logged()
        parts = [[answers.read_segment(ring, slot, name, k) for k in range(max(1, segments))] for name in SEGMENTED]
        prompt = answers.read_prompt_ids(ring, slot).tobytes()
    except UNREADABLE as problem:
        raise Malformed(position, str(problem)) from None
    sizes = [[len(part) for part in name] for name in parts]
    if segments > 1 and not (sizes[0] == sizes[1] == sizes[2] and all(sizes[0])):
        raise Malformed(position, "its segments have {} tokens, {} log-probs, {} versions".format(*sizes))
    payload = dict(zip(TENSORS, (prompt, *(np.concatenate(name).tobytes() for name in parts))))
    return {**payload, "segments": sizes[0]} if segments > 1 else payload


def _routes(ring: Ring, position: int, slot: int, payload: Payload, routed: Routed) -> Payload:
    """The routes of the sample with this payload, as fields of a record, checked."""
    parts: list[tuple[str, int, int]]  # tensor, segment, rows
    if "turns" in payload:
        parts = [("routes", 0, routed_rows(np.array(payload["turns"]).reshape(-1, TURN)))]
    else:
        sizes = payload.get("segments") or [len(payload["token_ids"]) // 4]
        parts = [("routes", segment, size) for segment, size in enumerate(sizes)]
        if routed.prompts:
            parts.append(("prompt_routes", NO_SEGMENT, len(payload["prompt_ids"]) // 4 - 1))
    fields: Payload = {"routes": b"", "routes_shape": [*routed.routing.shape, routed.routing.experts]}
    for name, segment, rows in parts:
        place = f"{name} of segment {segment}" if len(parts) > 2 and segment != NO_SEGMENT else name
        try:
            array = ring.get(slot, name, segment)
        except UNREADABLE as problem:
            raise Malformed(position, f"{place}: {problem}") from None
        if fault := first_fault(array, rows, routed.routing):
            raise Malformed(position, f"{place}: {fault}")
        fields[name] = fields.get(name, b"") + array.tobytes()
    return fields


def give_back(ring: Ring, owned: Owned) -> None:
    for slot, word in owned:
        ring.release(slot, word, State.REWARDED)


def end(ring: Ring, claimed: Claimed, fate: Fate) -> None:
    """Store the fate of every sample of a claimed group and free its slots."""
    for slot, word in claimed.slots:
        ring.finish(slot, word, fate)


def parts_of(ring: Ring, slots: Iterable[int]) -> list[dict[str, float]]:
    """The parts of the rewards in these slots; none are read if the first slot has none."""
    by_slot: list[dict[str, float]] = []
    for slot in slots:
        parts = answers.read_parts(ring, slot)
        if not parts and not by_slot:
            return []
        by_slot.append(parts)
    return by_slot


def context_at(ring: Ring, group: Claimed) -> Counter[str]:
    """Counts of a group's episodes besides tokens and rewards (`busrl.data.episodes.CONTEXT`)."""
    counts = (context_of(ring, slot) for (slot, _), record in zip(group.slots, group.records) if record.turns)
    return sum(counts, Counter[str]())


def tag_at(ring: Ring, slot: int, key: str) -> str:
    """The tag of the prompt in a slot (`busrl.data.figures.tag_of`); "" where its line has none."""
    with contextlib.suppress(*UNREADABLE, msgspec.DecodeError):
        return tag_of(msgspec.json.decode(answers.read_task(ring, slot), type=dict[str, Any]), key)
    return ""


def shaped(lines: Lines, reward: Reward, limit: int) -> Lines:
    """Change the rewards of training answers in place.

    An answer that the limit (in tokens) cut gets the number reward.truncated, or loses a penalty; one that comes near
    the limit loses the soft overlong punishment. The learner applies this to its copy of the ring's lines, so it holds
    for every kind of reward worker, and the slot keeps the original. Validation measures the task itself, unchanged.
    """
    truncated, penalty = reward.truncated, reward.truncated_penalty
    if isinstance(truncated, str) and not penalty and not reward.overlong_tokens:
        return lines
    state = lines["state"]
    training = ((state == State.REWARDED) | (state == State.TRAINING)) & (lines["cls"] == SampleClass.TRAIN)
    if reward.overlong_tokens:
        lengths = lines["response_tokens"].astype(np.int64)
        punishment = overlong(lengths, limit, reward.overlong_tokens, reward.overlong_penalty)
        lines["reward"] += np.where(training, punishment, 0)
    cut = training & (lines["finish"] == Finish.LENGTH)
    worth = lines["reward"] - penalty if isinstance(truncated, str) else truncated
    lines["reward"] = np.where(cut, worth, lines["reward"])
    return lines


def overlong(lengths: npt.NDArray[np.int64], limit: int, buffer: int, penalty: float) -> npt.NDArray[np.float64]:
    """Amounts to add to the rewards of answers of these lengths: 0 up to `limit - buffer` tokens, -penalty at the
    limit, on a straight line between them (soft overlong punishment, DAPO, arXiv 2503.14476, equation 13)."""
    over = np.clip(lengths - (limit - buffer), 0, buffer)
    return -(penalty * over / buffer)


# -- looks of a learner --------------------------------------------------------

LOOK_LEAST_S = 0.003  # between two looks
LOOK_SHARE = 0.05  # of its time that a learner may spend on looks
LOOK_MOST_S = 0.1  # what else than a reward changes the groups is seen within this time


class Looks:
    """Times of a learner's looks at the groups. A look costs time for each slot, so it is not taken for each reward.

    `LOOK_LEAST_S` after the last look, or later where looks take long, if as many rewards came as are worth one; else
    after the time of `within`; at once after `again`.
    """

    def __init__(
        self, ring: Ring, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._ring, self._clock, self._sleep = ring, clock, sleep
        self._rewards = ring.transitions(State.REWARDED)  # at the last look
        self._worth = 1
        self._soon_s = self._next_s = -math.inf

    def due(self) -> bool:
        """True if the groups are looked at now; a reward that is committed from here on is new for the next look."""
        rewards = self._ring.transitions(State.REWARDED)
        if self._left_s(self._clock(), rewards) > 0:
            return False
        self._rewards = rewards
        return True

    def again(self) -> None:
        """Look at once: something was changed."""
        self._soon_s = self._next_s = -math.inf

    def within(self, most_s: float, worth: int, cost_s: float = 0.0) -> None:
        """Look after `worth` new rewards, and after `most_s` seconds at the latest. `cost_s`: CPU of the last look."""
        now = self._clock()
        self._soon_s, self._next_s = now + min(max(LOOK_LEAST_S, cost_s / LOOK_SHARE), most_s), now + most_s
        self._worth = worth

    def wait(self, timeout_s: float) -> None:
        """Sleep until a look is due, or the time is over."""
        end = self._clock() + timeout_s
        if (pause_s := min(end, self._soon_s) - self._clock()) > 0:
            self._sleep(pause_s)  # no reward makes a look due before then, so none may wake it: each would cost CPU
        now, rewards = self._clock(), self._ring.transitions(State.REWARDED)
        while (left_s := min(end - now, self._left_s(now, rewards))) > 0:
            rewards, now = self._ring.wait(State.REWARDED, rewards, left_s), self._clock()

    def _left_s(self, now: float, rewards: int) -> float:
        """Seconds until the next look if no reward comes after these."""
        return (self._soon_s if rewards - self._rewards >= self._worth else self._next_s) - now


# -- claims of a learner -------------------------------------------------------


class Claims:
    """The groups that a learner has claimed for its coming step, and its look at the lines of the ring."""

    def __init__(self, ring: Ring, topology: Topology, fault: Fault) -> None:
        """`fault` names a record that cannot be trained, and why."""
        self._ring, self._fault, self._routed = ring, fault, Routed.of(topology)
        self.follow(topology)
        self.held: dict[int, Claimed] = {}  # by draw
        self.pending: list[Claimed] = []  # claimed, not yet in a micro-batch
        # Slots of trained samples may still be REWARDED, or come back so when their dead owner is reaped.
        self._unfinished = True
        self.lines: Lines = ring.lines()

    def follow(self, topology: Topology) -> None:
        """Go by these rewards of cut answers from the next look on."""
        self._reward, self._limit = topology.reward, topology.generation.max_new_tokens

    def look(self, trained: TrainedSet) -> Lines:
        """Copy the ring's lines, with the rewards that [reward] gives to cut answers. One pass sees, claims and drops
        groups by one copy; a slot that moved since has another word, and neither claim nor drop touches it.

        Slots of `trained` samples, which a predecessor could not free any more, are freed first.
        """
        lines = self._ring.lines()
        if self._unfinished and self._free_trained(lines, trained):
            lines = self._ring.lines()
        self.lines = shaped(lines, self._reward, self._limit)
        return self.lines

    def take(self, view: GroupView, draws: Sequence[int]) -> list[Claimed] | Malformed | None:
        """Claim these groups, all or none (`claim_groups`)."""
        groups = [view.slots_of(draw) for draw in draws]
        claimed = claim_groups(self._ring, self.lines, groups, self._fault, self._routed)
        if isinstance(claimed, list):
            self.held.update(zip(draws, claimed))
            self.pending += claimed
        return claimed

    def lines_of(self, groups: Sequence[Sequence[int]]) -> list[Lines]:
        """The lines of the slots of each group, as the last look saw them; one copy for all groups."""
        every = self.lines[[slot for slots in groups for slot in slots]]
        ends = np.cumsum([len(slots) for slots in groups]).tolist()
        return [every[end - len(slots) : end] for slots, end in zip(groups, ends)]

    @property
    def pending_samples(self) -> int:
        return sum(len(group.records) for group in self.pending)

    def take_pending(self) -> list[Claimed]:
        """The groups that were in no micro-batch yet, for the next one."""
        groups, self.pending = self.pending, []
        return groups

    def drop(self, slots: Iterable[int], draw: int, fate: str) -> None:
        """End a group that nobody has claimed: drop the samples of it that rest in these slots."""
        for slot in slots:
            line = self.lines[slot]
            if int(line["state"]) == State.REWARDED and int(line["group"]) == draw:
                self._ring.drop(slot, int(line["word"]), fate)

    def end(self, groups: Iterable[Claimed]) -> None:
        """The step with these groups is committed: they are trained, and their slots free."""
        for group in groups:
            end(self._ring, group, Fate.TRAINED)
        self.held.clear()

    def give_back(self) -> None:
        for group in self.held.values():
            give_back(self._ring, group.slots)
        self.held.clear()
        self.pending = []

    def _free_trained(self, lines: Lines, trained: TrainedSet) -> int:
        """Free and count the REWARDED slots whose uid is in checkpoint or log already. Repeated while others than this
        process have slots in TRAINING: those of a dead owner may come back to rest."""
        freed = 0
        for slot in (lines["state"] == State.REWARDED).nonzero()[0].tolist():
            if int(lines["uid"][slot]) in trained and int(lines["cls"][slot]) == SampleClass.TRAIN:
                word = self._ring.claim(slot, int(lines["word"][slot]), State.TRAINING)
                if word:
                    self._ring.finish(slot, word, Fate.TRAINED)
                    freed += 1
        theirs = (lines["state"] == State.TRAINING) & (lines["cls"] == SampleClass.TRAIN)
        self._unfinished = bool((theirs & (lines["owner"] != self._ring.index)).any())
        return freed
