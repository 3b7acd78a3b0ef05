"""Which run is meant: a run directory, an endpoint, or the only run of this user that lives.

Looks into /dev/shm and /proc, for reading. Knows nothing of what is done with the run.

Looks at the ring of a run without being seen: maps it read-only, takes no entry in its process table.

Talks to the ring and the fate table, both opened for reading. Knows nothing of messages or terminals.

- A run that ends takes its ring away and a later start makes another: `look` finds the one that is there now.
- The mapping is `PROT_READ`, so no bug here can write; whoever kills a monitor leaves nothing behind.
- A ring that is there and can not be read is not the same as none: `damage` says why.

Reads the files of a run while it writes them: facts once, lines of metrics.jsonl and errors.jsonl as they come.

Opens files for reading only, and keeps none open. Knows nothing of the bus or of what is shown.

- A line counts once it has its end; a torn last one is read later. A damaged line is left out.
- At first only the end of a long file is read, so attaching to an old run takes no longer than to a young one.

Keeps one picture up to date: attaches to a run or an endpoint, reads ring and files, then listens.

Talks to the tap, the ring (read-only) and the run's files (read-only). Knows nothing of how the picture is shown.

- Subscribe first, then look, then listen: what is sent between the look and the first message read is not missed, and
  the picture is right before the first message.
- Whoever is behind by more than `BEHIND_S` gives up the backlog, counts it and looks again: the present is in the ring.
- Nothing is written, sent or registered, so there is nothing to take back at the end.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from busrl.bus.tap import Heard, Tap
from busrl.errors import BadEndpoint, NoSuchRun, RingError, RingNotFound, UserError
from busrl.launch.story import read_map, restarts_of, sample_line
from busrl.monitor.state import (
    ErrorRecord,
    Facts,
    MetricsLine,
    ProcessRecord,
    RingRecord,
    RoundRecord,
    RunState,
    StepRecord,
)
from busrl.paths import SHM, RunPaths
from busrl.protocol import BY_NAME, Message, Rejected, codec
from busrl.ring import Fates, OfdLock, Process, Ring
from busrl.scheduling.groups import GroupScanner
from busrl.states import HeaderWord, SampleClass, State

# -- Which run is meant: a run directory, an endpoint, or the only run of this user that lives ------------------------


LOCK = "run.lock"  # launch holds it, and every child inherits it


@dataclass(frozen=True)
class Target:
    """What to attach to: a run directory, or an endpoint alone."""

    paths: RunPaths | None = None
    endpoint: str = ""


def find(named: str | None) -> Target:
    """The target that an argument means; without one the only living run of this user."""
    if named is None:
        return Target(paths=RunPaths.of(only_living_run()))
    if "://" in named:
        return Target(endpoint=require_ipc(named))
    paths = RunPaths.of(named)
    run = read_map(paths.run_json)
    if run.get("replay"):  # a directory that leads actors to a replay
        return Target(endpoint=require_ipc(str(run.get("backend"))))
    if not paths.run_json.is_file():
        raise NoSuchRun(f"{paths.root}: no run.json there; name the directory that `busrl launch` printed")
    return Target(paths=paths)


def require_ipc(endpoint: str) -> str:
    """The endpoint, if a watcher or a replay can use it. They have no keys, so they stay on the run's own host."""
    if not endpoint.startswith("ipc://"):
        raise BadEndpoint(
            f"{endpoint}: monitor, record and replay work over ipc:// alone, on the host of the run, also where the "
            "bus is reachable over tcp; log in there (`ssh HOST busrl monitor RUN_DIR`), or bring a recording here "
            "and replay it"
        )
    return endpoint


def only_living_run() -> Path:
    """The run directory of the one run that lives; the error lists them if there are several."""
    found = list(living_runs())
    if not found:
        raise NoSuchRun(
            f"no run of user {os.getuid()} lives on this host; name a run directory to see how its run ended"
        )
    if len(found) > 1:
        listed = "\n".join(f"  {directory}" for directory in found)
        raise UserError(f"{len(found)} runs live on this host; name the run directory of one:\n{listed}")
    return found[0]


