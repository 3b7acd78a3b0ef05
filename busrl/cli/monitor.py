"""`busrl monitor`: the live screen, plain lines where there is no terminal, or one snapshot. Changes nothing.

Chooses how to show the picture; knows nothing of how it is made.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from contextlib import suppress
from types import FrameType

from busrl.errors import NoSuchRun
from busrl.monitor import live
from busrl.monitor.find import Target, find
from busrl.monitor.watcher import Watcher

LISTEN_S, REPLAY_S = 1.0, 60.0  # of --once: at a run; at an endpoint, where a replay says when it is over


def monitor(named: str | None, once: bool, as_json: bool, plain: bool, seconds: float | None) -> int:
    """Show a run until `q`, or once."""
    target = find(named)
    watcher = Watcher(target)
    try:
        if once or as_json:
            return _once(watcher, target, as_json, seconds)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _leave)
        with suppress(KeyboardInterrupt):
            _until_quit(watcher, plain)
        return 0
    finally:
        watcher.close()


def _once(watcher: Watcher, target: Target, as_json: bool, seconds: float | None) -> int:
    patience = seconds if seconds is not None else LISTEN_S if target.paths else REPLAY_S
    live.settle(watcher, patience)
    if target.paths is None and not watcher.picture.traffic.count and not watcher.picture.replay:
        raise NoSuchRun(
            f"{target.endpoint}: nothing was heard there within {patience:g} s; name the tap of a run (`tap` in its "
            "run.json), or the endpoint that `busrl replay` printed"
        )
    print(json.dumps(live.as_data(watcher), ensure_ascii=False) if as_json else live.as_text(watcher))
    return 0


def _until_quit(watcher: Watcher, plain: bool) -> None:
    terminal = sys.stdout.isatty() and sys.stdin.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    if plain or not terminal:
        live.run_plain(watcher, sys.stdout)
    elif importlib.util.find_spec("rich") is None:
        print(
            "busrl: the live view needs `rich`: pip install 'busrl[monitor]'; plain lines until then", file=sys.stderr
        )
        live.run_plain(watcher, sys.stdout)
    else:
        live.run_live(watcher, sys.stdin)


def _leave(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
