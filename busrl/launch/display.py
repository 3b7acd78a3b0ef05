"""Shows a run while it goes on: a picture that is redrawn in place on a terminal, plain lines everywhere else.

Talks to one output stream; reads a `Progress`. Knows nothing of processes, the ring or the bus. Lines that stay (a
restart, a validation, an error) are printed above the picture. What others wrote reaches the terminal as plain text.

- Nothing here waits for a reader: a thread of its own writes. While nobody reads (a full pipe, Ctrl-S), no picture is
  drawn, lines are kept up to `MOST_WAITING` characters, and of the others a line says how many they were: here once
  somebody reads, else, at the end, in the log.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from busrl.launch.printable import printable, safe
from busrl.launch.progress import Progress, Row, duration, short

REDRAW_S = 0.25
PLAIN_EVERY_S = 5.0
BLOCKS = "▁▂▃▄▅▆▇█"
BOLD, DIM, GREEN, YELLOW, CYAN, OFF = "\x1b[1m", "\x1b[2m", "\x1b[32m", "\x1b[33m", "\x1b[36m", "\x1b[0m"
MOST_WAITING = 1 << 20
PIECE = 4096  # bytes per write, so that a slow reader is seen to read
STALLED_S = 0.5
UNREAD_S = 3.0  # at the end: a reader that takes nothing for this long gets no more
UP_AND_CLEAR = "\x1b[{}A\x1b[J"
SHOWN_STATES = ("queued", "generating", "generated", "rewarding", "rewarded", "training", "free")


def open_display(stream: TextIO, clock: Callable[[], float]) -> Display:
    """The display that suits the stream."""
    fancy = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb" and "NO_COLOR" not in os.environ
    return LiveDisplay(stream, clock) if fancy else Display(stream, clock)


class Outlet:
    """One stream, written to by a thread, so that `write` never waits. A stream without a descriptor is written to
    directly."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._encoding = stream, getattr(stream, "encoding", None) or "utf-8"
        self._waiting: deque[str] = deque()
        self._size, self._unshown, self._in_hand = 0, 0, ""
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
        """Whether something waits for a reader that has taken nothing for a while."""
        return self._size > 0 and time.monotonic() - self._moved > STALLED_S

    def write(self, text: str) -> None:
        """Hand text on; what does not fit is counted."""
        if self._fd < 0:
            self._write_directly(text)
            return
        with self._changed:
            if self._size + len(text) > MOST_WAITING:
                self._unshown += 1
                return
            if self._unshown and not self._size:
                text = self._told() + text
            self._hand_on(text)

    def _told(self) -> str:
        """What stands for the lines that did not fit."""
        unshown, self._unshown = self._unshown, 0
        return f"({unshown} lines are not shown, as nobody read: they are in logs/launch.log)\n"

    def _hand_on(self, text: str) -> None:
        if not self._size:
            self._moved = time.monotonic()
        self._waiting.append(text)
        self._size += len(text)
        self._changed.notify_all()

    def close(self) -> int:
        """Wait until all is written, or until nobody has read for `UNREAD_S`; how many lines nobody was shown."""
        with self._changed:
            unshown = self._unshown
            if unshown:
                self._hand_on(self._told())
            self._moved = time.monotonic()
            while self._size and (left := self._moved + UNREAD_S - time.monotonic()) > 0:
                self._changed.wait(left)
            self._over = True
            self._changed.notify_all()
            if not self._size:
                return 0
            waiting = [self._in_hand, *self._waiting]
            return unshown + sum(text.count("\n") for text in waiting) - bool(unshown)

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._over:
                    self._changed.wait()
                if not self._waiting:
                    os.close(self._fd)
                    return
                text = self._in_hand = self._waiting.popleft()
            self._put(text.encode(self._encoding, "replace"))
            with self._changed:
                self._size, self._in_hand = self._size - len(text), ""
                self._changed.notify_all()

    def _put(self, data: bytes) -> None:
        """All of it, or nothing more if whoever read it is gone: the run is not about being watched."""
        while data:
            try:
                data = data[os.write(self._fd, data[:PIECE]) :]
                self._moved = time.monotonic()
            except BlockingIOError:  # somebody who shares the terminal has made it non-blocking
                poller = select.poll()
                poller.register(self._fd, select.POLLOUT)
                poller.poll()
            except OSError as problem:
                if problem.errno != errno.ENOSPC:  # a file may have room again
                    os.dup2(os.open(os.devnull, os.O_WRONLY), self._fd)
                return

    def _write_directly(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._stream = open(os.devnull, "w")  # noqa: SIM115


class Display:
    """Plain lines: one per few seconds of progress, and every event."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._outlet, self._clock = Outlet(stream), clock
        self._next = 0.0
        self._shown_step = -1
        self.log: Path | None = None  # where it is told in the end what nobody read

    def say(self, line: str) -> None:
        """A line that stays."""
        self._outlet.write(f"{printable(line)}\n")

    def show(self, progress: Progress) -> None:
        """The state now; cheap to call often."""
        now = self._clock()
        if now < self._next or progress.step == self._shown_step or self._outlet.stalled:
            return
        self._next, self._shown_step = now + PLAIN_EVERY_S, progress.step
        self.say(plain_line(progress, now))

    def settle(self) -> None:
        """No more pictures: lines follow."""

    def close(self) -> None:
        """The end, once what was said is written, or nobody reads it: then the log says how many lines."""
        if not (unread := self._outlet.close()) or self.log is None:
            return
        with contextlib.suppress(OSError), open(self.log, "a", encoding="utf-8") as file:
            file.write(f"{unread} lines up to the end were not shown, as nobody read; `busrl status` tells the end\n")


class LiveDisplay(Display):
    """A picture of a few lines at the bottom of a terminal."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        super().__init__(stream, clock)
        self._height = 0

    def say(self, line: str) -> None:
        self._outlet.write(f"{self._erase()}{printable(line)}\n")
        self._next = 0.0

    def show(self, progress: Progress) -> None:
        now = self._clock()
        if now < self._next or self._outlet.stalled:
            return
        self._next = now + REDRAW_S
        width = shutil.get_terminal_size().columns
        lines = [fit(line, width) for line in picture(progress, now, width)]
        self._outlet.write(self._erase() + "".join(f"{line}{OFF}\n" for line in lines))
        self._height = len(lines)

    def settle(self) -> None:
        self._outlet.write(self._erase())  # the summary says it all

    def _erase(self) -> str:
        height, self._height = self._height, 0
        return UP_AND_CLEAR.format(height) if height else ""


def plain_line(progress: Progress, now: float) -> str:
    """One line of progress without colours."""
    parts = [f"{'FAULTS ARE ON · ' if progress.faults else ''}step {progress.step}/{progress.goal}"]
    reward = progress.recent_reward()
    if reward is not None:
        parts.append(f"reward {reward:.3f}")
    waste = progress.recent_waste()
    if waste is not None and waste[0] >= 0.005:
        parts.append(f"{waste[0]:.0%} flat")
    if progress.token_rate.per_s() > 0:
        parts.append(f"{short(progress.token_rate.per_s())} tokens/s")
    parts.append(f"version {progress.version}")
    parts.append(duration(now - progress.started))
    return " · ".join(parts)


def picture(progress: Progress, now: float, width: int) -> list[str]:
    """The lines of the live display."""
    lines = ["", _headline(progress, now), _bar(progress, width), _numbers(progress)]
    lines.append(_slots(progress))
    lines.extend(_row(row) for row in progress.rows)
    return lines


def _headline(progress: Progress, now: float) -> str:
    left = progress.left_s()
    rest = f", about {duration(left)} left" if left is not None and progress.step < progress.goal else ""
    doing = " · validating" if progress.validating >= 0 else ""
    faults = f"{YELLOW} · FAULTS ARE ON{OFF}" if progress.faults else ""
    return f"{BOLD}busrl {progress.name}{OFF} · {duration(now - progress.started)}{rest}{CYAN}{doing}{OFF}{faults}"


def _bar(progress: Progress, width: int) -> str:
    room = max(10, min(60, width - 30))
    share = min(1.0, progress.step / progress.goal) if progress.goal else 0.0
    full = int(share * room)
    return f"{GREEN}{'━' * full}{OFF}{DIM}{'━' * (room - full)}{OFF} step {progress.step}/{progress.goal}"


def _numbers(progress: Progress) -> str:
    reward = progress.recent_reward()
    if reward is None:
        return f"{DIM}waiting for the first step{f' ({safe(progress.waiting)})' if progress.waiting else ''}{OFF}"
    parts = [f"reward {BOLD}{reward:.3f}{OFF} {CYAN}{sparkline(progress.rewards)}{OFF}"]
    if progress.validations:
        parts.append(f"validated {progress.validations[-1][1]:.3f}")
    if (waste := progress.recent_waste()) is not None:
        parts.append(f"flat {waste[0]:.0%} · cut {waste[1]:.0%}")
    parts += [f"entropy {progress.entropy:.2f}", f"age {progress.age:.1f}", f"version {progress.version}"]
    parts.append(f"{short(progress.token_rate.per_s())} tokens/s")
    return " · ".join(parts)


def _slots(progress: Progress) -> str:
    shown = [f"{name} {progress.slots[name]}" for name in SHOWN_STATES if progress.slots.get(name)]
    return f"{DIM}slots{OFF} {f' {DIM}·{OFF} '.join(shown)}" if shown else f"{DIM}no ring yet{OFF}"


def _row(row: Row) -> str:
    colour = {"ready": GREEN, "gone": DIM}.get(row.phase, YELLOW)
    doing = safe(row.activity) or ("" if row.phase != "ready" else "working" if row.busy > 0.02 else "idle")
    busy = f"{row.busy:4.0%} busy" if row.phase == "ready" else " " * 9
    again = f" {YELLOW}restarted {row.restarts}×{OFF}" if row.restarts else ""
    return f"  {safe(row.name):<14}{colour}{row.phase:<17}{OFF}{busy}  {DIM}{doing}{OFF}{again}"


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """The course of a number in a few characters, from its lowest to its highest."""
    data = list(values)
    if not data:
        return ""
    step = max(1.0, len(data) / width)
    buckets = [data[int(i * step) : max(int(i * step) + 1, int((i + 1) * step))] for i in range(int(len(data) / step))]
    means = [sum(bucket) / len(bucket) for bucket in buckets if bucket]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[int((mean - low) * scale)] for mean in means)


def fit(line: str, width: int) -> str:
    """Cut a line to what fits, not counting colours, so that redrawing finds its lines again."""
    shown, at, out = 0, 0, []
    while at < len(line):
        if line[at] == "\x1b":
            end = line.index("m", at) + 1
            out.append(line[at:end])
            at = end
            continue
        if shown >= width - 1:
            at += 1
            continue
        out.append(line[at])
        shown, at = shown + 1, at + 1
    return "".join(out)
