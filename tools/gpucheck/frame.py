"""What every check has: its settings, and a file that it writes its findings into as it goes.

Used by the checks, which run in a process each. A check that is killed at its deadline has written what it found until
then. Knows nothing of what is checked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpucheck.stop import TOOL, dies_with_parent

ROOT = TOOL.parents[1]
GIGA = 1e9


class Skipped(Exception):
    """The check can not be done here; the message says why. It is no failure."""


@dataclass
class Context:
    """One check's settings and findings. `small`: shapes that a CPU can do, for trying the tool out; `bandwidth`: what
    the check of that name has found."""

    device: str
    small: bool
    file: Path
    seconds: float
    bandwidth: dict[str, float] = field(default_factory=dict)
    found: dict[str, Any] = field(default_factory=lambda: {"figures": {}, "bars": [], "notes": []})
    began: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Time until this check is stopped."""
        return self.seconds - (time.monotonic() - self.began)

    def figure(self, name: str, value: Any) -> None:
        self.found["figures"][name] = _rounded(value)
        self._write()

    def note(self, text: str) -> None:
        self.found["notes"].append(text)
        self._write()

    def bar(self, what: str, value: float, *, at_least: float | None = None, at_most: float | None = None) -> None:
        """A figure that has to keep its bounds; where there is no accelerator speed is reported, not judged."""
        bounds = ((">=", at_least), ("<=", at_most))
        bound = " and ".join(f"{sign} {limit:g}" for sign, limit in bounds if limit is not None)
        kept = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
        self.found["bars"].append({"what": what, "wanted": bound, "found": _rounded(value), "kept": bool(kept)})
        self._write()

    def judged(
        self, what: str, value: float, *, at_least: float | None = None, at_most: float | None = None
    ) -> None:
        """Bounds on speed or memory: judged on an accelerator alone."""
        if self.device == "cpu" or self.small:
            self.figure(what, value)
        else:
            self.bar(what, value, at_least=at_least, at_most=at_most)

    def _write(self) -> None:
        draft = self.file.with_suffix(".new")
        draft.write_text(json.dumps(self.found))
        os.replace(draft, self.file)


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def best_of(times: int, action: Callable[[], Any], wait: Callable[[], Any] = lambda: None) -> float:
    """Seconds of the fastest of so many runs, after one that is not counted."""
    action()
    wait()
    seconds = []
    for _ in range(times):
        begun = time.perf_counter()
        action()
        wait()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


class Peer:
    """Another process of a check: a function of `gpucheck.peers` that answers JSON lines. Its end is the check's."""

    def __init__(self, name: str, **settings: Any) -> None:
        self.name = name
        self.process = subprocess.Popen(
            dies_with_parent(sys.executable, str(TOOL), "--peer", name, json.dumps(settings)),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )

    def read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process {self.name} ended with {self.process.wait(10)}; its output is above")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer

    def ask(self, **order: Any) -> Any:
        self.tell(**order)
        return self.read()

    def tell(self, **order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        with suppress(OSError):
            self.process.kill()
        self.process.wait(20)


@contextmanager
def peer(name: str, **settings: Any) -> Iterator[Peer]:
    made = Peer(name, **settings)
    try:
        yield made
    finally:
        made.kill()