def living_runs() -> Iterator[Path]:
    """Run directories of this user's rings that a living process is registered in."""
    for path in sorted(SHM.glob(f"busrl.{os.getuid()}.*.ring")):
        directory = run_dir_of(path.name)
        if directory is not None:
            yield directory


def run_dir_of(ring_name: str) -> Path | None:
    """The directory of the run that uses this ring, told by one of its living processes."""
    for process in living(ring_name):
        with suppress(OSError):
            # Not from its environment: setting the title of a process overwrites that.
            for link in Path(f"/proc/{process.pid}/fd").iterdir():
                opened = Path(os.readlink(link))
                if opened.name == LOCK and RunPaths.of(opened.parent).ring_name == ring_name:
                    return opened.parent
    return None


def launched(paths: RunPaths) -> bool:
    """Whether a launch, or what it left running, holds the run directory; looks, and takes nothing."""
    lock = paths.lock("run")
    try:
        return lock.is_file() and OfdLock(str(lock)).holder() is not None
    except (OSError, RingError):  # of another user, say
        return False


def living(ring_name: str) -> list[Process]:
    """Registered processes of a ring that are not proven dead; none if it can not be read."""
    try:
        ring = Ring.attach(ring_name, read_only=True)
    except RingError:
        return []
    try:
        return [process for process in ring.processes() if not process.remote and not ring.is_dead(process.index)]
    finally:
        ring.close()


# -- Looks at the ring of a run without being seen: maps it read-only, takes no entry in its process table ------------


class Look:
    """The ring of one run directory, attached while it is there. `close` lets go of it."""

    def __init__(self, paths: RunPaths, ring_name: str = "", group_size: int = 0) -> None:
        self._paths, self._name, self._group_size = paths, ring_name or paths.ring_name, group_size
        self._ring: Ring | None = None
        self._file = (0, 0)
        self.damage = ""  # why the ring that is there can not be read, with the remedy
        self._fates: Fates | None = None
        self._scanner: GroupScanner | None = None

    def look(self) -> RingRecord | None:
        """What the ring shows now; None if there is no ring of this run."""
        ring = self._attached()
        if ring is None:
            return None
        stats = ring.stats()
        opened, ready = self._groups(ring)
        return RingRecord(
            slots=ring.n_slots,
            occupancy={name.lower(): count for name, count in stats.occupancy.items()},
            words={word.value: ring.header(word) for word in HeaderWord},
            dispatched=stats.dispatched,
            finished=stats.finished,
            dropped=stats.dropped,
            reaps=stats.reaps,
            tokens=stats.tokens,
            drops=stats.drops,
            groups_open=opened,
            groups_ready=ready,
            processes=tuple(_seen(ring, process) for process in ring.processes()),
        )

    def close(self) -> None:
        """Unmap."""
        if self._ring is not None:
            self._ring.close()
            self._ring = None
        if self._fates is not None:
            self._fates.close()
            self._fates, self._scanner = None, None

    def _attached(self) -> Ring | None:
        self.damage = ""
        try:
            info = os.stat(SHM / self._name)
        except OSError:
            self.close()
            return None
        if self._ring is None or (info.st_dev, info.st_ino) != self._file:
            self.close()
            try:
                self._ring = Ring.attach(self._name, read_only=True)
            except RingNotFound:  # it went away just now
                return None
            except RingError as error:
                self.damage = str(error)
                return None
            self._file = (info.st_dev, info.st_ino)
        return self._ring

    def _groups(self, ring: Ring) -> tuple[int, int]:
        """Open groups, and of these the ones that a step could take; -1 where the fates can not be read."""
        lines = ring.lines()
        scanner = self._scanner_of(lines)
        if scanner is None:
            return -1, -1
        view = scanner.scan(lines)
        return len(view), int(np.count_nonzero((view.resolved & view.usable) | (view.training > 0)))

    def _scanner_of(self, lines: np.ndarray) -> GroupScanner | None:
        if self._fates is None and self._group_size > 0:
            with suppress(RingError, OSError):
                self._fates = Fates(str(self._paths.fates), read_only=True)
        if self._fates is None:
            return None
        trains = lines[(lines["state"] > State.RESERVED) & (lines["cls"] == SampleClass.TRAIN)]
        if len(trains) and int(trains["uid"].max()) >= self._fates.capacity:
            return None  # no uid of this run: the lines are damaged, and the scanner would believe them
        if self._scanner is None:
            self._scanner = GroupScanner(self._fates.view(), self._group_size)
        elif len(self._fates) != len(self._scanner.fates):
            self._scanner.fates = self._fates.view()
        return self._scanner


