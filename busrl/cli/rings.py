"""`busrl ring list | inspect | clean`: the shared memory that runs of this user have, or left behind.

Maps rings read-only and asks the ring for proof of life. Removes files only in `clean`. `inspect --uid` has all that a
run keeps of one sample, from its files and its ring: while the run lasts, after it, and after it was killed.

- `clean` refuses while a launch has the ring or a registered process lives: what it wrote would be lost unnoticed.
- A ring that cannot be read may be in use by another version of busrl, so it takes --force too.
- Every line about a sample is what one place says about its uid. Places that say nothing are left out, except where
  that is the news. Which process worked on it is not kept once it has left its slot without an accident.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from busrl.data import JsonlStream, training_stream
from busrl.data.prompts import lines_of
from busrl.errors import BusrlError, NoSuchRun, NoSuchTensor, RingError, RingNotFound, RunInUse, UserError
from busrl.launch.rundir import unlink_segments
from busrl.ledger.openbin import read_draws, read_open
from busrl.ledger.trained import TrainedSet, checkpoints_of
from busrl.ledger.wal import Record, SampleRecord, payloads
from busrl.paths import SHM, RunPaths
from busrl.ring import UID_NONE, WORKING, Fates, Ring, RingGuard, State
from busrl.ring.calls import open_episodes
from busrl.states import ACCIDENTS, RULES, VALIDATE_BIT, Fate, fate_name, place_of, shown_uid
from busrl.status.reader import living, newest_run
from busrl.status.words import printable
from busrl.system.files import json_lines
from busrl.topology.prompts import AskedSet
from busrl.topology.recorded import recorded

SUFFIX = ".ring"
SHOWN = 200  # characters of a text
_records = msgspec.msgpack.Decoder(Record)


def show_all(_options: argparse.Namespace) -> int:
    names = ring_names()
    if not names:
        print(f"no rings of user {os.getuid()} in {SHM}")
    unused = "nobody uses it: `busrl launch` in its run directory continues, `busrl ring clean` removes it"
    for name in names:
        print(printable(f"{name}  {(SHM / name).stat().st_size / (1 << 20):8.1f} MiB  {users(name) or unused}"))
    return 0


def inspect(options: argparse.Namespace) -> int:
    """Slots by state with owners and ages, header words, and processes of one ring; or what is known of one sample."""
    target = options.ring or str(newest_run(Path("runs")))
    if options.uid:
        _show(history(Path(target), options.uid).split("\n"))
        return 0
    name = ring_name(target)
    with closing(Ring.attach(name, read_only=True)) as ring:
        print(f"{name}: {ring.n_slots} slots of {ring.slot_bytes} bytes, uuid {bytes(ring.uuid).hex()}")
        words = ("step", "version", "version_step", "next_admission", "unpublished_groups", "hold", "run_state")
        print("  " + ", ".join(f"{word} {ring.header(word)}" for word in words))
        print("  slots: " + ", ".join(f"{count} {state}" for state, count in states(ring).items()))
        _show(render_slots(ring))
        _show(render_calls(ring, f"{name.removesuffix(SUFFIX)}.calls"))
        _show(render_processes(ring))
    return 0


def _show(lines: Iterable[str]) -> None:
    """Names, activities and texts were written by others."""
    print("\n".join(map(printable, lines)))


def clean(options: argparse.Namespace) -> int:
    """Remove the ring, the weights and the sockets of a run; with `all`, of every run that nobody uses."""
    every = options.ring == "all"
    for name in ring_names() if every else [ring_name(options.ring)]:
        if living := _removed(name, options.force):
            if not every:
                raise RunInUse(f"{name}: {living}; stop the run first (`busrl stop RUN_DIR`), or use --force")
            print(printable(f"{name}: kept, {living}"))
    return 0


def _removed(name: str, force: bool) -> str:
    """Unlink what a run that nobody uses has outside its directory; who uses it, in words, else."""
    try:
        guard = RingGuard(SHM / name)
    except OSError as error:  # gone already, or not ours to open
        return "" if isinstance(error, FileNotFoundError) else f"it cannot be opened: {error.strerror}"
    try:
        if not guard.try_take() and not force:
            return "in use by a launch"
        if not force and (living := users(name)):
            return living
        if guard.has_name():
            unlink_segments(name)
            sockets = RunPaths(Path("/")).runtime_dir.parent / name.removesuffix(SUFFIX).rpartition(".")[2]
            shutil.rmtree(sockets, ignore_errors=True)
            print(f"{name}: removed")
        return ""
    finally:
        guard.release()


def ring_names() -> list[str]:
    return sorted(path.name for path in SHM.glob(f"busrl.{os.getuid()}.*{SUFFIX}"))


def ring_name(target: str) -> str:
    """The ring that a name or a run directory means; UserError if there is none."""
    name = target if target in ring_names() or not Path(target).is_dir() else RunPaths.of(target).ring_name
    if "/" in name or not (SHM / name).is_file() or not name.endswith(SUFFIX):
        raise UserError(f"{target}: there is no ring of that name or run directory; see `busrl ring list`")
    return name


def users(name: str) -> str:
    """Name the processes that use a ring; empty if none does."""
    try:
        ring = Ring.attach(name, read_only=True)
    except RingError as error:
        return f"it cannot be read ({error}), so another version of busrl may use it"
    with closing(ring):
        there = [f"{one.label} (pid {one.pid})" for one in living(ring)]
    return f"in use by {', '.join(there)}" if there else ""


def states(ring: Ring) -> dict[str, int]:
    counts = Counter(map(int, ring.lines()["state"]))
    known = {int(state): state.name for state in State}
    return {known.get(state, f"in no state ({state})"): counts[state] for state in sorted(counts)}


def render_slots(ring: Ring) -> list[str]:
    """A line per state and owner of the slots that hold a sample: how many, since when, and which uid the longest."""
    lines, now = ring.lines(), time.monotonic_ns()
    held = lines[(lines["state"] != State.FREE) & (lines["uid"] != UID_NONE)]
    if not len(held):
        return ["  no sample in any slot"]
    owners = {process.index: process.label for process in ring.processes()}
    table = [f"  {'state':<12}{'owner':<14}{'slots':>6}{'oldest':>10}  its uid"]
    for state, owner in sorted({(int(line["state"]), int(line["owner"])) for line in held}):
        here = held[(held["state"] == state) & (held["owner"] == owner)]
        oldest = here[here["changed_ns"].argmin()]
        age, uid = (now - int(oldest["changed_ns"])) / 1e9, int(oldest["uid"])
        # In DROPPED the owner's place holds the reason.
        name = owners.get(owner, f"process {owner}") if owner and State(state) in WORKING else "-"
        table.append(f"  {State(state).name:<12}{name:<14}{len(here):>6}{age:>8.1f} s  {shown_uid(uid)}")
    return table


def render_calls(ring: Ring, name: str) -> list[str]:
    """The ring of model calls by state, and what the open episodes do; nothing where the run has none."""
    try:
        calls = Ring.attach(name, read_only=True, calls=True)
    except RingError:
        return []
    with closing(calls):
        found = open_episodes(ring.lines(), calls.lines(), time.monotonic_ns())
        told = [f"  {state:<12}{count:>6} episodes, the oldest {age:.1f} s" for state, (count, age) in found.items()]
        return [f"  calls: {', '.join(f'{count} {state}' for state, count in states(calls).items())}", *told]


def render_processes(ring: Ring) -> list[str]:
    """The table of registered processes; busy is the share of time spent working."""
    lines = [f"  {'process':<14}{'pid':>8}  {'state':<10}{'busy':>6}  {'samples':>9}  {'version':>7}  activity"]
    for one in ring.processes():
        state = "dead" if ring.is_dead(one.index) else one.state
        busy = f"{one.busy_ns / (one.busy_ns + one.idle_ns):.0%}" if one.idle_ns else "-"
        lines.append(
            f"  {one.label:<14}{one.pid:>8}  {state:<10}{busy:>6}  {one.samples:>9,}  {one.version:>7}  {one.activity}"
        )
    return lines if len(lines) > 1 else ["  no processes"]


# -- one sample -----


def history(run_dir: Path, text: str) -> str:
    """Everything that the run knows of a sample, line by line. UserError if it knows nothing."""
    paths = RunPaths.of(run_dir)
    if not paths.topology.exists():
        raise NoSuchRun(f"{paths.root}: no topology.json there; --uid needs a run directory")
    return SampleHistory(paths, number(text)).text()


def number(text: str) -> int:
    """The uid that a person typed: a number, or v and the number of a validation sample."""
    digits = text[1:] if text.startswith("v") else text
    if not digits.isascii() or not digits.isdigit() or int(digits) >= UID_NONE:
        raise UserError(f"--uid {text}: a uid is a whole number below 2**64 - 1 (v7 is a validation sample)")
    return int(digits) | (VALIDATE_BIT if text.startswith("v") else 0)


class SampleHistory:
    """History of a uid of one run: of a training sample, or of a row of the validation's fates."""

    def __init__(self, paths: RunPaths, uid: int) -> None:
        self.paths, self.uid = paths, uid
        self.topology = recorded(paths.topology)
        self.validates = bool(uid & VALIDATE_BIT)
        self.row = uid & ~VALIDATE_BIT
        self.name = f"v{self.row}" if self.validates else str(uid)
        self.draw, self.again, self.member = place_of(uid, self.topology.groups.size)
        path = paths.validate_fates if self.validates else paths.fates
        self.fates = Fates(str(path), read_only=True).view() if path.exists() else np.empty(0, np.uint8)
        self.fate = int(self.fates[self.row]) if self.row < len(self.fates) else int(Fate.NONE)

    def text(self) -> str:
        slots = list(self._ring())
        found, place = [*slots, *self._files()], self._place()
        if not found and self.fate == Fate.NONE:
            known = np.flatnonzero(self.fates)
            highest = f"{'v' if self.validates else ''}{known[-1]}" if len(known) else ""
            rest = f"the highest uid of this run is {highest}" if highest else "nothing was dispatched yet"
            raise UserError(
                f"--uid {self.name}: {self.paths.root} knows no such sample, {place}: it was never dispatched; {rest}"
            )
        kind = " (an accident)" if self.fate in ACCIDENTS else " (set aside by rule)" if self.fate in RULES else ""
        lines = [f"sample {self.name} of {self.paths.root}", f"  who       {place}", *self._prompt()]
        lines.append(f"  fate      {fate_name(self.fate)}{kind}")
        if self.fate == Fate.DISPATCHED and not slots:
            lines.append("  slot      none: with the run stopped the next start generates it again")
        return "\n".join([*lines, *found, *self._relatives()])

    def _place(self) -> str:
        if self.validates:
            samples = max(1, self.topology.derived.val_samples)
            return f"validation round {self.row // samples}, sample {self.row % samples}"
        size = self.topology.groups.size
        return f"draw {self.draw}, try {self.again}, member {self.member} of {size}"

    def _prompt(self) -> Iterator[str]:
        try:
            with self._stream() as one:
                item = one.at(self._line(len(one))) if self.validates else one.item(self.draw)
                text = short(item.line.decode(errors="replace"))
                yield f"  prompt    {one.path}:{item.index + 1} (crc {item.crc:08x}) {text}"
        except (BusrlError, OSError) as error:
            yield f"  prompt    cannot be read: {error}"

    def _stream(self) -> JsonlStream:
        if not self.validates:
            return training_stream(self.topology)
        return JsonlStream(self._asked()[0].data, self.topology.run.seed, False, self.topology.data.prompt_key)

    def _asked(self) -> tuple[AskedSet, int]:
        """The set of validation that the sample is of, and its place in it."""
        place = self.row % max(1, self.topology.derived.val_samples)
        one = next((one for one in reversed(self.topology.sets) if one.first <= place), None)
        if one is None:
            raise UserError("the topology asks no set of validation")
        return one, place - one.first

    def _line(self, lines: int) -> int:
        one, place = self._asked()
        return int(lines_of(one.prompts, lines, one.k)[place])

    def _relatives(self) -> Iterator[str]:
        """A member that ended by accident is rolled again once."""
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
        held = f", held by {owner}" if owner else ""
        yield f"  slot      {slot}: {state.name} for {age:.1f} s{held}; claim number {int(line['seq'])}"
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
        for one in read_open(self.paths.open_bin) or []:
            if one.uid == self.uid:
                yield f"  open.bin  was {State(one.state).name} in slot {one.slot} when the run ended in order"

    def _put_backs(self) -> Iterator[str]:
        for one in read_draws(self.paths.draws):
            if self.uid in one.uids:
                yield f"  put back  {clock(one.time_ns / 1e9)}: {one.why}"

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
        """Each training of it once: a step that was trained again after a restart stands in the file again."""
        replayed: Counter[tuple[int, int]] = Counter()
        found: list[tuple[tuple[int, int], str, bool]] = []
        for line, stands in standing(list(json_lines(self.paths.train_log))):
            for attempt in [attempt for uid, attempt, _ in line["samples"] if uid == self.uid]:
                key = (line["step"], attempt)
                replayed[key] += not stands
                version, cause = line["version"], line["cause"]
                text = f"  step      {line['step']} (version {version}, {cause}) trained its attempt {attempt}"
                found.append((key, text, stands))
        kept = {key for key, _, stands in found if stands}
        for key, text, stands in found:
            if stands:
                yield text + (f"; replayed {replayed[key]}×, counted once" if replayed[key] else "")
            elif key not in kept:
                yield f"{text}; taken back: the learner went on from an earlier step"

    def _warnings(self) -> Iterator[str]:
        """Lines of errors.jsonl about it: those that name it, and texts of programs that give no names."""
        named = re.compile(rf"\bsample {self.uid}\b")
        for row in json_lines(self.paths.errors):
            uids, text = row.get("uids"), str(row.get("text", ""))
            if self.uid in uids if isinstance(uids, list) else named.search(text):
                when = clock(float(row.get("time", 0.0)))
                yield f"  told      {when}: {row.get('process')} {row.get('severity')}: {short(text)}"

    def _excerpt(self) -> Iterator[str]:
        for line in json_lines(self.paths.samples):
            if line.get("uid") == self.uid:
                versions = line.get("versions") or [line.get("version")]  # one, where nothing was trained
                made = f"reward {line['reward']:g}, versions {versions}"
                yield f"  answer    {short(line['completion'])} ({made})"

    def _validation(self) -> Iterator[str]:
        for line in json_lines(self.paths.validation_log):
            if line["uid"] == self.uid:
                yield (
                    f"  validated round {line['round']}: reward {line['reward']:g}, {line['tokens']} tokens, versions "
                    f"{line['oldest']} to {line['version']}"
                )


