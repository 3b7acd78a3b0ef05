"""The interface of a weight transport: a sender in the learner, a receiver in every process that runs the model.

The learner and the rollout processes talk to these classes alone. Knows nothing of models, optimisers or the bus, whose
WEIGHTS_PUBLISHED is only a hint to look at `newest`. Imports no torch.

- Versions only grow. A receiver gives complete versions only, never a mixture of two.
- `newest` never blocks; every other call has a deadline, after which its error names the process that was late.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from busrl.errors import UserError, WeightsTimeout

if TYPE_CHECKING:
    import torch

NOTHING = (-1, -1)  # (version, step) where no version has been published
LOOK_EVERY_S = 0.005
Hook = Callable[[str], None]
Write = Callable[[Path, "Mapping[str, torch.Tensor]"], None]  # (folder, tensors by name): the files of a version
T = TypeVar("T")


class Instrumented:
    """A transport that calls `hook`, if it is set, with the name of each point that it reaches: a tensor copied, a
    bucket sent, a phase begun. The learner reports progress with it; fault tests kill or stop a process there."""

    hook: Hook | None = None

    def _reached(self, point: str) -> None:
        if self.hook is not None:
            self.hook(point)


# -- the learner's side ----------------------------------------------------------------------------------------


class Sender(Instrumented, ABC):
    """The side that publishes, in the learner. Where engines share the weights, call `pause_engines` before the weights
    change."""

    @abstractmethod
    def newest(self) -> tuple[int, int]:
        """The last version published here, also by an earlier process; NOTHING if there is none."""

    @abstractmethod
    def publish(self, version: int, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Make the tensors available as `version`. The caller may change them again once this returns. A mapping with
        `described` makes each tensor when it is read; it is read one tensor after the other."""

    @property
    def engines_paused(self) -> bool:
        """True between `pause_engines` and the publication of its version, where engines share the weights."""
        return False

    def pause_engines(self, version: int, step: int) -> None:
        """Wait until the engines pause, where they share the weights, so that these may change to this version."""

    def check(self) -> None:
        """WeightsOwnerLost if the weights lie in the memory of a process that is gone."""

    @abstractmethod
    def close(self) -> None: ...


