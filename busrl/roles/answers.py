"""An answer in its slot: its tensors, who writes which and how they are read back, its segments and their commits.

| name       | segment | dtype   | written by | meaning                                              |
|------------|---------|---------|------------|------------------------------------------------------|
| task       | -       | uint8   | scheduler  | the prompt's JSONL line, byte for byte                |
| prompt_ids | -       | int32   | rollout    | the rendered prompt as token ids                      |
| tokens     | k       | int32   | rollout    | generated ids of segment k, EOS included              |
| logprobs   | k       | float32 | rollout    | behaviour log-probability of each, as sampled         |
| versions   | k       | uint32  | rollout    | weight version that produced each                     |
| text       | last    | uint8   | rollout    | the whole completion as UTF-8, special tokens visible |
| routes     | k       | uint8   | rollout    | of a mixture of experts, [tokens, layers, top_k]: the |
|            |         |         |            | experts of the position before each (or uint16)       |
| prompt_routes | -    | uint8   | rollout    | those of the prompt but for its last id, or none      |
| reward_parts | -     | float32 | reward     | parts of the reward, where the function gives any     |
| part_names | -       | uint8   | reward     | their names, a newline between two; may be missing    |

An episode of several model calls has other tensors in the place of prompt_ids and tokens: `busrl.data.episodes`.

Joins the topology, `busrl.scheduling` and the caller's clock readings; talks to the ring. Knows nothing of how tokens
are generated or judged.

- Arrays come back as views of the slot: they are valid while the reader owns the slot.
- Another program may have written a slot: a tensor that is missing, broken or of another type raises one of
  `UNREADABLE`, and costs its sample (fate M), never the reader.
- Validation answers are made in one segment: no round waits for pieces of them.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from busrl.errors import BadTensor, NoSuchTensor, SlotTooSmall
from busrl.protocol import messages as m
from busrl.ring import NO_SEGMENT, Ring, State, segments_of, seq_of
from busrl.scheduling.admission import Cut, SegmentPlan, Unbegun, Waves
from busrl.states import HeaderWord, SampleClass
from busrl.topology import Topology

if TYPE_CHECKING:
    from busrl.weights.base import VersionSteps

log = logging.getLogger("busrl")
BETA = 0.9  # smoothing of the two times
ANY_ATTEMPT = 255
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


# -- tensors -----

def write_segment(
    ring: Ring, slot: int, word: int, segment: int, ids: Ids, logprobs: Array, versions: Array,
    routes: Array | None = None,
) -> None:
    """Append segment number `segment`: arrays of one length, in the table's types. The caller commits."""
    ring.put(slot, word, "tokens", ids, segment)
    ring.put(slot, word, "logprobs", logprobs, segment)
    ring.put(slot, word, "versions", versions, segment)
    if routes is not None:
        ring.put(slot, word, "routes", routes, segment)


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
        stored = read_segment(ring, slot, "part_names", NO_SEGMENT).tobytes().decode("utf-8", "replace").split("\n")
        names = stored if len(stored) == len(values) else names
    return {name: value for name, value in zip(names, values) if math.isfinite(value)}


def read_task(ring: Ring, slot: int) -> bytes:
    return read_segment(ring, slot, "task", NO_SEGMENT).tobytes()


def read_prompt_ids(ring: Ring, slot: int) -> Ids:
    return read_segment(ring, slot, "prompt_ids", NO_SEGMENT)


def read_generated(ring: Ring, slot: int, name: str, segments: int) -> Array:
    """A tensor of all committed segments; a view of the slot when there is one segment."""
    if segments == 1:
        return read_segment(ring, slot, name, 0)
    return np.concatenate([read_segment(ring, slot, name, k) for k in range(max(1, segments))])


def read_copies(ring: Ring, claims: Sequence[tuple[int, int]], name: str) -> list[bytes]:
    """Copies of one tensor of each claimed slot (of its last segment); `UNREADABLE` if any cannot be read."""
    last = name not in ("task", "prompt_ids")
    return ring.copies(claims, name, DTYPES[name], last_segment=last)


def read_segment(ring: Ring, slot: int, name: str, segment: int) -> Array:
    """Read a tensor as a view of the slot, of the type in the table above; `UNREADABLE` otherwise."""
    return read_as(ring, slot, name, max(0, segment), DTYPES[name])


def read_as(ring: Ring, slot: int, name: str, segment: int, dtype: np.dtype[Any], dimensions: int = 1) -> Array:
    """Read a tensor as a view of the slot, of this type and rank; `UNREADABLE` otherwise."""
    array: Array = ring.get(slot, name, segment)
    if array.dtype != dtype or array.ndim != dimensions:
        raise BadTensor(
            f"slot {slot}: tensor {name} is {array.dtype} with {array.ndim} dimensions, expected {dtype} with "
            f"{dimensions}"
        )
    return array


# -- segments: what may be claimed, how long the next one may be, its commit -----

def class_of(topology: Topology, name: str) -> SampleClass | None:
    """The samples that a worker of this name may claim; None = all. Where rollouts are kept for validation, the others
    leave it to them."""
    if not topology.dedicated:
        return None
    spec = next((process.spec for process in topology.processes() if process.name == name), None)
    return SampleClass.VALIDATE if spec is not None and spec.serves == "validation" else SampleClass.TRAIN


