"""The work of a rollout process: slots claimed, turned into requests for its engine, and answers put back into them.

`SampleIntake` has the samples of the run's ring: it renders prompts, cuts segments, writes text. `CallIntake` has the
calls of the ring of model calls, where agents make the samples: ids in, ids out. Talks to one ring each. Knows nothing
of decoding steps, pauses or where weights come from: the role has those.

- A segment that reaches neither an end of sequence nor the answer's limit goes back to QUEUED for any worker.
- A slot that was being generated when its worker died is run alone the next time, so that it can only hurt itself.
- Of a call the line is read once, after its claim, and kept (docs/ring.md).
- A call that cannot be answered is answered with the reason; nothing that a caller wrote ends this process.
- An answer with an id that stands for no token is dropped: the text that would be judged is not what was drawn.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np

from busrl.data import prompt_of
from busrl.data.prompts import limit_in_words, prompt_lines
from busrl.data.vocabulary import token_rows
from busrl.engines import Engine, Finished, Request, engine_of
from busrl.engines.tokens import NO_IDS, Ids
from busrl.errors import DataError, SharedMemoryFull, SlotTooSmall, UserError
from busrl.protocol import messages as m
from busrl.protocol.codec import address
from busrl.ring import NO_SEGMENT, Ring, State, segments_of, seq_of
from busrl.ring.calls import CallDetails, asks_for_routes, read_ids, write_answer, write_refusal
from busrl.roles import answers
from busrl.roles.actor import Doorbell
from busrl.roles.answers import UNREADABLE, SegmentCuts
from busrl.scheduling.admission import Waves
from busrl.states import Fate, Finish, SampleClass, shown_uid
from busrl.topology import Topology
from busrl.weights.base import VersionSteps

Warn = Callable[..., None]
ORPHANS_EVERY_S = 1.0
FIRST = 64  # prompts that are counted before the start


class Intake(ABC):
    """The slots of one rollout process. `version` is that of the engine's weights, `steps` has the steps of all."""

    fields: ClassVar[list[str]]  # of a slot's line, for its request
    overlong: ClassVar[str]  # what may be too long for the engine, with its verb
    segments: SegmentCuts | None = None  # where answers are cut
    waves: Waves | None = None
    only_validates = False  # validation.mode = "dedicated"
    trains = True  # the scheduler has to know of this worker

    def __init__(self, ring: Ring, topology: Topology, name: str, engine: Engine, warn: Warn) -> None:
        self.ring, self.engine, self.warn = ring, engine, warn
        self._engine = f'engine = "{engine_of(topology, name)}" of {name}'
        self._known = token_rows(Path(topology.model.path))
        self.version, self.steps = 0, VersionSteps()
        self.claimed: dict[int, Any] = {}  # by slot
        self.alone = False

    def loaded(self, version: int, step: int) -> None:
        """The engine has the weights of another version, which a step of the learner made."""
        self.version = version
        self.steps.add(version, step)

    def take(self, room: int, behind: Callable[[], bool]) -> list[Request]:
        """Claim up to `room` slots; a suspect one only when nothing else runs. What cannot be used is dropped.
        `behind`: whether newer weights must come first."""
        while not (self.alone and self.claimed):
            claims, alone = self.claim(room)
            if claims and behind():  # asked after the claim: what it is admitted with was published before it
                for slot, word in claims:
                    self.ring.release(slot, word, State.QUEUED)
                break
            self.alone = alone
            if not claims:
                break
            if requests := self._requests(claims):
                return requests
        return []

    def claim(self, room: int) -> tuple[list[tuple[int, int]], bool]:
        """Claim up to `room` slots: (slot, word) of each, and whether the one of them has to run alone."""
        return answers.claim_queued(self.ring, None, room, not self.claimed)

    def _requests(self, claims: Sequence[tuple[int, int]]) -> list[Request]:
        """The request of each claimed slot; one that cannot be used is dropped, or refused."""
        described = self.ring.lines([slot for slot, _ in claims])[self.fields].tolist()
        requests = [self._request(*claim, dict(zip(self.fields, values))) for claim, values in zip(claims, described)]
        return [request for request in requests if request is not None]

    @abstractmethod
    def _request(self, slot: int, word: int, line: dict[str, Any]) -> Request | None: ...

    def commit(self, answer: Finished) -> bool:
        """Put an answer back. True if this worker is done with the slot: the answer is whole, or there is none.
        SharedMemoryFull: it is still claimed, and the same call succeeds once there is memory."""
        slot, task = answer.key, self.claimed.pop(answer.key)
        if answer.refused:
            self._drop(slot, task.word, Fate.UNRENDERED, answer.refused)
        elif answer.finish == Finish.ABORTED:  # not its fault: the next worker begins it again
            self.ring.release(slot, task.word, State.QUEUED)
            return False
        elif not len(answer.token_ids):
            why = f"its {self.overlong} no room in the engine's {self.engine.max_length} tokens"
            self._drop(slot, task.word, Fate.LONG, why)
        elif len(wrong := self._known.foreign(answer.token_ids[np.isfinite(answer.logprobs)])):
            self._drop(slot, task.word, Fate.MALFORMED, f"{self._known.describe(wrong)} ({self._engine} drew them)")
        else:
            try:
                return self._write(slot, task, answer)
            except SharedMemoryFull:
                self.claimed[slot] = task
                raise
            except (SlotTooSmall, *UNREADABLE) as problem:
                self._drop(slot, task.word, Fate.MALFORMED, str(problem))
        return True

    @abstractmethod
    def _write(self, slot: int, task: Any, answer: Finished) -> bool:
        """Commit an answer that is sound; whether it is whole."""

    @abstractmethod
    def _drop(self, slot: int, word: int, fate: Fate, why: str) -> None:
        """Give up a slot that we own."""

    @abstractmethod
    def bells(self, engine: Engine | None) -> Iterator[tuple[m.Message, str]]:
        """The messages to send now, each with its address ("" = everybody); `engine`: one that shows the tokens drawn
        so far."""

    def holds(self, slot: int, seq: int) -> bool:
        """True if this claim has the slot, which may be cancelled."""
        return False

    def cancelled(self, answer: Finished) -> None:
        """The engine has stopped working on a slot that was cancelled."""

    def orphans(self) -> list[int]:
        """Slots for whose answers nobody waits any more."""
        return []

    def give_back(self) -> None:
        for slot, task in self.claimed.items():
            self.ring.release(slot, task.word, State.QUEUED)


