"""A progress line on stderr: redrawn on a terminal, a line now and then elsewhere.

Talks to stderr only. Knows nothing of what makes progress.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType

WIDTH = 24
QUIET_S = 5.0  # between two lines when stderr is no terminal


class Progress:
    """`with Progress("making x") as progress: progress.show(0.4, "pass rate 0.31")`."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._terminal = sys.stderr.isatty()
        self._started = time.monotonic()
        self._shown = 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._terminal:
            print(file=sys.stderr, flush=True)

    def show(self, share: float, text: str) -> None:
        """Show that `share` (0 to 1) is done; `text` says where it stands."""
        now = time.monotonic()
        if not self._terminal and now - self._shown < QUIET_S and share < 1.0:
            return
        self._shown = now
        filled = round(WIDTH * min(max(share, 0.0), 1.0))
        bar = "#" * filled + "." * (WIDTH - filled)
        line = f"{self._title} [{bar}] {text}, {now - self._started:.0f} s"
        text, end = (f"\r{line:<78}", "") if self._terminal else (line, "\n")
        print(text, end=end, file=sys.stderr, flush=True)
