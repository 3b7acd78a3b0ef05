"""The validator: puts held-out prompts through the same engines and rewards, and writes their mean reward.

Talks to the ring (it dispatches and consumes the slots of class `validate`) and publishes VALIDATION_STARTED and
VALIDATION_DONE. Validation slots never enter the window, the trigger or staleness. Knows nothing of the optimiser.

With `validation.mode = "hold"` a round pins the published version: the learner publishes nothing while the header word
`hold` names this process. A metric of tokens of several versions, in one answer or in several, is labelled `mixed`.

- A result is appended to validation.log before its fate becomes V: a successor reads it back and loses nothing.
- The uid of a sample is round x samples + index: a round that was cut short is finished, not repeated.
- Every round asks the same prompts, spread over the file, and each prompt has the same weight in the mean.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from busrl.config.rules import batch_varies
from busrl.config.rules import due as due_by
from busrl.data import JsonlStream
from busrl.data.prompts import lines_of, mean_over_prompts
from busrl.errors import BadTensor
from busrl.files import LineFile, json_lines
from busrl.protocol import messages as m
from busrl.ring import State, segments_of
from busrl.roles import version_pin
from busrl.roles.actor import Actor
from busrl.roles.trajectory import UNREADABLE, read_generated, read_parts
from busrl.states import VALIDATE_BIT, Fate, HeaderWord, RunPhase, SampleClass

log = logging.getLogger("busrl")
PRIORITY = 1 << 20
RESULT_BYTES = 4096  # of a line of validation.log: far more than any has


class Result(msgspec.Struct, frozen=True):
    """One validated sample as it stands in validation.log."""

    uid: int
    round: int
    reward: float
    version: int  # policy version of the newest weights that drew a token,
    oldest: int  # and of the oldest
    tokens: int
    parts: dict[str, float] = {}  # of its reward


class Rounds:
    """Which rounds are due, from the learner's step and what validation.jsonl says is done."""

    def __init__(self, before: bool, every: int, at_end: bool, done: set[int]) -> None:
        self.before, self.every, self.at_end, self.done = before, every, at_end, done

    def due(self, step: int, finished: bool, newest: int | None = None) -> int | None:
        """The round to run now, numbered by the step it stands for; None if there is none. A run may end before
        `run.max_steps`: `finished` makes `step` the last one.

        A missed step is not made up for: the newest multiple of `every` counts, or `newest` where groups are counted.
        """
        if finished:
            return step if self.at_end and step not in self.done else None
        if self.before and not self.done:
            return 0
        if newest is None:
            newest = step - step % self.every if self.every else 0
        return newest if newest and newest not in self.done and newest > max(self.done, default=0) else None


