"""What a weight transport is: a sender in the learner, a receiver in every process that runs the model.

The learner role and the engines' roles talk to these protocols alone. Knows nothing of the bus (its WEIGHTS_PUBLISHED
is only a reason to look at `newest`), of models or of optimisers, and imports no torch.

- Versions only grow. A receiver hands out complete versions only, never a mixture of two.
- `newest` never blocks; every other call has a deadline, after which its error names who was late.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

NOTHING = (-1, -1)  # (version, step) where no version has been published


class Sender(Protocol):
    """The learner's side."""

    def newest(self) -> tuple[int, int]:
        """The last version that was published here, also by an earlier process; NOTHING if there is none."""
        ...

    def publish(self, version: int, step: int, named: dict[str, torch.Tensor]) -> None:
        """Make the tensors available as `version`. They may be changed again as soon as this returns."""
        ...

    def forget(self, member: str) -> None:
        """A receiver is known to be dead: do not wait for it any more."""
        ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """The side of a process that runs the model.

    `kind` says what a version is: "tensors" are fetched into parameters; an "adapter" enters a running engine, a
    "folder" (of an adapter or of a whole checkpoint) is what an engine starts again with: these are taken as files, by
    `take() -> (version, step, path)` (`Folders`).
    """

    kind: str

    def newest(self) -> tuple[int, int]:
        """The newest complete version that `fetch` would give, and the learner's step of it; NOTHING if none."""
        ...

    def wait_for(self, version: int, timeout_s: float) -> tuple[int, int]:
        """Block until at least `version` is there; WeightsTimeout after the deadline."""
        ...

    def fetch(self, params: dict[str, torch.Tensor]) -> tuple[int, int]:
        """Write the newest complete version into `params`, in place; returns which it was."""
        ...

    def step_of(self, version: int) -> int:
        """The learner's step of a version that this receiver has fetched; 0 if it is not known."""
        ...

    def close(self) -> None: ...


class Folders(Receiver, Protocol):
    """A receiver whose versions are directories."""

    def take(self) -> tuple[int, int, Path]:
        """The newest complete version, its step, and a directory of its files, which stays until the next `take`."""
        ...


class StepTable:
    """Remembers the learner's step of the last versions that were fetched."""

    def __init__(self, kept: int = 4096) -> None:
        self._steps: dict[int, int] = {}
        self._kept = kept

    def add(self, version: int, step: int) -> None:
        self._steps[version] = step
        if len(self._steps) > self._kept:
            del self._steps[next(iter(self._steps))]

    def step_of(self, version: int) -> int:
        return self._steps.get(version, 0)
