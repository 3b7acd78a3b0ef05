"""Writes what passes the tap of a run into a file, until it is asked to stop or the run has ended.

Talks to the tap, the ring (read-only) and one new file. Knows nothing of replays.

- It can not hurt the run: the tap drops for it rather than wait, and it stops before it fills the disk that the run
  writes its log to.
- What it missed is counted from the senders' own numbers and stands in the file.
- It reads in batches, which costs the machine of the run a tenth of waking up for each message. A record's time is when
  its message was sent, by the sender's clock, but never before the record before it or after it was read.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

import busrl
from busrl.bus.tap import Tap
from busrl.errors import NoSuchRun
from busrl.launch.status import status
from busrl.monitor.find import launched
from busrl.monitor.follow import RunFiles
from busrl.monitor.look import Look
from busrl.monitor.recording import Drops, End, Header, Kind, Writer
from busrl.paths import RunPaths

LOOK_EVERY_S: Final = 1.0
WAKE_S: Final = 0.2
FREE_BYTES: Final = 256 << 20  # left to others on the file system of the recording
LOOK_TOPIC: Final = b"LOOK/"


@dataclass(frozen=True)
class Bounds:
    """When a recording ends by itself; infinite where it does not."""

    seconds: float
    bytes: float


class Recorder:
    """`run` records until the end and gives its last record. `stop`, in a signal handler say, asks for it."""

    def __init__(self, paths: RunPaths, out: Path, bounds: Bounds) -> None:
        self._files, self._bounds, self._out = RunFiles(paths), bounds, out
        facts = self._files.facts()
        self._look = Look(paths, group_size=facts.group_size)
        refuse_if_over(paths, self._look)
        self._writer = Writer(out, Header.now(facts, busrl.__version__))
        self._tap = Tap(self._files.tap())
        self._asked, self._stopped = "", threading.Event()
        self._told_missed = 0
        self._absent = 0
        self.messages = self.bytes = 0

    def stop(self, why: str) -> None:
        """End soon, in order."""
        self._asked = self._asked or why
        self._stopped.set()

    def run(self, told: Callable[[Recorder], None] = lambda _: None) -> End:
        """Record. `told` is called after each look, about once a second."""
        end, next_look = time.monotonic() + self._bounds.seconds, 0.0
        try:
            while not (why := self._asked):
                now = time.monotonic()
                if now >= next_look:
                    next_look = now + LOOK_EVERY_S
                    self._once_a_second()
                    told(self)
                if now >= end:
                    self.stop("the time is over")
                self._stopped.wait(max(0.0, min(WAKE_S, end - now)))
                self._drain()
            return self._finish(why)
        finally:
            self._tap.close()
            self._look.close()
            self._writer.close()

    @property
    def missed(self) -> int:
        """Messages that were sent meanwhile and did not reach us."""
        return self._tap.missed

    def _drain(self) -> None:
        heard_all = self._tap.take()
        mono, wall = time.monotonic_ns(), time.time_ns()
        for heard in heard_all:
            ago = wall - heard.envelope.time_ns if heard.envelope is not None else 0
            self._writer.add(Kind.MESSAGE, heard.topic, heard.body, mono - max(0, ago))
            self.messages += 1
            self.bytes += len(heard.body)

    def _once_a_second(self) -> None:
        self._write_drops()
        seen = self._look.look()
        if seen is not None:
            self._writer.add(Kind.LOOK, LOOK_TOPIC, msgspec.msgpack.encode(seen))
        # Twice in a row: a launch that was just started has a ring, and nobody registered in it.
        self._absent = 0 if seen is not None and seen.living else self._absent + 1
        if self._absent >= 2:
            self.stop("the run has ended")
        self._writer.flush()
        if self._writer.bytes >= self._bounds.bytes:
            self.stop(f"the limit of {self._bounds.bytes:,.0f} bytes is reached")
        elif free_bytes(self._out.parent) < FREE_BYTES:
            self.stop(f"less than {FREE_BYTES >> 20} MiB are free where {self._out} is")

    def _write_drops(self) -> None:
        if self.missed == self._told_missed:
            return
        self._told_missed = self.missed
        by = {f"{sender} {topic}": count for (sender, topic), count in self._tap.gaps.missed_by.items()}
        self._writer.add(Kind.DROPS, b"", msgspec.msgpack.encode(Drops(self.missed, by)))

    def _finish(self, why: str) -> End:
        self._drain()
        self._write_drops()
        end = End(why, self.messages, self.bytes, self.missed)
        self._writer.add(Kind.END, b"", msgspec.msgpack.encode(end))
        return end


def refuse_if_over(paths: RunPaths, look: Look) -> None:
    """NoSuchRun if nobody runs there, in the words of `busrl status`; a launch that just starts is somebody."""
    seen = look.look()
    if seen is not None and (seen.living or launched(paths)):
        return
    look.close()
    if look.damage:
        raise NoSuchRun(f"{paths.root}: its ring is damaged, so nothing was recorded: {look.damage}")
    said = status(paths.root).splitlines()[0]
    raise NoSuchRun(f"{paths.root}: nothing runs there, so nothing was recorded; `busrl status` says: {said}")


def free_bytes(path: Path) -> int:
    """What is free on the file system of a path."""
    info = os.statvfs(path)
    return info.f_bavail * info.f_frsize
