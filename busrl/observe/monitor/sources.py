"""Reads what a monitor shows: a run's bus through its tap, and its ring and files (`status.reader`), in one `RunState`.

Talks to the tap of the bus, the ring and the files of a run, all for reading. Knows nothing of how the state is shown.

- Nothing is written, sent or registered: the ring is mapped `PROT_READ`, and no entry of its process table is taken.
- Subscribe first, then look, then listen: what is sent between the look and the first message read is not missed, and
  the state is right before the first message.
- A listener that is behind by more than `BEHIND_S` gives up the backlog, counts it and looks again: the present is in
  the ring.
- A busy bus costs a watcher no more wake-ups than a quiet one; only a full batch makes it read on at once.
- After the first picture a watcher lowers its priority to the least, so it gets some 1.5 % of a core on a busy machine.
- Drawing takes at most `DRAW_SHARE` of one core: the longer a picture takes to draw, the longer it stays.
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

# -- which run is meant -----------------------------------------------------------------------------------------------

LOCK = "run.lock"  # launch holds it, and every child inherits it


def find(named: str | None) -> RunPaths | str:
    """The run that an argument means, or an endpoint alone; without an argument the only living run of this user."""
    if named is None:
        return RunPaths.of(only_living_run())
    if "://" in named:
        return require_ipc(named)
    return RunPaths.of(named)


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
    """Run directories of this user's rings that a living process is registered in, as it shows them itself."""
    for path in sorted(SHM.glob(f"busrl.{os.getuid()}.*.ring")):
        with suppress(RingError), closing(Ring.attach(path.name, read_only=True)) as ring:
            opened = (file for process in living(ring) for file in files_of(process.pid))
            runs = (file.parent for file in opened if file.name == LOCK)
            yield from islice((one for one in runs if RunPaths.of(one).ring_name == path.name), 1)


# -- the bus, and all of it together -----------------------------------------------------------------------------------

LOOK_EVERY_S: Final = 1.0
BEHIND_S: Final = 3.0
BATCH: Final = 2048
MAX_BYTES: Final = 1 << 22
ERRORS: Final = 20  # in the data of a monitor
LOOK, REPLAY = "LOOK", "REPLAY"  # topics that a replay adds to those of the protocol


class ReplayMark(msgspec.Struct):
    """Body of `REPLAY/`: what is replayed, and that it is over; see docs/monitor.md."""

    phase: str  # "running" or "over"
    facts: Facts = Facts()
    speed: float = 1.0  # 0: as fast as it goes
    messages: int = 0
    missed: int = 0


class Watcher:
    """`refresh` and `listen` by turns keep `run` true. `close` leaves."""

    def __init__(self, target: RunPaths | str) -> None:
        self._reader = RunReader(target) if isinstance(target, RunPaths) else None
        self.run = self._reader.run if self._reader else RunState()
        self.samples: Sequence[dict[str, Any]] = self._reader.files.samples if self._reader else ()
        # Before ring and files are read: what is sent from here on waits for us.
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
        """Fold in what has come, at most one batch; how many messages that were."""
        messages = self.tap.take(BATCH)
        wall, traffic = time.time(), self.run.traffic
        lates = [late for one in messages if (late := self._fold(one, wall, now)) is not None]
        traffic.batch(len(messages), min(lates, default=None), now)
        if traffic.lag_s > BEHIND_S:
            self.tap.reopen()
            traffic.resyncs += 1
            self.refresh(now, force=True)
        # A replay has the gaps of its recording, which the tap counts again.
        traffic.missed, traffic.malformed = max(self.tap.gaps.missed, self._missed_in_record), self.tap.malformed
        return len(messages)

    def close(self) -> None:
        self.tap.close()
        if self._reader is not None:
            self._reader.close()

    def _fold(self, heard: TapMessage, wall: float, now: float) -> float | None:
        """Fold a message into the state; return how late it is in seconds, where that shows how far behind the monitor
        is."""
        name, run = heard.name, self.run
        if name in (LOOK, REPLAY):
            self._fold_replay(name, heard.body, now)
            return None
        kind = BY_NAME.get(name)
        sender = address_of(heard.envelope.sender) if heard.envelope is not None else ""
        run.traffic.received(name if kind is not None else "(unknown)", len(heard.body), sender)
        if kind is not None and kind in HEARD:  # most are only counted
            with suppress(Rejected):  # one that this program cannot read
                run.handle(codec.decode(kind, heard.body, MAX_BYTES), now)
        if heard.envelope is None or run.replay or not heard.envelope.time_ns:
            return None
        return run.traffic.late(heard.envelope.sender, wall - heard.envelope.time_ns / 1e9)

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
        self.run.facts = mark.facts
        self.run.replayed(mark.facts.run_id or "a recording", mark.speed, mark.phase == "over")


def watched(watcher: Watcher, target: RunPaths | str) -> dict[str, Any]:
    """The data of a run that is listened to, with what only a listener knows; `target` may be an endpoint alone."""
    run, traffic, now = watcher.run, watcher.run.traffic, time.monotonic()
    found = RunStatus(None, run, now, run.state)
    if isinstance(target, RunPaths):
        found = RunStatus.of(target, run, now, watcher.samples[-1] if watcher.samples else {})
    counts = {name: getattr(traffic, name) for name in ("missed", "malformed", "lag_s", "resyncs")}
    by_name = {name: _flow(flow) for name, flow in traffic.by_name.items()}
    return {
        **as_data(found), "replay": run.replay or None, "waiting": run.waiting,
        "messages": {**_flow(traffic.total), **counts, "by_name": by_name},
        "errors": {"count": run.errors.count, "newest": [asdict(error) for error in run.errors.newest(ERRORS)]},
    }


def _flow(flow: Flow) -> dict[str, float]:
    return {"count": flow.count, "bytes": flow.bytes, "per_s": flow.rate.per_s()}


# -- how a watcher goes on ---------------------------------------------------------------------------------------------

NICE: Final = 19
WAKE_S: Final = 0.5
DRAW_S: Final = 1.0
DRAW_SHARE: Final = 0.01


def give_way(nice: int) -> None:
    """The run goes first."""
    with suppress(OSError):
        os.nice(nice)


def catch_up(watcher: Watcher) -> None:
    """Read everything that is here; ring and files if it is time."""
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
