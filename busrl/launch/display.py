"""Shows a run while it goes on: a picture that is redrawn in place on a terminal, plain lines everywhere else.

Talks to one output stream; reads a `Progress`. Knows nothing of processes, the ring or the bus. Lines that stay (a
restart, a validation, an error) are printed above the picture. What others wrote reaches the terminal as plain text.

- Nothing here waits for a reader: a thread of its own writes. While nobody reads (a full pipe, Ctrl-S), no picture is
  drawn, lines are kept up to `MOST_WAITING` characters, and of the others a line says how many they were: here once
  somebody reads, else, at the end, in the log.

Looks at the ring for `launch`: who is ready, whose counter moves, how full the slots are.

Talks to the ring, reading only; knows nothing of restarts or of the terminal. One look costs some microseconds, so a
few looks a second are nothing.

`busrl status`: what a run is doing now, or how it ended, in some lines. Attaches to nothing itself.

Puts the data of `state` into words. Every line is made safe to print, whoever wrote what stands in it. A ring that can
not be used is a state to show, with its remedy.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import select
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from busrl.launch.story import (
    LIVING,
    Progress,
    Row,
    as_map,
    duration,
    number,
    printable,
    safe,
    sample_line,
    short,
    state_of,
)
from busrl.launch.story import lines as problem_lines
from busrl.launch.supervisor import Child, Sight
from busrl.paths import RunPaths
from busrl.ring import Process, Ring

# -- Shows a run while it goes on: a picture that is redrawn in place on a terminal, plain lines everywhere else ------


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


# -- Looks at the ring for `launch`: who is ready, whose counter moves, how full the slots are ------------------------


BUSY_WINDOW_S = 1.0


@dataclass
class _Load:
    """Busy time of one process since the last time it was worked out."""

    pid: int
    at: float
    busy_ns: int
    share: float = 0.0


class Watch:
    """The newest picture of the process table and the slots."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._entries: dict[int, Process] = {}
        self._loads: dict[str, _Load] = {}

    def look(self) -> None:
        """Read the process table."""
        self._entries = {process.pid: process for process in self._ring.processes()}

    @property
    def entries(self) -> dict[int, Process]:
        """The process table of the last look, by pid."""
        return self._entries

    def sight(self, pid: int) -> Sight | None:
        """What the ring says about a process; None if it does not map the ring (yet)."""
        entry = self._entries.get(pid)
        if entry is None:
            return None
        return Sight(entry.state == "ready", entry.progress, entry.activity, entry.deadline_s, entry.samples)

    def rows(self, children: Iterable[Child], now: float) -> tuple[Row, ...]:
        """One line per child for the display."""
        return tuple(self._row(child, now) for child in children)

    def _row(self, child: Child, now: float) -> Row:
        entry = self._entries.get(child.pid) if child.pid else None
        if entry is None:
            return Row(child.name, child.phase.value, restarts=child.restarts)
        load = self._loads.get(child.name)
        if load is None or load.pid != entry.pid:
            load = self._loads[child.name] = _Load(entry.pid, now, entry.busy_ns)
        elif now - load.at >= BUSY_WINDOW_S:
            share = (entry.busy_ns - load.busy_ns) / 1e9 / (now - load.at)
            self._loads[child.name] = _Load(entry.pid, now, entry.busy_ns, min(1.0, max(0.0, share)))
        return Row(child.name, child.phase.value, entry.activity, self._loads[child.name].share, child.restarts)

    def tokens(self) -> int:
        """Tokens that engines drew since the ring was made: those of dead workers and of lost samples too."""
        return self._ring.stats().tokens

    def slots(self) -> dict[str, int]:
        """How many slots are in which state."""
        return {name.lower(): count for name, count in self._ring.stats().occupancy.items()}


# -- `busrl status`: what a run is doing now, or how it ended, in some lines. Attaches to nothing itself --------------


def status(run_dir: str | os.PathLike[str] | None = None, *, as_json: bool = False) -> str:
    """The state of a run in some lines, or as one JSON object; without a directory that of the newest under `runs/`."""
    found = state_of(run_dir)
    if as_json:
        return json.dumps(_plain(found), ensure_ascii=False, allow_nan=False, default=str)
    return "\n".join(map(printable, _lines(found)))


