"""The control connections of a broadcast: JSON lines between the learner's door and each engine that came through it.

Used by `weights.broadcast` (the door) and `weights.broadcast_receiver` (a wire). The address and a secret stand in a
file that only this user can read. Knows nothing of epochs, versions or tensors.

- A process that dies closes its wire, so its death is known at once; a stopped one is found by a deadline alone.
- No call blocks for longer than the time that it is given.
- Who does not say the secret in its first line is turned away, and so is a line that is too long.
- Any user of the machine can connect: at most `MOST_UNKNOWN` connections wait for their first line, the oldest goes for
  a new one, and who they belong to is told.

Process groups of one epoch, and how the timeout is divided.

Used by both sides of the broadcast. The learner opens a store for each epoch and names its port over the control
connection (`weights.door`); the group is formed through it and the store goes with the group. Knows nothing of
versions or of who the members are.

- The store listens on the learner's host alone, and its keys lie below a secret prefix.
- Forming a group may block for as long as its timeout: both sides do it in a thread of its own (`Forming`), which is
  left to itself when the epoch has been given up.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
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

import torch
import torch.distributed

from busrl import files
from busrl.device import device_group, own_stream

# -- The control connections of a broadcast: JSON lines between the learner's door and each engine that came ... ------


HOST = "127.0.0.1"  # the only one that is served
LONGEST_LINE = 64 << 20  # a manifest of a large model has about a hundred bytes per tensor
LONGEST_FROM_ENGINE = 64 << 10
SEND_PATIENCE_S = 1.0
INTRODUCE_S = 5.0
MOST_UNKNOWN = 64
MOST_AT_ONCE = 32  # let in before others are heard
TOLD_EVERY_S = 60.0
log = logging.getLogger("busrl")
Message = dict[str, Any]


class ControlConnection:
    """One connection. `read` and `send` raise OSError when the other side is gone."""

    def __init__(self, connected: socket.socket, longest: int = LONGEST_LINE) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connected
        self.since = time.monotonic()
        self.known = False  # has said the secret
        self._longest = longest
        self._rest = b""
        self._ended = False

    @classmethod
    def to(cls, address: str, timeout_s: float) -> ControlConnection:
        """Connect to a door."""
        host, _, port = address.partition("/")[0].rpartition(":")
        return cls(socket.create_connection((host, int(port)), timeout_s))

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: Message) -> None:
        """Send a line; a peer that reads nothing for SEND_PATIENCE_S counts as gone."""
        left = memoryview(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        deadline = time.monotonic() + SEND_PATIENCE_S
        while left:
            try:
                left = left[self.socket.send(left) :]
            except BlockingIOError:
                if not ready([self.socket], deadline - time.monotonic(), select.POLLOUT):
                    raise TimeoutError(f"it has read nothing for {SEND_PATIENCE_S:g} s") from None

    def read(self) -> list[Message]:
        """The lines that have come; ConnectionError once there are no more and never will be."""
        while not self._ended:
            try:
                piece = self.socket.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                piece = b""
            self._ended = not piece
            self._rest += piece
            if len(self._rest) > self._longest:
                if b"\n" not in self._rest:
                    raise ConnectionError(f"a line of more than {self._longest} bytes")
                break  # who sends without end is heard again, after the others
        *lines, self._rest = self._rest.split(b"\n")
        if self._ended and not lines:
            raise ConnectionError("its connection closed")
        return [_parsed(line) for line in lines]

    def close(self) -> None:
        self.socket.close()


class Bell:
    """Wakes a thread that waits on wires."""

    def __init__(self) -> None:
        self._in, self._out = socket.socketpair()
        self._in.setblocking(False)
        self._out.setblocking(False)

    def fileno(self) -> int:
        return self._out.fileno()

    def ring(self) -> None:
        with contextlib.suppress(OSError):  # full: it rings already; closed: nobody waits
            self._in.send(b"!")

    def still(self) -> None:
        with contextlib.suppress(OSError):
            while self._out.recv(4096):
                pass

    def close(self) -> None:
        self._in.close()
        self._out.close()


class ControlServer:
    """Where engines come in. One thread uses it; any may `bell.ring()`."""

    def __init__(self, file: Path) -> None:
        self.file, self.host = file, HOST
        self.bell = Bell()
        self._listener = socket.create_server((HOST, 0), backlog=128)
        self._listener.setblocking(False)
        self._secret = secrets.token_hex(16)
        self._wires: set[ControlConnection] = set()
        self._turned_away, self._next_told = 0, 0.0
        self.address = f"{HOST}:{self._listener.getsockname()[1]}/{self._secret}"
        files.replace(file, self.address.encode())

    def poll(self, timeout_s: float) -> list[tuple[ControlConnection, Message | None]]:
        """What has been said since, None for a wire that is gone; returns early when there is something."""
        waited: list[Any] = [self._listener, self.bell, *self._wires]
        heard: list[tuple[ControlConnection, Message | None]] = []
        for one in ready(waited, timeout_s):
            if one is self._listener:
                heard += [said for wire in self._let_in() for said in self._hear(wire)]
            elif one is self.bell:
                self.bell.still()
            else:
                heard += self._hear(one)
        self._turn_away()
        return heard

    def shut(self, wire: ControlConnection) -> None:
        """End one connection."""
        self._wires.discard(wire)
        wire.close()

    def close(self) -> None:
        for wire in list(self._wires):
            self.shut(wire)
        self._listener.close()
        self.bell.close()
        with contextlib.suppress(OSError):
            if self.file.read_text() == self.address:  # not that of a successor
                self.file.unlink()

    def _let_in(self) -> list[ControlConnection]:
        """Those who knocked; who belongs here has sent its line already."""
        new: list[ControlConnection] = []
        with contextlib.suppress(OSError):
            while len(new) < MOST_AT_ONCE:
                new.append(ControlConnection(self._listener.accept()[0], LONGEST_FROM_ENGINE))
                self._wires.add(new[-1])
        return new

    def _turn_away(self) -> None:
        """End connections that have said nothing for too long, or that are too many."""
        unknown = sorted((wire for wire in self._wires if not wire.known), key=lambda wire: wire.since)
        late = [wire for wire in unknown if time.monotonic() - wire.since > INTRODUCE_S]
        late += unknown[len(late) : max(len(late), len(unknown) - MOST_UNKNOWN)]
        for wire in late:
            if not self._turned_away or time.monotonic() > self._next_told:
                self._next_told = time.monotonic() + TOLD_EVERY_S
                log.warning(
                    "weights: %d connections to port %d said nothing and were ended, the latest of %s",
                    self._turned_away + len(late), self._listener.getsockname()[1], owner_of(wire.socket),
                )
            self._turned_away += 1
            self.shut(wire)

    def _hear(self, wire: ControlConnection) -> list[tuple[ControlConnection, Message | None]]:
        try:
            said = wire.read()
            if said and not wire.known:
                wire.known = hmac.compare_digest(str(said[0].get("secret")).encode(), self._secret.encode())
                if not wire.known:
                    raise ConnectionError("it does not know the secret")
            return [(wire, message) for message in said]
        except (OSError, ValueError):
            self.shut(wire)
            return [(wire, None)]


def ready(waited: list[Any], timeout_s: float, event: int = select.POLLIN) -> list[Any]:
    """Those of `waited` that can be read (or written) without blocking, after at most that long."""
    poller, by_number = select.poll(), {one.fileno(): one for one in waited}  # no bound on a file's number
    for number in by_number:
        poller.register(number, event)
    return [by_number[number] for number, _ in poller.poll(max(0, round(timeout_s * 1000)))]


def owner_of(connected: socket.socket) -> str:
    """Whose the other end of a connection on this machine is, as far as the kernel says."""
    try:
        port = connected.getpeername()[1]
        with open("/proc/net/tcp") as table:
            rows = [line.split() for line in table.readlines()[1:]]
        uid = next(row[7] for row in rows if int(row[1].rpartition(":")[2], 16) == port)
    except (OSError, StopIteration, ValueError, IndexError):
        return "an unknown user"
    return f"user {uid}"


def secret_of(address: str) -> str:
    """The secret in the text of an address file."""
    return address.partition("/")[2]


def _parsed(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("a line is nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError("a line is no object")
    return message


# -- Process groups of one epoch, and how the timeout is divided ------------------------------------------------------


dist: Any = torch.distributed  # its stub exports neither the stores nor the options of the backends
IN_FLIGHT = 2
DEVICE_CONNECT_S = 60.0


@dataclass(frozen=True)
class GroupTimeouts:
    """The timeout of the topology in three parts, so that a member that is stopped costs the others less than all of
    it: a part until it is missed (in the connection, a bucket or the commit), a part in the roll call without it."""

    timeout_s: float

    @property
    def phase_s(self) -> float:
        """Longest wait in one phase: the roll call, connecting, one bucket, the commit."""
        return self.timeout_s / 3

    def connecting_s(self, backend: str) -> float:
        """Longest wait for a group to stand. The first one between devices makes their contexts too."""
        return 1.5 * self.phase_s if backend == "gloo" else max(1.5 * self.phase_s, DEVICE_CONNECT_S)


@dataclass(frozen=True)
class Place:
    """Where one process stands in an epoch. `store` is host:port/prefix; `backend` is gloo, nccl or hccl, and `device`
    is where its memory is."""

    epoch: int
    rank: int
    size: int
    store: str
    timeout_s: float
    backend: str = "gloo"
    device: str = "cpu"


class Group:
    """A connected group; rank 0 sends."""

    def __init__(self, process_group: Any, store: Any, place: Place) -> None:
        self.epoch = place.epoch
        self._group, self._store = process_group, store
        self._timeout, self._between_devices = timedelta(seconds=place.timeout_s), place.backend != "gloo"
        self._works: list[Any] = []

    def broadcast(self, piece: torch.Tensor) -> None:
        """Begin to send (rank 0) or receive; waits for the one before the last. RuntimeError: somebody is gone."""
        self._works.append(self._group.broadcast(piece, root=0))
        if len(self._works) > IN_FLIGHT:
            self._works.pop(0).wait(self._timeout)

    def finish(self) -> None:
        """Wait for all that has begun."""
        while self._works:
            self._works.pop(0).wait(self._timeout)

    def abandon(self) -> None:
        """Let go of it; call it outside of every lock. Connections of Gloo close at once, which the others notice. NCCL
        takes its time, and would end the process if its destructor took too long: it is aborted by a thread."""
        group, self._group, self._works = self._group, None, []
        if self._between_devices and group is not None:
            threading.Thread(target=_abort, args=(group,), name="weights abort", daemon=True).start()


def open_store(host: str, timeout_s: float) -> tuple[Any, str]:
    """A store on a free port of `host`, and how the others find it."""
    listener = socket.create_server((host, 0), backlog=128)
    port = listener.getsockname()[1]
    # The bound socket is handed over because the store by itself would listen on every interface.
    store = dist.TCPStore(
        host, port, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, f"{host}:{port}/{secrets.token_hex(16)}"


def join_store(address: str, timeout_s: float) -> Any:
    """A connection to the store of another process."""
    where = address.partition("/")[0]
    host, _, port = where.rpartition(":")
    # A store that is gone refuses at once; the store's own client would try until its timeout.
    socket.create_connection((host, int(port)), timeout_s).close()
    return dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def connect(place: Place, store: Any = None) -> Group:
    """Connect with all other ranks; raises when one does not come before the timeout."""
    host, _, prefix = place.store.partition("/")
    store = store if store is not None else join_store(place.store, place.timeout_s)
    below = dist.PrefixStore(prefix, store)
    if place.backend != "gloo":
        return _between_devices(place, below, store)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host.rpartition(":")[0])]
    options._timeout = timedelta(seconds=place.timeout_s)
    options._threads = 1
    return Group(dist.ProcessGroupGloo(below, place.rank, place.size, options), store, place)


def _between_devices(place: Place, below: Any, store: Any) -> Group:
    """A group of NCCL or HCCL. It connects in its first call: here, where a thread may be left to itself."""
    group = Group(device_group(place.backend, below, place.rank, place.size, place.timeout_s), store, place)
    group.broadcast(torch.zeros(1, dtype=torch.uint8, device=place.device))
    group.finish()
    return group


def _abort(group: Any) -> None:
    try:
        group.abort()
    except (RuntimeError, AttributeError) as problem:  # HCCL has none
        log.debug("weights: a group was left as it is: %s", first_line(problem))


class Forming:
    """A group that is being formed by a thread; `done` is called at its end. Forget it to give it up."""

    def __init__(self, place: Place, done: Callable[[], None], store: Any = None) -> None:
        self.place = place
        self.group: Group | None = None
        self.problem = ""
        self.ended = threading.Event()
        self._given_up = False
        self._done, self._store = done, store
        threading.Thread(target=self._run, name=f"weights epoch {place.epoch}", daemon=True).start()

    def give_up(self) -> None:
        self._given_up = True
        group, self.group = self.group, None
        if group is not None:
            group.abandon()

    def _run(self) -> None:
        begun = time.monotonic()
        try:
            own_stream(self.place.device)
            self.group = connect(self.place, self._store)
            if self._given_up:
                self.give_up()
        except Exception as problem:  # of sockets, of torch, of a backend that is not there: all are told
            self.problem = f"{first_line(problem)} (after {time.monotonic() - begun:.1f} s)"
        finally:
            self._store = None
            self.ended.set()
        with contextlib.suppress(OSError):
            self._done()


def pieces(length: int, size: int) -> list[tuple[int, int]]:
    """Start and end of each bucket of a block of `length` bytes."""
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def first_line(problem: BaseException) -> str:
    """The start of a message of torch, which may go on for pages."""
    return str(problem).strip().split("\n", 1)[0][:160]
