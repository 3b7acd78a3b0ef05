"""All that a run keeps of one sample, from its files and its ring: while the run lasts, after it, and after a kill.

Used by `busrl ring inspect --uid`. Reads the run's files and maps its ring read-only; changes nothing.

- Every line about a sample is what one file, or the ring, has about its uid. Files that have nothing give no line,
  except where that is the news. No record says which process worked on a sample that left its slot without an accident.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from busrl.data import JsonlStream, training_stream
from busrl.data.prompts import lines_of
from busrl.errors import BusrlError, NoSuchRun, NoSuchTensor, RingError, RingNotFound, UserError
from busrl.ledger.openbin import read_draws, read_open
from busrl.ledger.trained import TrainedSet, checkpoints_of
from busrl.ledger.wal import Record, SampleRecord, payloads
from busrl.paths import RunPaths
from busrl.ring import UID_NONE, Fates, Ring, State
from busrl.states import (
    ACCIDENTS,
    RULES,
    VALIDATE_BIT,
    Fate,
    draw_of,
    episode_of,
    fate_name,
    place_of,
    seat_of,
    side_of,
)
from busrl.status.words import printable
from busrl.system.files import json_lines
from busrl.topology.prompts import AskedSet
from busrl.topology.recorded import recorded

SHOWN = 200  # characters of a text
_records = msgspec.msgpack.Decoder(Record)


def history(run_dir: Path, text: str) -> str:
    """Everything that a run keeps of a sample, line by line. UserError if it keeps nothing."""
    paths = RunPaths.of(run_dir)
    if not paths.topology.exists():
        raise NoSuchRun(f"{paths.root}: no topology.json there; --uid needs a run directory")
    return SampleHistory(paths, number(text)).text()


def number(text: str) -> int:
    """Read the uid that a person typed: a number, or v and the number of a validation sample."""
    digits = text[1:] if text.startswith("v") else text
    if not digits.isascii() or not digits.isdigit() or int(digits) >= UID_NONE:
        raise UserError(f"--uid {text}: a uid is a whole number below 2**64 - 1 (v7 is a validation sample)")
    return int(digits) | (VALIDATE_BIT if text.startswith("v") else 0)


class SampleHistory:
    """Everything that a run keeps of one uid, of a training or of a validation sample (which has a bit of its own)."""

    def __init__(self, paths: RunPaths, uid: int) -> None:
        self.paths, self.uid = paths, uid
        self.topology = recorded(paths.topology)
        self.validates = bool(uid & VALIDATE_BIT)
        self.row = uid & ~VALIDATE_BIT
        self.name = f"v{self.row}" if self.validates else str(uid)
        group, self.again, self.member = place_of(uid, self.topology.groups.size)
        self.seats = self.topology.seats
        self.draw, self.seat = draw_of(group, len(self.seats)), seat_of(group, len(self.seats))
        path = paths.validate_fates if self.validates else paths.fates
        self.fates = Fates(str(path), read_only=True).view() if path.exists() else np.empty(0, np.uint8)
        self.fate = int(self.fates[self.row]) if self.row < len(self.fates) else int(Fate.NONE)

    def text(self) -> str:
        slots = list(self._ring())
        evidence, place = [*slots, *self._files()], self._place()
        if not evidence and self.fate == Fate.NONE:
            dispatched = np.flatnonzero(self.fates)
            highest = f"{'v' if self.validates else ''}{dispatched[-1]}" if len(dispatched) else ""
            rest = f"the highest uid of this run is {highest}" if highest else "nothing was dispatched yet"
            raise UserError(
                f"--uid {self.name}: {self.paths.root} knows no such sample, {place}: it was never dispatched; {rest}"
            )
        kind = " (an accident)" if self.fate in ACCIDENTS else " (set aside by rule)" if self.fate in RULES else ""
        lines = [f"sample {self.name} of {self.paths.root}", f"  who       {place}", *self._prompt()]
        lines.append(f"  fate      {fate_name(self.fate)}{kind}")
        if self.fate == Fate.DISPATCHED and not slots:
            lines.append("  slot      none: with the run stopped the next start generates it again")
        return "\n".join([*lines, *evidence, *self._relatives()])

    def _place(self) -> str:
        if self.validates:
            samples = max(1, self.topology.derived.val_samples)
            return f"validation round {self.row // samples}, sample {self.row % samples}"
        size = self.topology.groups.size
        seat = f", seat {self.seats[self.seat]}" if len(self.seats) > 1 else ""
        return f"draw {self.draw}{seat}, try {self.again}, member {self.member} of {size}"

    def _prompt(self) -> Iterator[str]:
        try:
            with self._stream() as stream:
                item = stream.at(self._validation_line(len(stream))) if self.validates else stream.item(self.draw)
                text = short(item.line.decode(errors="replace"))
                yield f"  prompt    {stream.path}:{item.index + 1} (crc {item.crc:08x}) {text}"
        except (BusrlError, OSError) as error:
            yield f"  prompt    cannot be read: {error}"

    def _stream(self) -> JsonlStream:
        if not self.validates:
            return training_stream(self.topology)
        return JsonlStream(self._validation_set()[0].data, self.topology.run.seed, False, self.topology.data.prompt_key)

    def _validation_set(self) -> tuple[AskedSet, int]:
        """The validation set of the sample, and its place in the set."""
        place = self.row % max(1, self.topology.derived.val_samples)
        for asked_set in reversed(self.topology.sets):
            if asked_set.first <= place:
                return asked_set, place - asked_set.first
        raise UserError("the topology asks no set of validation")

    def _validation_line(self, lines: int) -> int:
        asked_set, place = self._validation_set()
        return int(lines_of(asked_set.prompts, lines, asked_set.k)[place])

    def _relatives(self) -> Iterator[str]:
        """A line about the sample's re-roll or its parent: a member that ended by accident is rolled again once."""
        if self.validates:
            return
        size = self.topology.groups.size
        other = self.uid - size if self.again else self.uid + size
        fate = SampleHistory(self.paths, other).fate if other >= 0 else Fate.NONE
        if self.again:
            yield f"  parent    uid {other}, which ended as {fate_name(fate)}; this is its re-roll"
        elif fate:
            yield f"  re-roll   uid {other}: {fate_name(fate)}"
        elif self.fate in ACCIDENTS:
            yield f"  re-roll   uid {other} is not dispatched yet"
        yield from self._sides(size)

    def _sides(self, size: int) -> Iterator[str]:
        """The samples of the other seats of its episode."""
        episode = episode_of(self.uid, size, len(self.seats))
        for seat, name in enumerate(self.seats):
            if seat != self.seat:
                other = SampleHistory(self.paths, side_of(episode, seat, size, len(self.seats)))
                yield f"  side      {name}: uid {other.uid}, {fate_name(other.fate)}"

    def _ring(self) -> Iterator[str]:
        try:
            ring = Ring.attach(self.paths.ring_name, read_only=True)
        except RingNotFound:
            return
        except RingError as error:
            yield f"  ring      cannot be read: {error}"
            return
        with closing(ring):
            lines = ring.lines()
            for slot in np.flatnonzero((lines["uid"] == np.uint64(self.uid)) & (lines["state"] != State.FREE)):
                yield from self._slot(ring, int(slot), lines[slot])

    def _slot(self, ring: Ring, slot: int, line: Any) -> Iterator[str]:
        state = State(int(line["state"]))
        age = (time.monotonic_ns() - int(line["changed_ns"])) / 1e9
        owner = owner_name(ring, int(line["owner"]))
        holder = f", held by {owner}" if owner else ""
        yield f"  slot      {slot}: {state.name} for {age:.1f} s{holder}; claim number {int(line['seq'])}"
        yield (
            f"  attempts  {int(line['attempt'])} since the last commit, {int(line['alone_deaths'])} of them alone; "
            f"admitted as number {int(line['admission'])} at version {int(line['version'])}"
        )
        for segment in range(int(line["segs"])):
            yield f"  segment   {segment}: {segment_text(ring, slot, segment)}"
        if state in (State.REWARDED, State.TRAINING):
            yield f"  reward    {float(line['reward']):g}"

    def _files(self) -> Iterator[str]:
        if self.validates:
            yield from self._validation()
        else:
            yield from self._put_backs()
            yield from self._log()
            yield from self._checkpoints()
            yield from self._train_log()
            yield from self._excerpt()
        yield from self._warnings()
        for entry in read_open(self.paths.open_bin) or []:
            if entry.uid == self.uid:
                yield f"  open.bin  was {State(entry.state).name} in slot {entry.slot} when the run ended in order"

    def _put_backs(self) -> Iterator[str]:
        for draw in read_draws(self.paths.draws):
            if self.uid in draw.uids:
                yield f"  put back  {clock(draw.time_ns / 1e9)}: {draw.why}"

    def _log(self) -> Iterator[str]:
        for path in sorted(self.paths.wal.glob("*.wal")):
            data = path.read_bytes()
            for record in map(_records.decode, payloads(data, len(data))):
                for sample in record.samples:
                    if sample.uid == self.uid:
                        yield f"  log       {path.name}: step {record.step}, {logged(sample)}"

    def _checkpoints(self) -> Iterator[str]:
        for path in reversed(checkpoints_of(self.paths.checkpoints)):
            try:
                if self.uid in TrainedSet.load(path / "trained.bin"):
                    yield f"  trained   in checkpoint {path.name}"
            except (BusrlError, OSError) as error:
                yield f"  trained   {path.name} cannot be read: {error}"

    def _train_log(self) -> Iterator[str]:
        """A line for each training of the sample, once: the file has a step again that was trained again after a
        restart."""
        replayed: Counter[tuple[int, int]] = Counter()
        trainings: list[tuple[tuple[int, int], str, bool]] = []
        for line, stands in standing(list(json_lines(self.paths.train_log))):
            for attempt in [attempt for uid, attempt, _ in line["samples"] if uid == self.uid]:
                key = (line["step"], attempt)
                replayed[key] += not stands
                version, cause = line["version"], line["cause"]
                text = f"  step      {line['step']} (version {version}, {cause}) trained its attempt {attempt}"
                trainings.append((key, text, stands))
        standing_keys = {key for key, _, stands in trainings if stands}
        for key, text, stands in trainings:
            if stands:
                yield text + (f"; replayed {replayed[key]}×, counted once" if replayed[key] else "")
            elif key not in standing_keys:
                yield f"{text}; taken back: the learner went on from an earlier step"

    def _warnings(self) -> Iterator[str]:
        """Rows of errors.jsonl that list the uid, or whose text mentions it where the row lists none."""
        mention = re.compile(rf"\bsample {self.uid}\b")
        for row in json_lines(self.paths.errors):
            uids, text = row.get("uids"), str(row.get("text", ""))
            if self.uid in uids if isinstance(uids, list) else mention.search(text):
                when = clock(float(row.get("time", 0.0)))
                yield f"  told      {when}: {row.get('process')} {row.get('severity')}: {short(text)}"

    def _excerpt(self) -> Iterator[str]:
        for line in json_lines(self.paths.samples):
            if line.get("uid") == self.uid:
                versions = line.get("versions") or [line.get("version")]  # one, where nothing was trained
                details = f"reward {line['reward']:g}, versions {versions}"
                yield f"  answer    {short(line['completion'])} ({details})"

    def _validation(self) -> Iterator[str]:
        for line in json_lines(self.paths.validation_log):
            if line["uid"] == self.uid:
                yield (
                    f"  validated round {line['round']}: reward {line['reward']:g}, {line['tokens']} tokens, versions "
                    f"{line['oldest']} to {line['version']}"
                )