def _plain(value: Any) -> Any:
    """The same with null for what is no number: files of a run may hold anything, and NaN is not JSON."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines(found: dict[str, Any]) -> Iterator[str]:
    yield from _state(found)
    if found["state"] in LIVING:
        yield _progress(found)
    yield from _learning(found)
    if "slots" in found:
        yield "  slots    " + " · ".join(f"{name} {count}" for name, count in found["slots"].items())
    if found["samples"]:
        told = " · ".join(f"{short(count)} {name}" for name, count in found["samples"].items())
        yield f"  samples  {told}"
    if found.get("reaps"):
        yield f"  {short(found['reaps'])} slots taken back from dead processes"
    processes = found.get("processes", [])
    yield from map(_process, processes)
    yield from _restarts(found, {one["name"] for one in processes})
    yield from problem_lines(found["problems"], RunPaths.of(found["run_dir"]).errors)
    yield from (f"  {line}" for line in found["errors_from_outside"] + found["refusals"])
    yield f"  {found['run_dir']}"


def _state(found: dict[str, Any]) -> Iterator[str]:
    """The first lines: who runs, or how it ended, and what to do about it."""
    name, state, root = found["run_id"], found["state"], found["run_dir"]
    if state == "left":
        yield f"{name}: nobody runs; the next `busrl launch` in this directory adopts its ring"
    elif state in LIVING:
        since = duration(max(0.0, time.time() - (number(found["started"]) or time.time())))
        yield f"{name}: {state}, {since} since launch (pid {found['launch_pid']})"
    elif state == "damaged":
        yield from _damaged(found)
    elif state == "starting":
        yield (
            f"{name}: launch (pid {found['holder']}) is there, but no ring: it is starting or ending, or "
            f"{RunPaths.of(root).ring_file} was removed; if this stays so, `busrl stop {root}` and start it again"
        )
    elif state == "unfinished":
        yield f"{name}: no ring and no summary; it was never finished. Start it again to go on"
    else:
        yield f"{name}: {state}, {found['why']}"
        took = duration(number(found["seconds"]) or 0.0)
        yield f"  step {found['step']}/{found['max_steps']} in {took} · version {found['version']}"
        if found["open_samples"]:
            yield f"  {found['open_samples']} samples are open: the next start generates them again"


def _damaged(found: dict[str, Any]) -> Iterator[str]:
    """The ring is there and can not be used; the files still tell how far the run is."""
    yield f"{found['run_id']}: damaged, its ring can not be used: {found['problem']}"
    root = found["run_dir"]
    if found["holder"] is None:
        yield (
            f"  nobody runs, and the next start refuses: `busrl ring clean {root} --force`, then start it again "
            "(what was in its slots is generated again)"
        )
    else:
        yield (
            f"  launch (pid {found['holder']}) goes on with what its processes have mapped; none can be started again: "
            f"`busrl stop {root}` ends it in order, and a start continues from checkpoint and log"
        )
    goal = found["max_steps"] if found["max_steps"] is not None else "?"
    yield f"  step {found['step']}/{goal} · version {found['version']} (from metrics.jsonl)"


def _progress(found: dict[str, Any]) -> str:
    goal = found["max_steps"] if found["max_steps"] is not None else "?"
    parts = [f"step {found['step']}/{goal}", f"version {found['version']}"]
    if found["state"] != "left" and found["steps_per_min"]:
        parts.append(f"{found['steps_per_min']:.3g} steps/min · {short(found['tokens_per_s'])} tokens/s trained")
    if found.get("left_s"):
        parts.append(f"about {duration(found['left_s'])} left")
    return "  " + " · ".join(parts)


def _learning(found: dict[str, Any]) -> Iterator[str]:
    """Reward, validation, what was thrown away, and one sample."""
    reward, means = found["reward"], [one["mean"] for one in found["validation"]]
    parts = [f"{reward['first']:.3f} → {reward['last_10_steps']:.3f}"] if _both(reward) else []
    parts += [f"validation {' → '.join(f'{mean:.3f}' for mean in means[:1] + means[1:][-1:])}"] if means else []
    parts += [f"entropy {found['entropy']:.2f}"] if found["entropy"] is not None else []
    if parts:
        yield f"  reward   {' · '.join(parts)}"
    if idle := found["idle"]:
        causes = ", ".join(f"{count} {name}" for name, count in as_map(idle["causes"]).items())
        end = f", the run ends after {idle['limit']}" if idle["limit"] else ""
        yield f"  idle     {idle['groups']} groups in a row ended with nothing to train ({causes}){end}"
    waste = waste_line(found["flat_share"], found["cut_share"])
    if waste:
        yield f"  waste    {waste}"
    if found["sample"] and (line := sample_line(found["sample"])):
        yield f"  sample   {line}"


def _both(reward: dict[str, Any]) -> bool:
    return reward["first"] is not None and reward["last_10_steps"] is not None


def waste_line(flat: float | None, cut: float | None) -> str:
    """What was generated for nothing lately, in words; "" while nothing is known."""
    parts = []
    if flat is not None:
        parts.append(f"{flat:.0%} of the groups flat (all rewards equal: thrown away)")
    if cut is not None:
        parts.append(f"{cut:.0%} of the trained answers cut at the length limit")
    return " · ".join(parts)


def _process(one: dict[str, Any]) -> str:
    doing = one["activity"] or one["state"]
    tokens = f" · {short(one['tokens'])} tokens" if one["tokens"] else ""
    samples = f" · {short(one['samples'])} samples" if one["samples"] else ""
    where = "elsewhere   " if one["remote"] else f"pid {one['pid']:<8}"
    return (
        f"  {one['name']:<14} {where} {doing:<22} last progress {one['progress_age_s']:.1f} s ago{tokens}{samples}"
        f"{_again(one['restarts'])}"
    )


def _restarts(found: dict[str, Any], shown: set[str]) -> Iterator[str]:
    missing = {name: count for name, count in found["restarts"].items() if count and name not in shown}
    if found["state"] in LIVING:
        yield from (f"  {name:<14} not in the ring now{_again(count)}" for name, count in missing.items())
    elif missing and found["state"] != "damaged":
        yield f"  restarted: {', '.join(f'{name} {count}×' for name, count in missing.items())}"


def _again(count: int) -> str:
    return f" · restarted {count}×" if count else ""
