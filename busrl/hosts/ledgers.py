"""The ledger of workers that do not map the ring: claims, writes and commits in their names.

`busrl.hosts.desk` decides and calls; these classes act on the ring of samples, on that of model calls, or on both.
Claims stand in REMOTE entries of the process table, which the keeper's death does not touch. Knows nothing of the bus.

- A stand-in is a handle that acts for a REMOTE entry. The ring refuses it as soon as another worker has the entry, so
  nothing is written in a wrong name.
- A reward that was claimed `MOST_TRIES` times and never came is an accident (H), as with local workers.
- An episode is checked before anything of it is written: its own rules, and the limits of the run.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET

from busrl.data.episodes import (
    CONTEXT,
    FINISH,
    GENERATED,
    NEEDED,
    TYPES,
    WAITED,
    Array,
    EpisodeArrays,
    EpisodeLimits,
    fault_of,
    listed,
    routed_rows,
    split_keys,
)
from busrl.data.routing import Routed, Routing, first_fault
from busrl.errors import BadTensor, NotOwner, RingError, RingFull, SharedMemoryFull, SlotTooSmall
from busrl.hosts import messages as g
from busrl.hosts.desk import (
    HOST,
    OF_PROMPT,
    AnswerLimits,
    ClaimedTask,
    ClaimGone,
    Judged,
    NoMemory,
    Refused,
    RemoteAnswer,
    read_tensor,
    tensor,
    unzipped,
)
from busrl.protocol import messages as m
from busrl.ring import NO_SEGMENT, UID_NONE, Ring, State, segments_of, seq_of, state_of
from busrl.ring.calls import ROUTES, CallDetails, asks_for_routes, read_ids, write_answer, write_refusal
from busrl.roles import answers, episodes
from busrl.roles.answers import SegmentCuts
from busrl.scheduling.admission import Lines, Unbegun
from busrl.states import Fate, Finish, HeaderWord, SampleClass
from busrl.topology import Topology
from busrl.weights.base import VersionSteps

log = logging.getLogger("busrl")
RESTS_IN = {State.GENERATING: State.QUEUED, State.REWARDING: State.GENERATED}
ALONE = 1 << 31  # of the field `flags`: the claimer holds nothing else
MOST_TRIES = 3
JUDGED = 1 << 31  # as `reward_parts`: the reward of a host, whole; programs that judge parts have the other bits
OF_TASK = ("cls", "attempt", "max_new_tokens", "temperature", "top_p", "priority", "admission")
TENSORS = ("tokens", "logprobs", "versions")
LEAST_MESSAGES = 2  # bytes: [] where agents.transcript_bytes leaves no room


@dataclass(frozen=True)
class EpisodeBounds:
    """Limits of an episode of another host. `vocabulary` 0: unknown; `routing`: of the routes that it may have."""

    limits: EpisodeLimits
    transcript_bytes: int
    vocabulary: int
    routing: Routing | None = None

    @classmethod
    def of(cls, topology: Topology, vocabulary: int) -> EpisodeBounds | None:
        """The limits that the topology sets; None in a run whose samples are answers of one call."""
        if not topology.has_callers:
            return None
        limits, routing = EpisodeLimits.of(topology), topology.derived.routing
        return cls(limits, topology.agents.transcript_bytes, vocabulary, routing)


class RingEntries:
    """The entries of workers from outside in the process table of a ring, and the slots that they own.

    Their numbers begin at `first_entry` and `first_slot`: behind those of another ring, where a run has two.
    """

    def __init__(self, ring: Ring, first_entry: int = 0, first_slot: int = 0) -> None:
        self.ring, self.first_entry, self.first_slot = ring, first_entry, first_slot
        self._stand_ins: dict[int, Ring] = {}

    def members(self) -> list[tuple[int, str, str, int]]:
        remote = (entry for entry in self.ring.processes() if entry.remote)
        return [(self.first_entry + entry.index, entry.role, entry.label, entry.life) for entry in remote]

    def claims(self) -> list[tuple[int, ClaimedTask]]:
        remote, lines = [entry.index for entry in self.ring.processes() if entry.remote], self.ring.lines()
        claimed = np.isin(lines["state"], list(RESTS_IN)) & np.isin(lines["owner"], remote)
        slots = claimed.nonzero()[0].tolist()
        return [(self.first_entry + int(lines["owner"][slot]), self._claim(slot, lines[slot])) for slot in slots]

    def enter(self, role: str, name: str, life: int) -> int:
        try:
            return self.first_entry + self.ring.enter_remote(role, name, life=life)
        except RingFull as problem:
            raise Refused(str(problem), "full") from None

    def leave(self, index: int) -> None:
        stand_in = self._stand_ins.pop(index, None)
        if stand_in is not None:
            stand_in.close()
        self.ring.leave_remote(index - self.first_entry)

    def show(self, index: int, tasks: int) -> None:
        stand_in = self.stand_in(index)
        stand_in.activity(f"remote, holds {tasks}")
        stand_in.progress()

    def stand_in(self, index: int) -> Ring:
        """The handle that acts for this entry."""
        if index not in self._stand_ins:
            self._stand_ins[index] = self.ring.stand_in(index - self.first_entry)
        return self._stand_ins[index]

    def give_back(self, index: int, claim: ClaimedTask) -> None:
        self.stand_in(index).release(self._slot(claim), claim.word, RESTS_IN[state_of(claim.word)])

    def expire(self, index: int, claim: ClaimedTask) -> bool:
        self.stand_in(index).expire(self._slot(claim), claim.word)
        return False

    def committed(self, slot: int, seq: int, uid: int) -> bool:
        slot -= self.first_slot
        if slot >= self.ring.n_slots or uid == UID_NONE:
            return False
        line = self.ring.line(slot)
        return int(line["uid"]) == uid and int(line["last_commit_seq"]) == seq

    def _claims_of(self, slots: list[tuple[int, int]]) -> list[ClaimedTask]:
        """The claims of slots that were just taken, each with its word."""
        lines = self.ring.lines([slot for slot, _ in slots])
        return [self._claim(slot, line) for (slot, _), line in zip(slots, lines)]

    def _claim(self, slot: int, line: np.void) -> ClaimedTask:
        word = int(line["word"])
        alone = bool(int(line["flags"]) & ALONE)
        return ClaimedTask(self.first_slot + slot, word, seq_of(word), int(line["uid"]), alone)

    def _slot(self, claim: ClaimedTask) -> int:
        return claim.slot - self.first_slot


class RingLedger(RingEntries):
    """A `RemoteLedger` on the ring of samples. `announce` rings the doorbell that a local worker would ring."""

    def __init__(
        self, ring: Ring, announce: Callable[[m.Message], None], cuts: SegmentCuts, prompt_tokens: int, vocabulary: int,
        episodes: EpisodeBounds | None = None, routed: Routed | None = None,
    ) -> None:
        super().__init__(ring)
        self.announce, self.cuts, self.episodes, self.routed = announce, cuts, episodes, routed
        self.prompt_tokens, self.vocabulary = prompt_tokens, vocabulary
        self.steps, self._noted = VersionSteps(), (-1, -1)
        self.note_version()

    def note_version(self) -> None:
        """Remember which step made the version that is published now."""
        step = self.ring.header(HeaderWord.VERSION_STEP)  # before its version: it may look too old, never too new
        newest = (self.ring.header(HeaderWord.VERSION), step)
        if newest != self._noted:
            self.steps.add(*newest)
            self._noted = newest

    # -- claims ---------------------------------------------------------------------------------------------------

    def take(self, index: int, role: str, limit: int, idle: bool) -> list[ClaimedTask]:
        """Claim as a local worker does: a sample that was tried before goes to a worker that holds nothing else."""
        return self._claims_of(self._take(self.stand_in(index), role, limit, idle))

    def _take(self, stand_in: Ring, role: str, limit: int, idle: bool) -> list[tuple[int, int]]:
        if role == "reward":
            return stand_in.take(State.GENERATED, State.REWARDING, cls=None, limit=limit, max_attempt=1)
        if self.episodes is not None:  # attempts accuse no episode (`busrl.agents.roles.holder`)
            return stand_in.take(State.QUEUED, State.GENERATING, cls=None, limit=limit, max_attempt=answers.ANY_ATTEMPT)
        waves = Unbegun() if role == HOST and self.cuts.plan.most > 1 else self.cuts.waves
        return answers.claim_queued(stand_in, waves, limit, idle, self.cuts.cls)[0]

    def tasks(self, index: int, claims: list[ClaimedTask]) -> list[g.Task | None]:
        columns = self._columns(claims, *OF_TASK)
        return [self._task(index, claim, *fields) for claim, *fields in zip(claims, *columns)]

    def _columns(self, claims: list[ClaimedTask], *names: str) -> list[list[Any]]:
        """Columns of the lines of all claims; read line by line they take ten times as long."""
        lines = self.ring.lines([claim.slot for claim in claims])
        return [lines[name].tolist() for name in names]

    def _task(
        self, index: int, claim: ClaimedTask, cls: int, attempt: int, most: int, temperature: float, top_p: float,
        priority: int, admission: int,
    ) -> g.Task | None:
        segments, rewarding = segments_of(claim.word), state_of(claim.word) == State.REWARDING
        try:
            most = 0 if rewarding else most - self._earlier(claim)
            cut = self.cuts.next(cls, segments, most)
            return g.Task(
                task=claim.task, slot_id=claim.slot, seq=claim.seq, uid=claim.uid,
                record=answers.read_task(self.ring, claim.slot).decode("utf-8", "replace"), segment=segments,
                attempt=attempt, max_new_tokens=most, temperature=temperature, top_p=top_p,
                version=self.ring.header(HeaderWord.VERSION),
                completion=answers.read_text(self.ring, claim.slot, segments) if rewarding else "",
                tensors=self._tensors(claim.slot, segments), segment_tokens=0 if cut.last else cut.tokens,
                cls=cls, priority=priority, admission=admission,
                routes_from=UNSET if rewarding or self._prompt_rows(claim, cls) is None else 0,
            )
        except (RingError, ValueError) as problem:
            log.warning("sample %d cannot be sent to a remote worker: %s", claim.uid, problem)
            self.drop(index, claim, Fate.MALFORMED)
            return None

    def _tensors(self, slot: int, segments: int) -> dict[str, g.Tensor]:
        if not segments:
            return {}
        if (last := episodes.last_call(self.ring, slot)) is not None:
            return {name: tensor(array) for name, array in last.items()}
        arrays = {name: answers.read_generated(self.ring, slot, name, segments) for name in TENSORS}
        arrays["prompt_ids"] = self.ring.get(slot, "prompt_ids")
        return {name: tensor(array) for name, array in arrays.items()}

    def limits(self, claims: list[ClaimedTask]) -> list[AnswerLimits]:
        newest, run = self.ring.header(HeaderWord.VERSION), (self.prompt_tokens, self.vocabulary)
        columns = self._columns(claims, "max_new_tokens", "version", "step", "cls")
        routing = None if self.routed is None else self.routed.routing
        return [
            AnswerLimits(
                most - self._earlier(claim), segments_of(claim.word), *run, newest, version, step,
                routing if cls == SampleClass.TRAIN else None, self._prompt_rows(claim, cls),
            )
            for claim, most, version, step, cls in zip(claims, *columns)
        ]

    def _prompt_rows(self, claim: ClaimedTask, cls: int) -> int | None:
        """`prompt_rows` of the limits of a claim."""
        wanted = self.routed is not None and self.routed.prompts and cls == SampleClass.TRAIN
        return OF_PROMPT if wanted and not segments_of(claim.word) else None

    def _earlier(self, claim: ClaimedTask) -> int:
        """The number of tokens in the earlier segments."""
        segments = segments_of(claim.word)
        return len(answers.read_generated(self.ring, claim.slot, "tokens", segments)) if segments else 0

    # -- ends -----------------------------------------------------------------------------------------------------

    def commit_answer(
        self, index: int, claim: ClaimedTask, answer: RemoteAnswer, limits: AnswerLimits, judged: Judged | None = None
    ) -> None:
        stand_in, slot, word = self.stand_in(index), claim.slot, claim.word
        ends, episode = self._ends(limits, answer), self._episode(answer, limits)
        with _as_refusals():
            if judged is not None:
                answers.write_parts(stand_in, slot, word, judged.parts)
                stand_in.set(slot, word, reward=judged.reward, reward_parts=JUDGED)
            if episode is None:
                message = self._write(stand_in, claim, answer, limits, ends)
            else:
                message = self._write_episode(stand_in, claim, answer, *episode)
        if message is None:
            raise ClaimGone
        stand_in.add(tokens=len(answer.token_ids if episode is None else episode[0].logprobs), samples=int(ends))
        if judged is None or not self._judge(self.ring.line(slot), slot):
            self.announce(message)

    def _write(
        self, stand_in: Ring, claim: ClaimedTask, answer: RemoteAnswer, limits: AnswerLimits, ends: bool
    ) -> m.DataGenerated | None:
        """Commit an answer of one call; None if the slot has moved."""
        slot, prompt = claim.slot, answer.prompt_ids
        if prompt is not None:
            stand_in.put(slot, claim.word, "prompt_ids", prompt)
        return self.cuts.commit(
            stand_in, slot, claim.word, answer, answer.text if ends else None, self.steps, uid=claim.uid,
            version=limits.version, step=limits.step, earlier=self._earlier(claim), told=answer.step,
            prompt_tokens=len(self.ring.get(slot, "prompt_ids") if prompt is None else prompt),
        )

    def _episode(self, answer: RemoteAnswer, limits: AnswerLimits) -> tuple[EpisodeArrays, dict[str, Array]] | None:
        """The episode of the answer, checked; None in a run of answers of one call."""
        if self.episodes is None and answer.episode is None:
            return None
        if self.episodes is None or answer.episode is None:
            rule = "episodes, each with its tensors" if self.episodes is not None else "answers of one call"
            raise Refused(f"the samples of this run are {rule}")
        return received_episode(answer.episode, self.episodes, limits.newest)

    def _write_episode(
        self, stand_in: Ring, claim: ClaimedTask, answer: RemoteAnswer, episode: EpisodeArrays, arrays: dict[str, Array]
    ) -> m.DataGenerated | None:
        """Commit an episode; None if the slot has moved."""
        oldest = episode.oldest()
        step = 0 if oldest is None else self.steps.step_of(oldest, answer.step)
        episodes.write_arrays(stand_in, claim.slot, claim.word, arrays, answer.text)
        return episodes.commit_episode(stand_in, claim.slot, claim.word, episode, step)

    def finish_judged(self, lines: Lines) -> None:
        """Commit the rewards of answers that came with theirs, if an earlier keeper died between the two commits."""
        judged = (lines["state"] == State.GENERATED) & (lines["reward_parts"] == JUDGED)
        for slot in judged.nonzero()[0].tolist():
            self._judge(lines[slot], slot)

    def _judge(self, line: np.void, slot: int) -> bool:
        """Commit the reward that stands in the slot, in the keeper's own name; False if a reward worker was first."""
        word = self.ring.claim(slot, int(line["word"]), State.REWARDING)
        done = self.ring.release(slot, word, State.REWARDED) if word else 0
        if done:
            message = m.RewardComputed(
                slot_id=slot, seq=seq_of(done), uid=int(line["uid"]), reward=float(line["reward"])
            )
            self.announce(message)
        return bool(done)

    def _ends(self, limits: AnswerLimits, answer: RemoteAnswer) -> bool:
        """Check whether the answer ends with this segment; `Refused` where it must end but has done = false."""
        most = self.cuts.plan.most
        if answer.done or len(answer.token_ids) >= limits.tokens:
            return True
        if limits.segment + 1 < most:
            return False
        raise Refused(
            f"segment {limits.segment} is the last that an answer may have here (segments.max_segments = {most}, "
            "1 with segments off): send the answer to its end, with done = true"
        )

    def commit_reward(self, index: int, claim: ClaimedTask, reward: float, parts: dict[str, float]) -> None:
        stand_in, slot, word = self.stand_in(index), claim.slot, claim.word
        reward += episodes.turn_rewards_of(self.ring, slot)
        with _as_refusals():
            answers.write_parts(stand_in, slot, word, parts)
            stand_in.set(slot, word, reward=reward, reward_parts=1)
        done = stand_in.release(slot, word, State.REWARDED)
        if not done:
            raise ClaimGone
        stand_in.add(samples=1)
        self.announce(m.RewardComputed(slot_id=slot, seq=seq_of(done), uid=claim.uid, reward=reward))

    def expire(self, index: int, claim: ClaimedTask) -> bool:
        rewarding = state_of(claim.word) == State.REWARDING
        if rewarding and int(self.ring.line(claim.slot)["attempt"]) + 1 >= MOST_TRIES:
            self.drop(index, claim, Fate.REWARD_HUNG)
            return True
        return super().expire(index, claim)

    def drop(self, index: int, claim: ClaimedTask, fate: Fate) -> None:
        self.stand_in(index).drop(claim.slot, claim.word, fate)
        if state_of(claim.word) == State.REWARDING:  # the learner looks at its group again
            self.announce(m.RewardComputed(slot_id=claim.slot, seq=claim.seq, uid=claim.uid))