def logged(sample: SampleRecord) -> str:
    """The words of a record of the log about one sample."""
    versions = sample.version_array()
    made = f"versions {versions.min()} to {versions.max()}" if len(versions) else "no tokens"
    if sample.segments:
        made += f" in segments of {', '.join(map(str, sample.segments))}"
    if sample.turns:
        made += f" in {len(sample.turn_array())} turns of {len(sample.seqs)} sequences"
    return f"attempt {sample.attempt}, {len(versions)} tokens of {made}, reward {sample.reward:g}"


def segment_text(ring: Ring, slot: int, segment: int) -> str:
    try:
        versions = ring.get(slot, "versions", segment).copy()
    except (NoSuchTensor, RingError) as error:
        return f"no versions ({error})"
    return f"{len(versions)} tokens" + (f" of versions {versions.min()} to {versions.max()}" if len(versions) else "")


def owner_name(ring: Ring, index: int) -> str:
    entry = next((one for one in ring.processes() if one.index == index), None) if index else None
    if entry is None:
        return f"process {index}" if index else ""
    return f"{entry.label} (pid {entry.pid}{', dead' if ring.is_dead(index) else ''})"


def standing(lines: list[dict[str, Any]]) -> list[tuple[dict[str, Any], bool]]:
    """Each line of the train log, and whether it stands: a line replaces all earlier ones from its step on."""
    found, lowest = [], None
    for line in reversed(lines):
        stands = lowest is None or line["step"] < lowest
        found.append((line, stands))
        lowest = line["step"] if stands else lowest
    return found[::-1]


def clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def short(text: str) -> str:
    """A line of a text that may be long."""
    text = printable(text)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 4]} ..."
