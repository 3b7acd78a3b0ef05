"""Segments as a worker sees them: which queued slots it may claim, and how long the next segment may be.

Joins the topology, `busrl.scheduling` and this process's clock readings; talks to the ring for claims. Used by the
rollout role and by the keeper for remote workers. Knows nothing of what is generated.

- Validation answers are made in one segment: no round waits for pieces of them.
"""

from __future__ import annotations

import logging

from busrl.config import Topology
from busrl.ring import Ring, State
from busrl.scheduling.admission import Waves
from busrl.scheduling.limits import AdmissionLimits
from busrl.scheduling.segments import Cut, SegmentPlan
from busrl.states import HeaderWord, SampleClass
from busrl.weights.base import VersionSteps

log = logging.getLogger("busrl")
BETA = 0.9  # smoothing of the two times
ANY_ATTEMPT = 255


def waves_of(limits: AdmissionLimits) -> Waves | None:
    """The waves of a run whose rounds are made of segments; None for any other."""
    return Waves(limits.n_min) if limits.waves else None


def claim_queued(ring: Ring, waves: Waves | None, limit: int, idle: bool) -> tuple[list[tuple[int, int]], bool]:
    """Claim up to `limit` QUEUED slots for generation: (slot, word) of each. A sample that was tried before goes only
    to a worker that holds nothing (`idle`), which runs it alone: then the second value is true."""
    taken = _take(ring, waves, limit, 1)
    if taken or not idle:
        return taken, False
    taken = _take(ring, waves, 1, ANY_ATTEMPT)
    for slot, word in taken:
        ring.mark_alone(slot, word)
    return taken, bool(taken)


def _take(ring: Ring, waves: Waves | None, limit: int, most_attempts: int) -> list[tuple[int, int]]:
    if waves is None:
        return list(ring.take(State.QUEUED, State.GENERATING, cls=None, limit=limit, max_attempt=most_attempts))
    next_admission = ring.header(HeaderWord.NEXT_ADMISSION)  # before the lines: a slot looks less far than it is
    lines = ring.lines()
    taken = []
    for slot in waves.best(lines, next_admission, limit, most_attempts):
        word = ring.claim(slot, int(lines["word"][slot]), State.GENERATING)
        if word:
            taken.append((slot, word))
    return taken


class SegmentCuts:
    """`next` for every claim; `finished`, `fetched` and `stepped` only matter to `segments.length = "auto"`."""

    def __init__(self, plan: SegmentPlan, trains_last_only: bool = False, waves: Waves | None = None) -> None:
        self.plan, self.trains_last_only, self.waves = plan, trains_last_only, waves
        self._sync_s = self._token_s = 0.0

    @classmethod
    def of(cls, topology: Topology) -> SegmentCuts:
        own = topology.segments
        plan = SegmentPlan(own.length, own.max_segments, topology.generation.max_new_tokens)
        return cls(plan, own.on and own.loss == "last_segment", waves_of(topology.derived.limits))

    def next(self, cls: int, segment: int, left: int) -> Cut:
        """The segment number `segment` of a sample of that class, which may still have `left` tokens."""
        return self.plan.next(segment, left) if cls == SampleClass.TRAIN else Cut(left, True)

    def trained_as(
        self, ring: Ring, version: int, step: int, oldest: int, steps: VersionSteps, whole: bool
    ) -> tuple[int, int]:
        """Version and step from which a sample's age counts: those of its admission, or of older weights that made a
        token; those of now where only the last segment is trained and this was not the last (`whole`)."""
        if not whole and self.trains_last_only:
            step = ring.header(HeaderWord.VERSION_STEP)
            return ring.header(HeaderWord.VERSION), step
        if oldest < version:
            return oldest, min(step, steps.step_of(oldest))
        return version, step

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
