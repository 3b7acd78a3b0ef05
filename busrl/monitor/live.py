"""The loops of `busrl monitor`: one snapshot, lines that go on, or the live screen until `q`.

Talks to a `Watcher` and a terminal. Knows nothing of how the picture is made.

- After the first picture it lowers its priority to the least, so on a machine whose cores are all busy it gets some
  1.5 % of one, whatever there is to draw.
- It wakes up a few times a second and reads what has come since, so a busy bus costs it no more wake-ups than a quiet
  one; only a full batch makes it go on at once.
- Drawing takes at most `DRAW_SHARE` of one core: the longer a picture takes to draw, the longer it stays.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Any, Final, TextIO

from busrl.monitor import plain
from busrl.monitor.snapshot import snapshot
from busrl.monitor.watcher import BATCH, Watcher

NICE: Final = 19
WAKE_S: Final = 0.25
DRAW_S: Final = 1.0
DRAW_SHARE: Final = 0.02
LINE_S: Final = 5.0


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
    while not watcher.picture.replay_over and (left := end - time.monotonic()) > 0:
        watcher.tap.wait(min(WAKE_S, left))
        catch_up(watcher)
    watcher.listen(time.monotonic())
    watcher.refresh(time.monotonic(), force=True)


def as_data(watcher: Watcher) -> dict[str, Any]:
    """The snapshot of the picture now."""
    return snapshot(watcher.picture, time.monotonic(), time.time())


def as_text(watcher: Watcher) -> str:
    """The picture now, in plain lines."""
    return "\n".join(plain.lines(watcher.picture, time.monotonic(), time.time()))


def run_plain(watcher: Watcher, out: TextIO) -> None:
    """A line every few seconds until the run or the replay has ended, or whoever reads is gone."""
    watcher.refresh(time.monotonic(), force=True)
    print(as_text(watcher), file=out, flush=True)
    give_way(NICE)
    due = time.monotonic() + LINE_S
    while not over(watcher):
        time.sleep(WAKE_S)  # not woken by messages: there may be many
        catch_up(watcher)
        if time.monotonic() >= due:
            due = time.monotonic() + LINE_S
            print(plain.line(watcher.picture, time.monotonic()), file=out, flush=True)
    print(as_text(watcher), file=out, flush=True)


def over(watcher: Watcher) -> bool:
    """Whether there is nothing more to come."""
    return watcher.picture.replay_over or watcher.picture.state == "ended"


def run_live(watcher: Watcher, stdin: TextIO) -> None:
    """The live screen until `q`. Imports `rich`."""
    from rich.console import Console
    from rich.live import Live

    from busrl.monitor.keys import Keys
    from busrl.monitor.view import view

    console, errors_only, gave_way, due, drawn = Console(), False, False, 0.0, (0, 0)
    watcher.refresh(time.monotonic(), force=True)
    with Keys(stdin) as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            catch_up(watcher)
            now, size = time.monotonic(), (console.size.width, console.size.height)
            if now >= due or size != drawn:
                begun, drawn = time.process_time(), size
                live.update(view(watcher.picture, now, time.time(), *size, errors_only), refresh=True)
                due = now + max(DRAW_S, (time.process_time() - begun) / DRAW_SHARE)
                if not gave_way:
                    give_way(NICE)
                    gave_way = True
            for key in keys.pressed(WAKE_S):
                if key in "qQ":
                    return
                if key in "eE":
                    errors_only, due = not errors_only, 0.0
