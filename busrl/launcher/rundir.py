"""The run directory: locked, compared with what earlier starts left (`identity`), with a ring that is new or adopted.

Talks to the file system, the ring and the ledger's files, before any child runs. Knows nothing of processes or of the
bus. Recovery is the ordinary path: a first start is a start that finds nothing.

- One launch per directory: it holds `run.lock`, and every child inherits that, so a directory is free only when the
  last process of its run is gone.
- run.lock counts while it is the file of that name. If it is removed, the launch makes it again; if another launch has
  it by then, this one has lost its turn and touches nothing more of the run.
- Before anything is written it is settled that it is the same run, and that something is left to do.
- A ring is adopted only if it is this run's (uuid), of this boot and of this layout. With a ring nothing is put back:
  its slots still hold their samples. Without one, samples in no slot are settled before the new ring has its name.
- A ring whose samples have lost their fates is not adopted: only checkpoint and log show what was trained.
"""

from __future__ import annotations

import errno
import json
import os
import pwd
import re
import secrets
import shutil
import time
import uuid as uuids
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from busrl.bus.addresses import prepare as prepare_endpoint
from busrl.errors import LockTimeout, MachineError, RingError, RingMismatch, RingNotFound, RunInUse, UserError
from busrl.launcher.fates import FateWatch, PutBack, put_back
from busrl.launcher.identity import BLOCK, Start, check_goal, compare
from busrl.launcher.supervisor import is_titled
from busrl.ledger.openbin import remove_open
from busrl.ledger.trained import mend_trained_set
from busrl.paths import CLAIMED_FROM, SHM, RunPaths
from busrl.ring import Fates, OfdLock, Ring, RingGuard
from busrl.states import PAUSE_STARTING, HeaderWord, RunPhase
from busrl.status.reader import files_of, living
from busrl.system import files
from busrl.system.guardian import end_left_behind, stat_of
from busrl.topology import Topology
from busrl.topology.recorded import made_files, placed

DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
LOCK_S = 15.0  # children of a killed launch die at once, but a loaded machine takes its time to bury them


