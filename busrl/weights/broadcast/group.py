"""The connections of a broadcast: control connections between learner and engines, and a process group per epoch.

Used by both sides (`sender`, `receiver`). Control messages are JSON lines over a socket of this host, whose file only
this user can open. A group is formed through a store that the learner opens for its epoch. Knows nothing of versions or
of which engines are members.

- The connection of a process that dies closes, which shows its death at once; a stopped process misses a deadline.
- No call blocks for longer than its timeout.
- A connection that sends no valid message, or too long a line, is closed.
- The store listens on the learner's host alone, and its keys lie below a secret prefix.
- Forming a group may block for its whole timeout, so both sides do it in a thread (`GroupSetup`), which is abandoned
  when the epoch is given up.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed

from busrl.errors import first_line
from busrl.system.device import device_group, own_stream
from busrl.system.listener import shut
from busrl.weights.base import is_named

log = logging.getLogger("busrl")
dist: Any = torch.distributed  # its stub exports neither the stores nor the options of the backends
Message = dict[str, Any]
HOST = "127.0.0.1"  # engines on other hosts are not served
LONGEST_LINE = 64 << 20  # a manifest of a large model has about a hundred bytes per tensor
SEND_PATIENCE_S = 1.0
IN_FLIGHT = 2


# -- control connections ---------------------------------------------------------------------------------------


class ControlConnection:
    """A connection. `read` and `send` raise OSError when the other side is gone."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.socket = connected
        self._rest = b""
        self._ended = False

    @classmethod
    def to(cls, file: Path) -> ControlConnection:
        """Connect to the ControlServer at that file."""
        connected = socket.socket(socket.AF_UNIX)
        connected.setblocking(False)  # a server whose queue is full refuses, like one that is gone
        try:
            connected.connect(str(file))
        except OSError:
            connected.close()
            raise
        return cls(connected)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: Message) -> None:
        """Send a line; a peer that reads nothing for SEND_PATIENCE_S counts as gone."""
        left = memoryview(msgspec.json.encode(message) + b"\n")
        deadline = time.monotonic() + SEND_PATIENCE_S
        while left:
            try:
                left = left[self.socket.send(left) :]
            except BlockingIOError:
                if not ready([self.socket], deadline - time.monotonic(), select.POLLOUT):
                    raise TimeoutError(f"it has read nothing for {SEND_PATIENCE_S:g} s") from None

    def read(self) -> list[Message]:
        """The lines that have arrived; ConnectionError once there can be no more."""
        while not self._ended:
            try:
                piece = self.socket.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                piece = b""
            self._ended = not piece
            self._rest += piece
            if len(self._rest) > LONGEST_LINE:
                if b"\n" not in self._rest:
                    raise ConnectionError(f"a line of more than {LONGEST_LINE} bytes")
                break  # a peer that sends without end is read again after the others
        *lines, self._rest = self._rest.split(b"\n")
        if self._ended and not lines:
            raise ConnectionError("its connection closed")
        return [msgspec.json.decode(line, type=Message) for line in lines]

    def close(self) -> None:
        self.socket.close()


class Waker:
    """Wakes a thread that waits on connections."""

    def __init__(self) -> None:
        self._in, self._out = socket.socketpair()
        self._in.setblocking(False)
        self._out.setblocking(False)

    def fileno(self) -> int:
        return self._out.fileno()

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake already; closed: nobody waits
            self._in.send(b"!")

    def clear(self) -> None:
        with contextlib.suppress(OSError):
            while self._out.recv(4096):
                pass

    def close(self) -> None:
        self._in.close()
        self._out.close()