def _seen(ring: Ring, process: Process) -> ProcessRecord:
    now = time.monotonic_ns()
    return ProcessRecord(
        name=process.label,
        role=process.role,
        pid=process.pid,
        state="dead" if ring.is_dead(process.index) else process.state,
        activity=process.activity,
        deadline_s=process.deadline_s,
        progress_age_s=_age(now, process.progress_ns),
        activity_age_s=_age(now, process.activity_ns),
        busy_ns=process.busy_ns,
        tokens=process.tokens,
        samples=process.samples,
        version=process.version,
        remote=process.remote,
    )


def _age(now_ns: int, then_ns: int) -> float:
    return max(0, now_ns - then_ns) / 1e9


# -- Reads the files of a run while it writes them: facts once, lines of metrics.jsonl and errors.jsonl as they come --


TAIL_BYTES: Final = 4 << 20
SAMPLE_BYTES: Final = 1 << 18
CHUNK: Final = 1 << 20
T = TypeVar("T")


class Follower:
    """The complete lines of one file that were not given before; `skipped` is how many earlier ones were not read."""

    def __init__(self, path: Path, tail_bytes: int = TAIL_BYTES) -> None:
        self._path, self._tail = path, tail_bytes
        self._file = (0, 0)
        self._at = 0
        self.skipped = 0

    def new(self) -> list[bytes]:
        """Lines that were completed since the last call; all anew if the file was replaced."""
        try:
            with open(self._path, "rb") as file:
                info = os.fstat(file.fileno())
                if (info.st_dev, info.st_ino) != self._file or info.st_size < self._at:
                    self._file = (info.st_dev, info.st_ino)
                    self._at = self._start(file, info.st_size)
                if info.st_size == self._at:
                    return []
                file.seek(self._at)
                found = file.read(info.st_size - self._at)
        except OSError:
            return []
        whole = found.rfind(b"\n") + 1
        self._at += whole
        return found[:whole].split(b"\n")[:-1]

    def _start(self, file: Any, size: int) -> int:
        """Where the first line begins that is read; the ones before it are only counted."""
        self.skipped = 0
        left = size - self._tail
        if left <= 0:
            return 0
        at = 0
        while left > 0 and (part := file.read(min(CHUNK, left))):
            self.skipped += part.count(b"\n")
            at, left = at + len(part), left - len(part)
        rest = file.readline()  # the line that the cut is in
        self.skipped += rest.endswith(b"\n")
        return at + len(rest)