class CallLedger(RingEntries):
    """A `RemoteLedger` on the ring of model calls, for remote rollouts. `samples` has the version of the weights. The
    numbers of entries and slots here follow those of `samples`, so that no claim has a name of the other ring."""

    def __init__(self, ring: Ring, samples: RingLedger) -> None:
        super().__init__(ring, samples.ring.n_processes, samples.ring.n_slots)
        self.samples, self.vocabulary = samples, samples.vocabulary

    def take(self, index: int, role: str, limit: int, idle: bool) -> list[ClaimedTask]:
        return self._claims_of(answers.claim_queued(self.stand_in(index), None, limit, idle)[0])

    def tasks(self, index: int, claims: list[ClaimedTask]) -> list[g.Task | None]:
        return [self._call(index, claim) for claim in claims]

    def _call(self, index: int, claim: ClaimedTask) -> g.Task | None:
        slot = self._slot(claim)
        line = self.ring.line(slot)
        try:
            ids = read_ids(self.ring, slot, "prompt_ids", NO_SEGMENT)
            details, have = self._details(slot), self._routes_from(slot)
        except (RingError, msgspec.MsgspecError) as problem:
            self.refuse(index, claim, f"the call cannot be read: {problem}")
            return None
        return g.Task(
            task=claim.task, slot_id=claim.slot, seq=claim.seq, uid=claim.uid, record="", attempt=int(line["attempt"]),
            max_new_tokens=int(line["max_new_tokens"]), temperature=float(line["temperature"]),
            top_p=float(line["top_p"]), version=self.samples.ring.header(HeaderWord.VERSION),
            tensors={"prompt_ids": tensor(ids)}, kind="call", stream=details.stream, stop=details.stop,
            routes_from=UNSET if have is None else have,
        )

    def _details(self, slot: int) -> CallDetails:
        return msgspec.msgpack.decode(self.ring.get(slot, "call").tobytes(), type=CallDetails)

    def _routes_from(self, slot: int) -> int | None:
        """The first position whose routes a call asks for; None if it asks for none."""
        extra, ids = self._details(slot).extra, len(self.ring.get(slot, "prompt_ids"))
        if self.samples.routed is None or not asks_for_routes(extra):
            return None
        have = extra.get("routes_from", 0)
        if not isinstance(have, int) or not 0 <= have < ids:
            raise BadTensor(f"slot {slot}: routes_from = {have!r} of {ids} ids: must be one of them")
        return have

    def limits(self, claims: list[ClaimedTask]) -> list[AnswerLimits]:
        return [self._limits(self._slot(claim)) for claim in claims]

    def _limits(self, slot: int) -> AnswerLimits:
        newest, most = self.samples.ring.header(HeaderWord.VERSION), int(self.ring.line(slot)["max_new_tokens"])
        limits = AnswerLimits(most, 0, 0, self.vocabulary, newest)
        if self.samples.routed is None or (have := self._routes_from(slot)) is None:
            return limits
        rows = len(self.ring.get(slot, "prompt_ids")) - 1 - have
        return limits._replace(routing=self.samples.routed.routing, prompt_rows=rows)

    def commit_answer(
        self, index: int, claim: ClaimedTask, answer: RemoteAnswer, limits: AnswerLimits, judged: Judged | None = None
    ) -> None:
        if not answer.done:
            raise Refused("the answer to a model call is sent whole, with done = true")
        stand_in, slot = self.stand_in(index), self._slot(claim)
        arrays = answer.token_ids, answer.logprobs, answer.versions, answer.finish
        claimed_ns = int(self.ring.line(slot)["changed_ns"])
        given = zip(ROUTES, (answer.routes, answer.prompt_routes), strict=True)
        routes = {name: array for name, array in given if array is not None}
        with _as_refusals():
            step = self.samples.steps.step_of(int(answer.versions.min()))
            if not write_answer(stand_in, slot, claim.word, *arrays, claimed_ns, step, 0, routes):
                raise ClaimGone
        stand_in.add(tokens=len(answer.token_ids), samples=1)

    def refuse(self, index: int, claim: ClaimedTask, why: str) -> None:
        with _as_refusals():
            write_refusal(self.stand_in(index), self._slot(claim), claim.word, why)

    def drop(self, index: int, claim: ClaimedTask, fate: Fate) -> None:
        """A call has no fate: its caller gets the reason instead."""
        self.refuse(index, claim, f"a worker from outside gave it up: {fate.words}")


