"""Keeps one picture up to date: attaches to a run or an endpoint, reads ring and files, then listens.

Talks to the tap, the ring (read-only) and the run's files (read-only). Knows nothing of how the picture is shown.

- Subscribe first, then look, then listen: what is sent between the look and the first message read is not missed, and
  the picture is right before the first message.
- Whoever is behind by more than `BEHIND_S` gives up the backlog, counts it and looks again: the present is in the ring.
- Nothing is written, sent or registered, so there is nothing to take back at the end.
"""

from __future__ import annotations

import time
from typing import Final

import msgspec

from busrl.bus.tap import Heard, Tap
from busrl.monitor.find import Target
from busrl.monitor.follow import RunFiles
from busrl.monitor.look import Look
from busrl.monitor.picture import Picture
from busrl.monitor.seen import Facts, RingSeen
from busrl.protocol import BY_NAME, Message, Rejected, codec

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
        self.picture = Picture()
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
                    self.picture.look(msgspec.msgpack.decode(body, type=RingSeen), now)
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
