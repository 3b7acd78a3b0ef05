"""What a weight transport is: a sender in the learner, a receiver in every process that runs the model.

The learner and the rollout processes talk to these protocols alone. This module knows nothing of the bus (its
WEIGHTS_PUBLISHED is only a hint to look at `newest`), of models or of optimisers, and imports no torch.

- Versions only grow. A receiver gives complete versions only, never a mixture of two.
- `newest` never blocks; every other call has a deadline, after which its error names the process that was late.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from busrl.errors import WeightsTimeout

if TYPE_CHECKING:
    from pathlib import Path

    import torch

NOTHING = (-1, -1)  # (version, step) where no version has been published
LOOK_EVERY_S = 0.005
Kind = Literal["tensors", "adapter", "folder"]
Hook = Callable[[str], None]


# -- the learner's side ----------------------------------------------------------------------------------------


class Sender(Protocol):
    """What the learner publishes with. `hook`: see `Instrumented`."""

    hook: Hook | None

    def newest(self) -> tuple[int, int]:
        """The last version published here, also by an earlier process; NOTHING if there is none."""
        ...

    def publish(self, version: int, step: int, named: dict[str, torch.Tensor]) -> None:
        """Make the tensors available as `version`. The caller may change them again once this returns."""
        ...

    @property
    def begun(self) -> bool:
        """Whether `begin` has paused the engines for a version that is not published yet."""
        ...

    def begin(self, version: int, step: int) -> None:
        """Before the weights change to this version: where engines share them, wait until the engines pause."""
        ...

    def check(self) -> None:
        """WeightsOwnerLost if the weights lie in the memory of a process that is gone."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class GroupChange:
    """A broadcast group that was formed: its epoch, its members, and what changed since the group before."""

    epoch: int
    members: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class GroupCallbacks:
    """What a broadcasting sender reports: `formed(change)` for each group, `missing(name, text)` for a member that it
    left out. `text` names the member too. A thread of the sender makes the calls."""

    formed: Callable[[GroupChange], None]
    missing: Callable[[str, str], None]


class Instrumented:
    """A transport that calls `hook`, if one is set, with the name of each point that it reaches: a tensor copied, a
    bucket sent, a phase begun. The learner reports progress with it; fault tests kill or stop a process there."""

    hook: Hook | None = None

    def _reached(self, point: str) -> None:
        if self.hook is not None:
            self.hook(point)


class CopyingSender(Instrumented):
    """The part of a sender that publishes copies: the learner's weights are its own, so no engine has to pause."""

    begun = False

    def begin(self, version: int, step: int) -> None: ...

    def check(self) -> None: ...


# -- the side of a process that runs the model -----------------------------------------------------------------


class VersionSource(Protocol):
    """What all receivers have in common."""

    def newest(self) -> tuple[int, int]:
        """The newest complete version that can be had, and the learner's step of it; NOTHING if there is none."""
        ...

    def wait_for(self, version: int, timeout_s: float) -> tuple[int, int]:
        """Block until at least `version` is there; WeightsTimeout after the deadline."""
        ...

    def close(self) -> None: ...


class TensorReceiver(VersionSource, Protocol):
    """A receiver whose versions are values for the model's tensors."""

    @property
    def kind(self) -> Literal["tensors"]: ...

    def fetch(self, params: dict[str, torch.Tensor]) -> tuple[int, int]:
        """Write the newest complete version into `params`, in place; returns (version, step)."""
        ...


class FileReceiver(VersionSource, Protocol):
    """A receiver whose versions are directories: a whole model ("folder") or an adapter for one ("adapter")."""

    @property
    def kind(self) -> Literal["adapter", "folder"]: ...

    def take(self) -> tuple[int, int, Path]:
        """Version, step and complete directory of the newest version; it stays until the next `take`."""
        ...


Receiver = TensorReceiver | FileReceiver  # `kind` tells which


class PollingReceiver(Instrumented, ABC):
    """The part of a receiver that looks: nothing in another process's memory or directory can be waited on."""

    @abstractmethod
    def newest(self) -> tuple[int, int]: ...

    @abstractmethod
    def _writer(self) -> str:
        """Where versions come from, and what the writer is doing; the start of an error."""

    def wait_for(self, version: int, timeout_s: float) -> tuple[int, int]:
        deadline, pause = time.monotonic() + timeout_s, threading.Event()
        while (found := self.newest())[0] < version:
            if time.monotonic() > deadline:
                raise WeightsTimeout(f"{self._writer()}: no version {version} after {timeout_s:g} s, newest {found[0]}")
            pause.wait(LOOK_EVERY_S)
        return found


class VersionSteps:
    """Which learner step made which policy version, of the last `kept` versions that were added.

    Versions are added in the order of their numbers. One that is not the newest changes nothing; one that is added
    again keeps the smallest step.
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

    def step_of(self, version: int) -> int:
        """The step of the newest version that is not above `version`, 0 if none is known: what an unknown version made
        looks too old, never too new."""
        i = bisect_right(self._versions, version)
        return self._steps[i - 1] if i else 0

    def step_of_row(self, version: int, newest_step: int) -> int:
        """The same where versions without an entry were published in a row at one step, that of the next entry;
        `newest_step` for those above all entries."""
        i = bisect_left(self._versions, version)
        return self._steps[i] if i < len(self._steps) else newest_step

    def state(self) -> list[list[int]]:
        """[version, step] of each entry, for a checkpoint."""
        return [list(pair) for pair in zip(self._versions, self._steps, strict=True)]

    def load(self, state: Sequence[Sequence[int]]) -> None:
        self._versions, self._steps = [int(v) for v, _ in state], [int(s) for _, s in state]