class Validator(Actor):
    role = "validator"
    singleton = True
    subscribe: ClassVar[tuple[type[m.Message], ...]] = (m.LearnerStateUpdate,)

    def setup(self) -> None:
        config, data = self.topology.validation, self.topology.data
        self.stream = JsonlStream(config.data, self.topology.run.seed, False, data.prompt_key)
        self.samples = self.topology.derived.val_samples
        self.asked = lines_of(self.samples, len(self.stream))
        self.log_path = self.paths.root / "validation.log"
        self.log, self.rows = LineFile(self.log_path), LineFile(self.paths.validation)
        done = _finished_rounds(self.paths.validation)
        self.rounds = Rounds(config.at_start, config.every, config.at_end, set(done))
        # Where the batch size can vary an interval is so many groups, which the learner's messages count.
        self.interval = config.every * self.topology.learner.trigger.n_min if batch_varies(self.topology) else 0
        self.groups, self.groups_done = 0, max(done.values(), default=0)
        self.round: int | None = None
        self.results: dict[int, Result] = {}
        # A slot that a predecessor was about to fill must be decided before its sample is dispatched again.
        self.ring.reap()

    def handle(self, message: m.Message) -> None:
        if isinstance(message, m.LearnerStateUpdate):
            total = message.metrics.get("groups_total", 0.0)
            self.groups = max(self.groups, int(total) if np.isfinite(total) else 0)

    def step(self) -> bool:
        if self.round is None:
            return self._maybe_start()
        moved = self._dispatch_some() + self._collect()
        if len(self.results) == self.samples or self._all_ended():
            self._finish()
        return bool(moved)

    def idle(self, timeout_s: float) -> None:
        """Wait for the ring's wake-up in a round, quicker than a message; between rounds look now and then."""
        if self.round is None:
            super().idle(4 * timeout_s)
        else:
            self.ring.wait(State.REWARDED, self.ring.transitions(State.REWARDED), timeout_s / 5)

    # -- a round ------------------------------------------------------------------------------------------------

    def _maybe_start(self) -> bool:
        finished = self.ring.header(HeaderWord.RUN_STATE) == RunPhase.FINISHING
        step = self.ring.header(HeaderWord.STEP)
        newest = None  # where groups are counted: the round that is due by them, 0 if none is
        if self.interval:
            newest = step if due_by(self.interval, self.groups_done, self.groups) else 0
        due = self.rounds.due(step, finished, newest)
        if due is None:
            if finished:
                self.stop("all rounds are done")
            return False
        self.round, self.started, self.groups_done = due, time.monotonic(), max(self.groups, self.groups_done)
        self.results = _read_log(self.log_path, due, self.samples * RESULT_BYTES)
        self.pending = [uid for uid in self._uids() if self.validate_fates.get(uid & ~VALIDATE_BIT) == Fate.NONE]
        if self.topology.validation.mode == "hold" and not finished:
            version_pin.pin(self.ring)
        self.ring.activity(f"validate round {due}", self.topology.limits.ready_s)
        version = self.ring.header(HeaderWord.VERSION)
        self.bus.send(m.ValidationStarted(round=due, version=version, samples=self.samples))
        log.info("round %d begins at version %d", due, version)
        return True

    def _uids(self) -> range:
        """Rounds are numbered by steps, so their uids are apart by `samples` and never meet."""
        first = VALIDATE_BIT | (self.round or 0) * self.samples
        return range(first, first + self.samples)

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
        item = self.stream.at(int(self.asked[(uid & ~VALIDATE_BIT) % self.samples]))
        generation = self.topology.generation
        version, step = self.ring.header(HeaderWord.VERSION), self.ring.header(HeaderWord.STEP)
        self.validate_fates.reserve((uid & ~VALIDATE_BIT) + 1)
        done = self.ring.dispatch(
            uid=uid, group=uid, admission=0, member=0, group_size=1, cls=SampleClass.VALIDATE, task=item.line,
            prompt_crc=item.crc, priority=PRIORITY, max_new_tokens=generation.max_new_tokens,
            temperature=self.topology.validation.temperature, top_p=1.0, version=version, step=step,
        )
        return bool(done)

    def _collect(self) -> int:
        taken = self.ring.take(State.REWARDED, State.TRAINING, cls=SampleClass.VALIDATE, limit=256)
        for slot, word in taken:
            line = self.ring.line(slot)
            try:
                result = self._result(slot, word, line)
            except UNREADABLE as problem:
                uid = int(line["uid"])
                self.warn("validator", f"sample {uid} is dropped: {problem}", kind="unreadable", uids=[uid])
                self.ring.drop(slot, word, Fate.MALFORMED)
                continue
            known = result.uid in self.results or result.round != self.round
            if known or self._append(result):
                self.ring.finish(slot, word, Fate.VALIDATED)
            else:
                self.ring.release(slot, word, State.REWARDED)  # not written: a successor writes it
        return len(taken)

    def _result(self, slot: int, word: int, line: np.void) -> Result:
        uid = int(line["uid"])
        versions = read_generated(self.ring, slot, "versions", segments_of(word))
        if not len(versions):
            raise BadTensor(f"slot {slot}: no tokens")
        return Result(
            uid=uid, round=(uid & ~VALIDATE_BIT) // self.samples, reward=float(line["reward"]),
            version=int(versions.max()), oldest=int(versions.min()), tokens=int(line["response_tokens"]),
            parts=read_parts(self.ring, slot),
        )

    def _append(self, result: Result) -> bool:
        written = self.write_or_wait("validation", lambda: self.log.append(msgspec.json.encode(result)))
        if written:
            self.results[result.uid] = result
        return written

    def _all_ended(self) -> bool:
        """Every sample has a final fate: the round ends although some were dropped."""
        return not self.pending and all(
            self.validate_fates.get(uid & ~VALIDATE_BIT) not in (Fate.NONE, Fate.DISPATCHED) for uid in self._uids()
        )

    def _finish(self) -> None:
        round_number = self.round or 0
        record = self._record(round_number)
        mean, samples = record["val/reward"], record["samples"]
        if not self.write_or_wait("validation", lambda: self.rows.append(msgspec.json.encode(record))):
            return
        version_pin.unpin(self.ring)
        self.ring.activity("")
        self.bus.send(m.ValidationDone(
            round=round_number, version=record["version"], samples=samples, mean=mean, mixed=record["mixed"]
        ))
        if record["dropped"]:
            self.warn(
                "validator",
                f"round {round_number}: {record['dropped']} of {self.samples} samples ended without a reward; "
                f"{'its mean is over the others' if samples else 'it has no mean, and says 0'}",
            )
        found = (round_number, mean, samples, record["versions"])
        log.info("round %d: mean reward %.3f over %d samples of versions %s", *found)
        self.rounds.done.add(round_number)
        self.round = None

    def _record(self, round_number: int) -> dict[str, Any]:
        """The round's line of validation.jsonl."""
        versions = sorted({v for result in self.results.values() for v in (result.oldest, result.version)})
        names = dict.fromkeys(name for one in self.results.values() for name in one.parts)
        parts = {name: self._mean({uid: one.parts.get(name) for uid, one in self.results.items()}) for name in names}
        reward, length = (
            self._mean({uid: getattr(one, name) for uid, one in self.results.items()}) for name in ("reward", "tokens")
        )
        return {
            "round": round_number, "val/reward": reward, **({"val/parts": parts} if parts else {}),
            "samples": len(self.results), "dropped": self.samples - len(self.results),
            "version": versions[0] if versions else 0,
            "versions": versions, "mixed": len(versions) > 1, "seconds": round(time.monotonic() - self.started, 3),
            "groups": self.groups_done, "val/length": length,
        }

    def _mean(self, values: dict[int, float | None]) -> float:
        """Of the samples that have a value, each prompt with the same weight."""
        at = {(uid & ~VALIDATE_BIT) % self.samples: value for uid, value in values.items() if value is not None}
        return mean_over_prompts(at, self.asked)

    def teardown(self) -> None:
        version_pin.unpin(self.ring)


def _finished_rounds(path: Path) -> dict[int, int]:
    """The rounds with a line, and how many groups were trained when each began. A round whose line was damaged is
    finished again: its samples are in the log."""
    rows = [row for row in json_lines(path) if isinstance(row.get("round"), int)]
    return {row["round"]: row["groups"] if isinstance(row.get("groups"), int) else 0 for row in rows}


def _read_log(path: Path, round_number: int, tail: int) -> dict[int, Result]:
    """Results of this round that an earlier validator wrote, among the last `tail` bytes: rounds follow each other."""
    found: dict[int, Result] = {}
    for line in json_lines(path, tail):
        try:
            result = msgspec.convert(line, type=Result)
        except msgspec.ValidationError:
            continue
        if result.round == round_number:
            found[result.uid] = result
    return found
