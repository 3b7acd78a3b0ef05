"""Single keys from a terminal, without waiting for Enter, and the terminal as it was afterwards.

Talks to one terminal; knows nothing of what the keys mean.
"""

from __future__ import annotations

import os
import select
import termios
import tty
from typing import TextIO


class Keys:
    """Use with `with`: `pressed` gives the keys that were hit, and waits for one at most so long."""

    def __init__(self, stream: TextIO) -> None:
        self._fd = stream.fileno()
        self._before: list[int | list[bytes | int]] | None = None

    def __enter__(self) -> Keys:
        self._before = termios.tcgetattr(self._fd)
        tty.setcbreak(self._fd)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def pressed(self, timeout_s: float) -> str:
        """Keys hit meanwhile."""
        ready, _, _ = select.select([self._fd], [], [], timeout_s)
        if not ready:
            return ""
        got = os.read(self._fd, 64)
        return got.decode(errors="replace") if got else "q"  # the terminal is gone