def claim_queued(
    ring: Ring, waves: Waves | Unbegun | None, limit: int, idle: bool, cls: SampleClass | None = None
) -> tuple[list[tuple[int, int]], bool]:
    """Claim up to `limit` QUEUED slots for generation: (slot, word) of each. A sample that was tried before goes only
    to a worker that holds nothing (`idle`), which runs it alone: then the second value is true."""
    claims = _take(ring, waves, limit, 1, cls)
    if claims or not idle:
        return claims, False
    claims = _take(ring, waves, 1, ANY_ATTEMPT, cls)
    for slot, word in claims:
        ring.mark_alone(slot, word)
    return claims, bool(claims)


def _take(
    ring: Ring, waves: Waves | Unbegun | None, limit: int, most_attempts: int, cls: SampleClass | None
) -> list[tuple[int, int]]:
    if waves is None or cls == SampleClass.VALIDATE:
        return list(ring.take(State.QUEUED, State.GENERATING, cls=cls, limit=limit, max_attempt=most_attempts))
    next_admission = ring.header(HeaderWord.NEXT_ADMISSION)  # before the lines: a slot looks less far than it is
    lines = ring.lines()
    ranked = waves.best(lines, next_admission, limit if cls is None else len(lines), most_attempts)
    best = [slot for slot in ranked if cls is None or lines["cls"][slot] == cls][:limit]
    claims = ((slot, ring.claim(slot, int(lines["word"][slot]), State.GENERATING)) for slot in best)
    return [claim for claim in claims if claim[1]]


class Sampled(Protocol):
    """Tokens that an engine sampled for a segment: arrays of one length, and how they ended (a code of `Finish`)."""

    @property
    def token_ids(self) -> Ids: ...
    @property
    def logprobs(self) -> Array: ...
    @property
    def versions(self) -> Array: ...
    @property
    def finish(self) -> int: ...
    @property
    def routes(self) -> Array | None: ...
    @property
    def prompt_routes(self) -> Array | None: ...


class SegmentCuts:
    """`next` for every claim; `finished`, `fetched` and `stepped` only matter to `segments.length = "auto"`."""

    cls: SampleClass | None = None  # of the samples that this worker may claim

    def __init__(self, plan: SegmentPlan, trains_last_only: bool = False, waves: Waves | None = None) -> None:
        self.plan, self.trains_last_only, self.waves = plan, trains_last_only, waves
        self._sync_s = self._token_s = 0.0

    @classmethod
    def of(cls, topology: Topology, name: str = "") -> SegmentCuts:
        """The cuts of the worker of this name, or of one from outside."""
        segments = topology.segments
        plan = SegmentPlan(segments.length, segments.max_segments, topology.generation.max_new_tokens)
        cuts = cls(plan, segments.on and segments.loss == "last_segment", Waves.of(topology.derived.limits))
        cuts.cls = class_of(topology, name)
        return cuts

    def next(self, cls: int, segment: int, left: int) -> Cut:
        """The segment number `segment` of a sample of that class, which may still have `left` tokens."""
        return self.plan.next(segment, left) if cls == SampleClass.TRAIN else Cut(left, True)

    def commit(
        self, ring: Ring, slot: int, word: int, sampled: Sampled, text: str | None,
        steps: VersionSteps, *, uid: int, version: int, step: int, earlier: int, prompt_tokens: int,
        told: int = 0,
    ) -> m.DataGenerated | None:
        """Write `sampled` as the next segment and commit it; without a `text` the answer is cut here. `version`
        and `step`: those of its admission, of which the sample's age counts. Returns the doorbell; None if the slot
        has moved. SlotTooSmall: nothing is committed. `told`: the step of the oldest weights, where `steps` does not
        know them."""
        segment, length = segments_of(word), earlier + len(sampled.token_ids)
        if segment == 0 and sampled.prompt_routes is not None:
            ring.put(slot, word, "prompt_routes", sampled.prompt_routes)
        write_segment(
            ring, slot, word, segment, sampled.token_ids, sampled.logprobs, sampled.versions, sampled.routes,
        )
        if text is not None:
            write_text(ring, slot, word, segment, text)
        if (oldest := int(sampled.versions.min())) < version:  # older weights than those of the admission made a token
            version, step = oldest, min(step, steps.step_of(oldest, told))
        if text is None and self.trains_last_only:  # as if admitted now: what is trained is still to come
            step, version = ring.header(HeaderWord.VERSION_STEP), ring.header(HeaderWord.VERSION)
        ring.set(
            slot, word, version=version, step=step, finish=sampled.finish if text is not None else 0,
            response_tokens=length, prompt_tokens=prompt_tokens,
        )
        done = ring.commit_segment(slot, word, text is not None)
        if not done:
            return None
        if text is not None:
            self.finished(length)
        newest, status = int(sampled.versions[-1]), "segment" if text is None else "generated"
        return m.DataGenerated(slot_id=slot, seq=seq_of(done), uid=uid, version=newest, status=status)

    def finished(self, tokens: int) -> None:
        if (auto := self.plan.auto) is None:
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
        self._token_s = _smooth(self._token_s, seconds)


def _smooth(value: float, new: float) -> float:
    return BETA * value + (1 - BETA) * new if value else new
