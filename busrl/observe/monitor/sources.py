"""Sources of a monitor: a run's bus by its tap, its ring and its files (`status.reader`), folded into one `RunState`.

Opens the tap of the bus, the ring and the files of a run, all for reading. Knows nothing of how the state is shown.

- Nothing is written, sent or registered: the ring is mapped `PROT_READ`, and no entry of its process table is taken.
- Subscribe first, then look, then listen: a message that is sent between the look and the first read is not missed, and
  the state is right before the first message.
- A watcher that is behind by more than `BEHIND_S` drops the backlog, counts it and looks again: the ring shows the
  present.
- A busy bus costs a watcher no more wake-ups than a quiet one; only after a full batch it reads on at once.
- After the first picture a watcher lowers its priority to the least, so it gets some 1.5 % of a core on a busy machine.
- Rendering takes at most `RENDER_SHARE` of one core: the longer a picture takes, the longer it stays.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import asdict

from busrl.bus.endpoint import Tap, TapMessage
from busrl.errors import BadEndpoint, NoSuchRun, RingError, UserError
from busrl.paths import SHM, RunPaths
from busrl.protocol import codec
from busrl.protocol.codec import BY_NAME, Rejected
from busrl.ring import Ring
from busrl.status.reader import RunReader, files_of, living
from busrl.status.state import HEARD, Facts, Flow, RingRecord, RunState, address_of
from busrl.status.view import RunStatus, as_data
from busrl.system.files import read_map

# -- the run to watch --------------------------------------------------------------------------------------------------

LOCK = "run.lock"  # launch holds it, and every child inherits it


def find(argument: str | None) -> RunPaths | str:
    """Resolve the argument of a command: a run, or an endpoint alone; without one, the only living run of this user."""
    if argument is None:
        return RunPaths.of(only_living_run())
    if "://" in argument:
        return require_ipc(argument)
    return RunPaths.of(argument)


def require_ipc(endpoint: str) -> str:
    """The endpoint, if it is one of this host: watchers and replays have no keys. BadEndpoint if it is not."""
    if not endpoint.startswith("ipc://"):
        raise BadEndpoint(
            f"{endpoint}: monitor, record and replay work over ipc:// alone, on the host of the run, also where the "
            "bus is reachable over tcp; log in there (`ssh HOST busrl monitor RUN_DIR`), or bring a recording here "
            "and replay it"
        )
    return endpoint


def only_living_run() -> Path:
    directories = list(living_runs())
    if not directories:
        raise NoSuchRun(
            f"no run of user {os.getuid()} lives on this host; name a run directory to see how its run ended"
        )
    if len(directories) > 1:
        listed = "\n".join(f"  {directory}" for directory in directories)
        raise UserError(f"{len(directories)} runs live on this host; name the run directory of one:\n{listed}")
    return directories[0]


def living_runs() -> Iterator[Path]:
    """Run directories of this user's rings with living processes, by the run.lock that those have open."""
    for path in sorted(SHM.glob(f"busrl.{os.getuid()}.*.ring")):
        with suppress(RingError), closing(Ring.attach(path.name, read_only=True)) as ring:
            opened = (file for process in living(ring) for file in files_of(process.pid))
            runs = (file.parent for file in opened if file.name == LOCK)
            yield from islice((directory for directory in runs if RunPaths.of(directory).ring_name == path.name), 1)


# -- the bus, and all of it together -----------------------------------------------------------------------------------

LOOK_EVERY_S: Final = 1.0
BEHIND_S: Final = 3.0
BATCH: Final = 2048
MAX_BYTES: Final = 1 << 22
ERRORS: Final = 20  # in the data of a monitor
LOOK, REPLAY = "LOOK", "REPLAY"  # topics that a replay adds to those of the protocol


class ReplayMark(msgspec.Struct):
    """Body of `REPLAY/`: the run that is replayed, and whether the replay is over; see docs/monitor.md."""

    phase: str  # "running" or "over"
    facts: Facts = Facts()
    speed: float = 1.0  # 0: as fast as it goes
    messages: int = 0
    missed: int = 0