# -- samples ------------------------------------------------

class ClaimedSlot(NamedTuple):
    """A slot of this worker: the word that owns it, and what its line said at the claim."""

    word: int
    uid: int
    version: int  # policy version when the sample was admitted
    step: int  # the learner's step when it was admitted
    prompt_tokens: int = 0
    earlier: int = 0  # tokens of the segments before
    tokens: int = 0  # the most that this segment may have
    last: bool = True  # the answer has to end with this segment
    routed: bool = False  # its routes are kept,
    prompt_routed: bool = False  # and those of its prompt


class SampleIntake(Intake):
    """Samples: consumes QUEUED slots, produces GENERATED ones and DATA_GENERATED."""

    claimed: dict[int, ClaimedSlot]
    segments: SegmentCuts
    fields: ClassVar = ["uid", "cls", "version", "step", "max_new_tokens", "temperature", "top_p"]
    overlong = "prompt leaves"

    def __init__(self, ring: Ring, topology: Topology, name: str, engine: Engine, warn: Warn) -> None:
        super().__init__(ring, topology, name, engine, warn)
        self.topology = topology
        self.bell, self.segment_bell = Doorbell(), Doorbell()
        self.segments = SegmentCuts.of(topology, name)
        self.waves = self.segments.waves
        self.only_validates = self.segments.cls == SampleClass.VALIDATE
        self.trains = not self.only_validates

    def require_room(self) -> None:
        """UserError if none of the first prompts fits by this engine's own count: then none will, and a run in which
        every prompt is set aside would find that out much later."""
        lengths, path = list(self._first_lengths()), self.topology.data.train
        if lengths and min(lengths) > self.topology.max_prompt_tokens:
            counted = f"by the tokenizer of {self._engine} the first {len(lengths)} of {path} have {min(lengths)} to"
            limit, remedy = limit_in_words(self.topology), "give generation.max_prompt_tokens a number that fits them"
            raise UserError(f"no prompt fits: {counted} {max(lengths)} tokens, and {limit}; {remedy}")

    def _first_lengths(self) -> Iterator[int]:
        """Tokens of the first prompts; none on a host that does not have the file."""
        data = self.topology.data
        with contextlib.suppress(OSError, DataError), open(data.train, "rb") as file:
            for _, line in itertools.islice(prompt_lines(file), FIRST):
                with contextlib.suppress(Exception):  # a prompt that cannot be rendered is one sample's fault
                    yield len(self.engine.encode(prompt_of(msgspec.json.decode(line), data)))

    def bells(self, engine: Engine | None) -> Iterator[tuple[m.Message, str]]:
        for bell in (self.bell, self.segment_bell):
            if (message := bell.take()) is not None:
                yield message, ""

    def claim(self, room: int) -> tuple[list[tuple[int, int]], bool]:
        return answers.claim_queued(self.ring, self.waves, room, not self.claimed, self.segments.cls)

    def _request(self, slot: int, word: int, line: dict[str, Any]) -> Request | None:
        version, step = line["version"], line["step"]
        if (loaded_step := self.steps.step_of(self.version)) < step:
            # Admitted with newer weights than these: write it now, since the learner counts the age from it.
            version, step = self.version, loaded_step
            self.ring.set(slot, word, version=version, step=step)
        segments = segments_of(word)
        try:
            prompt = self._prompt_ids(slot, word, segments)
            prefix = answers.read_generated(self.ring, slot, "tokens", segments).copy() if segments else NO_IDS
        except UNREADABLE as problem:
            self._drop(slot, word, Fate.MALFORMED, f"an earlier segment cannot be read: {problem}")
            return None
        if prompt is None:
            return None
        left = line["max_new_tokens"] - len(prefix)
        cut = self.segments.next(line["cls"], segments, left)
        routed = self.topology.derived.routing is not None and line["cls"] == SampleClass.TRAIN
        of_prompt = routed and not segments and self.topology.learner.routes_of == "all"
        counted = (len(prompt), len(prefix), cut.tokens, cut.last, routed, of_prompt)
        self.claimed[slot] = ClaimedSlot(word, line["uid"], version, step, *counted)
        return Request(
            key=slot, uid=line["uid"], segment=segments, prompt_ids=prompt, prefix_ids=prefix,
            max_new_tokens=cut.tokens, temperature=line["temperature"], top_p=line["top_p"],
            seed=self.topology.run.seed, routes_from=0 if of_prompt else len(prompt) + len(prefix) - 1,
        )

    def _prompt_ids(self, slot: int, word: int, segments: int) -> Ids | None:
        if segments:
            earlier: Ids = answers.read_prompt_ids(self.ring, slot).copy()
            return earlier
        try:
            prompt = prompt_of(msgspec.json.decode(answers.read_task(self.ring, slot)), self.topology.data)
            ids = np.asarray(self.engine.encode(prompt), np.int32)
        except Exception as problem:
            self._drop(slot, word, Fate.UNRENDERED, f"the prompt cannot be rendered: {problem}")
            return None
        limit = self.topology.max_prompt_tokens
        if not 0 < len(ids) <= limit:
            self._drop(slot, word, Fate.LONG, f"its prompt has {len(ids)} tokens; {limit_in_words(self.topology)}")
            return None
        self.ring.put(slot, word, "prompt_ids", ids)
        return ids

    def _write(self, slot: int, task: ClaimedSlot, answer: Finished) -> bool:
        """Commit a segment that ended; an answer that is not whole goes on with any worker."""
        if answer.routes is not None:
            prompt_routes = answer.prompt_routes if task.prompt_routed else None
            answer = replace(answer, routes=answer.routes if task.routed else None, prompt_routes=prompt_routes)
        whole = not self._is_cut(task, answer)
        message = self.segments.commit(
            self.ring, slot, task.word, answer, self._text(slot, task.word, answer) if whole else None, self.steps,
            uid=task.uid, version=task.version, step=task.step, earlier=task.earlier, prompt_tokens=task.prompt_tokens,
        )
        if message is not None:
            (self.bell if whole else self.segment_bell).add(lambda: message)
        return whole

    def _text(self, slot: int, word: int, sequence: Finished) -> str:
        """The whole answer; a scripted engine brings its own."""
        if sequence.text is not None:
            return sequence.text
        ids = sequence.token_ids
        if segments := segments_of(word):
            ids = np.concatenate([answers.read_generated(self.ring, slot, "tokens", segments), ids])
        return self.engine.decode(ids, sequence.finish == Finish.EOS)

    def _is_cut(self, task: ClaimedSlot, sequence: Finished) -> bool:
        """True if only the segment's own length ended it: not the answer's limit, and no fault."""
        if task.last or sequence.finish == Finish.EOS or len(sequence.token_ids) < task.tokens:
            return False
        room = self.engine.max_length - task.prompt_tokens - task.earlier - len(sequence.token_ids)
        return room > 0 and math.isfinite(sequence.logprobs[-1])

    def _drop(self, slot: int, word: int, fate: Fate, why: str) -> None:
        uid = int(self.ring.line(slot)["uid"])
        self.claimed.pop(slot, None)
        self.warn("rollout", f"sample {shown_uid(uid)} is dropped: {why}", kind=f"dropped {fate.letter}", uids=[uid])
        self.ring.drop(slot, word, fate)