class SharedSender(Sender):
    """A sender whose versions are the tensors of the engine itself: the learner trains them in place."""

    @abstractmethod
    def connect(
        self, loaded: Mapping[str, torch.Tensor], device: torch.device, wait_s: float,
        stopping: Callable[[], object] = lambda: False,
    ) -> dict[str, torch.Tensor] | None:
        """The engine's weights, by the names of `loaded`, this process's own weights; None if `stopping()` became true
        meanwhile. WeightsTimeout after `wait_s`."""

    @abstractmethod
    def write(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """While the engine is paused: copy tensors that are no views of its weights, and wait for the copies. Returns
        the bytes copied."""


@dataclass(frozen=True)
class GroupChange:
    """A broadcast group that was formed: its epoch, its members, and what changed since the group before."""

    epoch: int
    members: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class GroupCallbacks:
    """Reports of a broadcasting sender: `formed(change)` for each group, `missing(name, text)` for each member that was
    left out; `text` names the member too. A thread of the sender makes the calls."""

    formed: Callable[[GroupChange], None] = lambda change: None
    missing: Callable[[str, str], None] = lambda name, text: None


# -- the side of a process that runs the model -----------------------------------------------------------------


class VersionSource(Instrumented, ABC):
    """The common part of all receivers."""

    @abstractmethod
    def newest(self) -> tuple[int, int]:
        """The newest complete version that can be had, and the learner's step of it; NOTHING if there is none."""

    def wait_for(self, version: int, timeout_s: float) -> tuple[int, int]:
        """Block until at least `version` is there; WeightsTimeout after the deadline."""
        reached = poll(lambda: newest if (newest := self.newest())[0] >= version else None, timeout_s)
        if reached is None:
            last = self.newest()[0]
            raise WeightsTimeout(f"{self._writer()}: no version {version} after {timeout_s:g} s, newest {last}")
        return reached

    def _writer(self) -> str:
        """Name where versions come from, and what the writer is doing; the start of an error."""
        return "weights"

    @abstractmethod
    def close(self) -> None: ...


class TensorReceiver(VersionSource):
    """A receiver whose versions are values of the model's tensors."""

    kind: Literal["tensors"] = "tensors"

    @abstractmethod
    def fetch(self, params: dict[str, torch.Tensor]) -> tuple[int, int]:
        """Write the newest complete version into `params`, in place; returns (version, step)."""


class SharedReceiver(TensorReceiver):
    """A receiver of one copy: the learner trains the very tensors that the engine shares."""

    @abstractmethod
    def share(self, tensors: Mapping[str, torch.Tensor], wanted: Mapping[str, tuple[int, ...]] | None = None) -> None:
        """Share the model's tensors with the learner. `wanted`: names and shapes of the checkpoint, if the engine has
        fused its tensors."""


class FileReceiver(VersionSource):
    """A receiver whose versions are directories: a whole model ("folder") or an adapter for one ("adapter")."""

    kind: Literal["adapter", "folder"]

    @abstractmethod
    def take(self) -> tuple[int, int, Path]:
        """Version, step and complete directory of the newest version; it stays until the next `take`."""


Receiver = TensorReceiver | FileReceiver  # `kind` tells which


# -- waiting, and files that another process has made ----------------------------------------------------------


def poll(look: Callable[[], T], timeout_s: float, every_s: float = LOOK_EVERY_S) -> T:
    """Call `look` until its result is true, or until the timeout; returns the last result. It polls because nothing
    signals a change in another process's memory."""
    deadline = time.monotonic() + timeout_s
    while not (seen := look()) and time.monotonic() < deadline:
        time.sleep(every_s)
    return seen


def open_own(path: Path, flags: int) -> int | None:
    """A descriptor of the file, None if there is no file. UserError for a link, and for a file of another user, who
    could change the weights or read them."""
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise UserError(f"{path}: {problem.strerror}; it is no file of this run, have it removed") from None
    if (owner := os.fstat(descriptor).st_uid) != os.geteuid():
        os.close(descriptor)
        raise UserError(f"{path} belongs to user {owner}, not to you ({os.geteuid()}): have it removed")
    return descriptor


def is_named(path: Path, inode: int) -> bool:
    """Tell whether the path leads to that file (a process that was started again may have replaced it)."""
    try:
        return path.stat().st_ino == inode
    except FileNotFoundError:
        return False


def alive(pid: int | str) -> str:
    """ "alive" or "dead", for messages."""
    return "alive" if os.path.exists(f"/proc/{pid}") else "dead"


# -- versions and steps ----------------------------------------------------------------------------------------


class VersionSteps:
    """The learner step that made each policy version, for the last `kept` versions.

    Versions are added in ascending order. Adding an older version than the newest changes nothing; adding the newest
    again keeps the smaller step.
    """

    def __init__(self, kept: int = 4096) -> None:
        self._versions: list[int] = []
        self._steps: list[int] = []
        self._kept = kept

    def add(self, version: int, step: int) -> None:
        if not self._versions or version > self._versions[-1]:
            self._versions.append(version)
            self._steps.append(step)
            del self._versions[: -self._kept], self._steps[: -self._kept]
        elif version == self._versions[-1]:
            self._steps[-1] = min(self._steps[-1], step)

    def step_of(self, version: int, unknown: int = 0) -> int:
        """The step of the newest version up to `version`, else `unknown`: 0 looks too old, never too new."""
        i = bisect_right(self._versions, version)
        return self._steps[i - 1] if i else unknown

    def step_of_row(self, version: int, newest_step: int) -> int:
        """The step where versions without an entry were published in a row at one step, that of the next entry;
        `newest_step` for those above all entries."""
        i = bisect_left(self._versions, version)
        return self._steps[i] if i < len(self._steps) else newest_step

    def state(self) -> list[list[int]]:
        """[version, step] of each entry, for a checkpoint."""
        return [list(pair) for pair in zip(self._versions, self._steps, strict=True)]

    def load(self, state: Sequence[Sequence[int]]) -> None:
        self._versions, self._steps = [int(v) for v, _ in state], [int(s) for _, s in state]
