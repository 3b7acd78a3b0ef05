"""The ring and the files of a run, read while others write them, and folded into its `RunState`.

Maps the ring read-only and opens files for reading: takes no entry of the process table, sends nothing, holds no lock.
Used by launch (its summary and its stall alarm), by `busrl status`, and by the monitor. Knows nothing of the bus.

- The end of a run removes its ring, and a later start makes another: `look` finds the ring that is there now.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from msgspec.structs import replace

from busrl.capabilities import CALLER_ROLES, MODEL_ROLES
from busrl.errors import NoSuchRun, RingError, RingNotFound
from busrl.paths import SHM, RunPaths
from busrl.ring import Fates, OfdLock, Process, Ring
from busrl.scheduling.groups import GroupScanner
from busrl.states import VALIDATE_BIT, WORKING, HeaderWord, SampleClass, State, episode_of
from busrl.status.runfiles import RunFiles, number, whole_number
from busrl.status.state import VERSIONS, Held, ProcessRecord, RingRecord, RunState
from busrl.status.waits import reason_of
from busrl.system.files import as_map, read_map
from busrl.system.guardian import halted

# -- runs and their processes ------------------------------------------------------------------------------------------

def newest_run(parent: Path) -> Path:
    changed: dict[Path, float] = {}
    for file in parent.glob("*/run.json"):
        with suppress(FileNotFoundError):  # somebody has just removed that run
            changed[file.parent] = file.stat().st_mtime
    if not changed:
        raise NoSuchRun(f"no run under {parent.resolve()}; name a run directory")
    return max(changed, key=lambda run: changed[run])


def holder_of(paths: RunPaths) -> int | None:
    """The pid of the launch that holds the run directory, or of a process that it left running; takes no lock."""
    lock = paths.lock("run")
    try:
        return OfdLock(str(lock)).holder() if lock.is_file() else None
    except (OSError, RingError):  # such as a lock of another user
        return None


def summary_of(paths: RunPaths) -> dict[str, Any]:
    """Summary of the newest start; empty before its end, or if its launch was killed and left an earlier one. That of a
    model beside the lead has its own numbers in the place of the lead's."""
    summary = read_map(paths.summary)
    if paths.run and summary:
        own = as_map(as_map(summary.get("models")).get(paths.root.name))
        summary = {**summary, "steps": 0, "version": 0, "audit": None, **own}
    ended, started = number(summary.get("ended")), number(read_map(paths.run_json).get("started"))
    return {} if ended is not None and started is not None and ended < started else summary


def living(ring: Ring) -> list[Process]:
    """The registered processes of this host that are not proven dead."""
    return [process for process in ring.processes() if not process.remote and not ring.is_dead(process.index)]


def files_of(pid: int) -> Iterator[Path]:
    """Yield the files that a process has open. Its environment is no source: setting a process title overwrites it."""
    with suppress(OSError):
        for link in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                yield Path(os.readlink(link.path))


# -- the ring ----------------------------------------------------------------------------------------------------------

SILENT_S: Final = 1.0  # a stopped process is silent for longer than this
HELD_PLACES: Final = (0, 4, 18, 19, 40)  # bits of the state, owner, class, group and call of a slot, packed
COPIED: Final = ("role", "pid", "activity", "deadline_s", "busy_ns", "tokens", "samples", "version", "remote")


