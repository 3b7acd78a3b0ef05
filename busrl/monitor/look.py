"""Looks at the ring of a run without being seen: maps it read-only, takes no entry in its process table.

Talks to the ring and the fate table, both opened for reading. Knows nothing of messages or terminals.

- A run that ends takes its ring away and a later start makes another: `look` finds the one that is there now.
- The mapping is `PROT_READ`, so no bug here can write; whoever kills a monitor leaves nothing behind.
- A ring that is there and can not be read is not the same as none: `damage` says why.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

import numpy as np

from busrl.errors import RingError, RingNotFound
from busrl.monitor.seen import ProcessSeen, RingSeen
from busrl.paths import SHM, RunPaths
from busrl.ring import HEADER_WORDS, Fates, Process, Ring
from busrl.scheduling import GroupScanner


class Look:
    """The ring of one run directory, attached while it is there. `close` lets go of it."""

    def __init__(self, paths: RunPaths, ring_name: str = "", group_size: int = 0) -> None:
        self._paths, self._name, self._group_size = paths, ring_name or paths.ring_name, group_size
        self._ring: Ring | None = None
        self._file = (0, 0)
        self.damage = ""  # why the ring that is there can not be read, with the remedy
        self._fates: Fates | None = None
        self._scanner: GroupScanner | None = None

    def look(self) -> RingSeen | None:
        """What the ring shows now; None if there is no ring of this run."""
        ring = self._attached()
        if ring is None:
            return None
        stats = ring.stats()
        opened, ready = self._groups(ring)
        return RingSeen(
            slots=ring.n_slots,
            occupancy={name.lower(): count for name, count in stats.occupancy.items()},
            words={word: ring.header(word) for word in HEADER_WORDS},
            dispatched=stats.dispatched,
            finished=stats.finished,
            dropped=stats.dropped,
            reaps=stats.reaps,
            tokens=stats.tokens,
            drops=stats.drops,
            groups_open=opened,
            groups_ready=ready,
            processes=tuple(_seen(ring, process) for process in ring.processes()),
        )

    def close(self) -> None:
        """Unmap."""
        if self._ring is not None:
            self._ring.close()
            self._ring = None
        if self._fates is not None:
            self._fates.close()
            self._fates, self._scanner = None, None

    def _attached(self) -> Ring | None:
        self.damage = ""
        try:
            info = os.stat(SHM / self._name)
        except OSError:
            self.close()
            return None
        if self._ring is None or (info.st_dev, info.st_ino) != self._file:
            self.close()
            try:
                self._ring = Ring.attach(self._name, read_only=True)
            except RingNotFound:  # it went away just now
                return None
            except RingError as error:
                self.damage = str(error)
                return None
            self._file = (info.st_dev, info.st_ino)
        return self._ring

    def _groups(self, ring: Ring) -> tuple[int, int]:
        """Open groups, and of these the ones that a step could take; -1 where the fates can not be read."""
        lines = ring.lines()
        scanner = self._scanner_of(lines)
        if scanner is None:
            return -1, -1
        view = scanner.scan(lines)
        return len(view), int(np.count_nonzero((view.resolved & view.usable) | (view.training > 0)))

    def _scanner_of(self, lines: np.ndarray) -> GroupScanner | None:
        if self._fates is None and self._group_size > 0:
            with suppress(RingError, OSError):
                self._fates = Fates(str(self._paths.fates), read_only=True)
        if self._fates is None:
            return None
        trains = lines[(lines["state"] > 1) & (lines["cls"] == 0)]
        if len(trains) and int(trains["uid"].max()) >= self._fates.capacity:
            return None  # no uid of this run: the lines are damaged, and the scanner would believe them
        if self._scanner is None:
            self._scanner = GroupScanner(self._fates.view(), self._group_size)
        elif len(self._fates) != len(self._scanner.fates):
            self._scanner.fates = self._fates.view()
        return self._scanner


def _seen(ring: Ring, process: Process) -> ProcessSeen:
    now = time.monotonic_ns()
    return ProcessSeen(
        name=process.label,
        role=process.role,
        pid=process.pid,
        state="dead" if ring.is_dead(process.index) else process.state,
        activity=process.activity,
        deadline_s=process.deadline_s,
        progress_age_s=_age(now, process.progress_ns),
        activity_age_s=_age(now, process.activity_ns),
        busy_ns=process.busy_ns,
        tokens=process.tokens,
        samples=process.samples,
        version=process.version,
        remote=process.remote,
    )


def _age(now_ns: int, then_ns: int) -> float:
    return max(0, now_ns - then_ns) / 1e9