class ControlServer:
    """The learner's side of the control connections. One thread uses it; any thread may call `waker.wake()`."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.waker = Waker()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        os.fchmod(self._listener.fileno(), 0o600)  # the mode of the file that `bind` makes
        file.unlink(missing_ok=True)
        self._listener.bind(str(file))
        self._listener.listen(128)
        self._inode = file.stat().st_ino
        self._connections: set[ControlConnection] = set()

    def poll(self, timeout_s: float) -> list[tuple[ControlConnection, Message | None]]:
        """Messages that have arrived, None for a connection that is gone; returns early when there is something."""
        received: list[tuple[ControlConnection, Message | None]] = []
        for source in ready([self._listener, self.waker, *self._connections], timeout_s):
            if source is self._listener:
                with contextlib.suppress(OSError):
                    self._connections.add(ControlConnection(self._listener.accept()[0]))
            elif source is self.waker:
                self.waker.clear()
            else:
                try:
                    received += [(source, message) for message in source.read()]
                except (OSError, ValueError, RecursionError):
                    self.disconnect(source)
                    received.append((source, None))
        return received

    def disconnect(self, connection: ControlConnection) -> None:
        self._connections.discard(connection)
        connection.close()

    def close(self) -> None:
        for connection in list(self._connections):
            self.disconnect(connection)
        self._listener.close()
        self.waker.close()
        if is_named(self.file, self._inode):  # not that of a successor
            self.file.unlink(missing_ok=True)


def ready(waited: list[Any], timeout_s: float, event: int = select.POLLIN) -> list[Any]:
    """Wait, for at most that long, until some of `waited` can be read (or written) without blocking; returns these."""
    poller, by_number = select.poll(), {source.fileno(): source for source in waited}  # no bound on a file's number
    for number in by_number:
        poller.register(number, event)
    return [by_number[number] for number, _ in poller.poll(max(0, round(timeout_s * 1000)))]


# -- process groups --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rendezvous:
    """A process's part in an epoch: rank `rank` of `size`; rank 0 sends. `store` is host:port/prefix; `backend` is
    gloo, nccl or hccl; `device` holds the memory that is sent."""

    epoch: int
    rank: int
    size: int
    store: str
    timeout_s: float
    backend: str = "gloo"
    device: str = "cpu"


class Group:
    """A connected process group."""

    def __init__(self, process_group: Any, store: Any, rendezvous: Rendezvous) -> None:
        self._group, self._store = process_group, store
        self._timeout, self._between_devices = timedelta(seconds=rendezvous.timeout_s), rendezvous.backend != "gloo"
        self._works: list[Any] = []

    def broadcast(self, piece: torch.Tensor) -> None:
        """Begin to send (rank 0) or receive a piece; keeps IN_FLIGHT pieces under way. RuntimeError: a member is gone.
        """
        self._works.append(self._group.broadcast(piece, root=0))
        if len(self._works) > IN_FLIGHT:
            self._works.pop(0).wait(self._timeout)

    def finish(self) -> None:
        while self._works:
            self._works.pop(0).wait(self._timeout)

    def abandon(self) -> None:
        """Drop the group; call it without holding a lock. Connections of Gloo close at once, which the other members
        notice. A thread aborts NCCL, because that is slow and a destructor that took too long would end the process."""
        group, self._group, self._works = self._group, None, []
        if self._between_devices and group is not None:
            threading.Thread(target=_abort, args=(group,), name="weights abort", daemon=True).start()


def open_store(host: str, timeout_s: float) -> tuple[Any, str, socket.socket]:
    """Open a store on a free port of `host`; returns it, its address for the other members, and its listening socket.
    """
    listener = socket.create_server((host, 0), backlog=128)
    port, listening = listener.getsockname()[1], listener.dup()
    # The store takes a bound socket, because it would listen on every interface itself.
    store = dist.TCPStore(
        host, port, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, f"{host}:{port}/{secrets.token_hex(16)}", listening


def join_store(address: str, timeout_s: float) -> Any:
    """A connection to the store of another process."""
    where = address.partition("/")[0]
    host, _, port = where.rpartition(":")
    # A plain connection fails at once if the store is gone; the store's own client would retry until its timeout.
    socket.create_connection((host, int(port)), timeout_s).close()
    return dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def connect(rendezvous: Rendezvous, store: Any = None) -> Group:
    """Connect with all other ranks; raises if one does not connect before the timeout."""
    host, _, prefix = rendezvous.store.partition("/")
    store = store if store is not None else join_store(rendezvous.store, rendezvous.timeout_s)
    below, rank, size = dist.PrefixStore(prefix, store), rendezvous.rank, rendezvous.size
    if rendezvous.backend == "gloo":
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host.rpartition(":")[0])]
        options._timeout = timedelta(seconds=rendezvous.timeout_s)
        options._threads = 1
        return Group(dist.ProcessGroupGloo(below, rank, size, options), store, rendezvous)
    process_group = device_group(rendezvous.backend, below, rank, size, rendezvous.timeout_s)
    group = Group(process_group, store, rendezvous)
    # NCCL and HCCL connect in their first call. It is made here because this thread may be abandoned.
    group.broadcast(torch.zeros(1, dtype=torch.uint8, device=rendezvous.device))
    group.finish()
    return group


def _abort(group: Any) -> None:
    try:
        group.abort()
    except (RuntimeError, AttributeError) as problem:  # HCCL has none
        log.debug("weights: a group was not aborted: %s", first_line(str(problem)))


class GroupSetup:
    """Forms a group in a thread. At its end `group` or `problem` is set, then `ended`; last it calls `done`."""

    def __init__(
        self, rendezvous: Rendezvous, done: Callable[[], None], store: Any = None,
        listening: socket.socket | None = None,
    ) -> None:
        """`store` and `listening`: the store of this process, where it opened one, and its listening socket."""
        self.rendezvous = rendezvous
        self.group: Group | None = None
        self.problem = ""
        self.ended = threading.Event()
        self._cancelled = False
        self._done, self._store, self._listening = done, store, listening
        threading.Thread(target=self._run, name=f"weights epoch {rendezvous.epoch}", daemon=True).start()

    def cancel(self) -> None:
        self._cancelled = True
        group, self.group = self.group, None
        if group is not None:
            group.abandon()

    def _run(self) -> None:
        begun = time.monotonic()
        try:
            own_stream(self.rendezvous.device)
            self.group = connect(self.rendezvous, self._store)
            if self._listening is not None and self.rendezvous.backend == "gloo":  # NCCL may connect once more
                shut(self._listening)
            if self._cancelled:
                self.cancel()
        except Exception as problem:  # sockets, torch, a missing backend: all are reported
            self.problem = f"{first_line(str(problem))} (after {time.monotonic() - begun:.1f} s)"
        finally:
            self._store = None
            if self._listening is not None:
                self._listening.close()
            self.ended.set()
        with contextlib.suppress(OSError):
            self._done()


def pieces(length: int, size: int) -> list[tuple[int, int]]:
    """Start and end of each bucket of a block of `length` bytes."""
    return [(start, min(start + size, length)) for start in range(0, length, size)]