class RingLook:
    """The ring of one run directory, attached while it exists. `close` detaches it."""

    def __init__(self, paths: RunPaths, group_size: int = 0) -> None:
        self._paths, self._name, self._group_size = paths, paths.ring_name, group_size
        self._calls = f"{self._name.removesuffix('.ring')}.calls"
        self._ring: Ring | None = None
        self._file: os.stat_result | None = None
        self.damage = ""  # why the ring that is there cannot be read, with the remedy
        self._fates: Fates | None = None
        self._scanner: GroupScanner | None = None
        self._seats = 1

    def look(self) -> RingRecord | None:
        """Read the ring; None if this run has none."""
        ring = self._attached()
        if ring is None:
            return None
        lines = ring.lines()
        record = ring_record(ring, *self._groups(lines))
        processes = tuple(replace(process, stopped=is_stopped(process)) for process in record.processes)
        moved = {name.lower(): count for name, count in ring.stats().transitions.items()}
        draws, more = {reason_of(process)[1] for process in record.processes}, slots_of(lines)
        if beside := {tag: found for tag, paths in self._models() if (found := _workers(paths))}:
            more["beside"] = beside
        played, calls = _by_episode(lines, self._group_size, self._seats), list[Calls]()
        with suppress(RingError), closing(Ring.attach(self._calls, read_only=True, calls=True)) as called:
            more["calls"] = {name.lower(): count for name, count in called.stats().occupancy.items() if count}
            calls = [Calls.of(called), *(there for tag, paths in self._models() for there in _calls(paths, tag))]
            asked = np.concatenate([each.lines for each in calls])
            more["episodes"] = open_episodes(played, asked, time.monotonic_ns())
        more["held"] = held_slots(played, ring.processes(), draws, calls_by_uid(calls))
        return replace(record, processes=processes, moved=moved, **more)

    def close(self) -> None:
        if self._ring is not None:
            self._ring.close()
            self._ring = None
        if self._fates is not None:
            self._fates.close()
            self._fates, self._scanner = None, None

    def _models(self) -> Iterator[tuple[str, RunPaths]]:
        """The models beside the lead, by tag, where this is the ring of the lead."""
        if self._paths.run is None:
            for file in sorted(self._paths.models.glob("*/run.json")):
                yield file.parent.name, self._paths.of_tag(file.parent.name)

    def _attached(self) -> Ring | None:
        self.damage = ""
        try:
            info = os.stat(SHM / self._name)
        except OSError:
            self.close()
            return None
        if self._ring is None or self._file is None or not os.path.samestat(info, self._file):
            self.close()
            try:
                self._ring = Ring.attach(self._name, read_only=True)
            except RingNotFound:  # it was removed just now
                return None
            except RingError as error:
                self.damage = str(error)
                return None
            self._file = info
            self._seats = len(as_map(read_map(self._paths.topology).get("model")).get("seats") or ["the only one"])
        return self._ring

    def _groups(self, lines: np.ndarray) -> tuple[int, int]:
        """The number of open groups, and of those that a step could take; -1 where the fates cannot be read."""
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
            return None  # no uid of this run: the lines are damaged, and the scanner does not check them
        if self._scanner is None:
            self._scanner = GroupScanner(self._fates.view(), self._group_size)
        elif len(self._fates) != len(self._scanner.fates):
            self._scanner.read_from(self._fates.view())

        return self._scanner


class Calls(NamedTuple):
    """The ring of model calls of a model: its lines, its processes, and the tag, "" for the lead."""

    lines: np.ndarray
    processes: list[Process]
    tag: str = ""

    @classmethod
    def of(cls, ring: Ring, tag: str = "") -> Calls:
        return cls(ring.lines(), ring.processes(), tag)


def _calls(paths: RunPaths, tag: str) -> Iterator[Calls]:
    with suppress(RingError), closing(Ring.attach(paths.calls_name, read_only=True, calls=True)) as ring:
        yield Calls.of(ring, tag)


def _workers(paths: RunPaths) -> tuple[ProcessRecord, ...]:
    """The learner and the engines of a model, of its ring."""
    with suppress(RingError), closing(Ring.attach(paths.ring_name, read_only=True)) as ring:
        found = [_process_record(ring, process) for process in ring.processes() if process.role in MODEL_ROLES]
        return tuple(replace(process, stopped=is_stopped(process)) for process in found)
    return ()


