"""A rollout actor: claims QUEUED slots, generates, commits tokens with log-probabilities and policy versions.

Talks to the ring, to one engine (`busrl.engines`) and to the weight transport (`busrl.weights`). Consumes QUEUED slots,
produces GENERATED ones and DATA_GENERATED; waits for slots, unblocked by the ring's wake-up, NEW_TASK or the timer.
Knows nothing of rewards, groups or the learner's state beyond the newest version.

- A segment that reaches neither an end of sequence nor the answer's limit goes back to QUEUED for any worker.
- New weights enter only between two decoding steps; every token carries the version that produced it.
- A slot is claimed only when the engine has a row for it: no worker prefetches more than it runs.
- A slot that was being generated when its worker died is run alone the next time, so that it can only hurt itself.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np

from busrl.data import prompt_of
from busrl.engines import Engine, Finished, Request, make_engine
from busrl.engines.base import PartialAnswer
from busrl.engines.tokens import NO_IDS, Ids
from busrl.errors import MachineError, SlotTooSmall, WeightsRefused, WeightsTimeout
from busrl.files import LineFile
from busrl.protocol import messages as m
from busrl.protocol.codec import topic
from busrl.ring import State, segments_of
from busrl.roles import version_pin
from busrl.roles.actor import WAVE_TICK_S, Actor, Doorbell, WorkDeadline
from busrl.roles.trajectory import (
    UNREADABLE,
    SegmentCuts,
    claim_queued,
    read_generated,
    read_prompt_ids,
    read_task,
)
from busrl.states import Fate, Finish, HeaderWord, SampleClass
from busrl.weights.base import Receiver, VersionSteps
from busrl.weights.factory import TransportSettings, make_receiver

log = logging.getLogger("busrl")
PACE_EVERY_S = 0.25
MIB_EACH = 2  # of the pace file, after which half as many intervals are written
MOST_LEFT_OUT = 256  # at least one interval in so many is written, for people who look at the engine's numbers
REQUEST_EVERY_S = 1.0
BELL_EVERY_S = 0.04
SPARSE, SPARSE_BELL_EVERY_S = 8, 0.01  # an eighth of the rows in use: others may wait for these answers
WEIGHTS_TURN_S = 0.25
LEFT_BEHIND_S = 10.0  # new weights usually reach every worker within a decoding step
LINE_FIELDS = ["uid", "cls", "version", "step", "max_new_tokens", "temperature", "top_p"]


# -- the pace of decoding, for `busrl simulate --fit` ------


class PaceRow(msgspec.Struct):
    """One interval, wall = steps + weights + idle + the loop's own time. `tokens`: running sequences summed over the
    steps, so their mean is tokens / steps. `engine`: its statistics since it was made."""

    wall_s: float = 0.0
    step_s: float = 0.0
    weights_s: float = 0.0
    idle_s: float = 0.0
    steps: int = 0
    tokens: int = 0
    joined: int = 0
    updates: int = 0
    engine: Any = None


class Pace:
    """Sums over short intervals in `pace/NAME.jsonl`, a line per interval. The role adds to `row`.

    The file is thinned as it grows, also over restarts: each further `MIB_EACH` MiB take as long as all before, down to
    a line a minute. A first week makes some 20 MB, later ones 3 MB. Each line is of one short interval, whatever was
    left out beside it, so a fit reads all alike. A full disk costs lines, never the process.
    """

    def __init__(self, directory: Path, name: str, engine: Callable[[], Any]) -> None:
        self._engine = engine
        directory.mkdir(exist_ok=True)
        self._file = LineFile(directory / f"{name}.jsonl")
        self._left_out = 0
        self._began, self.row = time.monotonic(), PaceRow()

    def stepped(self, active: int, drawn: int, seconds: float) -> None:
        """An engine's step: `drawn` tokens by `active` sequences, which is one decoding step or several."""
        self.row.step_s += seconds
        self.row.steps += drawn // active
        self.row.tokens += drawn
        self.write_when_due()

    def write_when_due(self) -> None:
        row, now = self.row, time.monotonic()
        if now < self._began + PACE_EVERY_S:
            return
        self._left_out += 1
        if self._left_out >= one_in(self._file.size()):
            self._left_out, row.wall_s, row.engine = 0, now - self._began, self._engine()
            times = {name: round(getattr(row, name), 6) for name in ("wall_s", "step_s", "weights_s", "idle_s")}
            with contextlib.suppress(MachineError, OSError):
                self._file.append(msgspec.json.encode(msgspec.structs.replace(row, **times)))
        self._began, self.row = now, PaceRow()

    def close(self) -> None:
        self._file.close()


