"""Segments as a worker sees them: which queued slots it may claim, how long the next segment may be, its commit.

Joins the topology, `busrl.scheduling` and this process's clock readings; talks to the ring. Used by the rollout role
and by the keeper for remote workers. Knows nothing of how tokens are generated.

- Validation answers are made in one segment: no round waits for pieces of them.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from busrl.config import Topology
from busrl.protocol import messages as m
from busrl.ring import Ring, State, segments_of, seq_of
from busrl.roles.trajectory import write_segment, write_text
from busrl.scheduling.admission import Waves
from busrl.scheduling.limits import AdmissionLimits
from busrl.scheduling.segments import Cut, SegmentPlan
from busrl.states import HeaderWord, SampleClass
from busrl.weights.base import VersionSteps

if TYPE_CHECKING:
    from busrl.engines import Finished
    from busrl.gateway import Answer

log = logging.getLogger("busrl")
BETA = 0.9  # smoothing of the two times
ANY_ATTEMPT = 255


def waves_of(limits: AdmissionLimits) -> Waves | None:
    """The waves of a run whose rounds are made of segments; None for any other."""
    return Waves(limits.n_min) if limits.waves else None


def class_of(topology: Topology, name: str) -> SampleClass | None:
    """The samples that a worker of this name may claim; None = all. Where rollouts are kept for validation, the others
    leave it to them."""
    if not topology.dedicated:
        return None
    own = next((one.spec for one in topology.processes() if one.name == name), None)
    return SampleClass.VALIDATE if own is not None and own.serves == "validation" else SampleClass.TRAIN


def claim_queued(
    ring: Ring, waves: Waves | None, limit: int, idle: bool, cls: SampleClass | None = None
) -> tuple[list[tuple[int, int]], bool]:
    """Claim up to `limit` QUEUED slots for generation: (slot, word) of each. A sample that was tried before goes only
    to a worker that holds nothing (`idle`), which runs it alone: then the second value is true."""
    taken = _take(ring, waves, limit, 1, cls)
    if taken or not idle:
        return taken, False
    taken = _take(ring, waves, 1, ANY_ATTEMPT, cls)
    for slot, word in taken:
        ring.mark_alone(slot, word)
    return taken, bool(taken)


def _take(
    ring: Ring, waves: Waves | None, limit: int, most_attempts: int, cls: SampleClass | None
) -> list[tuple[int, int]]:
    if waves is None or cls == SampleClass.VALIDATE:
        return list(ring.take(State.QUEUED, State.GENERATING, cls=cls, limit=limit, max_attempt=most_attempts))
    next_admission = ring.header(HeaderWord.NEXT_ADMISSION)  # before the lines: a slot looks less far than it is
    lines = ring.lines()
    taken = []
    own = waves.best(lines, next_admission, limit if cls is None else len(lines), most_attempts)
    for slot in [slot for slot in own if cls is None or lines["cls"][slot] == cls][:limit]:
        word = ring.claim(slot, int(lines["word"][slot]), State.GENERATING)
        if word:
            taken.append((slot, word))
    return taken


class SegmentCuts:
    """`next` for every claim; `finished`, `fetched` and `stepped` only matter to `segments.length = "auto"`."""

    cls: SampleClass | None = None  # of the samples that this worker may claim

    def __init__(self, plan: SegmentPlan, trains_last_only: bool = False, waves: Waves | None = None) -> None:
        self.plan, self.trains_last_only, self.waves = plan, trains_last_only, waves
        self._sync_s = self._token_s = 0.0

    @classmethod
    def of(cls, topology: Topology, name: str = "") -> SegmentCuts:
        """Those of the worker of this name, or of one from outside."""
        own = topology.segments
        plan = SegmentPlan(own.length, own.max_segments, topology.generation.max_new_tokens)
        made = cls(plan, own.on and own.loss == "last_segment", waves_of(topology.derived.limits))
        made.cls = class_of(topology, name)
        return made

    def next(self, cls: int, segment: int, left: int) -> Cut:
        """The segment number `segment` of a sample of that class, which may still have `left` tokens."""
        return self.plan.next(segment, left) if cls == SampleClass.TRAIN else Cut(left, True)

    def commit(
        self, ring: Ring, slot: int, word: int, drawn: Finished | Answer, text: str | None, steps: VersionSteps, *,
        uid: int, version: int, step: int, earlier: int, prompt_tokens: int,
    ) -> m.DataGenerated | None:
        """Write what was `drawn` as the next segment and commit it; without a `text` the answer is cut here. `version`
        and `step`: those of its admission, of which the sample's age counts. Returns the doorbell; None if the slot
        has moved. SlotTooSmall: nothing is committed."""
        segment, length = segments_of(word), earlier + len(drawn.token_ids)
        write_segment(ring, slot, word, segment, drawn.token_ids, drawn.logprobs, drawn.versions)
        if text is not None:
            write_text(ring, slot, word, segment, text)
        if (oldest := int(drawn.versions.min())) < version:  # older weights than those of the admission made a token
            version, step = oldest, min(step, steps.step_of(oldest))
        if text is None and self.trains_last_only:  # as if admitted now: what is trained is still to come
            step, version = ring.header(HeaderWord.VERSION_STEP), ring.header(HeaderWord.VERSION)
        ring.set(
            slot, word, version=version, step=step, finish=drawn.finish if text is not None else 0,
            response_tokens=length, prompt_tokens=prompt_tokens,
        )
        done = ring.commit_segment(slot, word, text is not None)
        if not done:
            return None
        if text is not None:
            self.finished(length)
        newest, status = int(drawn.versions[-1]), "segment" if text is None else "generated"
        return m.DataGenerated(slot_id=slot, seq=seq_of(done), uid=uid, version=newest, status=status)

    def finished(self, tokens: int) -> None:
        """A whole answer ended."""
        auto = self.plan.auto
        if auto is None:
            return
        before = auto.length
        auto.finished([tokens])
        auto.costs(self._sync_s, self._token_s)
        if (chosen := auto.choose()) is not None:
            log.info("segments.length = auto: %d tokens now, %d before", chosen, before)

    def fetched(self, seconds: float) -> None:
        """New weights were loaded, which took so long."""
        self._sync_s = _smooth(self._sync_s, seconds)

    def stepped(self, seconds: float) -> None:
        """One decoding step: a token for each running answer."""
        self._token_s = _smooth(self._token_s, seconds)


def _smooth(value: float, new: float) -> float:
    return BETA * value + (1 - BETA) * new if value else new
