"""The endpoint of the bus for asyncio programs, on whatever loop runs (uvloop with the extra `busrl[aio]`).

Talks to the broker through `Core`, whose docstring says where messages may be dropped and why that is safe. Knows
nothing of blocking waits. It watches the socket's descriptor only while it has nothing to read, because that descriptor
is edge-triggered: first read until empty, then wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import TracebackType

from busrl.bus.endpoint import Core
from busrl.protocol import Message


class AsyncEndpoint(Core):
    """As `Endpoint`, with `await`. One task receives at a time; any task of the loop may send."""

    async def send(self, message: Message, to: str = "") -> None:
        """Publish to everybody, or to process `to`; never waits (`post` is the same without await)."""
        self.post(message, to)

    async def recv(self, timeout_s: float) -> Message | None:
        """The next message, or None when `timeout_s` has passed without one."""
        deadline = time.monotonic() + timeout_s
        while (message := self.take()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            await self._readable(self.patience(left))
        return message

    async def ready(self, timeout_s: float) -> None:
        """Return when a ping of our own came back through the broker; BusNotReady after `timeout_s`."""
        self.forget_echo()
        deadline = time.monotonic() + timeout_s
        while not self.round_trip(now := time.monotonic()):
            if now >= deadline:
                raise self.not_ready(timeout_s)
            await self._readable(self.patience(self.ping_in_s()))

    async def close(self) -> None:
        """Close; idempotent. What was sent last gets a moment to leave."""
        self.shut()

    async def _readable(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        fd: int = self.fileno()
        arrived: asyncio.Future[None] = loop.create_future()
        loop.add_reader(fd, _wake, arrived)
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(arrived, timeout_s)
        finally:
            loop.remove_reader(fd)

    async def __aenter__(self) -> AsyncEndpoint:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _wake(arrived: asyncio.Future[None]) -> None:
    if not arrived.done():
        arrived.set_result(None)
