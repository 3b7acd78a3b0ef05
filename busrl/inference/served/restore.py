"""Gives a server that went away its version again, in a thread beside the role's own loop, which has to go on.

Used by the served engine. Talks to the server through the function that it is given. Knows nothing of requests, gates
or weights.

- idle -> on (`begin`) -> idle: by the thread itself, before it says how it ended. Who hears of the end may begin again.
- One at a time; a new version is loaded after `wait` alone, or an older one could come last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from busrl.errors import PeerTimeout


class Restore:
    """`done` and `failed` are called by the thread."""

    def __init__(self, server: str, done: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        self._server, self._done, self._failed = server, done, failed
        self._thread: threading.Thread | None = None
        self._what = ""
        self.on = False

    def begin(self, what: str, load: Callable[[], None]) -> None:
        """`what` is for the error of `wait`. Not while one is on."""
        self.on, self._what = True, what
        self._thread = threading.Thread(target=self._run, args=(load,), name="restore", daemon=True)
        self._thread.start()

    def wait(self, limit_s: float) -> None:
        """Until none is on; PeerTimeout after `limit_s`."""
        if self._thread is None:
            return
        self._thread.join(limit_s)
        if self._thread.is_alive():
            raise PeerTimeout(
                f"{self._server}: {self._what}, which it lost, is still being loaded again after {limit_s:.1f} s more; "
                "phase: before a new version"
            )
        self._thread = None

    def _run(self, load: Callable[[], None]) -> None:
        try:
            load()
        except Exception as problem:
            self.on = False
            self._failed(problem)
            return
        self.on = False
        self._done()
