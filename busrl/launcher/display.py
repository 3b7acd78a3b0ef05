"""Display of a run for the person who started it: a picture that is redrawn in place on a terminal, plain lines
everywhere else.

Talks to one output stream. The picture comes from an optional part (`capabilities`, "launch_picture"); without it a
terminal gets plain lines too. Knows nothing of processes, the ring or the bus.

- Lines that stay (a restart, a validation, an error) are printed above the picture.
- Launch never waits for a reader: a thread writes. While nobody reads (a full pipe, Ctrl-S), no picture is drawn, and
  lines are stored up to `MOST_WAITING` bytes. The others are counted, and their number is printed once somebody reads,
  else written to the log at the end.
- Texts of other programs reach the terminal without what it would obey.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TextIO

from busrl import capabilities
from busrl.launcher.summary import Progress
from busrl.pages import opened
from busrl.status.state import ProcessRow, RunState
from busrl.status.view import overviews
from busrl.status.words import duration, joined, line, printable

REDRAW_S = 0.5
PLAIN_EVERY_S = 5.0
MOST_WAITING = 1 << 20
PIECE = 4096  # bytes per write, so that a slow reader is seen to read
STALLED_S = 0.5
UNREAD_S = 3.0  # at the end: a reader that takes nothing for this long gets no more
UP_AND_CLEAR = "\x1b[{}A\x1b[J"


def open_display(stream: TextIO, clock: Callable[[], float]) -> Display:
    """A display with the picture of an optional part if one is installed and the stream is a terminal; else with plain
    lines."""
    fancy = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb" and "NO_COLOR" not in os.environ
    pictures: tuple[Picture, ...] = capabilities.plugs("launch_picture") if fancy else ()
    return LiveDisplay(stream, clock, pictures[0]) if pictures else Display(stream, clock)


class Outlet:
    """A stream that a thread writes to, so that `write` never waits. A stream without a descriptor is written directly.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._encoding = stream, getattr(stream, "encoding", None) or "utf-8"
        self._waiting = bytearray()
        self._unshown = 0  # lines that did not fit
        self._moved = time.monotonic()  # when the reader last took something
        self._changed = threading.Condition()
        self._over, self._fd = False, -1
        try:
            self._fd = os.dup(stream.fileno())
        except (OSError, ValueError, AttributeError):
            return
        threading.Thread(target=self._serve, name="display", daemon=True).start()

    @property
    def stalled(self) -> bool:
        """True while text waits for a reader that has taken nothing for a while."""
        return bool(self._waiting) and time.monotonic() - self._moved > STALLED_S

    def write(self, text: str) -> None:
        """Queue a text; a text that does not fit is counted instead."""
        if self._fd < 0:
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(text)
                self._stream.flush()
            return
        with self._changed:
            if len(self._waiting) + len(text) > MOST_WAITING:
                self._unshown += 1
                return
            if self._unshown and not self._waiting:
                text = self._unread() + text
            self._hand_on(text)

    def _unread(self) -> str:
        """The line in place of those that did not fit."""
        unshown, self._unshown = self._unshown, 0
        return f"({unshown} lines are not shown, as nobody read: they are in logs/launch.log)\n"

    def _hand_on(self, text: str) -> None:
        if not self._waiting:
            self._moved = time.monotonic()
        self._waiting += text.encode(self._encoding, "replace")
        self._changed.notify_all()

    def close(self) -> int:
        """Wait until all is written, or until nobody has read for `UNREAD_S`; the number of lines that nobody was
        shown."""
        with self._changed:
            unshown = self._unshown
            if unshown:
                self._hand_on(self._unread())
            self._moved = time.monotonic()
            while self._waiting and (left := self._moved + UNREAD_S - time.monotonic()) > 0:
                self._changed.wait(left)
            self._over = True
            self._changed.notify_all()
            return unshown + self._waiting.count(b"\n") - bool(unshown) if self._waiting else 0

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._over:
                    self._changed.wait()
                if not self._waiting:
                    os.close(self._fd)
                    return
                piece = bytes(self._waiting[:PIECE])
            count = self._put(piece)
            with self._changed:
                del self._waiting[:count]
                self._changed.notify_all()

    def _put(self, data: bytes) -> int:
        """Write; the number of bytes that are settled. If the reader is gone these are all: a run goes on unwatched."""
        try:
            count = os.write(self._fd, data)
            self._moved = time.monotonic()
            return count
        except BlockingIOError:  # another program has made the terminal non-blocking
            poller = select.poll()
            poller.register(self._fd, select.POLLOUT)
            poller.poll()
            return 0
        except OSError as problem:
            if problem.errno != errno.ENOSPC:  # there may be room again later
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._fd)
            return len(data)


class Display:
    """Plain lines: one per few seconds of progress, and every event."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._outlet, self._clock = Outlet(stream), clock
        self._next = 0.0
        self._shown_step = -1
        self.log: Path | None = None  # gets at the end the number of lines that nobody read

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self._outlet.write(f"{printable(opened(line))}\n")

    def show(self, progress: Progress) -> None:
        """Show the state of the run; cheap to call often."""
        now = self._clock()
        step = progress.run.at_step
        if now < self._next or step == self._shown_step or self._outlet.stalled:
            return
        self._next, self._shown_step = now + PLAIN_EVERY_S, step
        parts = (part.lines[0].partition(part.name)[2].strip() for part in overviews(progress.run.facts.run_dir))
        self.say(joined(line(progress.run, now), *parts, duration(now - progress.started)))

    def settle(self) -> None:
        """Draw no more pictures: lines follow."""

    def close(self) -> None:
        """End once all lines are written, or once nobody reads: then the log gets the number of those left."""
        if not (unread := self._outlet.close()) or self.log is None:
            return
        with contextlib.suppress(OSError), open(self.log, "a", encoding="utf-8") as file:
            file.write(f"{unread} lines up to the end were not shown, as nobody read; `busrl status` tells the end\n")


class Picture(Protocol):
    """The state of a run as whole lines for a terminal of this size; one column and one row of it stay free."""

    def __call__(self, run: RunState, rows: list[ProcessRow], now: float, width: int, height: int) -> str: ...


class LiveDisplay(Display):
    """A picture of a few lines at the bottom of a terminal."""

    def __init__(self, stream: TextIO, clock: Callable[[], float], picture: Picture) -> None:
        super().__init__(stream, clock)
        self._picture, self._height = picture, 0

    def say(self, line: str) -> None:
        self._outlet.write(f"{self._erase()}{printable(opened(line))}\n")
        self._next = 0.0

    def show(self, progress: Progress) -> None:
        now = self._clock()
        if now < self._next or self._outlet.stalled:
            return
        self._next = now + REDRAW_S
        text = self._picture(progress.run, progress.rows(now), now, *shutil.get_terminal_size())
        self._outlet.write(self._erase() + text)
        self._height = text.count("\n")

    def settle(self) -> None:
        self._outlet.write(self._erase())

    def _erase(self) -> str:
        height, self._height = self._height, 0
        return UP_AND_CLEAR.format(height) if height else ""