# -- model calls --------------------------------------------

@dataclass
class ClaimedCall:
    """A call of this worker: the word that owns its slot, when it was claimed, who is to get its tokens at once, how
    many were announced, and whether routes come with its answer."""

    word: int
    claimed_ns: int
    listener: str = ""
    sent: int = 0
    routed: bool = False


class CallIntake(Intake):
    """Model calls: consumes QUEUED slots of the ring of calls, produces GENERATED ones and, where they are wanted,
    CALL_TOKENS. No bell is rung for an answer: its caller waits at the ring."""

    claimed: dict[int, ClaimedCall]
    fields: ClassVar = ["uid", "max_new_tokens", "temperature", "top_p", "group"]
    overlong = "ids leave"
    trains = False

    def __init__(self, ring: Ring, topology: Topology, name: str, engine: Engine, warn: Warn) -> None:
        super().__init__(ring, topology, name, engine, warn)
        self._seed, self._model = topology.run.seed, m.of_model(topology.beside)
        self._next_orphans = 0.0
        self._decoder = msgspec.msgpack.Decoder(CallDetails)

    def _request(self, slot: int, word: int, line: dict[str, Any]) -> Request | None:
        try:
            ids = read_ids(self.ring, slot, "prompt_ids", NO_SEGMENT).copy()
            details = self._decoder.decode(self.ring.get(slot, "call").tobytes())
        except (*UNREADABLE, msgspec.MsgspecError) as problem:
            self._drop(slot, word, Fate.MALFORMED, f"the call cannot be read: {problem}")
            return None
        most = self._known.rows or int(ids.max()) + 1
        if wrong := next((token for token in (int(ids.min()), int(ids.max())) if not 0 <= token < most), None):
            self._drop(slot, word, Fate.MALFORMED, f"token id {wrong}: the model knows 0 to {most - 1}")
            return None
        listener = self._label(line["group"]) if details.tokens else ""
        have = details.extra.get("routes_from", 0)
        if not isinstance(have, int) or not 0 <= have < len(ids):
            self._drop(slot, word, Fate.MALFORMED, f"routes_from = {have!r} of {len(ids)} ids: must be one of them")
            return None
        routed = asks_for_routes(details.extra)
        self.claimed[slot] = ClaimedCall(word, time.monotonic_ns(), listener, routed=routed)
        return Request(
            key=slot, uid=line["uid"], segment=details.stream, prompt_ids=ids, prefix_ids=NO_IDS,
            max_new_tokens=line["max_new_tokens"], temperature=line["temperature"], top_p=line["top_p"],
            seed=self._seed, stop_ids=tuple(details.stop), routes_from=have, extra=details.extra,
        )

    def _label(self, index: int) -> str:
        labels = (process.label for process in self.ring.processes() if process.index == index)
        return next((address(label) for label in labels), "")

    def _write(self, slot: int, task: ClaimedCall, answer: Finished) -> bool:
        sampled = answer.token_ids, answer.logprobs, answer.versions, answer.finish
        step = self.steps.step_of(int(answer.versions.min()))
        extra = answer.extra
        if task.routed and answer.routes is not None and answer.prompt_routes is not None:
            extra = extra | {"routes": answer.routes, "prompt_routes": answer.prompt_routes}
        try:
            write_answer(self.ring, slot, task.word, *sampled, task.claimed_ns, step, answer.computed, extra)
        except SlotTooSmall as problem:
            self._drop(slot, task.word, Fate.MALFORMED, f"the answer does not fit its slot: {problem}")
        return True

    def _drop(self, slot: int, word: int, fate: Fate, why: str) -> None:
        """A call has no fate: the reason goes to its caller."""
        self.warn("rollout", f"a model call gets no answer: {why}", kind="call refused")
        write_refusal(self.ring, slot, word, why)

    def give_back(self) -> None:
        super().give_back()
        self.ring.close()

    # -- cancelling and streaming -----

    def holds(self, slot: int, seq: int) -> bool:
        return slot in self.claimed and seq_of(self.claimed[slot].word) == seq

    def cancelled(self, answer: Finished) -> None:
        self.ring.free_call(answer.key, self.claimed.pop(answer.key).word)

    def orphans(self) -> list[int]:
        """Slots whose callers are gone, looked for now and then: nobody waits for their answers."""
        now = time.monotonic()
        if now < self._next_orphans:
            return []
        self._next_orphans = now + ORPHANS_EVERY_S
        return [slot for slot in self.claimed if self.ring.is_orphan(slot)]

    def bells(self, engine: Engine | None) -> Iterator[tuple[m.Message, str]]:
        if engine is None:
            return
        for slot, task in list(self.claimed.items()):
            new: Ids = engine.sampled(slot, task.sent)[: m.MAX_MAP] if task.listener else NO_IDS
            if len(new):
                ids, seq = new.tolist(), seq_of(task.word)
                yield m.CallTokens(slot_id=slot, seq=seq, at=task.sent, ids=ids, model=self._model), task.listener
                task.sent += len(new)