class RunFiles:
    """The files of one run directory."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._metrics, self._errors = Follower(paths.metrics), Follower(paths.errors)
        self._rounds = Follower(paths.validation)
        self._samples = Follower(paths.samples, SAMPLE_BYTES)
        self._skipped_told = False

    def facts(self) -> Facts:
        """What run.json and topology.json say; what is missing there stays unknown."""
        run, topology = read_map(self._paths.run_json), read_map(self._paths.topology)
        if not run:
            raise NoSuchRun(f"{self._paths.root}: no run.json there; name the directory that `busrl launch` printed")
        trigger = _map(_map(topology.get("learner")).get("trigger"))
        return Facts(
            name=_get(_map(topology.get("run")), "name", ""),
            run_id=_get(run, "run_id", ""),
            uuid=_get(run, "uuid", ""),
            run_dir=str(self._paths.root),
            launch_pid=_get(run, "launch_pid", 0),
            started=_number(run.get("started"), 0.0),
            max_steps=_get(_map(topology.get("run")), "max_steps", 0),
            group_size=_get(_map(topology.get("groups")), "size", 0),
            n_min=_get(trigger, "n_min", 0),
            t_max_s=_t_max_s(trigger),
            mode=_get(_map(topology.get("weights")), "mode", ""),
            max_staleness=_get(_map(topology.get("weights")), "max_staleness", 0),
            progress_s=_number(_map(topology.get("limits")).get("progress_s"), 30.0),
            slots=_get(_map(topology.get("derived")), "slots", 0),
        )

    def tap(self) -> str:
        """Where the run's tap is."""
        return _get(read_map(self._paths.run_json), "tap", "") or self._paths.tap

    def steps(self) -> list[StepRecord]:
        """Steps that were written since the last call."""
        return [row for row in _decoded(self._metrics.new(), MetricsLine) if not row.kind]

    def step_age_s(self) -> float | None:
        """Seconds since a step was written; None if none was."""
        try:
            return max(0.0, time.time() - self._paths.metrics.stat().st_mtime)
        except OSError:
            return None

    def rounds(self) -> list[RoundRecord]:
        """Rounds of validation that were finished since the last call."""
        return list(_decoded(self._rounds.new(), RoundRecord))

    def sample(self) -> str:
        """What the model wrote lately, in one line; "" if nothing was written since the last call."""
        return next(filter(None, map(sample_line, _decoded(self._samples.new()[::-1], dict[str, Any]))), "")

    def errors(self) -> list[ErrorRecord]:
        """Warnings and errors that were filed since the last call."""
        return list(_decoded(self._errors.new(), ErrorRecord))

    def errors_before(self) -> int:
        """How many were filed earlier than what `errors` gave; told once."""
        told, self._skipped_told = self._skipped_told, True
        return 0 if told else self._errors.skipped

    def restarts(self) -> dict[str, int]:
        """How often launch has started each of its children again."""
        return restarts_of(self._paths)

    def ended(self) -> str:
        """How the run ended, in words; empty if no summary says so."""
        summary = read_map(self._paths.summary)
        return f"{summary.get('outcome')}: {summary.get('why')}" if summary else ""


def _decoded(lines: list[bytes], kind: type[T]) -> Iterator[T]:
    decoder = msgspec.json.Decoder(kind, strict=False)
    for line in lines:
        try:
            yield decoder.decode(line)
        except (ValueError, RecursionError):
            continue


def _t_max_s(trigger: dict[str, Any]) -> float:
    """In seconds; a run of an older busrl has milliseconds, under another name."""
    if "t_max_s" in trigger:
        return _number(trigger["t_max_s"], math.inf)
    return _number(trigger.get("t_max"), math.inf) / 1000