def one_in(nbytes: int) -> int:
    """Of how many intervals one is written to a file of `nbytes`."""
    return min(MOST_LEFT_OUT, 1 << min(32, nbytes // (MIB_EACH << 20)))


# -- an engine that restarts with new weights ---------------


class EngineRestart:
    """The answers of an engine that starts again with new weights (versions are folders there).

    `finish`: let answers end before the restart, and start none meanwhile; else they are cut and continued after it.

    - A cut answer loses no token: what was drawn becomes the prefix of a new request, and the pieces are committed as
      one answer, each token with its own log-probability and version.
    - The piece after a cut draws from a random stream of its own: the same numbers twice would correlate tokens of one
      answer.
    - Pieces live in this process alone: if it dies, the whole segment is generated again.
    """

    def __init__(self, finish: bool) -> None:
        self.finish = finish
        self.draining = False
        self._answers: dict[int, PartialAnswer] = {}
        self._cut: list[int] = []  # keys of what was taken out of the engine, until `resume`

    def submitted(self, requests: Iterable[Request]) -> None:
        """Remember what runs; every request comes back by `merged`."""
        self._answers.update((request.key, PartialAnswer(request)) for request in requests)

    def waits(self, engine: Engine) -> bool:
        """Whether the restart has to wait for running answers; none is to be started meanwhile (`draining`)."""
        self.draining = self.finish and engine.active > 0
        return self.draining

    def take_out(self, engine: Engine) -> list[Finished]:
        """Stop the engine and take out what runs. Returns the answers that had ended."""
        ended = []
        for one in engine.pause("abort"):
            if one.finish == Finish.ABORTED:
                self._cut.append(one.key)
                self._answers[one.key].add_piece(one)
            else:
                ended.append(one)
        return ended

    def resume(self, engine: Engine) -> None:
        """Let the engine work again, on the answers that were cut."""
        engine.resume()
        cut, self._cut = self._cut, []
        engine.submit([self._answers[key].rest() for key in cut])

    def merged(self, last: Finished) -> Finished:
        """The answer whose last piece is `last`, with the pieces before it."""
        partial = self._answers.pop(last.key, None)
        if partial is None or not partial.pieces:
            return last
        partial.add_piece(last)  # without its text: the engine knows that of the last piece at most
        return partial.finished(last.finish, refused=last.refused)


# -- the role ----------------------------------------------


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


class Rollout(Actor):
    role = "rollout"
    subscribe: ClassVar[tuple[type[m.Message], ...]] = ()
    restart: EngineRestart | None = None  # where new weights make the engine start again
    refused = 0  # version that could not be used here
    only_validates = False  # validation.mode = "dedicated"

    def setup(self) -> None:
        self.claimed: dict[int, ClaimedSlot] = {}  # by slot
        self.bell, self.segment_bell = Doorbell(), Doorbell()
        self.alone = False
        self.limits = self.topology.derived.limits
        self.segments = SegmentCuts.of(self.topology, self.name)
        self.only_validates = self.segments.cls == SampleClass.VALIDATE
        self.waves = self.segments.waves
        if self.waves is not None:
            self.tick_s = WAVE_TICK_S
        self.version = 0
        self.steps = VersionSteps()  # of the versions that this engine has run
        self.engine: Engine = make_engine(self.topology, self.name)
        weights = TransportSettings.of(self.topology, self.paths)
        own = self.engine.receiver(weights, self.worker_id)
        self.receiver: Receiver = own or make_receiver(weights, self.worker_id)
        if self.receiver.kind == "folder":
            self.restart = EngineRestart(finish=self.topology.weights.on_restart == "finish")
        self._next_request = self._last_bell = 0.0
        self.joined = False  # since the last decoding step
        self.deadline = WorkDeadline(self.topology.limits.progress_s, self.topology.limits.work_s)
        self._behind_since = math.inf
        self._update_weights(wait=True)
        self.pace = Pace(self.paths.pace, self.worker_id, self.engine.statistics)

    def work(self) -> bool:
        self._update_weights()
        self._take()
        self._request_tasks()
        if not self.engine.active:
            return False
        begun, active, drawn = time.monotonic(), self.engine.active, self.engine.drawing
        # Counted before they are drawn: a death in the middle of the step hides none.
        self.ring.add(tokens=drawn)
        finished = self._engine_step(joining=self.joined or drawn < active)
        whole = sum([self._commit(sequence) for sequence in finished])
        self._announce()
        busy_s = time.monotonic() - begun
        self.segments.stepped(busy_s)
        self.ring.add(busy_ns=int(busy_s * 1e9), samples=whole)
        self.pace.stepped(active, drawn, busy_s)
        return True

    def _engine_step(self, joining: bool) -> list[Finished]:
        """A decoding step; declared if it may compute long prompts, or all keys again after new weights."""
        self.joined = False
        if not joining:
            return self.engine.step()
        with self.activity("prefill", self.deadline.begin()):
            finished = self.engine.step()
        self.deadline.ended()
        return finished

    def _announce(self) -> None:
        """Ring doorbells, seldom while many answers run: the reward worker takes all there are at each."""
        now = time.monotonic()
        pause = SPARSE_BELL_EVERY_S if self.engine.active < self.engine.capacity // SPARSE else BELL_EVERY_S
        if now >= self._last_bell + pause:
            self._last_bell = now
            self.ring_bells(self.bell, self.segment_bell)

    def idle(self, timeout_s: float) -> None:
        self.ring_bells(self.bell, self.segment_bell)
        seen = self.ring.transitions(State.QUEUED)
        if not self._take():
            begun = time.monotonic()
            self.ring.wait(State.QUEUED, seen, timeout_s)
            self.pace.row.idle_s += time.monotonic() - begun
            self.pace.write_when_due()

    def subscriptions(self) -> list[str]:
        return [*super().subscriptions(), topic(m.NewTask, self.worker_id)]

    def _request_tasks(self) -> None:
        """Send the scheduler this worker's name and how many rows it has for training; it answers with doorbells."""
        now = time.monotonic()
        if now >= self._next_request and not self.only_validates:
            self._next_request = now + REQUEST_EVERY_S
            rows, active = self.engine.capacity, self.engine.active
            self.bus.send(m.TaskRequest(worker_id=self.worker_id, capacity=rows - active, rows=rows))

    # -- weights ------------------------------------------------------------------------------------------------

    def _update_weights(self, wait: bool = False) -> None:
        """Load the newest version if there is one. At the start `wait` for it: old weights would age every sample. A
        worker that only validates keeps its version through a round."""
        if self.only_validates and not wait and version_pin.pinned_by(self.ring):
            return
        newest, _ = self.receiver.newest()
        # Version 0 is the model folder that the engine has loaded; nothing was published then.
        if wait and self.ring.header(HeaderWord.VERSION) > max(newest, 0):
            self._wait_for_weights(self.ring.header(HeaderWord.VERSION))
            newest, _ = self.receiver.newest()
        if newest <= max(self.version, self.refused) or (self.restart is not None and self.restart.waits(self.engine)):
            return
        begun = time.monotonic()
        try:
            with self.activity("new weights", self.topology.limits.ready_s):  # some engines restart for them
                self.version, step = self._new_weights()
        except WeightsRefused as problem:
            self.refused = newest
            self.warn("rollout", f"continues with version {self.version}: {problem}", "error", kind="weights refused")
            return
        self.joined = True
        seconds = time.monotonic() - begun
        self.segments.fetched(seconds)
        self.steps.add(self.version, step)
        self.ring.set_version_seen(self.version)
        if not wait:
            self.pace.row.weights_s += seconds
            self.pace.row.updates += 1

    def _new_weights(self) -> tuple[int, int]:
        """Load between two decoding steps; running answers leave an engine that has to restart, and come back."""
        if self.restart is None:
            return self.engine.update_weights(self.receiver)
        ended, refused = self.restart.take_out(self.engine), None
        try:
            found = self.engine.update_weights(self.receiver)
        except WeightsRefused as problem:
            refused = problem
        self.restart.resume(self.engine)
        self.ring.add(samples=sum([self._commit(sequence) for sequence in ended]))
        if refused is not None:
            raise refused
        return found

    def _wait_for_weights(self, version: int) -> None:
        """Wait for a version in short turns: the learner may be starting too, and the run may be stopped.

        The limit counts from the learner's last progress, since it may have many steps to train again.
        """
        limit_s = self.topology.limits.ready_s
        turns = left = math.ceil(limit_s / WEIGHTS_TURN_S)  # turns, not time: the machine may be suspended
        seen: list[tuple[int, int]] | None = None
        with self.activity("first weights", limit_s):
            while left > 0:
                with contextlib.suppress(WeightsTimeout):
                    self.receiver.wait_for(version, WEIGHTS_TURN_S)
                    return
                if self.stopping:
                    return
                left -= 1
                learners = [(one.pid, one.progress) for one in self.ring.processes() if one.role == "learner"]
                if learners != seen:
                    seen, left = learners, turns
                    self.ring.progress()
        raise WeightsTimeout(f"{self.name}: no version {version}, and no progress of a learner for {limit_s:g} s")

    # -- slots --------------------------------------------------------------------------------------------------

    def _take(self) -> bool:
        """Claim as many slots as the engine has rows for; a suspect one only when nothing else runs."""
        room = self.engine.capacity - self.engine.active
        draining = self.restart is not None and self.restart.draining
        if room <= 0 or draining or (self.alone and self.claimed) or self._left_behind():
            return False
        taken, self.alone = claim_queued(self.ring, self.waves, room, not self.claimed, self.segments.cls)
        if taken:
            requests = self._requests(taken)
            if self.restart is not None:
                self.restart.submitted(requests)
            self.engine.submit(requests)
            self.joined = True
            self.pace.row.joined += len(taken)
        return bool(taken)

    def _requests(self, taken: Sequence[tuple[int, int]]) -> list[Request]:
        """The request of each claimed slot; a slot whose prompt cannot be used is dropped here."""
        described = self.ring.lines([slot for slot, _ in taken])[LINE_FIELDS].tolist()
        made = [self._request(*claim, dict(zip(LINE_FIELDS, values))) for claim, values in zip(taken, described)]
        return [request for request in made if request is not None]

    def _left_behind(self) -> bool:
        """Whether new weights do not reach this worker: what it starts would be too old before it is trained."""
        bound = 0 if self.limits.waves else self.limits.max_staleness
        if self.only_validates:
            return False
        behind = self.ring.header(HeaderWord.VERSION_STEP) - self.steps.step_of(self.version)
        if bound is None or self.topology.experiments.forced_age != 0 or behind < max(1, bound):
            self._behind_since = math.inf
            return False
        self._behind_since = min(self._behind_since, time.monotonic())
        if time.monotonic() - self._behind_since > LEFT_BEHIND_S:
            newest, _ = self.receiver.newest()
            published = self.ring.header(HeaderWord.VERSION)
            text = f"takes no new prompts: version {published} is published, but only {newest} has reached this worker"
            self.warn("rollout", text, kind="left behind")
        return True

    def _request(self, slot: int, word: int, line: dict[str, Any]) -> Request | None:
        version, step = line["version"], line["step"]
        if (own := self.steps.step_of(self.version)) < step:
            # Admitted with newer weights than these: write it now, since the learner counts the age from it.
            version, step = self.version, own
            self.ring.set(slot, word, version=version, step=step)
        segments = segments_of(word)
        try:
            prompt = self._prompt_ids(slot, word, segments)
            prefix = read_generated(self.ring, slot, "tokens", segments).copy() if segments else NO_IDS
        except UNREADABLE as problem:
            self._drop(slot, word, Fate.MALFORMED, f"an earlier segment cannot be read: {problem}")
            return None
        if prompt is None:
            return None
        left = line["max_new_tokens"] - len(prefix)
        cut = self.segments.next(line["cls"], segments, left)
        counted = (len(prompt), len(prefix), cut.tokens, cut.last)
        self.claimed[slot] = ClaimedSlot(word, line["uid"], version, step, *counted)
        return Request(
            key=slot, uid=line["uid"], segment=segments, prompt_ids=prompt, prefix_ids=prefix,
            max_new_tokens=cut.tokens, temperature=line["temperature"], top_p=line["top_p"],
            seed=self.topology.run.seed,
        )

    def _prompt_ids(self, slot: int, word: int, segments: int) -> Ids | None:
        if segments:
            earlier: Ids = read_prompt_ids(self.ring, slot).copy()
            return earlier
        try:
            prompt = prompt_of(msgspec.json.decode(read_task(self.ring, slot)), self.topology.data)
            ids = np.asarray(self.engine.encode(prompt), np.int32)
        except Exception as problem:
            self._drop(slot, word, Fate.UNRENDERED, f"the prompt cannot be rendered: {problem}")
            return None
        limit = self.topology.max_prompt_tokens
        if not 0 < len(ids) <= limit:
            text = f"its prompt has {len(ids)} tokens; generation.max_prompt_tokens is {limit}"
            self._drop(slot, word, Fate.LONG, text)
            return None
        self.ring.put(slot, word, "prompt_ids", ids)
        return ids

    def _commit(self, sequence: Finished) -> bool:
        """Commit a segment that ended. True if this worker is done with the sample: its answer is whole or dropped."""
        if self.restart is not None:
            sequence = self.restart.merged(sequence)
        slot, task = sequence.key, self.claimed.pop(sequence.key)
        word = task.word
        if sequence.refused:
            self._drop(slot, word, Fate.UNRENDERED, sequence.refused)
            return True
        if sequence.finish == Finish.ABORTED:  # not its fault: the next worker begins this segment again
            self.ring.release(slot, word, State.QUEUED)
            return False
        if not len(sequence.token_ids):
            why = f"its prompt leaves no room in the engine's {self.engine.max_length} tokens"
            self._drop(slot, word, Fate.LONG, why)
            return True
        whole = not self._is_cut(task, sequence)
        try:
            message = self.segments.commit(
                self.ring, slot, word, sequence, self._text(slot, word, sequence) if whole else None, self.steps,
                uid=task.uid, version=task.version, step=task.step, earlier=task.earlier,
                prompt_tokens=task.prompt_tokens,
            )
        except (SlotTooSmall, *UNREADABLE) as problem:
            self._drop(slot, word, Fate.MALFORMED, str(problem))
            return True
        if message is not None:
            (self.bell if whole else self.segment_bell).add(lambda: message)
        return whole

    def _text(self, slot: int, word: int, sequence: Finished) -> str:
        """The whole answer; a scripted engine brings its own."""
        if sequence.text is not None:
            return sequence.text
        ids = sequence.token_ids
        if segments := segments_of(word):
            ids = np.concatenate([read_generated(self.ring, slot, "tokens", segments), ids])
        return self.engine.decode(ids, sequence.finish == Finish.EOS)

    def _is_cut(self, task: ClaimedSlot, sequence: Finished) -> bool:
        """Whether only the segment's own length ended it: not the answer's limit, and no fault."""
        if task.last or sequence.finish == Finish.EOS or len(sequence.token_ids) < task.tokens:
            return False
        room = self.engine.max_length - task.prompt_tokens - task.earlier - len(sequence.token_ids)
        return room > 0 and math.isfinite(sequence.logprobs[-1])

    def _drop(self, slot: int, word: int, fate: Fate, why: str) -> None:
        uid = int(self.ring.line(slot)["uid"])
        self.claimed.pop(slot, None)
        self.warn("rollout", f"sample {uid} is dropped: {why}", kind=f"dropped {fate.letter}", uids=[uid])
        self.ring.drop(slot, word, fate)

    def teardown(self) -> None:
        for slot, task in self.claimed.items():
            self.ring.release(slot, task.word, State.QUEUED)
        log.info("engine: %s", self.engine.statistics())
        self.pace.close()
        self.receiver.close()
        self.engine.close()
