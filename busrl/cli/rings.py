"""`busrl ring list | inspect | clean`: the shared memory that runs of this user have, or left behind.

Maps rings read-only and reads from them which processes live. Only `clean` removes files. `inspect --uid` shows all
that a run keeps of one sample, from its files and its ring: while the run lasts, after it, and after it was killed.

- `clean` refuses while a launch has the ring or a registered process lives: what it writes would be lost unnoticed.
- Another version of busrl may use a ring that cannot be read, so removing it takes --force too.
- Every line about a sample is what one file, or the ring, has about its uid. Files that have nothing give no line,
  except where that is the news. No record says which process worked on a sample that left its slot without an accident.
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
    """Print slots by state with owners and ages, header words and processes of a ring; or the history of a sample."""
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
    """Print lines that hold names, activities and texts of other programs, without what a terminal would obey."""
    print("\n".join(map(printable, lines)))


def clean(options: argparse.Namespace) -> int:
    """Remove the ring, the weights and the sockets of a run; with `all`, of every run that nobody uses."""
    every = options.ring == "all"
    for name in ring_names() if every else [ring_name(options.ring)]:
        if user := _remove(name, options.force):
            if not every:
                raise RunInUse(f"{name}: {user}; stop the run first (`busrl stop RUN_DIR`), or use --force")
            print(printable(f"{name}: kept, {user}"))
    return 0


def _remove(name: str, force: bool) -> str:
    """Unlink what a run has outside its directory; a text that names its user if a process uses it."""
    try:
        guard = RingGuard(SHM / name)
    except OSError as error:  # removed already, or of another user
        return "" if isinstance(error, FileNotFoundError) else f"it cannot be opened: {error.strerror}"
    try:
        if not guard.try_take() and not force:
            return "in use by a launch"
        if not force and (user := users(name)):
            return user
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
    """The name of a ring, by that name or by the directory of its run; UserError if there is no such ring."""
    name = target if target in ring_names() or not Path(target).is_dir() else RunPaths.of(target).ring_name
    if "/" in name or not (SHM / name).is_file() or not name.endswith(SUFFIX):
        raise UserError(f"{target}: there is no ring of that name or run directory; see `busrl ring list`")
    return name


def users(name: str) -> str:
    """A text that names the processes that use a ring; empty if none does."""
    try:
        ring = Ring.attach(name, read_only=True)
    except RingError as error:
        return f"it cannot be read ({error}), so another version of busrl may use it"
    with closing(ring):
        processes = [f"{process.label} (pid {process.pid})" for process in living(ring)]
    return f"in use by {', '.join(processes)}" if processes else ""


def states(ring: Ring) -> dict[str, int]:
    counts = Counter(map(int, ring.lines()["state"]))
    names = {int(state): state.name for state in State}
    return {names.get(state, f"in no state ({state})"): counts[state] for state in sorted(counts)}


def render_slots(ring: Ring) -> list[str]:
    """A line per state and owner of the slots that hold a sample: how many, since when, and which uid the longest."""
    lines, now = ring.lines(), time.monotonic_ns()
    samples = lines[(lines["state"] != State.FREE) & (lines["uid"] != UID_NONE)]
    if not len(samples):
        return ["  no sample in any slot"]
    owners = {process.index: process.label for process in ring.processes()}
    table = [f"  {'state':<12}{'owner':<14}{'slots':>6}{'oldest':>10}  its uid"]
    for state, owner in sorted({(int(line["state"]), int(line["owner"])) for line in samples}):
        here = samples[(samples["state"] == state) & (samples["owner"] == owner)]
        oldest = here[here["changed_ns"].argmin()]
        age, uid = (now - int(oldest["changed_ns"])) / 1e9, int(oldest["uid"])
        # In DROPPED the owner's word holds the reason.
        name = owners.get(owner, f"process {owner}") if owner and State(state) in WORKING else "-"
        table.append(f"  {State(state).name:<12}{name:<14}{len(here):>6}{age:>8.1f} s  {shown_uid(uid)}")
    return table


def render_calls(ring: Ring, name: str) -> list[str]:
    """Lines about the ring of model calls by state, and about the open episodes; none if the run has no such ring."""
    try:
        calls = Ring.attach(name, read_only=True, calls=True)
    except RingError:
        return []
    with closing(calls):
        episodes = open_episodes(ring.lines(), calls.lines(), time.monotonic_ns())
        lines = [f"  calls: {', '.join(f'{count} {state}' for state, count in states(calls).items())}"]
        for state, (count, age) in episodes.items():
            lines.append(f"  {state:<12}{count:>6} episodes, the oldest {age:.1f} s")
        return lines


def render_processes(ring: Ring) -> list[str]:
    """The table of registered processes; busy is the share of time spent working."""
    lines = [f"  {'process':<14}{'pid':>8}  {'state':<10}{'busy':>6}  {'samples':>9}  {'version':>7}  activity"]
    for process in ring.processes():
        state = "dead" if ring.is_dead(process.index) else process.state
        busy = f"{process.busy_ns / (process.busy_ns + process.idle_ns):.0%}" if process.idle_ns else "-"
        counts = f"{busy:>6}  {process.samples:>9,}  {process.version:>7}"
        lines.append(f"  {process.label:<14}{process.pid:>8}  {state:<10}{counts}  {process.activity}")
    return lines if len(lines) > 1 else ["  no processes"]


# -- one sample -----


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
        self.draw, self.again, self.member = place_of(uid, self.topology.groups.size)
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
        return f"draw {self.draw}, try {self.again}, member {self.member} of {size}"

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
