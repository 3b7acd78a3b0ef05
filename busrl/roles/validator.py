"""The validator: puts held-out prompts through the same engines and rewards, and writes their figures.

Talks to the ring (it dispatches and consumes the slots of class `validate`), to the request of `busrl validate`, and
publishes VALIDATION_STARTED, VALIDATION_DONE and VALIDATION_SET_DONE. Validation slots never enter the window, the
trigger or staleness. Knows nothing of the optimiser; `busrl.data.figures` makes the figures.

`validation.mode`: "hold" pins the published version, the learner publishes nothing while the header word `hold` names
this process (of several models the lead's, or that of the one that a request is about); "dedicated" pins that of the
rollouts which only validate, and training goes on; "free" pins nothing. Figures of tokens of several versions, in one
answer or in several, are labelled `mixed`.

- A result is appended to validation.log before its fate becomes V: a successor reads it back and loses nothing.
- The uid of a sample is round x answers of all sets + place: a round that was cut short is finished, not repeated.
- Every round asks the same prompts, spread over the file, and each prompt has the same weight in the mean.
- A round on demand has the learner's step as its number, and is finished by a successor like any other.
- A round of which no sample was judged measured nothing: its line has null for a mean, it does not count as done, and
  it is asked again: at the next start, and while the run goes on after one more step, after two, four, ...
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from busrl.data import JsonlStream
from busrl.data.figures import Figures, Judged, by_tag, tags_of
from busrl.data.prompts import lines_of
from busrl.errors import BadTensor
from busrl.paths import RunPaths
from busrl.protocol import messages as m
from busrl.ring import Fates, Ring, State, segments_of
from busrl.roles import version_pin
from busrl.roles.actor import Actor
from busrl.roles.answers import UNREADABLE, read_generated, read_parts, read_text
from busrl.roles.episodes import partners_of
from busrl.roles.ledgers import Ledger
from busrl.scheduling.plan import due as due_by
from busrl.scheduling.trigger import Rounds
from busrl.states import PAUSE_STARTING, TERMINAL, VALIDATE_BIT, Fate, HeaderWord, RunPhase, SampleClass, shown_uid
from busrl.system import files
from busrl.system.files import LineFile, json_lines
from busrl.system.imports import of_busrl
from busrl.topology.prompts import AskedSet

log = logging.getLogger("busrl")
PRIORITY = 1 << 20
RESULT_BYTES = 1024  # of a line of validation.log: far more than any has
ANSWER_LENGTH = 64  # of an answer that is compared with others as it stands


class Result(msgspec.Struct, frozen=True):
    """A validated sample as it stands in validation.log."""

    uid: int
    round: int
    reward: float
    version: int  # policy version of the newest weights that drew a token,
    oldest: int  # and of the oldest
    tokens: int
    parts: dict[str, float] = {}  # of its reward
    set: str = ""
    line: int = -1  # of the set's file, from 0; not there in logs of before
    answer: str | None = None  # what the reward took from its text, where answers of a prompt are compared
    others: dict[str, list[int]] | msgspec.UnsetType = msgspec.UNSET  # versions of other models, by their tags


# -- which round ------------------------------------------------------------------------------------------------------


class Request(msgspec.Struct):
    """A request of `busrl validate`, and what becomes of it: the content of validate.json."""

    id: str
    sets: list[str]  # by name; "" is [validation] itself
    free: bool = False  # whatever validation.mode says
    state: str = "asked"  # asked, begun, done or refused
    round: int = -1
    text: str = ""
    model: str | msgspec.UnsetType = msgspec.UNSET  # the one of several whose version is pinned, where not the lead's

    @property
    def open(self) -> bool:
        return self.state in ("asked", "begun")

    @classmethod
    def read(cls, paths: RunPaths) -> Request | None:
        """The newest request; None without one. One that cannot be read is refused."""
        try:
            return msgspec.json.decode(paths.validate_request.read_bytes(), type=cls)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, ValueError) as problem:
            return cls("", [], state="refused", text=f"{paths.validate_request} cannot be read: {problem}")

    def write(self, paths: RunPaths) -> None:
        files.replace(paths.validate_request, msgspec.json.encode(self))


@dataclass
class MeasuredSet:
    """A set in this process: its prompts, which of its rounds are done, and the results of the round under way.

    `answers_of_all`: the answers of all sets in a round, by which the uids of rounds are apart.
    """

    spec: AskedSet
    stream: JsonlStream
    rounds: Rounds
    answers_of_all: int
    groups_done: int = 0  # trained when its newest round began
    results: dict[int, Result] = field(default_factory=dict)  # by uid

    def __post_init__(self) -> None:
        self.lines = lines_of(self.spec.prompts, len(self.stream), self.spec.k)

    def uids(self, number: int) -> range:
        """The uids of a round. Rounds are numbered by steps, so those of two rounds never meet."""
        first = VALIDATE_BIT | (number * self.answers_of_all + self.spec.first)
        return range(first, first + self.spec.answers)

    def is_result(self, number: int, uid: int, result: Result) -> bool:
        """True if a result of the log is of the prompt of this uid now: sets may have changed since it was written."""
        uids = self.uids(number)
        if uid not in uids or result.set != self.spec.name:
            return False
        return result.line in (-1, int(self.lines[uid - uids.start]))

    def judged(self, number: int) -> list[Judged]:
        """The results of a round, with the prompt and the place of each."""
        first = self.uids(number).start
        results, k = sorted((uid - first, result) for uid, result in self.results.items()), self.spec.k
        return [
            Judged(int(self.lines[place]), place // k, result.reward, result.answer, result.tokens, result.parts)
            for place, result in results
        ]


class RoundPin:
    """The pin of the published version for a round. What is waited for before, each `ready_s` at most: a version that
    a learner kept back for the round before, which rounds in a row would keep back for ever; and with `keepers`, the
    rollouts that only validate, that they all have the version that was the newest when the round became due, or a
    later one, so that each answers with one version."""

    def __init__(self, ring: Ring, keepers: set[str], ready_s: float, warn: Callable[[str], None]) -> None:
        self._ring, self._keepers, self._ready_s, self._warn = ring, keepers, ready_s, warn
        self._wanted: tuple[int, float] | None = None  # version that a round waits for, and since when

    def take(self, now: float) -> bool:
        """Pin the version; False while the round has to wait."""
        self._wanted = self._wanted or (self._ring.header(HeaderWord.VERSION), now)
        version, since = self._wanted
        if not self._keepers:
            if now <= since + self._ready_s and version_pin.keeps_back(self._ring):
                return False
            self._wanted = None
            version_pin.pin(self._ring)
            return True
        if self._ready_at(version) and version_pin.pin(self._ring) and self._ready_at(version):
            self._wanted = None
            return True
        if now > since + self._ready_s:
            return self._take_late(version)
        self.release()
        return False

    def release(self) -> None:
        version_pin.unpin(self._ring)

    def _take_late(self, version: int) -> bool:
        self._wanted = None
        seen = {entry.label: entry.version for entry in self._ring.processes() if entry.label in self._keepers}
        there = seen or "none is there"
        self._warn(f"the round begins though its rollouts do not all have version {version}: {there}")
        version_pin.pin(self._ring)
        return True

    def _ready_at(self, version: int) -> bool:
        """True if the rollouts that only validate all have one version, this or a later one."""
        seen = {entry.version for entry in self._ring.processes() if entry.label in self._keepers}
        return len(seen) <= 1 and min(seen, default=version) >= version


class Validator(Actor):
    role = "validator"
    singleton = True
    subscribe: ClassVar[tuple[type[m.Message], ...]] = (m.LearnerStateUpdate,)

    def setup(self) -> None:
        topology, config = self.topology, self.topology.validation
        start = next(iter(deque(json_lines(self.paths.starts), maxlen=1)), {})
        self.begun_at = step if isinstance(step := start.get("step"), int) else 0  # steps that were done by then
        self.answers = topology.derived.val_samples
        self.sets = [self.measured(spec) for spec in topology.sets]
        self.log_path, keep = self.paths.validation_log, topology.log.keep
        # A successor finds in it what was judged of the round that is under way.
        self.log = LineFile(self.log_path, keep=keep and max(keep, 4 * self.answers * RESULT_BYTES))
        self.rows = LineFile(self.paths.validation)
        finder = topology.reward.finder
        self.find = None if finder is None else of_busrl(finder[0])(finder[1])
        # Where the batch size can vary an interval is so many groups, which the learner's messages count.
        self.interval = topology.learner.trigger.n_min if topology.learner.batch_varies else 0
        keepers = {process.name for process in topology.processes() if process.spec.serves == "validation"}
        self._late = partial(self.warn, "validator", kind="late round")
        self.pins_of = {topology.tag: RoundPin(self.ring, keepers, topology.limits.ready_s, self._late)}
        self.pins = config.mode in ("hold", "dedicated")
        self.groups = 0
        self.round: int | None = None
        self.due: list[MeasuredSet] = []
        self.request: Request | None = None
        # A slot that a predecessor was about to fill must be decided before its sample is dispatched again.
        self.ring.reap()

    def measured(self, spec: AskedSet) -> MeasuredSet:
        """A set with what the run's files say of its rounds."""
        topology, config = self.topology, self.topology.validation
        done = _finished_rounds(self.paths.validation, spec.name)
        begun = self.validate_fates.view()[spec.first : spec.first + spec.answers].any()  # the first round
        late = (self.begun_at > 0 and not begun) or 0 in _rounds(self.paths.validation, spec.name)
        rounds = Rounds(config.at_start, spec.every, config.at_end, set(done), late)
        stream = JsonlStream(spec.data, topology.run.seed, False, topology.data.prompt_key)
        return MeasuredSet(spec, stream, rounds, self.answers, max(done.values(), default=0))

    def handle(self, message: m.Message) -> None:
        if isinstance(message, m.LearnerStateUpdate):
            total = message.metrics.get("groups_total", 0.0)
            self.groups = max(self.groups, int(total) if np.isfinite(total) else 0)

    def work(self) -> bool:
        if self.round is None:
            self._maybe_start()
            return False
        ended = self._collect()
        for ring in self.other_rings:  # where the version of another model may be held: results come
            ring.add(samples=ended)
        moved = self._dispatch_some() + ended
        if self._is_over():
            self._finish()
        return bool(moved)

    def idle(self, timeout_s: float) -> None:
        """Wait for the ring's wake-up in a round, quicker than a message; between rounds look now and then."""
        if self.round is None:
            super().idle(4 * timeout_s)
        else:
            self.ring.wait(State.REWARDED, self.ring.transitions(State.REWARDED), timeout_s / 5)

    # -- when a round begins ------------------------------------------------------------------------------------

    def _maybe_start(self) -> None:
        finished = self.ring.header(HeaderWord.RUN_STATE) == RunPhase.FINISHING
        if self.begun_at and self.ring.header(HeaderWord.GENERATION_PAUSE) & PAUSE_STARTING:
            return  # the learner has not said yet which step the run is at
        step, request = self.ring.header(HeaderWord.STEP), None
        next_round = self._scheduled(step, finished)
        if next_round is None and (request := self._requested(step)) is not None:
            wanted = (measured for measured in self.sets if measured.spec.name in request.sets)
            next_round = (request.round, [measured for measured in wanted if request.round not in measured.rounds.done])
        if next_round is None:
            if finished:
                self.stop("all rounds are done")
            return
        pins = self.pins and not finished and not (request is not None and request.free)
        if pins and not self._pin_for(request).take(time.monotonic()):
            return
        if request is not None:
            self._answer(request, "begun")
        self.request = request
        self.begin(*next_round)

    def _scheduled(self, step: int, finished: bool) -> tuple[int, list[MeasuredSet]] | None:
        """The lowest round that is due, and the sets that it is due for."""
        due: dict[int, list[MeasuredSet]] = {}
        for measured in self.sets:
            newest = None  # where groups are counted: the round that is due by them, 0 if none is
            if self.interval:
                newest = step if due_by(self.interval * measured.spec.every, measured.groups_done, self.groups) else 0
            if (number := measured.rounds.due(step, finished, newest)) is not None:
                due.setdefault(number, []).append(measured)
        return min(due.items(), key=lambda entry: entry[0]) if due else None

    def _requested(self, step: int) -> Request | None:
        """The request of `busrl validate`; it is the round of this step, or that which a predecessor began."""
        request = Request.read(self.paths)
        if request is None or not request.open:
            return None
        unknown = sorted(set(request.sets) - {measured.spec.name for measured in self.sets})
        if unknown:
            self._answer(request, "refused", f"there is no set {unknown[0]!r} in this run")
            return None
        if request.model and request.model not in self.topology.trained_tags:
            self._answer(request, "refused", f"there is no model {request.model!r} in this run that learns")
            return None
        request.round = request.round if request.state == "begun" else step
        return request

    def _pin_for(self, request: Request | None) -> RoundPin:
        """The pin of the lead's version, or of that of the model which a request is about."""
        tag = (request.model if request else "") or self.topology.tag
        if tag not in self.pins_of:
            own = self.topology.of(tag)
            ring = Ledger.attach(own, self.topology.paths_of(tag, self.paths), self.role, self.name).ring
            ring.set_ready()
            self.other_rings.append(ring)
            self.pins_of[tag] = RoundPin(ring, set(), own.limits.ready_s, self._late)
        return self.pins_of[tag]

    def _unpin(self) -> None:
        for pin in self.pins_of.values():
            pin.release()

    def _answer(self, request: Request, state: str, text: str = "") -> None:
        request.state, request.text = state, text
        self.write_or_wait("validation", lambda: request.write(self.paths))

    # -- a round ------------------------------------------------------------------------------------------------

    def begin(self, number: int, due: list[MeasuredSet]) -> None:
        """Begin a round of these sets, or go on with what a predecessor left of it."""
        self.round, self.due, self.started = number, due, time.monotonic()
        logged = _read_log(self.log_path, number, self.answers * RESULT_BYTES)
        self.pending = []
        for measured in due:
            measured.groups_done = max(self.groups, measured.groups_done)
            uids = measured.uids(number)
            measured.results = {
                uid: result for uid, result in logged.items() if measured.is_result(number, uid, result)
            }
            if not measured.results:
                self._forget(uids)
            self.pending += [uid for uid in uids if self.validate_fates.get(uid & ~VALIDATE_BIT) == Fate.NONE]
        self.ring.activity(f"validate round {number}", self.topology.limits.ready_s)
        version = self.ring.header(HeaderWord.VERSION)
        samples = sum(measured.spec.answers for measured in due)
        self.bus.send(m.ValidationStarted(round=number, version=version, samples=samples))
        titles = ", ".join(measured.spec.title for measured in due)
        log.info("round %d of %s begins at version %d", number, titles, version)

    def _forget(self, uids: range) -> None:
        """Take away the fates of a round that is over and measured nothing: it is asked again as it was."""
        first, last = uids.start & ~VALIDATE_BIT, uids.stop & ~VALIDATE_BIT
        codes = self.validate_fates.view()[first:last]
        if codes.size and np.isin(codes, [*TERMINAL]).all() and not _in_slots(self.ring, uids):
            with open(self.validate_fates.path, "r+b", buffering=0) as file:
                os.pwrite(file.fileno(), bytes(codes.size), first)



    def _set_of(self, uid: int) -> tuple[MeasuredSet, int]:
        """The set of a sample, and its place in it."""
        place = (uid & ~VALIDATE_BIT) % self.answers
        measured = next(measured for measured in reversed(self.sets) if measured.spec.first <= place)
        return measured, place - measured.spec.first

    def _dispatch_some(self) -> int:
        """Fill the class's own reserve, no more: training keeps the rest of the ring."""
        if not self.pending:
            return 0
        lines = self.ring.lines()
        used = int(np.count_nonzero((lines["cls"] == SampleClass.VALIDATE) & (lines["state"] != State.FREE)))
        room = max(0, min(self.topology.derived.val_reserve - used, len(self.pending)))
        sent = 0
        for uid in self.pending[:room]:
            if not self._dispatch_one(uid):
                break
            sent += 1
        del self.pending[:sent]
        return sent

    def _dispatch_one(self, uid: int) -> bool:
        measured, place = self._set_of(uid)
        item, spec = measured.stream.at(int(measured.lines[place])), measured.spec
        version, step = self.ring.header(HeaderWord.VERSION), self.ring.header(HeaderWord.STEP)
        self.validate_fates.reserve((uid & ~VALIDATE_BIT) + 1)
        done = self.ring.dispatch(
            uid=uid, group=uid, admission=0, member=0, group_size=1, cls=SampleClass.VALIDATE, task=item.line,
            prompt_crc=item.crc, priority=PRIORITY, max_new_tokens=spec.max_new_tokens,
            temperature=spec.temperature, top_p=spec.top_p, version=version, step=step,
        )
        return bool(done)

    def _collect(self) -> int:
        """Log what was judged; the number of samples that ended. One that could not be written has not."""
        ended = 0
        claims = self.ring.take(State.REWARDED, State.TRAINING, cls=SampleClass.VALIDATE, limit=256)
        for slot, word in claims:
            line = self.ring.line(slot)
            try:
                result = self.result_of(slot, word, line)
            except UNREADABLE as problem:
                uid = int(line["uid"])
                self.warn("validator", f"sample {shown_uid(uid)} is dropped: {problem}", kind="unreadable", uids=[uid])
                self.ring.drop(slot, word, Fate.MALFORMED)
                ended += 1
                continue
            results = self._set_of(result.uid)[0].results
            is_logged = result.uid in results or result.round != self.round
            if is_logged or self._append(result, results):
                self.ring.finish(slot, word, Fate.VALIDATED)
                ended += 1
            else:
                self.ring.release(slot, word, State.REWARDED)  # not written: a successor writes it
        return ended

    def result_of(self, slot: int, word: int, line: np.void) -> Result:
        """The result of a judged answer, from its slot; one of `UNREADABLE` where the answer breaks a rule."""
        uid = int(line["uid"])
        measured, place = self._set_of(uid)
        versions = read_generated(self.ring, slot, "versions", segments_of(word))
        if not len(versions):
            raise BadTensor(f"slot {slot}: no tokens")
        answer = None
        if self.find is not None and measured.spec.k > 1:
            answer = _short(self.find(read_text(self.ring, slot, segments_of(word))))
        return Result(
            uid=uid, round=(uid & ~VALIDATE_BIT) // self.answers, reward=float(line["reward"]),
            version=int(versions.max()), oldest=int(versions.min()), tokens=int(line["response_tokens"]),
            parts=read_parts(self.ring, slot), set=measured.spec.name, line=int(measured.lines[place]), answer=answer,
            others=partners_of(self.ring, slot) or msgspec.UNSET,
        )

    def _append(self, result: Result, results: dict[int, Result]) -> bool:
        written = self.write_or_wait("validation", lambda: self.log.append(msgspec.json.encode(result)))
        if written:
            results[result.uid] = result
        return written

    def _is_over(self) -> bool:
        """True once all are judged, or every sample has a final fate: a round ends although some were dropped."""
        if all(len(measured.results) == measured.spec.answers for measured in self.due):
            return True
        if self.pending:
            return False
        return not any(_has_unended(self.validate_fates, measured.uids(self.round or 0)) for measured in self.due)

    # -- its end ------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Write a line for each set; what is not written is written by a successor."""
        number = self.round or 0
        while self.due:
            if not self._finish_set(self.due[0], number):
                return
            del self.due[0]
        self._unpin()
        self.ring.activity("")
        if self.request is not None:
            self._answer(self.request, "done")
        self.round, self.request = None, None

    def _finish_set(self, measured: MeasuredSet, number: int) -> bool:
        record = self.record_of(measured, number)
        if not self.write_or_wait("validation", lambda: self.rows.append(msgspec.json.encode(record))):
            return False
        measured.rounds.ended(number, record["samples"] > 0)
        self._announce(measured, record)
        if record["dropped"]:
            means = "its mean is over the others" if record["samples"] else (
                "nothing was measured, and it is asked again when the run has made steps, and at its next start"
            )
            self.warn(
                "validator",
                f"{measured.spec.title}, round {number}: {record['dropped']} of {measured.spec.answers} samples ended "
                f"without a reward; {means}",
            )
        figures = (measured.spec.title, number, record["val/reward"], record["samples"], record["versions"])
        log.info("%s, round %d: mean reward %s over %d samples of versions %s", *figures)
        return True

    def _announce(self, measured: MeasuredSet, record: dict[str, Any]) -> None:
        fields = {"round": record["round"], "version": record["version"], "samples": record["samples"],
                "mean": record["val/reward"] or 0.0, "mixed": record["mixed"], "dropped": record["dropped"]}
        if not measured.spec.name and measured.spec.k == 1:
            self.bus.send(m.ValidationDone(**fields))
            return
        figures = {name: value for name, value in record.items()
                   if name.startswith("val/") and name != "val/parts" and isinstance(value, (int, float))}
        self.bus.send(m.ValidationSetDone(**fields, set=measured.spec.name, figures=figures))

    def record_of(self, measured: MeasuredSet, number: int) -> dict[str, Any]:
        """The line of validation.jsonl of one set in a round."""
        results, config = measured.results.values(), self.topology.validation
        versions = sorted({v for result in results for v in (result.oldest, result.version)})
        figures = Figures(measured.judged(number), measured.spec.k, config.solved, self.find is not None)
        parts = figures.parts()
        tagged = by_tag(figures, tags_of(measured.stream.records(measured.lines), config.tag_key))
        return {
            "round": number, **({"set": measured.spec.name} if measured.spec.name else {}), **figures.record(),
            **({"val/parts": parts} if parts else {}), "dropped": measured.spec.answers - len(results),
            "version": versions[0] if versions else 0, "versions": versions, "mixed": len(versions) > 1,
            "time": round(time.time(), 3), "seconds": round(time.monotonic() - self.started, 3),
            "groups": measured.groups_done, "val/length": figures.mean("tokens"), "k": measured.spec.k,
            **({"by": tagged} if tagged else {}), **_of_others(results),
        }

    def teardown(self) -> None:
        self._unpin()