class BothLedgers:
    """The `RemoteLedger` of a run with model calls: rollouts work on calls, rewards on samples."""

    def __init__(self, samples: RingLedger, calls: CallLedger) -> None:
        self.samples, self.calls = samples, calls
        self.note_version, self.commit_reward = samples.note_version, samples.commit_reward

    def _of(self, index: int) -> RingLedger | CallLedger:
        return self.samples if index < self.calls.first_entry else self.calls

    def _with(self, slot: int) -> RingLedger | CallLedger:
        return self.samples if slot < self.calls.first_slot else self.calls

    def members(self) -> list[tuple[int, str, str, int]]:
        return [*self.samples.members(), *self.calls.members()]

    def claims(self) -> list[tuple[int, ClaimedTask]]:
        return [*self.samples.claims(), *self.calls.claims()]

    def enter(self, role: str, name: str, life: int) -> int:
        return (self.calls if role == "rollout" else self.samples).enter(role, name, life)

    def leave(self, index: int) -> None:
        self._of(index).leave(index)

    def show(self, index: int, tasks: int) -> None:
        self._of(index).show(index, tasks)

    def take(self, index: int, role: str, limit: int, idle: bool) -> list[ClaimedTask]:
        return self._of(index).take(index, role, limit, idle)

    def tasks(self, index: int, claims: list[ClaimedTask]) -> list[g.Task | None]:
        return self._of(index).tasks(index, claims)

    def limits(self, claims: list[ClaimedTask]) -> list[AnswerLimits]:
        return [limits for claim in claims for limits in self._with(claim.slot).limits([claim])]

    def commit_answer(
        self, index: int, claim: ClaimedTask, answer: RemoteAnswer, limits: AnswerLimits, judged: Judged | None = None
    ) -> None:
        self._of(index).commit_answer(index, claim, answer, limits, judged)

    def give_back(self, index: int, claim: ClaimedTask) -> None:
        self._of(index).give_back(index, claim)

    def expire(self, index: int, claim: ClaimedTask) -> bool:
        return self._of(index).expire(index, claim)

    def drop(self, index: int, claim: ClaimedTask, fate: Fate) -> None:
        self._of(index).drop(index, claim, fate)

    def committed(self, slot: int, seq: int, uid: int) -> bool:
        return self._with(slot).committed(slot, seq, uid)


