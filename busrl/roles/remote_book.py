"""The gateway's ledger on the ring: what the keeper does in the name of workers that do not map it.

Talks to the ring through stand-ins (handles that act for a REMOTE entry) and announces commits by doorbells, which the
worker itself would ring if it could. Knows nothing of leases or of the bus.

- A stand-in is refused by the ring as soon as its entry is another's, so nothing is written in a wrong name.
- A reward that was claimed `MOST_TRIES` times and never came is an accident (H), as with workers of our own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from busrl.gateway import Answer, Gone, Held, Member, Room, VersionSteps
from busrl.gateway.checks import tensor
from busrl.protocol import gateway as g
from busrl.protocol import messages as m
from busrl.ring import UID_NONE, NotOwner, Ring, RingError, RingFull, SlotTooSmall, State, state_of
from busrl.roles.segment_cuts import SegmentCuts
from busrl.roles.trajectory import (
    Generated,
    read,
    read_task,
    read_text,
    segments_of,
    seq_of,
    write_parts,
    write_segment,
    write_text,
)
from busrl.roles.wave_claims import take_queued

log = logging.getLogger("busrl")
WORKS_IN = {"rollout": (State.QUEUED, State.GENERATING), "reward": (State.GENERATED, State.REWARDING)}
RESTS_IN = {State.GENERATING: State.QUEUED, State.REWARDING: State.GENERATED}
ALONE = 1 << 31  # of the field `flags`: the claimer holds nothing else
MOST_TRIES = 3
ANY_ATTEMPT = 255
TENSORS = ("tokens", "logprobs", "versions")


class RemoteBook:
    """`busrl.gateway.Book` on a ring that this process is registered in. `announce` rings a doorbell."""

    def __init__(
        self, ring: Ring, steps: VersionSteps, announce: Callable[[m.Message], None], cuts: SegmentCuts
    ) -> None:
        self.ring, self.steps, self.announce, self.cuts = ring, steps, announce, cuts
        self._hands: dict[int, Ring] = {}

    # -- entries --------------------------------------------------------------------------------------------------

    def members(self) -> list[Member]:
        return [Member(p.index, p.role, p.label, p.life) for p in self.ring.processes() if p.remote]

    def held(self) -> list[tuple[int, Held]]:
        remote = [member.index for member in self.members()]
        lines = self.ring.lines()
        theirs = np.isin(lines["state"], list(RESTS_IN)) & np.isin(lines["owner"], remote)
        return [(int(lines["owner"][slot]), self._held(slot, lines[slot])) for slot in theirs.nonzero()[0].tolist()]

    def enter(self, role: str, name: str, life: int) -> int:
        try:
            return self.ring.enter_remote(role, name, life=life)
        except RingFull as problem:
            raise Room(str(problem)) from None

    def leave(self, index: int) -> None:
        hand = self._hands.pop(index, None)
        if hand is not None:
            hand.close()
        self.ring.leave_remote(index)

    def heard(self, index: int, tasks: int) -> None:
        hand = self._hand(index)
        hand.activity(f"remote, holds {tasks}")
        hand.progress()

    def _hand(self, index: int) -> Ring:
        if index not in self._hands:
            self._hands[index] = self.ring.stand_in(index)
        return self._hands[index]

    # -- claims ---------------------------------------------------------------------------------------------------

    def take(self, index: int, role: str, limit: int, idle: bool) -> list[Held]:
        """As a worker of our own takes: a sample that was tried twice only by a worker that holds nothing else."""
        hand, (rest, work) = self._hand(index), WORKS_IN[role]
        if role == "reward":
            taken = hand.take(rest, work, cls=None, limit=limit, max_attempt=1)
        else:
            taken = take_queued(hand, self.cuts.waves, limit, 1)
        if not taken and idle and role == "rollout":
            taken = take_queued(hand, self.cuts.waves, 1, ANY_ATTEMPT)
            for slot, word in taken:
                hand.mark_alone(slot, word)
        return [self._held(slot, self.ring.line(slot)) for slot, _ in taken]

    def _held(self, slot: int, line: np.void) -> Held:
        word = int(line["word"])
        return Held(slot, word, seq_of(word), int(line["uid"]), bool(int(line["flags"]) & ALONE))

    def task(self, index: int, held: Held) -> g.Task | None:
        try:
            return self._task(held)
        except (RingError, ValueError) as problem:
            log.warning("sample %d can not be sent to a remote worker: %s", held.uid, problem)
            self.drop(index, held, "M")
            return None

    def _task(self, held: Held) -> g.Task:
        line, segments = self.ring.line(held.slot), segments_of(held.word)
        rewarding = state_of(held.word) == State.REWARDING
        most, _ = (0, 0) if rewarding else self.most_tokens(held)
        cut = self.cuts.next(int(line["cls"]), segments, most)
        return g.Task(
            task=held.task, slot_id=held.slot, seq=held.seq, uid=held.uid,
            record=read_task(self.ring, held.slot).decode("utf-8", "replace"), segment=segments,
            attempt=int(line["attempt"]), max_new_tokens=most, temperature=float(line["temperature"]),
            top_p=float(line["top_p"]), version=self.ring.header("version"),
            completion=read_text(self.ring, held.slot, segments) if rewarding else "",
            tensors=self._tensors(held.slot, segments), segment_tokens=0 if cut.last else cut.tokens,
        )  # fmt: skip

    def _tensors(self, slot: int, segments: int) -> dict[str, g.Tensor]:
        if not segments:
            return {}
        arrays = {name: read(self.ring, slot, name, segments) for name in TENSORS}
        arrays["prompt_ids"] = self.ring.get(slot, "prompt_ids")
        return {name: tensor(array) for name, array in arrays.items()}

    def most_tokens(self, held: Held) -> tuple[int, int]:
        segments = segments_of(held.word)
        done = len(read(self.ring, held.slot, "tokens", segments)) if segments else 0
        return int(self.ring.line(held.slot)["max_new_tokens"]) - done, segments

    # -- ends -----------------------------------------------------------------------------------------------------

    def commit_answer(self, index: int, held: Held, answer: Answer) -> None:
        hand, slot, word = self._hand(index), held.slot, held.word
        segment, whole = segments_of(word), self._whole(held, answer)
        try:
            if answer.prompt_ids is not None:
                hand.put(slot, word, "prompt_ids", answer.prompt_ids)
            write_segment(hand, slot, word, segment, Generated(answer.tokens, answer.logprobs, answer.versions))
            if whole:
                write_text(hand, slot, word, segment, answer.text)
        except SlotTooSmall as problem:
            raise Room(str(problem)) from None
        except NotOwner:
            raise Gone from None
        notes = self._notes(hand, held, answer, whole)
        hand.set(slot, word, **notes)
        done = _moved(hand.commit_segment(slot, word, whole))
        hand.add(tokens=len(answer.tokens), samples=int(whole))
        if whole:
            self.cuts.finished(notes["response_tokens"])
        version, status = int(answer.versions[-1]), "generated" if whole else "segment"
        self.announce(m.DataGenerated(slot_id=slot, seq=seq_of(done), uid=held.uid, version=version, status=status))

    def _whole(self, held: Held, answer: Answer) -> bool:
        """Whether the answer ends with this segment; `Room` where it must but says that it does not."""
        left, segment = self.most_tokens(held)
        if answer.done or len(answer.tokens) >= left:
            return True
        if segment + 1 < self.cuts.plan.most:
            return False
        raise Room(
            f"segment {segment} is the last that an answer may have here (segments.max_segments = "
            f"{self.cuts.plan.most}, 1 with segments off): send the answer to its end, with done = true"
        )

    def _notes(self, hand: Ring, held: Held, answer: Answer, whole: bool) -> dict[str, Any]:
        """Fields of the line. The oldest version is that of admission, or of older weights that made a token."""
        line, earlier = self.ring.line(held.slot), 0
        if segments := segments_of(held.word):
            earlier = len(read(self.ring, held.slot, "tokens", segments))
        version, step, oldest = int(line["version"]), int(line["step"]), int(answer.versions.min())
        if oldest < version:
            version, step = oldest, min(step, self.steps.step_of(oldest))
        if not whole and self.cuts.trains_last_only:  # as if it were admitted now: what is trained is still to come
            step, version = self.ring.header("version_step"), self.ring.header("version")
        return {
            "version": version, "step": step, "finish": answer.finish if whole else 0,
            "response_tokens": earlier + len(answer.tokens),
            "prompt_tokens": len(hand.get(held.slot, "prompt_ids")),
        }  # fmt: skip

    def commit_reward(self, index: int, held: Held, reward: float, parts: dict[str, float]) -> None:
        hand, slot, word = self._hand(index), held.slot, held.word
        try:
            write_parts(hand, slot, word, parts)
            hand.set(slot, word, reward=reward, reward_parts=1)
        except SlotTooSmall as problem:
            raise Room(str(problem)) from None
        except NotOwner:
            raise Gone from None
        done = _moved(hand.release(slot, word, State.REWARDED))
        hand.add(samples=1)
        self.announce(m.RewardComputed(slot_id=slot, seq=seq_of(done), uid=held.uid, reward=reward))

    def give_back(self, index: int, held: Held) -> None:
        self._hand(index).release(held.slot, held.word, RESTS_IN[state_of(held.word)])

    def expire(self, index: int, held: Held) -> bool:
        rewarding = state_of(held.word) == State.REWARDING
        if rewarding and int(self.ring.line(held.slot)["attempt"]) + 1 >= MOST_TRIES:
            self.drop(index, held, "H")
            return True
        self._hand(index).expire(held.slot, held.word)
        return False

    def drop(self, index: int, held: Held, fate: str) -> None:
        self._hand(index).drop(held.slot, held.word, fate)
        if state_of(held.word) == State.REWARDING:  # whoever waits for its group should look
            self.announce(m.RewardComputed(slot_id=held.slot, seq=held.seq, uid=held.uid))

    def committed(self, slot: int, seq: int, uid: int) -> bool:
        if slot >= self.ring.n_slots or uid == UID_NONE:
            return False
        line = self.ring.line(slot)
        return int(line["uid"]) == uid and int(line["last_commit_seq"]) == seq


def _moved(word: int) -> int:
    if not word:
        raise Gone
    return word