def _has_unended(fates: Fates, uids: range) -> bool:
    """True if a sample of these has no fate that ends it."""
    codes = fates.view()[uids.start & ~VALIDATE_BIT : uids.stop & ~VALIDATE_BIT]
    return bool(((codes == Fate.NONE) | (codes == Fate.DISPATCHED)).any())


def _in_slots(ring: Ring, uids: range) -> bool:
    """True if a slot still holds a sample of these: whoever frees it would store its fate once more."""
    lines = ring.lines()
    in_slots = lines["uid"][lines["state"] != State.FREE]
    return bool(((in_slots >= uids.start) & (in_slots < uids.stop)).any())


def _of_others(results: Iterable[Result]) -> dict[str, list[int]]:
    """The versions of other models that answered in a round."""
    versions: dict[str, set[int]] = {}
    for tag, found in (item for result in results for item in (result.others or {}).items()):
        versions.setdefault(f"val/versions/{tag}", set()).update(found)
    return {name: sorted(found) for name, found in versions.items()}


def _short(answer: str | None) -> str | None:
    """The text that stands for an answer where answers are compared: a long one is its beginning and a digest."""
    if answer is None or len(answer) <= ANSWER_LENGTH:
        return answer
    return f"{answer[: ANSWER_LENGTH // 2]}... {hashlib.sha1(answer.encode(errors='replace')).hexdigest()[:16]}"


def _rounds(path: Path, name: str = "") -> dict[int, dict[str, Any]]:
    """The line of each round of a set, of several the last that measured something; damaged ones are left out."""
    rows: dict[int, dict[str, Any]] = {}
    for row in json_lines(path):
        number = row.get("round")
        if isinstance(number, int) and row.get("set", "") == name and (number not in rows or row.get("samples") != 0):
            rows[number] = row
    return rows


def _finished_rounds(path: Path, name: str = "") -> dict[int, int]:
    """The rounds of a set that measured something, and how many groups were trained when each began. A round whose line
    was damaged is finished again: its samples are in the log."""
    rows = {number: row for number, row in _rounds(path, name).items() if row.get("samples") != 0}
    return {number: row["groups"] if isinstance(row.get("groups"), int) else 0 for number, row in rows.items()}


def _read_log(path: Path, round_number: int, tail: int) -> dict[int, Result]:
    """Results of this round that an earlier validator wrote, among the last `tail` bytes: rounds follow each other."""
    results: dict[int, Result] = {}
    for line in json_lines(path, tail):
        try:
            result = msgspec.convert(line, type=Result)
        except msgspec.ValidationError:
            continue
        if result.round == round_number:
            results[result.uid] = result
    return results
