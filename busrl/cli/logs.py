"""`busrl logs`: what the processes of a run wrote, of one as it stands, of all with their names before the lines.

Talks to the files below `logs/` of a run directory, or of a host's, and to the lock that says whether the run is over.
Knows nothing of what stands in them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from busrl.errors import NoSuchRun, UserError
from busrl.monitor.sources import holder_of
from busrl.paths import RunPaths

LOOK_S = 0.25
PART = 1 << 20


class Log:
    """One file: `new` gives the whole lines since the last call, with `rest` also what has no end yet."""

    def __init__(self, path: Path) -> None:
        self.path, self._done, self._begun = path, 0, b""

    def new(self, rest: bool = False) -> Iterator[bytes]:
        with suppress(FileNotFoundError), open(self.path, "rb") as file:
            if file.seek(0, 2) < self._done:  # it was begun anew
                self._done, self._begun = 0, b""
            file.seek(self._done)
            while part := file.read(PART):
                self._done += len(part)
                *lines, self._begun = (self._begun + part).split(b"\n")
                yield from lines
        if rest and self._begun:
            yield self._begun
            self._begun = b""


def logs(options: argparse.Namespace) -> int:
    paths = RunPaths.of(options.run_dir)
    if not paths.logs.is_dir():
        raise NoSuchRun(f"{paths.logs}: no logs there; name the directory that `busrl launch` or `busrl host` printed")
    if options.name and not paths.log(options.name).is_file():
        known = ", ".join(one.stem for one in _files(paths)) or "none"
        raise UserError(f"{options.name}: no process of that name has a log in {paths.logs}; there are {known}")
    with suppress(KeyboardInterrupt):
        _print(paths, options.name, options.follow)
    return 0


def _files(paths: RunPaths) -> list[Path]:
    return sorted(paths.logs.glob("*.log"))


def _print(paths: RunPaths, name: str, follow: bool) -> None:
    known: dict[Path, Log] = {}
    out = sys.stdout.buffer
    while True:
        lives = follow and holder_of(paths) is not None  # asked before: what is written at the end is read after it
        found = [paths.log(name)] if name else _files(paths)
        width = max((len(path.stem) for path in found), default=0)
        for path in found:
            before = b"" if name else f"{path.stem:<{width}} | ".encode()
            for line in known.setdefault(path, Log(path)).new(rest=not lives):
                out.write(before + line + b"\n")
        out.flush()
        if not lives:
            return
        time.sleep(LOOK_S)