def logged(sample: SampleRecord) -> str:
    """Describe one sample of a record of the log."""
    versions = sample.version_array()
    tokens = f"versions {versions.min()} to {versions.max()}" if len(versions) else "no tokens"
    if sample.segments:
        tokens += f" in segments of {', '.join(map(str, sample.segments))}"
    if sample.turns:
        tokens += f" in {len(sample.turn_array())} turns of {len(sample.seqs)} sequences"
    return f"attempt {sample.attempt}, {len(versions)} tokens of {tokens}, reward {sample.reward:g}"


def segment_text(ring: Ring, slot: int, segment: int) -> str:
    try:
        versions = ring.get(slot, "versions", segment).copy()
    except (NoSuchTensor, RingError) as error:
        return f"no versions ({error})"
    return f"{len(versions)} tokens" + (f" of versions {versions.min()} to {versions.max()}" if len(versions) else "")


def owner_name(ring: Ring, index: int) -> str:
    entry = next((process for process in ring.processes() if process.index == index), None) if index else None
    if entry is None:
        return f"process {index}" if index else ""
    return f"{entry.label} (pid {entry.pid}{', dead' if ring.is_dead(index) else ''})"


def standing(lines: list[dict[str, Any]]) -> list[tuple[dict[str, Any], bool]]:
    """Each line of the train log, and whether it stands: a line replaces all earlier ones of its step and later steps.
    """
    marked, lowest = [], None
    for line in reversed(lines):
        stands = lowest is None or line["step"] < lowest
        marked.append((line, stands))
        lowest = line["step"] if stands else lowest
    return marked[::-1]


def clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def short(text: str) -> str:
    """A text as one line of at most `SHOWN` characters."""
    text = printable(text)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 4]} ..."