@dataclass
class OpenRun:
    """A run directory that this process holds."""

    paths: RunPaths
    topology: Topology
    lock: OfdLock
    ring: Ring
    fates: Fates | None  # of a model that only serves, none
    validate_fates: Fates | None
    written: dict[Path, bytes]  # topology.json, run.json and others, as they were written
    directory: int  # a descriptor of the directory, wherever it is moved
    guard: RingGuard
    calls: Ring | None = None  # the ring of model calls, where agents make the samples
    notes: list[str] = field(default_factory=list)
    displaced: str = ""  # by which launch, as a text
    beside: tuple[OpenRun, ...] = ()  # the directories of the models beside the lead, under the same lock
    _last_problem: str = ""

    @property
    def every(self) -> tuple[OpenRun, ...]:
        """This one and those of the other models."""
        return (self, *self.beside)

    def of_process(self, name: str) -> OpenRun:
        """The directory of the model to which a process of this name belongs."""
        tag = self.topology.tag_of(name)
        return next((other for other in self.beside if other.topology.tag == tag), self)

    def of_models(self, name: str) -> tuple[OpenRun, ...]:
        """The directories of all models that a process of this name works for."""
        tags = self.topology.models_of(name)
        return tuple(each for each in self.every if each.topology.tag in tags)

    def has_made_steps(self, name: str) -> bool:
        """Tell whether all models that a process works for have made their steps."""
        return all(each.ring.header(HeaderWord.RUN_STATE) == RunPhase.FINISHING for each in self.of_models(name))

    def trained(self) -> tuple[OpenRun, ...]:
        """The directories of the models that learn."""
        return tuple(each for each in self.every if not each.topology.frozen)

    def keep_lock(self) -> str | None:
        """Make run.lock again if it was removed; a line about that, or about another launch that has it by now
        (`displaced`)."""
        if self.lock.stands or self.displaced or self.moved():
            return None
        try:
            if self.lock.try_acquire():
                return f"{self.lock.path} was removed by another program; it is made and held again"
            pid = OfdLock(self.lock.path).holder()
        except RingError as problem:
            text = f"{problem}; another launch cannot be kept out of {self.paths.root} until that is mended"
            previous, self._last_problem = self._last_problem, text
            return None if previous == text else text
        self.displaced = (
            f"another launch (pid {pid or 'unknown'}) has run in {self.paths.root} since somebody removed run.lock; "
            "this one has lost its turn and leaves ring and files to it"
        )
        return self.displaced

    def moved(self) -> str | None:
        """A text that says where the run directory is now; None if it still has its name."""
        with suppress(OSError):
            if os.path.samestat(os.stat(self.paths.root), os.fstat(self.directory)):
                return None
        text, place = f"the run directory {self.paths.root} was ", os.readlink(f"/proc/self/fd/{self.directory}")
        if place.endswith(" (deleted)"):
            return f"{text}removed while the run went on"
        return (
            f"{text}moved to {place} while the run went on, so its processes cannot find their files; start it again "
            f"there, with --run-dir {place}: what was trained is trained, what was under way is generated again"
        )

    def ring_gone(self) -> str:
        """A text if the ring has lost its name, so that no process can attach any more; "" while it has it."""
        gone = next((each.paths.ring_file for each in self.every if not each.guard.has_name()), None)
        if gone is None:
            return ""
        return (
            f"{gone} was removed or replaced by another program; start the run again: what was trained "
            "is trained, what was in its slots is generated again"
        )

    def use(self, topology: Topology) -> None:
        """Put another topology in force, in topology.json too."""
        data = topology.to_json().encode()
        files.replace(self.paths.topology, data)
        self.written[self.paths.topology], self.topology = data, topology
        for other in self.beside:
            other.use(topology.of(other.topology.tag))

    def read_only(self) -> str:
        """A text if the run directory cannot be written any more, with what to do; "" while it can."""
        try:
            os.close(os.open(self.paths.log("launch"), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            if error.errno == errno.EROFS:
                return (
                    f"{self.paths.root} cannot be written any more: {error.strerror}; look at the disk (`dmesg`) and "
                    "its mount, then start the run again: what was trained is trained, nothing is lost"
                )
        return ""

    def restore(self) -> list[str]:
        """Write files again that every process of the run reads and that were removed or changed; lines about that.

        A child that starts later, `status` and the audit have to read the same as the others.
        """
        done: list[str] = []
        if self.moved():
            return done
        for path, data in self.written.items():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                if not path.is_file() or path.read_bytes() != data:
                    files.replace(path, data)
                    done.append(f"{path} was removed or changed by another program; it is written again as it was")
            except (OSError, MachineError) as problem:
                done.append(f"{path} was removed or changed by another program, and cannot be written again: {problem}")
        return done + [line for other in self.beside for line in other.restore()]

    def release(self) -> None:
        """Close and unlock everything; the files and the ring stay."""
        for each in self.every:
            for part in (each.ring, each.calls, each.fates, each.validate_fates):
                if part is not None:
                    part.close()
            os.close(each.directory)
            each.guard.release()
        self.lock.release()


def open_run(run_dir: str | os.PathLike[str], topology: Topology, *, resume: bool = True) -> OpenRun:
    """Lock the directory and make or adopt its ring. What an earlier start left there is used, or refused by name."""
    paths = RunPaths.of(run_dir)
    if (whose := belongs_to_another(paths.root)) and not os.access(paths.root, os.W_OK | os.X_OK):
        raise UserError(f"--run-dir {paths.root}: {whose}; give a directory of your own, or have them start it again")
    make_directories("--run-dir", paths.root, paths.logs, paths.checkpoints)
    with locked(paths) as lock:
        prompt_files = made_files(topology)
        topology = placed(topology, paths.data)
        start = compare(paths, topology, _read_json(paths.topology), resume, prompt_files)
        beside = _compared_beside(paths, topology, resume, start.step)
        for endpoint in (paths.frontend, paths.backend):
            prepare_endpoint(endpoint)
        for file in prompt_files.values():
            _take_prompts(file, paths.data / file.name)
        run = opened(paths, topology, lock, start)
        run.beside = tuple(_opened_beside(run, tag, of_tag) for tag, of_tag in beside.items())
        return run


def _compared_beside(paths: RunPaths, topology: Topology, resume: bool, step: int) -> dict[str, Start]:
    """Compare with what earlier starts left in the directories of the models beside the lead, before anything is
    written; `step`: the lead's. RunFinished if every model has made its steps."""
    starts = dict[str, Start]()
    for own in map(topology.of, topology.tags):
        if own.beside:
            of_tag = paths.of_tag(own.tag)
            make_directories("--run-dir", of_tag.root)
            before = _read_json(of_tag.topology)
            starts[own.tag] = Start() if own.frozen and not before else compare(of_tag, own, before, resume)
    if starts:
        check_goal(paths, topology, {topology.tag: step, **{tag: start.step for tag, start in starts.items()}})
    return starts


def _opened_beside(run: OpenRun, tag: str, start: Start) -> OpenRun:
    """Write the files of a model beside the lead, and make or adopt its ring."""
    own, paths = run.topology.of(tag), run.paths.of_tag(tag)
    told = json.loads(run.written[run.paths.run_json])
    opened_one = _served(paths, own, run, told) if own.frozen else opened(paths, own, run.lock, start, told)
    run.notes += [f"{tag}: {note}" for note in opened_one.notes]
    return opened_one


def _served(paths: RunPaths, topology: Topology, run: OpenRun, told: dict[str, Any]) -> OpenRun:
    """A model that only serves: no sample is ever in its ring, which has its process table and header words alone."""
    _require_own(SHM / paths.ring_name)
    written = write_files(paths, topology, run.ring.uuid, told)
    unlink_segments(paths.ring_name)
    ring, guard = _created(paths, topology, run.ring.uuid, 0)
    ring.set_header(HeaderWord.RUN_STATE, RunPhase.RUNNING)
    calls, directory = _new_calls(paths, topology, run.ring.uuid), os.open(paths.root, DIRECTORY)
    return OpenRun(paths, topology, run.lock, ring, None, None, written, directory, guard, calls)


@contextmanager
def locked(paths: RunPaths) -> Iterator[OfdLock]:
    """Hold run.lock; it stays held unless the body raises."""
    lock = take_lock(paths)
    try:
        yield lock
    except BaseException:
        remove_runtime_dir(paths)
        lock.release()
        raise


def make_directories(option: str, *wanted: Path) -> None:
    """Make directories; UserError names `option`, which the first of them was given by."""
    for directory in wanted:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{option} {wanted[0]}: {directory} cannot be made a directory: {error.strerror}; give a path that "
                "is free, or a directory that you may write to"
            ) from None


def _take_prompts(source: Path, place: Path) -> None:
    """Move prompts that were made from others to their place in the run directory, durably."""
    if source.resolve() == place.resolve() or not source.exists():  # two sets may have the same lines
        return
    place.parent.mkdir(exist_ok=True)
    with open(source, "rb") as file:
        files.replace(place, iter(lambda: file.read(BLOCK), b""))
    source.unlink(missing_ok=True)


def belongs_to_another(root: Path) -> str:
    """A text that names the owner of the run directory; "" if it is this user, or if there is no directory."""
    try:
        owner, me = root.stat().st_uid, os.geteuid()
    except OSError:
        return ""
    return "" if owner == me else f"it belongs to {_user(owner)}, not to you ({_user(me)})"


def _user(uid: int) -> str:
    with suppress(KeyError):
        return f"{pwd.getpwuid(uid).pw_name}, user {uid}"
    return f"user {uid}"


def take_lock(paths: RunPaths, timeout_s: float = LOCK_S) -> OfdLock:
    """Take run.lock in a way that children can inherit. Waits only for children of a launch that is gone."""
    lock = OfdLock(str(paths.lock("run")))
    try:
        if lock.holder() is None:
            _await_holders_of_a_removed_lock(paths, timeout_s)
        acquired = lock.try_acquire()
    except RingError as problem:
        raise UserError(f"{paths.root}: {problem}; move away what is there") from None
    if not acquired:
        holder = lock.holder()
        if holder and stat_of(holder)[:1] not in ([], ["Z"]):
            raise RunInUse(
                f"{paths.root}: another launch is running there (pid {holder}); watch it with "
                f"`busrl status {paths.root}`, or choose another run directory"
            )
        # Children die with their launch, and its guardian ends what they had started; it may have been ended too.
        end_left_behind(paths.key)
        try:
            lock.acquire(timeout_s)
        except LockTimeout:
            raise RunInUse(f"{paths.root}: {_still_held(paths, lock, timeout_s)}") from None
    lock.inheritable = True
    end_left_behind(paths.key)  # foreign programs hold no lock
    return lock


def _still_held(paths: RunPaths, lock: OfdLock, waited_s: float) -> str:
    """A text that names the holders of run.lock, none of them a launch of this machine, and what to do about them."""
    if here := [pid for pid in _holders(str(paths.lock("run"))) if pid != os.getpid()]:
        return (
            f"the launch that ran there (pid {lock.holder()}) is gone, but children of it still hold run.lock after "
            f"{waited_s:g} s; end them: kill {' '.join(map(str, here))}"
        )
    return (
        f"run.lock is held after {waited_s:g} s, and by no process that can be seen from here: the directory is shared "
        "with another container or host, where the run goes on; stop it there (`busrl stop`), or choose another run "
        "directory"
    )


def _await_holders_of_a_removed_lock(paths: RunPaths, timeout_s: float) -> None:
    """Wait until no process holds a run.lock that was removed; RunInUse if a launch does. A new lock does not show
    them, /proc does."""
    end = time.monotonic() + timeout_s
    while holders := _holders(f"{paths.lock('run')} (deleted)"):
        launch = next((pid for pid in holders if is_titled(pid, "launch")), 0)
        if launch or time.monotonic() > end:
            raise RunInUse(
                f"{paths.root}: another launch is running there (pid {launch or holders[0]}), though somebody removed "
                "its run.lock; end it first, or choose another run directory"
            )
        time.sleep(0.05)


def _holders(name: str) -> list[int]:
    """Processes of this user that have a file open which the kernel shows by this name."""
    others = [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and entry != str(os.getpid())]
    return [pid for pid in others if Path(name) in files_of(pid)]


def opened(
    paths: RunPaths, topology: Topology, lock: OfdLock, start: Start, told: dict[str, Any] | None = None
) -> OpenRun:
    """Write the files of a start in a locked directory, and make or adopt its ring. `told`: the run's run.json, where
    this is the directory of a model beside the lead."""
    before = told or _read_json(paths.run_json)
    uuid = _uuid_of(before, paths.run_json) if before else uuids.uuid4().bytes
    start.record(paths)  # before topology.json: its changes are on record even if this start is killed here
    written = write_files(paths, topology, uuid, before)
    fates, validate_fates = (Fates(str(path), create=True) for path in (paths.fates, paths.validate_fates))
    mended = mend_trained_set(paths)
    notes = [*start.notes, mended] if mended else start.notes
    adopted = _adopted(paths, topology, uuid, notes)
    if adopted is None:  # another prefix: claims of the new ring must not have the names of the old ring's claims
        written = write_files(paths, topology, uuid, {**before, CLAIMED_FROM: ""})
    ring, guard = adopted or _created_anew(paths, topology, uuid, notes)
    remove_open(paths.open_bin)
    ring.bind_fates(fates, validate_fates)
    ring.set_header(HeaderWord.RUN_STATE, RunPhase.RUNNING)
    calls = _new_calls(paths, topology, uuid)
    directory = os.open(paths.root, DIRECTORY)
    return OpenRun(paths, topology, lock, ring, fates, validate_fates, written, directory, guard, calls, notes)


def _new_calls(paths: RunPaths, topology: Topology, uuid: bytes) -> Ring | None:
    """Make the ring of model calls, if the run has one. Calls of an earlier start have no caller any more."""
    Ring.unlink(paths.calls_name)
    size = topology.derived
    if not size.call_slots:
        return None
    return Ring.create(
        paths.calls_name, slots=size.call_slots, slot_bytes=size.call_slot_bytes, processes=topology.ring.processes,
        uuid=uuid, calls=True,
    )


def take_guard(paths: RunPaths) -> RingGuard | None:
    """Take the guard of the run's ring; None if the ring has lost its name, RunInUse if a cleaner holds the guard."""
    try:
        guard = RingGuard(paths.ring_file)
    except FileNotFoundError:
        return None
    try:
        if guard.take():
            return guard
    except TimeoutError as problem:
        guard.release()
        raise RunInUse(str(problem)) from None
    guard.release()
    return None


def _created_anew(paths: RunPaths, topology: Topology, uuid: bytes, notes: list[str]) -> tuple[Ring, RingGuard]:
    """Make a ring, once the samples that are in no slot are settled."""
    settled = put_back(paths)
    notes += [str(settled)] if settled != PutBack() else []
    # Weights that an earlier run left are of policy versions that the new ring does not count from.
    unlink_segments(paths.ring_name)
    shutil.rmtree(paths.published, ignore_errors=True)
    # The learner clears this bit when it has set the newest version; no sample is admitted before.
    return _created(paths, topology, uuid, PAUSE_STARTING)


def _created(paths: RunPaths, topology: Topology, uuid: bytes, pause: int) -> tuple[Ring, RingGuard]:
    """Make a ring of the topology's size and guard it."""
    size = topology.derived
    while True:
        ring = Ring.create(
            paths.ring_name, slots=size.slots, slot_bytes=size.slot_bytes, processes=topology.ring.processes, uuid=uuid
        )
        ring.set_header(HeaderWord.GENERATION_PAUSE, pause)
        if (guard := take_guard(paths)) is not None:
            return ring, guard
        ring.close()  # `busrl ring clean` removed it before it was guarded


def _adopted(paths: RunPaths, topology: Topology, uuid: bytes, notes: list[str]) -> tuple[Ring, RingGuard] | None:
    """The ring that an earlier launch of this run left; None if there is none, or if its samples have no fates."""
    ring = _attached(paths, topology, uuid)
    if ring is None:
        return None
    with closing(FateWatch(paths.fates, paths.validate_fates, ring, topology.groups.size)) as watch:
        lost = watch.unrecorded()
    if lost:
        notes.append(f"the ring that an earlier launch left is not used: {lost}")
    elif (guard := take_guard(paths)) is not None:  # else another program has just removed the ring
        counts = {name.lower(): count for name, count in ring.stats().occupancy.items() if count}
        left = ", ".join(f"{count} {name}" for name, count in counts.items())
        notes.append(f"adopted the ring that an earlier launch left: {left}")
        return ring, guard
    ring.close()
    return None


def _attached(paths: RunPaths, topology: Topology, uuid: bytes) -> Ring | None:
    """Attach the run's ring if there is one; a ring of another shape, or of another user, is refused."""
    _require_own(SHM / paths.ring_name)
    try:
        ring = Ring.attach(paths.ring_name)
    except RingNotFound:
        return None
    except RingMismatch as problem:
        raise RingMismatch(
            f"{paths.root}: the ring that an earlier launch left cannot be used: {problem}. If it was of another "
            f"version of busrl, finish the run with that one; else remove it with `busrl ring clean {paths.root} "
            "--force` (its samples are then generated again)"
        ) from None
    if ring.uuid != uuid:
        _remove_stale(paths, ring)
        return None
    size = topology.derived
    if ring.n_slots != size.slots or ring.slot_bytes < size.slot_bytes:
        raise UserError(
            f"{paths.root}: the ring that an earlier launch left has {ring.n_slots} slots of {ring.slot_bytes} bytes, "
            f"the topology asks for {size.slots} of {size.slot_bytes}; finish that run with the topology as it was, or "
            f"remove the ring with `busrl ring clean {paths.root}` (its samples are then generated again)"
        )
    return ring


def _require_own(file: Path) -> None:
    """UserError for another user's file of the ring's name: only its owner can remove a file in /dev/shm."""
    with suppress(FileNotFoundError):
        if (owner := file.lstat().st_uid) != os.geteuid():
            raise UserError(
                f"{file}: a run in this directory keeps its ring there, and this file belongs to {_user(owner)}, not "
                f"to you ({_user(os.geteuid())}): have it removed by that user or by root (`rm {file}`), or give "
                "--run-dir another path, whose ring has another name"
            )


def _remove_stale(paths: RunPaths, ring: Ring) -> None:
    """Remove a ring of this run's name that belongs to another run, whose directory was removed; RunInUse if one of its
    processes lives."""
    # A remote entry is no process here: it keeps no ring in use, and nothing here proves its death.
    alive = living(ring)
    ring.close()
    if alive:
        names = ", ".join(f"{process.label} (pid {process.pid})" for process in alive)
        raise RunInUse(
            f"{SHM / paths.ring_name} belongs to another run in a directory of the same name, and is in use by "
            f"{names}; {_how_to_end(SHM / paths.ring_name, [process.pid for process in alive])}"
        )
    Ring.unlink(paths.ring_name)


def _how_to_end(ring: Path, pids: Collection[int]) -> str:
    """A remedy for processes that use a ring. If two containers share one /dev/shm they may be of the other one, where
    their pids mean other processes or none."""
    here = {*_holders(str(ring)), os.getpid()}
    if here >= set(pids):
        return f"end those processes first: kill {' '.join(map(str, pids))}"
    return (
        "they are of another container, which has the same /dev/shm, and cannot be ended from here: end that run "
        "there, give the containers a /dev/shm each (docker run --ipc=private), or this run another --run-dir"
    )


def unlink_segments(ring_name: str) -> None:
    """Remove from shared memory a ring, and the calls, weights, adapters and drafts of weights of the same run."""
    run = ring_name.removesuffix(".ring")
    for file in (SHM / ring_name, SHM / f"{run}.calls", *SHM.glob(f"{run}.weights*")):
        try:
            if file.is_dir() and not file.is_symlink():
                shutil.rmtree(file)
            else:
                file.unlink(missing_ok=True)
        except PermissionError:
            raise UserError(
                f"{file} cannot be removed: it belongs to user {file.stat().st_uid}, not to you ({os.geteuid()}); "
                "have it removed by that user or by root, or choose another run directory"
            ) from None


def remove_runtime_dir(paths: RunPaths) -> None:
    """Remove the directory of the sockets, and the user's directory above it if this was the last run."""
    shutil.rmtree(paths.runtime_dir, ignore_errors=True)
    with suppress(OSError):
        paths.runtime_dir.parent.rmdir()


def write_files(paths: RunPaths, topology: Topology, uuid: bytes, before: dict[str, Any]) -> dict[Path, bytes]:
    """Write topology.toml, topology.json and run.json; the content of the last two. `before` is the run.json of an
    earlier start."""
    source = Path(topology.source)
    if not topology.beside and topology.source and source.is_file() and source.resolve() != paths.topology_file:
        files.replace(paths.topology_file, source.read_bytes())
    info = {
        "run_id": before.get("run_id") or f"{topology.run.name}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.hex()[:4]}",
        "ring": paths.ring_name, "calls": paths.calls_name if topology.derived.call_slots else "",
        "weights": paths.weights_name, "runtime_dir": str(paths.runtime_dir),
        "frontend": paths.frontend, "backend": paths.backend,
        "tcp": "" if topology.bus.endpoint == "ipc" else topology.bus.endpoint, "tap": paths.tap,
        "launch_pid": os.getpid(), "started": time.time(),
        "uuid": uuid.hex(),
        CLAIMED_FROM: before.get(CLAIMED_FROM) or uuid.hex()[:16] + secrets.token_hex(8),
    }
    written = {paths.topology: topology.to_json().encode(), paths.run_json: json.dumps(info, indent=2).encode() + b"\n"}
    for path, data in written.items():
        files.replace(path, data)
    return written


def _uuid_of(info: dict[str, Any], path: Path) -> bytes:
    """The uuid by which a ring is this run's; UserError if it is damaged, as a new one would give up the ring."""
    text = info.get("uuid")
    if not isinstance(text, str) or not re.fullmatch("[0-9a-f]{32}", text):
        raise UserError(
            f"{path}: uuid = {text!r}: it must have 32 hex digits; was it edited? Restore it, or remove the file: then "
            "nothing that is in the ring is kept"
        )
    return bytes.fromhex(text)


def _read_json(path: Path) -> dict[str, Any]:
    """The map in a file; empty if there is no file. busrl replaces such files as a whole, so half of one is an error.
    """
    try:
        content = json.loads(path.read_bytes())
        if not content or not isinstance(content, dict):
            raise ValueError("expected a map")
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; it must be a file that you may read") from None
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: not what busrl wrote ({error}); was it edited? Restore it, or start in another directory"
        ) from None
    return content
