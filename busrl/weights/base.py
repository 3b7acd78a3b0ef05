"""What a weight transport is: a sender in the learner, a receiver in every process that runs the model.

The learner role and the engines' roles talk to these protocols alone. Knows nothing of the bus (its WEIGHTS_PUBLISHED
is only a reason to look at `newest`), of models or of optimisers, and imports no torch.

- Versions only grow. A receiver hands out complete versions only, never a mixture of two.
- `newest` never blocks; every other call has a deadline, after which its error names who was late.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    import torch

NOTHING = (-1, -1)  # (version, step) where no version has been published
Kind = Literal["tensors", "adapter", "folder"]


@dataclass(frozen=True)
class GroupChange:
    """A group of engines was formed: its epoch, who is in it, and what happened since the one before."""

    epoch: int
    members: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class News:
    """Who hears what becomes of the groups: `formed(change)`, and `missing(name, text)` of a member that is left out
    without having said that it leaves; the text names it too. Called by a thread of the sender."""

    formed: Callable[[GroupChange], None]
    missing: Callable[[str, str], None]


Hook = Callable[[str], None]


class Sender(Protocol):
    """The learner's side. `hook`, if there is one, is called at each piece of a publication, with its name."""

    hook: Hook | None

    def newest(self) -> tuple[int, int]:
        """The last version that was published here, also by an earlier process; NOTHING if there is none."""
        ...

    def publish(self, version: int, step: int, named: dict[str, torch.Tensor]) -> None:
        """Make the tensors available as `version`. They may be changed again as soon as this returns."""
        ...

    @property
    def begun(self) -> bool:
        """Whether engines stand still, because of `begin`, for a version that is not published yet."""
        ...

    def begin(self, version: int, step: int) -> None:
        """The weights are about to be changed to this version: where engines share them, wait until they pause."""
        ...

    def check(self) -> None:
        """WeightsOwnerLost if the weights lie in the memory of a process that is gone."""
        ...

    def close(self) -> None: ...


class Copies:
    """The part of a sender that gives copies away: the learner's weights are its own, so nobody has to stand still."""

    begun = False
    hook: Hook | None = None

    def begin(self, version: int, step: int) -> None: ...

    def check(self) -> None: ...


class Receiver(Protocol):
    """The side of a process that runs the model.

    `kind` says what a version is. "tensors": `fetch` writes it into the model. "adapter" and "folder" are receivers
    with `take` beside it (`FolderReceiver`), whose `fetch` raises.
    """

    @property
    def kind(self) -> Kind: ...

    def newest(self) -> tuple[int, int]:
        """The newest complete version that `fetch` would give, and the learner's step of it; NOTHING if none."""
        ...

    def wait_for(self, version: int, timeout_s: float) -> tuple[int, int]:
        """Block until at least `version` is there; WeightsTimeout after the deadline."""
        ...

    def fetch(self, params: dict[str, torch.Tensor]) -> tuple[int, int]:
        """Write the newest complete version into `params`, in place; returns which it was."""
        ...

    def close(self) -> None: ...


class FolderReceiver(Receiver, Protocol):
    """A receiver whose versions are directories: a whole model ("folder") or an adapter for one ("adapter")."""

    def take(self) -> tuple[int, int, Path]:
        """Version, step and complete directory of the newest version; it stays until the next `take`."""
        ...


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
