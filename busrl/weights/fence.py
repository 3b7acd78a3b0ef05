"""The fence around a change of shared weights: one page of shared memory, which says whether they are at rest.

Used by both sides of `weights.one_copy`. Knows nothing of tensors.

    at rest (version v) --learner: begin--> to be changed --engine: paused--> being changed --learner: end--> at rest
                                                                                                     (version v + 1)
- The learner changes no weight before the engine has said that it is paused for this very change.
- State, version and step share one 64-bit word, so nobody sees one of them without the others.
- Little-endian words: 0 magic, 1 layout, 2-3 the engine's pid and start, 4-5 the learner's, 8 the state
  (step << 32 | version << 1 | 1 while it is to be changed), 16 the state word that the engine is paused for.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from busrl.errors import UserError
from busrl.weights.base import NOTHING
from busrl.weights.mark import Mark

MAGIC = int.from_bytes(b"busrlfnc", "little")
LAYOUT, SIZE = 1, 4096
W_MAGIC, W_LAYOUT, W_OWNER, W_LEARNER, W_STATE, W_PAUSED = 0, 1, 2, 4, 8, 16
MOST = (1 << 31) - 1  # of a version


@dataclass(frozen=True)
class State:
    """Version and step of the weights, and whether they are at rest. Version 0 is what the engine loaded."""

    version: int
    step: int
    changing: bool

    @property
    def word(self) -> int:
        if not (0 <= self.version <= MOST and 0 <= self.step < 1 << 32):
            raise UserError(f"version {self.version} of step {self.step}: the fence counts to {MOST}")
        return self.step << 32 | self.version << 1 | self.changing

    @classmethod
    def of(cls, word: int) -> State:
        return cls(word >> 1 & MOST, word >> 32, bool(word & 1))

    @property
    def stamp(self) -> tuple[int, int]:
        """(version, step), NOTHING before the first publication."""
        return (self.version, self.step) if self.version else NOTHING


class Fence:
    """A mapping of the page."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.inode = os.fstat(descriptor).st_ino
        self._map = mmap.mmap(descriptor, SIZE)
        self._words: npt.NDArray[np.uint64] = np.frombuffer(self._map, np.uint64)

    @classmethod
    def create(cls, path: Path) -> Fence:
        """A new page of this process's under that name, at rest with version 0; readable by this user only."""
        draft = path.with_name(f"{path.name}.{os.getpid()}.new")
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, SIZE)
            made = cls(path, descriptor)
            made._words[:2] = MAGIC, LAYOUT
            made._set_mark(W_OWNER, Mark.mine())
            os.rename(draft, path)
            return made
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    @classmethod
    def attach(cls, path: Path) -> Fence | None:
        """The page of that name, None if there is no such file; UserError if it is no page, or another user's."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        except OSError as problem:
            raise UserError(f"{path}: no fence of shared weights there ({problem.strerror})") from None
        try:
            status = os.fstat(descriptor)
            head = np.frombuffer(os.pread(descriptor, 16, 0).ljust(16, b"\0"), np.uint64)
            if (int(head[0]), int(head[1]), status.st_size) != (MAGIC, LAYOUT, SIZE):
                raise UserError(f"{path}: no fence of shared weights, or one of another version of busrl")
            if status.st_uid != os.geteuid():
                raise UserError(f"{path} belongs to user {status.st_uid}, not to you ({os.geteuid()}): have it removed")
            return cls(path, descriptor)
        finally:
            os.close(descriptor)

    @property
    def state(self) -> State:
        return State.of(int(self._words[W_STATE]))

    @state.setter
    def state(self, state: State) -> None:
        self._words[W_STATE] = state.word

    @property
    def owner(self) -> Mark:
        """The engine's process."""
        return self._mark(W_OWNER)

    @property
    def learner(self) -> Mark:
        return self._mark(W_LEARNER)

    @learner.setter
    def learner(self, mark: Mark) -> None:
        self._set_mark(W_LEARNER, mark)

    def pause_for(self, state: State) -> None:
        """The engine: nothing of it reads the weights until they are at rest again."""
        self._words[W_PAUSED] = state.word

    def paused_for(self, state: State) -> bool:
        return int(self._words[W_PAUSED]) == state.word

    def forget_pause(self) -> None:
        """Whatever a predecessor was told does not count any more."""
        self._words[W_PAUSED] = 0

    def still_named(self) -> bool:
        """Whether the path still leads to this page (a restarted engine puts its own there)."""
        try:
            return os.stat(self.path).st_ino == self.inode
        except FileNotFoundError:
            return False

    def close(self) -> None:
        self._words = np.zeros(SIZE // 8, np.uint64)
        self._map.close()

    def _mark(self, at: int) -> Mark:
        return Mark(int(self._words[at]), int(self._words[at + 1]))

    def _set_mark(self, at: int, mark: Mark) -> None:
        self._words[at : at + 2] = mark.pid, mark.started