def _map(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _get(found: dict[str, Any], key: str, default: T) -> T:
    value = found.get(key, default)
    return value if isinstance(value, type(default)) else default


def _number(value: Any, default: float) -> float:
    if value == "inf":
        return math.inf
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else default


# -- Keeps one picture up to date: attaches to a run or an endpoint, reads ring and files, then listens ---------------


LOOK_EVERY_S: Final = 1.0
BEHIND_S: Final = 3.0
BATCH: Final = 2048
MAX_BYTES: Final = 1 << 22
LOOK, REPLAY = "LOOK", "REPLAY"  # topics that a replay adds to those of the protocol


class ReplayMark(msgspec.Struct):
    """Body of `REPLAY/`: what is replayed, and that it is over; see docs/monitor.md."""

    phase: str  # "running" or "over"
    facts: Facts = Facts()
    speed: float = 1.0  # 0: as fast as it goes
    messages: int = 0
    missed: int = 0


class Watcher:
    """`refresh` and `listen` by turns keep `picture` true. `close` leaves."""

    def __init__(self, target: Target) -> None:
        self.picture = RunState()
        self._files = RunFiles(target.paths) if target.paths else None
        facts = self._files.facts() if self._files else Facts()
        self.picture.facts = facts
        # First of all: what is sent from here on waits for us.
        self.tap = Tap(self._files.tap() if self._files else target.endpoint)
        self._look = Look(target.paths, group_size=facts.group_size) if target.paths else None
        self._next_look = 0.0
        self._missed_in_record = 0
        self._first = True

    def refresh(self, now: float, force: bool = False) -> bool:
        """Look at ring and files if it is time; whether it was."""
        if now < self._next_look and not force:
            return False
        self._next_look = now + LOOK_EVERY_S
        picture = self.picture
        if self._look is not None and self._files is not None:
            had = picture.ring is not None
            picture.look(self._look.look(), now, self._look.damage)
            if picture.ring is None:
                picture.ended = self._files.ended()
            elif not had:
                picture.facts = self._files.facts()  # a later start may have other goals
            self._read_files(now)
        picture.tick(now)
        return True

    def listen(self, now: float) -> int:
        """Fold in what has come, at most one batch; how many messages that were."""
        heard = self.tap.take(BATCH)
        wall, least = time.time(), None
        for one in heard:
            late = self._fold(one, wall, now)
            if late is not None:
                least = late if least is None else min(least, late)
        traffic = self.picture.traffic
        traffic.batch(len(heard), least, now)
        if traffic.lag_s > BEHIND_S:
            self.tap.reopen()
            traffic.resyncs += 1
            self.refresh(now, force=True)
        # A replay has the gaps of its recording, which the tap counts again.
        traffic.missed, traffic.malformed = max(self.tap.missed, self._missed_in_record), self.tap.malformed
        return len(heard)

    def close(self) -> None:
        """Leave."""
        self.tap.close()
        if self._look is not None:
            self._look.close()

    def _read_files(self, now: float) -> None:
        assert self._files is not None
        # What stands there already ended when the file was last written; a run that is over has no such clock.
        age = self._files.step_age_s() if self._first and self.picture.ring is not None else None
        ended = now if not self._first else None if age is None else now - age
        for step in self._files.steps():
            self.picture.step(step, ended)
        for done in self._files.rounds():
            self.picture.validated(done)
        self.picture.sample = self._files.sample() or self.picture.sample
        for error in self._files.errors():
            self.picture.error(error, "file")
        self.picture.complaints.before(self._files.errors_before())
        self.picture.restarts = self._files.restarts()
        self._first = False

    def _fold(self, heard: Heard, wall: float, now: float) -> float | None:
        """One message into the picture; how late it is in seconds, where that says how far behind we are."""
        name, picture = heard.name, self.picture
        if name in (LOOK, REPLAY):
            self._fold_replay(name, heard.body, now)
            return None
        picture.traffic.heard(name if name in BY_NAME else "(unknown)", len(heard.body))
        message = decoded(name, heard.body)
        if message is not None:
            picture.hear(message, now)
        if heard.envelope is None or picture.replay or not heard.envelope.time_ns:
            return None
        return picture.traffic.late(heard.envelope.sender, wall - heard.envelope.time_ns / 1e9)

    def _fold_replay(self, name: str, body: bytes, now: float) -> None:
        try:
            if name == LOOK:
                if self._look is None:
                    self.picture.look(msgspec.msgpack.decode(body, type=RingRecord), now)
                return
            mark = msgspec.msgpack.decode(body, type=ReplayMark)
        except (ValueError, RecursionError):
            self.picture.traffic.malformed += 1
            return
        self._missed_in_record = mark.missed
        self.picture.facts = mark.facts
        self.picture.replayed(mark.facts.run_id or "a recording", mark.speed, mark.phase == "over")


def decoded(name: str, body: bytes) -> Message | None:
    """The message of a known name; None for one that this program can not read."""
    kind = BY_NAME.get(name)
    if kind is None:
        return None
    try:
        return codec.decode(kind, body, MAX_BYTES)
    except Rejected:
        return None