class Watcher:
    """A watched run: `refresh` and `listen` by turns keep `run` up to date."""

    def __init__(self, target: RunPaths | str) -> None:
        self._reader = RunReader(target) if isinstance(target, RunPaths) else None
        self.run = self._reader.run if self._reader else RunState()
        self.samples: Sequence[dict[str, Any]] = self._reader.files.samples if self._reader else ()
        # Before ring and files are read: messages that are sent from here on wait in the tap.
        self.tap = Tap(self._reader.files.tap() if self._reader else str(target))
        self._next_look = 0.0
        self._missed_in_record = 0

    def refresh(self, now: float, force: bool = False) -> None:
        if now < self._next_look and not force:
            return
        self._next_look = now + LOOK_EVERY_S
        if self._reader is not None:
            self._reader.refresh(now)
        self.run.traffic.tick(now)

    def listen(self, now: float) -> int:
        """Fold in the messages that have come, at most one batch; their number."""
        messages = self.tap.take(BATCH)
        wall, traffic = time.time(), self.run.traffic
        lates = [late for message in messages if (late := self._fold(message, wall, now)) is not None]
        traffic.batch(len(messages), min(lates, default=None), now)
        if traffic.lag_s > BEHIND_S:
            self.tap.reopen()
            traffic.resyncs += 1
            self.refresh(now, force=True)
        # Gaps of a recording are in its replay too, where the tap counts them again.
        traffic.missed, traffic.malformed = max(self.tap.gaps.missed, self._missed_in_record), self.tap.malformed
        return len(messages)

    def close(self) -> None:
        self.tap.close()
        if self._reader is not None:
            self._reader.close()

    def _fold(self, message: TapMessage, wall: float, now: float) -> float | None:
        """Fold a message into the state; the seconds by which it is late, None if that is not known or not this
        monitor's delay."""
        name, run = message.name, self.run
        if name in (LOOK, REPLAY):
            self._fold_replay(name, message.body, now)
            return None
        kind = BY_NAME.get(name)
        sender = address_of(message.envelope.sender) if message.envelope is not None else ""
        run.traffic.received(name if kind is not None else "(unknown)", len(message.body), sender)
        if kind is not None and kind in HEARD:  # the others are only counted
            with suppress(Rejected):  # a message that this program cannot read
                run.handle(codec.decode(kind, message.body, MAX_BYTES), now)
        if message.envelope is None or run.replay or not message.envelope.time_ns:
            return None
        return run.traffic.late(message.envelope.sender, wall - message.envelope.time_ns / 1e9)

    def _fold_replay(self, name: str, body: bytes, now: float) -> None:
        try:
            if name == LOOK:
                if self._reader is None:
                    self.run.look(msgspec.msgpack.decode(body, type=RingRecord), now)
                return
            mark = msgspec.msgpack.decode(body, type=ReplayMark)
        except (ValueError, RecursionError):
            self.run.traffic.malformed += 1
            return
        self._missed_in_record = mark.missed
        self.run.replayed(mark.facts, mark.speed, mark.phase == "over")


def models_of(target: RunPaths) -> list[RunPaths]:
    """The directories of the models of a run, this one first; of a run of one model it alone."""
    run = RunPaths(target.home)
    others = [RunPaths.of(file.parent) for file in sorted(run.models.glob("*/run.json"))]
    return [target, *(paths for paths in (run, *others) if paths.root != target.root)]


def tag_of(target: RunPaths) -> str:
    """The tag of the model whose directory this is."""
    return target.root.name if target.run else str(read_map(target.topology).get("tag") or "")


def watched(watcher: Watcher, target: RunPaths | str) -> dict[str, Any]:
    """The data of a watched run, those of the bus included; `target` may be an endpoint alone."""
    run, traffic, now = watcher.run, watcher.run.traffic, time.monotonic()
    status = RunStatus(None, run, now, run.state)
    if isinstance(target, RunPaths):
        status = RunStatus.of(target, run, now, watcher.samples[-1] if watcher.samples else {})
    counts = {name: getattr(traffic, name) for name in ("missed", "malformed", "lag_s", "resyncs")}
    by_name = {name: _flow(flow) for name, flow in traffic.by_name.items()}
    return {
        **as_data(status), "replay": run.replay or None, "waiting": run.waiting,
        "messages": {**_flow(traffic.total), **counts, "by_name": by_name},
        "errors": {"count": run.errors.count, "newest": [asdict(error) for error in run.errors.newest(ERRORS)]},
    }


def _flow(flow: Flow) -> dict[str, float]:
    return {"count": flow.count, "bytes": flow.bytes, "per_s": flow.rate.per_s()}


# -- the pace of a watcher ---------------------------------------------------------------------------------------------

NICE: Final = 19
WAKE_S: Final = 0.5
RENDER_S: Final = 1.0
RENDER_SHARE: Final = 0.01


def give_way(nice: int) -> None:
    """Lower the priority of this process: the run goes first."""
    with suppress(OSError):
        os.nice(nice)


def catch_up(watcher: Watcher) -> None:
    """Read all messages that are there, and ring and files if it is time."""
    while watcher.listen(time.monotonic()) >= BATCH:
        pass
    watcher.refresh(time.monotonic())


def settle(watcher: Watcher, seconds: float) -> None:
    """Look, listen for so long or until a replay is over, look again."""
    end = time.monotonic() + seconds
    watcher.refresh(time.monotonic(), force=True)
    while not watcher.run.replay_over and (left := end - time.monotonic()) > 0:
        watcher.tap.wait(min(WAKE_S, left))
        catch_up(watcher)
    watcher.listen(time.monotonic())
    watcher.refresh(time.monotonic(), force=True)
