"""The length predictor of a run: made as the topology says, and kept in `predictor.npz`.

Talks to that file. Used by the scheduler, which makes, restores and saves it. Knows nothing of policies or slots.

- Losing the state costs order, never a sample: a file that can not be used is warned about and passed over, and a save
  that fails is tried again later.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from busrl.data import JsonlStream
from busrl.paths import RunPaths
from busrl.roles import plaindata
from busrl.scheduling.predictors import Predictor, make_predictor
from busrl.topology import Topology

SAVE_EVERY_S = 30.0
Warn = Callable[[str], None]


class PredictorState:
    """`guard` is the predictor to be asked. `warn` is told of what goes wrong."""

    def __init__(self, topology: Topology, paths: RunPaths, stream: JsonlStream, warn: Warn) -> None:
        self.paths, self._warn = paths, warn
        self.guard: Predictor = make_predictor(topology.scheduler.predictor)
        self._next_save = time.monotonic() + SAVE_EVERY_S

    def restore(self) -> bool:
        """Take over what an earlier scheduler learned; False if there was nothing that could be used."""
        try:
            state = plaindata.load(self.paths.predictor)
            if state is not None:
                self.guard.load(state)
                return True
        except (KeyError, ValueError) as problem:
            self._warn(f"{self.paths.predictor}: what the predictor learned is not used: {problem}")
        return False

    def keep(self, now: float) -> None:
        """Save from time to time."""
        if now >= self._next_save:
            self._next_save = now + SAVE_EVERY_S
            self.save()

    def save(self) -> None:
        """Replace the saved state by the present one; nothing if nothing was learned."""
        state = self.guard.state()
        try:
            if state:
                plaindata.save(self.paths.predictor, state)
        except OSError as problem:
            self._warn(f"what the predictor learned is not saved: {problem}")

    def close(self) -> None:
        self.save()
