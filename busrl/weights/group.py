"""What both sides of the broadcast share: the store with its keys, the ordered event log in it, and Gloo groups.

Used by `weights.broadcast` (the sender hosts the store) and `weights.broadcast_receiver`. The store is a TCPStore on
the sender's host; its address and a secret key prefix stand in a file that only this user can read. Knows nothing of
tensors' names or of versions.

Keys, below the prefix: `manifest` · `head`, `event/<i>` (the log, written by the sender alone) · `joins` (one JSON line
appended per join) · `ready/<epoch>/<id>` (a member has seen the epoch) · `go/<epoch>` (all have: connect now).

- Every wait is a poll with a deadline: a blocking wait on the store could not be ended from outside.
- The log is a total order: a member acts on epochs and transfers in the order in which the sender decided them.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

dist: Any = torch.distributed  # its stub exports neither the stores nor the options of Gloo
BUCKET_BYTES = 64 << 20
POLL_S = 0.005
LOG_KEPT = 256


@dataclass(frozen=True)
class Event:
    """One entry of the log. kind "epoch": a new group of `members` [name, id]; kind "send": a version follows in it."""

    kind: str
    epoch: int
    members: tuple[tuple[str, str], ...] = ()
    version: int = 0
    step: int = 0


@dataclass(frozen=True)
class Join:
    """A process wants in. `failed` is the epoch whose group broke for it, 0 for a newcomer."""

    name: str
    id: str
    failed: int = 0


@dataclass(frozen=True)
class Limits:
    """How the timeout of the topology is divided, so that one dead member costs the others less than all of it."""

    timeout_s: float

    @property
    def transfer_s(self) -> float:
        """Longest wait for one bucket, and for connecting a group."""
        return self.timeout_s / 3

    @property
    def ready_s(self) -> float:
        """Longest wait for all members to see an epoch: they may be held up in a transfer that is failing."""
        return self.timeout_s / 2


class Plane:
    """A connection to the store, with the operations on its keys."""

    def __init__(self, store: Any, address: str) -> None:
        self.address = address
        self._store = store

    @classmethod
    def host(cls, file: Path, host: str, timeout_s: float) -> Plane:
        """Start the store on a free port of `host` and write its address to `file`."""
        listener = socket.socket()
        listener.bind((host, 0))
        listener.listen(128)
        port = listener.getsockname()[1]
        # The bound socket is handed over because the store by itself would listen on every interface.
        store = dist.TCPStore(
            host, port, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
        prefix = secrets.token_hex(16)
        plane = cls(dist.PrefixStore(prefix, store), f"{host}:{port}/{prefix}")
        plane._store.set("joins", "")
        plane._store.add("head", 0)
        _write_private(file, plane.address)
        return plane

    @classmethod
    def connect(cls, address: str, timeout_s: float) -> Plane:
        where, _, prefix = address.partition("/")
        host, _, port = where.rpartition(":")
        # A store that is gone refuses at once; the store's own client would try until its timeout.
        socket.create_connection((host, int(port)), timeout_s).close()
        store = dist.TCPStore(
            host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )
        return cls(dist.PrefixStore(prefix, store), address)

    # -- the log ------------------------------------------------------------------------------------------------

    def head(self) -> int:
        """Index of the newest event, 0 if there is none."""
        return int(self._store.add("head", 0))

    def write_event(self, event: Event) -> None:
        index = self.head() + 1
        self._store.set(f"event/{index}", json.dumps(asdict(event)))
        self._store.add("head", 1)
        if index > LOG_KEPT:
            self._store.delete_key(f"event/{index - LOG_KEPT}")

    def read_event(self, index: int) -> Event | None:
        if not self._store.check([f"event/{index}"]):
            return None
        read = json.loads(self._store.get(f"event/{index}"))
        read["members"] = tuple((name, identity) for name, identity in read["members"])
        return Event(**read)

    # -- members ------------------------------------------------------------------------------------------------

    def join(self, join: Join) -> None:
        self._store.append("joins", json.dumps(asdict(join)) + "\n")

    def joins(self, seen: int) -> list[Join]:
        """Joins after the first `seen` ones."""
        lines = self._store.get("joins").decode().splitlines()
        return [Join(**json.loads(line)) for line in lines[seen:]]

    def set_ready(self, epoch: int, identity: str) -> None:
        self._store.set(f"ready/{epoch}/{identity}", "1")

    def ready(self, epoch: int, identity: str) -> bool:
        return bool(self._store.check([f"ready/{epoch}/{identity}"]))

    def set_go(self, epoch: int) -> None:
        self._store.set(f"go/{epoch}", "1")

    def may_go(self, epoch: int) -> bool:
        return bool(self._store.check([f"go/{epoch}"]))

    # -- layout and groups ----------------------------------------------------------------------------------------

    def set_manifest(self, text: bytes) -> None:
        self._store.set("manifest", text.decode())

    def manifest(self) -> bytes:
        return bytes(self._store.get("manifest"))

    def form(self, epoch: int, rank: int, size: int, timeout_s: float) -> Group:
        """Connect with all other ranks of an epoch; raises when one does not come before the timeout."""
        host = self.address.rpartition(":")[0]
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        group = dist.ProcessGroupGloo(dist.PrefixStore(f"group/{epoch}", self._store), rank, size, options)
        return Group(group, epoch, timeout_s)


class Group:
    """A connected group of one epoch; rank 0 sends."""

    def __init__(self, group: Any, epoch: int, timeout_s: float) -> None:
        self.epoch = epoch
        self._group = group
        self._timeout = timedelta(seconds=timeout_s)

    def broadcast(self, bucket: torch.Tensor) -> None:
        """Send (rank 0) or receive one bucket; raises RuntimeError when a member is gone or late."""
        self._group.broadcast(bucket, root=0).wait(self._timeout)


def buckets(flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The flat block in pieces that each have their own deadline."""
    return tuple(flat[start : start + BUCKET_BYTES] for start in range(0, len(flat), BUCKET_BYTES))


class Ticker:
    """Polls with a pause that another thread can cut short."""

    def __init__(self) -> None:
        self._stop = threading.Event()

    def stop(self) -> None:
        self._stop.set()

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    def pause(self, seconds: float = POLL_S) -> None:
        self._stop.wait(seconds)


def deadline_in(seconds: float) -> float:
    return time.monotonic() + seconds


def past(deadline: float) -> bool:
    return time.monotonic() > deadline


def first_line(problem: BaseException) -> str:
    """The start of a message of torch, which may go on for pages."""
    return str(problem).strip().split("\n", 1)[0][:160]


def _write_private(file: Path, text: str) -> None:
    """Put a file in place at once and complete, readable by this user only: it holds the secret prefix."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}.new")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as out:
        out.write(text)
    os.rename(temporary, file)