@contextlib.contextmanager
def _as_refusals() -> Iterator[None]:
    """Turn the ring's refusals of a write into exceptions of the desk."""
    try:
        yield
    except SlotTooSmall as problem:
        raise Refused(str(problem)) from None
    except SharedMemoryFull as problem:
        raise NoMemory(str(problem)) from None
    except NotOwner:
        raise ClaimGone from None


# -- what an episode must be -----


def received_episode(
    tensors: Mapping[str, g.Tensor], bounds: EpisodeBounds, newest: int
) -> tuple[EpisodeArrays, dict[str, Array]]:
    """An episode that another host sent, and all its tensors; `Refused` if it breaks a rule. `newest`: the newest
    version that was published."""
    types = TYPES
    if (routing := bounds.routing) is not None:
        types, most = {**TYPES, "routes": (routing.dtype, 3)}, bounds.limits.tokens * routing.bytes_per_token
        tensors = {name: unzipped(piece, name, most) if name == "routes" else piece for name, piece in tensors.items()}
    if unknown := sorted(tensors.keys() - types.keys()):
        raise Refused(f"tensor {unknown[0]!r}: an episode has {', '.join(types)}")
    if missing := [name for name in NEEDED if name not in tensors]:
        raise Refused(f"tensor {missing[0]} is missing: an episode has {', '.join(NEEDED)}")
    arrays = {name: read_tensor(tensors[name], name, *types[name]) for name in types if name in tensors}
    needed, keys = {name: arrays[name] for name in NEEDED}, split_keys(arrays.get("keys"))
    episode = EpisodeArrays(**needed, turn_rewards=arrays.get("turn_rewards"), keys=keys)
    if fault := fault_of(episode) or _beyond_bounds(episode, bounds, newest) or _fault_of_rest(episode, arrays, bounds):
        raise Refused(fault)
    return episode, arrays


