"""A learner for several models of one base: the base is in memory once, each model has its adapter.

A `ModelLearner` is the learner of one model, with its own adapter, optimiser, plan, log and publisher. Talks to the
models by the function that reads them (`Bases`). Knows nothing of what a step is.

- Steps are made in turns: at any time one model is trained.
- A model whose steps are made ends by itself; the process ends with the last.
- A model whose version a round of validation holds keeps its next one back, and the others go on.
- The weights of the base are the same tensors in all: no step changes them, whatever an adapter does.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from busrl.bus import Endpoint
from busrl.roles import version_pin
from busrl.roles.learner.loop import Learner, import_all
from busrl.roles.learner.models import Read
from busrl.several.together import Part, Together
from busrl.states import HeaderWord
from busrl.topology import Topology
from busrl.training.model import load


class Bases:
    """Models that are read and never trained: each folder is read once, and given out with the same tensors."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], Any] = {}

    def read(self, folder: Path, dtype: torch.dtype, device: torch.device, attention: str) -> Any:
        """The model of that folder, whose modules are the caller's own."""
        key = folder, dtype, device, attention
        if key not in self._kept:
            self._kept[key] = load(*key)
        model = self._kept[key]
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        return copy.deepcopy(model, shared)


class ModelLearner(Part, Learner):
    """The learner of one of the models."""

    def __init__(self, process: Together, topology: Topology, read: Read) -> None:
        super().__init__(process, topology)
        self.read, self.kept_back = read, False

    def work(self) -> bool:
        if not self.kept_back:
            return super().work()
        self._attend()
        self._publish()
        self.shown.usually(version_pin.HELD if self.kept_back else "")
        return not self.kept_back

    def _publish(self, wait: bool = False) -> float:
        """Make the present weights the next version. While a round of validation holds the one before, for which a
        learner of one model waits here, keep them back: one look decides, and nothing waits."""
        self.kept_back = self.publisher.still_held()
        return 0.0 if self.kept_back else super()._publish(wait)

    def _finish(self) -> None:
        if self.ring.header(HeaderWord.UNPUBLISHED_GROUPS):
            self._publish()
        if not self.kept_back:
            super()._finish()


class SharedLearner(Together):
    """A learner with one base, and an adapter for each of several models."""

    role = "learner"
    warm = staticmethod(import_all)
    singleton = True
    tick_s = Learner.tick_s
    subscribe = Learner.subscribe

    def setup(self) -> None:
        bases = Bases()
        self.set_up([ModelLearner(self, self.whole.of(tag), bases.read) for tag in self.whole.models_of(self.name)])

    def bus_of(self, topology: Topology) -> Endpoint:
        """An endpoint with the name of the model's learner, from whom alone its updates count; it gets no message."""
        settings = topology.bus
        return Endpoint(
            topology.named(self.role, 0).replace("/", "-"), self._run.frontend, self._run.backend,
            hwm=settings.hwm, max_bytes=settings.max_message_bytes, report=lambda text: self.warn("bus", text),
        )

    def work(self) -> bool:
        worked = False
        for member in list(self.members):
            worked = member.work() or worked
            if member.stopping and not self.stopping:
                self._end(member)
        return worked

    def _end(self, member: Part) -> None:
        """End a model whose steps are made, and the process with the last."""
        self._taken_down(member)
        self.members = [other for other in self.members if other is not member]
        if not self.members:
            self.stop(member.stopping)

    def idle(self, timeout_s: float) -> None:
        for member in self.members:
            member.idle(timeout_s / len(self.members))

    def teardown(self) -> None:
        for member in self.members:
            self._taken_down(member)
        self.close_rings()

    def _taken_down(self, member: Part) -> None:
        member.teardown()
        if member.bus is not self.bus:
            member.bus.close()
