"""Process groups of one epoch, and how the timeout is divided.

Used by both sides of the broadcast. The learner opens a store for each epoch and names its port over the control
connection (`weights.door`); the group is formed through it and the store goes with the group. Knows nothing of
versions or of who the members are.

- The store listens on the learner's host alone, and its keys lie below a secret prefix.
- Forming a group may block for as long as its timeout: both sides do it in a thread of its own (`Forming`), which is
  left to itself when the epoch has been given up.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from busrl.device import device_group, own_stream

log = logging.getLogger("busrl")
dist: Any = torch.distributed  # its stub exports neither the stores nor the options of the backends
IN_FLIGHT = 2
DEVICE_CONNECT_S = 60.0


@dataclass(frozen=True)
class Limits:
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
    )  # fmt: skip
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