def _beyond_bounds(episode: EpisodeArrays, bounds: EpisodeBounds, newest: int) -> str:
    """The bound of the run that a sound episode breaks, in words; "" if none."""
    limits, turns = bounds.limits, episode.turns
    for what, value, most in (
        ("ids in its longest sequence", int(episode.seqs.max()), limits.context),
        ("sampled ids", len(episode.logprobs), limits.sampled), ("ids", len(episode.ids), limits.tokens),
        ("turns", len(turns), limits.turns), ("sequences", len(episode.seqs), limits.sequences),
    ):
        if value > most:
            return f"{value} {what}: [agents] allows {most}"
    low, high = int(episode.ids.min()), int(episode.ids.max())
    if low < 0 or (bounds.vocabulary and high >= bounds.vocabulary):
        return f"ids from {low} to {high}: the model knows {bounds.vocabulary or 'none below 0'}"
    if int(episode.versions.max()) > newest:
        return f"versions has {int(episode.versions.max())}: the newest version that was published is {newest}"
    if not np.isin(turns[:, FINISH], (Finish.EOS, Finish.LENGTH)).all():
        return f"turns end by {listed(turns[:, FINISH])}: {Finish.EOS:d} (by itself) or {Finish.LENGTH:d} (a limit)"
    if int(turns[:, [WAITED, GENERATED]].min()) < 0:
        return "a turn has a time below 0"
    return ""


def _fault_of_rest(episode: EpisodeArrays, arrays: Mapping[str, Array], bounds: EpisodeBounds) -> str:
    """A fault of the optional tensors, in words; "" if none."""
    reward, context, messages = (arrays.get(name) for name in ("reward", "context", "messages"))
    if reward is not None and (not len(reward) or not np.isfinite(reward).all()):
        return f"the reward is {listed(reward)}: must be finite numbers, at least one"
    if context is not None and len(context) != len(CONTEXT):
        return f"context has {len(context)} numbers: must be {len(CONTEXT)}"
    if messages is not None and not 1 <= len(messages) <= max(LEAST_MESSAGES, bounds.transcript_bytes):
        return f"messages has {len(messages)} bytes: agents.transcript_bytes allows {bounds.transcript_bytes}"
    if bounds.routing is not None and "routes" in arrays:
        return first_fault(arrays["routes"], routed_rows(episode.turns), bounds.routing)
    return ""
