"""A listening socket for aiohttp's server that strangers cannot block: it bounds connections, and their silence.

Talks to asyncio and to the connections of aiohttp's server. Knows nothing of routes, keys and answers: the handler of a
request says whether its client is a stranger.

- A connection has HEAD_S for the head of its first request. Where there are too many connections, the one that has been
  silent longest is closed. One with a request, or of a client that is no stranger, stays. If all stay, the new one is
  closed.
- Connections take half of the descriptors at most: the other half is for the process's own work.
- One line with counts reports all this, at most every TELL_S, and asyncio's reports on a lack of descriptors with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import resource
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

HEAD_S = 10.0
MOST_CONNECTIONS = 8192
ACCEPTS_AT_ONCE = 64  # in a turn of the loop: they have their descriptors before they are counted
BACKLOG = 1024  # connections that the kernel keeps until they are accepted
TELL_S = 30.0
SWEEP_S = 0.5
SHOWN = 3  # addresses of a line
ATTACH_FILTER, RETURN = 26, 0x06  # an option of sockets, and an instruction of its filters
OUT_OF_DESCRIPTORS = "socket.accept() out of system resource"
log = logging.getLogger("busrl")


def room() -> int:
    """Raise this process's limit of descriptors as far as allowed; returns the connections that it may then have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MOST_CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, 2 * MOST_CONNECTIONS)
    if wanted > soft:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(1, min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))


class Listener:
    """Accepts the connections of a bound socket, for the handlers that `runner.server` of aiohttp makes. Use `open` and
    `close`; call `heard` when the head of a request is there. `tell` takes lines about strangers."""

    def __init__(self, bound: socket.socket, most: int, tell: Callable[[str], object] = log.warning) -> None:
        self._socket, self._most, self._tell = bound, most, tell
        self._asking: dict[Any, float] = {}  # by connection without a whole request: until when that is allowed
        self._new = 0  # connections that the handlers do not count yet
        # Since the last line: addresses of those that were closed, new ones that had to go, lacks of a descriptor.
        self._gone: Counter[str] = Counter()
        self._refused = self._lacks = 0
        self._told = -TELL_S
        self._sweeping: asyncio.TimerHandle | None = None

    async def open(self, handlers: Any) -> None:
        self._handlers, self._loop = handlers, asyncio.get_running_loop()
        self._before = self._loop.get_exception_handler()
        self._loop.set_exception_handler(self._failed)
        # Those of the newest turns have no transport yet and cannot be closed: were all so, a client would have to go.
        at_once = max(1, min(ACCEPTS_AT_ONCE, self._most // 4))
        self._server = await self._loop.create_server(self._accepted, sock=self._socket, backlog=at_once)
        self._socket.listen(BACKLOG)  # asyncio has one number for this and for the accepts of a turn
        self._sweep()

    def close(self) -> None:
        self._server.close()
        self._loop.set_exception_handler(self._before)
        if self._sweeping is not None:
            self._sweeping.cancel()

    def heard(self, connection: Any) -> None:
        """Note that the head of a request is there: the connection is silent no more."""
        self._asking.pop(connection, None)

    def answered(self, connection: Any) -> None:
        """Note that a stranger has its answer: while the rest of its request comes, it counts as silent."""
        self._asking[connection] = time.monotonic() + HEAD_S

    # -- internals -----

    def _accepted(self) -> asyncio.Protocol:
        """The protocol of a new connection."""
        if len(self._handlers.connections) + self._new >= self._most and not self._close_silent():
            self._refused += 1
            return Closed()
        handler: asyncio.Protocol = self._handlers()
        self._asking[handler] = time.monotonic() + HEAD_S
        self._new += 1
        self._loop.call_soon(self._loop.call_soon, self._made)  # it has its transport in the next turn of the loop
        return handler

    def _made(self) -> None:
        self._new -= 1

    def _close_silent(self) -> bool:
        """Close the connection that has been without a request longest; False if there is none. Connections that are
        gone are forgotten; the newest come last."""
        while len(self._asking) > self._new:
            connection = next(iter(self._asking))
            del self._asking[connection]
            if connection.transport is not None:
                self._end(connection)
                return True
        return False

    def _end(self, connection: Any) -> None:
        peer = connection.transport.get_extra_info("peername")
        self._gone[peer[0] if peer else "an unknown address"] += 1
        connection.force_close()

    def _sweep(self) -> None:
        now = time.monotonic()
        for late in [connection for connection, limit in self._asking.items() if now > limit]:
            del self._asking[late]
            if late.transport is not None:
                self._end(late)
        if (self._gone or self._refused or self._lacks) and now >= self._told + TELL_S:
            self._told = now
            self._tell(self._line())
            self._gone.clear()
            self._refused = self._lacks = 0
        self._sweeping = self._loop.call_later(SWEEP_S, self._sweep)

    def _line(self) -> str:
        limit, silent = resource.getrlimit(resource.RLIMIT_NOFILE)[0], sum(self._gone.values())
        names = [f"{count:,} from {address}" for address, count in self._gone.most_common(SHOWN)]
        more = [f"{len(self._gone) - SHOWN} other addresses"] if len(self._gone) > SHOWN else []
        counts = {f"{silent:,} silent connections were closed ({', '.join([*names, *more])})": silent,
                  f"{self._refused:,} new ones were closed, since all others had asked for something": self._refused,
                  f"{self._lacks:,} times there was no descriptor for a new one": self._lacks}
        return (f"port {self._socket.getsockname()[1]}: {'; '.join(text for text, count in counts.items() if count)}; "
                f"{limit:,} descriptors allow {self._most:,} connections, and one may be silent for {HEAD_S:g} s")

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle what asyncio reports; a lack of descriptors, which it reports a thousand times a second, is
        counted."""
        if context.get("message") == OUT_OF_DESCRIPTORS:
            self._lacks += 1
            self._close_silent()
        elif self._before is not None:
            self._before(loop, context)
        else:
            loop.default_exception_handler(context)


def bounded(server: Any, most: int = 64) -> None:
    """Bound the connections of a server of the standard library, which has a thread for each: beyond `most` the oldest
    is closed, and each that is silent for HEAD_S."""
    here: dict[socket.socket, None] = {}
    ends = server.shutdown_request

    def begin(connected: socket.socket, address: object) -> bool:
        first = next(iter(here), None) if len(here) >= most else None
        if first is not None:
            here.pop(first, None)  # its own thread may just have done so
            with contextlib.suppress(OSError):  # the client is gone
                first.shutdown(socket.SHUT_RDWR)
        here[connected] = None
        return True

    def end(connected: socket.socket) -> None:
        here.pop(connected, None)
        ends(connected)

    server.socket.listen(most)  # the library's queue of five would let strangers wait in each other's way
    server.verify_request, server.shutdown_request = begin, end
    server.RequestHandlerClass = type("Handler", (server.RequestHandlerClass,), {"timeout": HEAD_S})


def shut(bound: socket.socket) -> None:
    """Refuse all further connections of a socket that another library listens on, once all peers have come. Present
    connections stay. Does nothing where the kernel has no filters."""
    nothing = ctypes.create_string_buffer(struct.pack("HBBI", RETURN, 0, 0, 0))  # of every packet it keeps no byte
    with contextlib.suppress(OSError):
        bound.setsockopt(socket.SOL_SOCKET, ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(nothing)))


class Closed(asyncio.Protocol):
    """The protocol of a connection for which there is no room."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
