"""The blocking face of the bus for processes that wait in a loop of their own.

Talks to the broker through `Core`, whose docstring says where messages may be dropped and why that is safe. Knows
nothing of asyncio; `aio.py` is the other face.
"""

from __future__ import annotations

import math
import select
import time
from types import TracebackType

from busrl.bus.core import RECEIVE_SLICE_S, Core
from busrl.bus.wire import WAIT
from busrl.protocol import Message


class Endpoint(Core):
    """A process's connection to the bus: `send`, `recv`, `drain`, `ready`. One thread, one process."""

    _poll: select.poll | None = None
    send = Core.post  # to everybody, or to process `to`; never blocks

    def recv(self, timeout_s: float) -> Message | None:
        """The next message, or None when `timeout_s` has passed without one."""
        if self._pending:
            return self._pending.popleft()
        now = time.monotonic()
        deadline = now + timeout_s
        while self._trouble is None and deadline - now >= RECEIVE_SLICE_S:
            # Waiting inside libzmq: asleep at once after a send, one look less for a message that is here.
            if (message := self._take_new(WAIT)) is not None:
                return message
            now = time.monotonic()
        if (message := self.take()) is not None:
            return message
        while (left := deadline - time.monotonic()) > 0:
            self._wait(left)
            if (message := self.take()) is not None:
                return message
        return None

    def wait(self, timeout_s: float, fd: int) -> None:
        """Return when a message may be here, when the descriptor `fd` is readable, or when the time is over.

        As `_wait`: call it only after a `take` of None."""
        poller = select.poll()
        poller.register(self.fileno(), select.POLLIN)
        poller.register(fd, select.POLLIN)
        poller.poll(math.ceil(self.patience(timeout_s) * 1000))

    def ready(self, timeout_s: float) -> None:
        """Return when a ping of our own came back through the broker; BusNotReady after `timeout_s`."""
        self.forget_echo()
        deadline = time.monotonic() + timeout_s
        while not self.knock(now := time.monotonic()):
            if now >= deadline:
                raise self.not_ready(timeout_s)
            self._wait(self.ping_in_s())

    def _wait(self, timeout_s: float) -> None:
        """Until something may have arrived. The descriptor is edge-triggered: call it only after a `take` of None."""
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self.fileno(), select.POLLIN)
        self._poll.poll(max(1, math.ceil(self.patience(timeout_s) * 1000)))

    def close(self) -> None:
        """Close; idempotent. What was sent last gets a moment to leave."""
        self.shut()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