def _by_episode(lines: np.ndarray, group_size: int, seats: int) -> np.ndarray:
    """The lines, with the number of its episode in the place of the uid of each sample: that is in the calls of it."""
    if seats == 1 or not group_size:
        return lines
    numbered: np.ndarray = lines.copy()
    of_training = lines["uid"] < VALIDATE_BIT
    numbered["uid"][of_training] = episode_of(lines["uid"][of_training].astype(np.int64), group_size, seats)
    return numbered


def ring_record(ring: Ring, opened: int = -1, ready: int = -1) -> RingRecord:
    """Read a ring; `opened` and `ready`: the numbers of groups, -1 where they were not counted."""
    stats = ring.stats()
    return RingRecord(
        slots=ring.n_slots,
        occupancy={name.lower(): count for name, count in stats.occupancy.items()},
        words={word.value: ring.header(word) for word in HeaderWord},
        reaps=stats.reaps, tokens=stats.tokens, groups_open=opened, groups_ready=ready,
        processes=tuple(_process_record(ring, process) for process in ring.processes()),
    )


def _process_record(ring: Ring, process: Process) -> ProcessRecord:
    now = time.monotonic_ns()
    return ProcessRecord(
        name=process.label,
        state="dead" if ring.is_dead(process.index) else process.state,
        progress_age_s=max(0, now - process.progress_ns) / 1e9,
        activity_age_s=max(0, now - process.activity_ns) / 1e9,
        **{name: getattr(process, name) for name in COPIED},
    )


def slots_of(lines: np.ndarray) -> dict[str, Any]:
    """The ages of slots in their states, and the numbers of slots by the version that began their answer."""
    ages: dict[str, tuple[float, ...]] = {}
    now, states = time.monotonic_ns(), lines["state"]
    for state in State:
        if len(since := lines["changed_ns"][states == state]):
            passed = np.sort(np.maximum(0.0, (now - since.astype(np.int64)) / 1e9)).tolist()
            median = (passed[(len(passed) - 1) // 2] + passed[len(passed) // 2]) / 2  # numpy's is slow
            ages[state.name.lower()] = (passed[0], median, passed[-1])
    begun = lines["version"][(states >= State.GENERATING) & (states < State.DROPPED)]
    versions, counts = np.unique(begun, return_counts=True)
    newest = list(zip(versions.tolist(), counts.tolist()))[-VERSIONS:]
    return {"ages": ages, "versions": {str(version): count for version, count in newest}}


def held_slots(
    lines: np.ndarray, processes: list[Process], draws: Collection[int], calls: Mapping[int, tuple[str, int]]
) -> tuple[Held, ...]:
    """The slots of a ring that are not free, in classes of like ones; each group of `draws` has classes of its own.
    `calls`: for an episode's sample, where its call is, and since when."""
    names = {process.index: process.label for process in processes}
    plays = [process.index for process in processes if process.role in CALLER_ROLES]
    used = lines[lines["state"] != State.FREE]
    changed, whose = used["changed_ns"].astype(np.int64), np.zeros(len(used), np.int64)
    callees = sorted({name for name, _ in calls.values()} | {""})
    for at in np.flatnonzero((used["state"] == State.GENERATING) & np.isin(used["owner"], plays)).tolist():
        name, since = calls.get(int(used["uid"][at]), ("", 0))
        whose[at], changed[at] = callees.index(name), max(int(changed[at]), since)
    order = sorted(draws)
    group = sum((n * (used["group"] == draw) for n, draw in enumerate(order, 1) if draw >= 0), np.zeros_like(whose))
    owner = np.where(np.isin(used["state"], WORKING), used["owner"], 0)
    kind = (used["state"], owner, used["cls"] == SampleClass.VALIDATE, group, whose)
    packed = sum((part.astype(np.int64) << place for part, place in zip(kind, HELD_PLACES)), np.zeros_like(whose))
    _, example, of, counts = np.unique(packed, return_index=True, return_inverse=True, return_counts=True)
    oldest = np.full(len(counts), np.iinfo(np.int64).max)
    np.minimum.at(oldest, of, changed)
    now, rows = time.monotonic_ns(), []
    for state, owned, validates, n, who, count, first in zip(
        *(part[example].tolist() for part in kind), counts.tolist(), oldest.tolist()
    ):
        name = names.get(owned, f"process {owned}") if state in WORKING else ""
        age, draw = max(0, now - first) / 1e9, order[n - 1] if n else -1
        rows.append(Held(State(state).name.lower(), name, count, age, validates, draw, callees[who]))
    return tuple(rows)


def calls_by_uid(calls: Iterable[Calls]) -> dict[int, tuple[str, int]]:
    """Find for each episode that made a call where the newest is ("queued", with the tag beside the lead; an engine; ""
    once it was answered), and since when. The slot of an answered call shows it until the slot is used again."""
    newest: dict[int, tuple[str, int]] = {}
    for lines, processes, tag in calls:
        names, queued = {process.index: process.label for process in processes}, f"queued {tag}".rstrip()
        columns = (lines[name].tolist() for name in ("state", "owner", "uid", "changed_ns"))
        for state, owner, uid, changed in zip(*columns):
            whose = names.get(owner, "") if state == State.GENERATING else queued if state == State.QUEUED else ""
            before = newest.get(uid)
            # A call under way counts before those that are over.
            if before is None or (bool(whose), changed) > (bool(before[0]), before[1]):
                newest[uid] = whose, changed
    return newest


def open_episodes(samples: np.ndarray, calls: np.ndarray, now_ns: int) -> dict[str, tuple[int, float]]:
    """Count the episodes under way by activity, each with the seconds since its oldest episode began.

    `thinking`: an engine is at work on a call of the episode; `waiting`: its calls wait for an engine; `tool`: it has
    no call under way. Read from the lines of both rings.
    """
    playing, episodes = samples[samples["state"] == State.GENERATING], {}
    at_work = np.isin(playing["uid"], calls["uid"][np.isin(calls["state"], (State.GENERATING, State.GENERATED))])
    queued = np.isin(playing["uid"], calls["uid"][calls["state"] == State.QUEUED]) & ~at_work
    for name, which in (("thinking", at_work), ("waiting", queued), ("tool", ~(at_work | queued))):
        if count := int(which.sum()):
            episodes[name] = count, (now_ns - int(playing["changed_ns"][which].min())) / 1e9
    return episodes


def is_stopped(process: ProcessRecord) -> bool:
    if process.remote or process.state == "dead" or process.progress_age_s < SILENT_S:
        return False
    return bool(halted(process.pid))


# -- ring and files together ------------------------------------------------------------------------------------------

class RunReader:
    """Folds ring and files of one run directory into `run`: `refresh` from time to time, `close` at the end."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths, self.files = paths, RunFiles(paths)
        self.run = RunState(facts=self.files.facts())
        self._look = RingLook(paths, group_size=self.run.facts.group_size)
        self._first = True

    def refresh(self, now: float) -> None:
        run, had = self.run, self.run.ring is not None
        run.look(self._look.look(), now, self._look.damage)
        hosts = read_map(self._paths.hosts_now) if run.ring is not None else {}
        run.hosts = {name: as_map(host) for name, host in hosts.items()}
        if run.ring is None:
            summary = summary_of(self._paths)
            run.ended = f"{summary.get('outcome')}: {summary.get('why')}" if summary else ""
            run.ended_step, run.ended_version = whole_number(summary.get("steps")), whole_number(summary.get("version"))
        elif not had:
            run.facts = self.files.facts()  # a later start may have other goals
        ended: float | None = now
        if self._first:  # the newest step ended when its file was last written; a run without a ring is over
            age = self.files.step_age_s() if run.ring is not None else None
            ended, self._first = None if age is None else now - age, False
        self.files.fold_into(run, ended)

    def close(self) -> None:
        self._look.close()
