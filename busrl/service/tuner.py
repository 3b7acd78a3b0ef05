"""The role tuner: trains the models of a service as its clients drive it, in the place of a learner.

Talks to the door through the two logs of `requests`, to models through `tenants` or `whole`. Knows nothing of HTTP, of
engines or of rewards.

- Whatever kills it costs time alone: its next life runs the requests again that are in no state (`driver`).
- A pause of the run holds execution; requests are still logged.
- A full disk holds it too, from the answer on that finds no room.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from busrl.data.pretrained import import_classes
from busrl.protocol import messages as m
from busrl.roles.actor import Actor
from busrl.service.driver import Driver, Limits
from busrl.service.figures import Course
from busrl.service.folders import ServiceFolders
from busrl.service.messages import AnswersLogged, RequestsLogged
from busrl.service.models import Models
from busrl.service.registry import FULL
from busrl.service.tenants import Tenants
from busrl.service.whole import WholeModels
from busrl.states import PAUSE_STARTING, HeaderWord
from busrl.system import device
from busrl.topology import Topology

log = logging.getLogger("busrl")
TEND_S = 5.0
SMALL_SHARE = 4  # of a turn: what comes between a forward and its backward may hold so much more


def import_all(topology: Topology, name: str) -> None:
    import_classes(topology.model.path)


class Tuner(Actor):
    role = "tuner"
    warm = staticmethod(import_all)
    singleton = True
    tick_s = 0.1  # without a message
    subscribe: ClassVar[tuple[type[m.Message], ...]] = (RequestsLogged,)
    next_tend: float = 0.0
    told: int = 0  # answers of this life that the door was told of

    def setup(self) -> None:
        topology = self.topology
        with self.activity("load", topology.limits.work_s):
            where = ServiceFolders(self.paths.root)
            where.root.mkdir(exist_ok=True)
            warn = partial(self.warn, self.role)
            self.course = Course(self.paths.metrics, where, warn, topology.log.keep)
            self.driver = Driver(models_of(topology, self.role), where, self.course, warn, limits_of(topology))
            self.driver.follow()
        if replays := sum(model.replays for model in self.driver.standing.values()):
            log.info("%d requests that were answered are run again", replays)
        pause = self.ring.header(HeaderWord.GENERATION_PAUSE)
        self.ring.set_header(HeaderWord.GENERATION_PAUSE, pause & ~PAUSE_STARTING)

    def work(self) -> bool:
        news = self.driver.follow()
        if self.course.due:
            self._show()
        if (now := time.monotonic()) >= self.next_tend:
            self.next_tend = now + TEND_S
            with self.activity("upkeep", self.topology.limits.work_s):
                self.driver.tend()
        if self.paused or not self.driver.ready:
            return news
        with self.activity("request", self.topology.limits.work_s):
            advanced = self.driver.advance()
        self.write_or_wait("answers", self.driver.flush)
        if self.driver.answers.written > self.told:
            self.told = self.driver.answers.written
            self.bus.send(AnswersLogged())
        return advanced

    def teardown(self) -> None:
        with self.activity("states", self.topology.limits.work_s):
            self.driver.write_states()
        self._show()
        self.driver.close()
        self.course.close()

    def _show(self) -> None:
        self.course.show(self.driver.standing)


def models_of(topology: Topology, process: str) -> Models[Any]:
    """The models of a service over its base, which is loaded."""
    settings, folder = topology.tinker, Path(topology.model.path)
    dtype, where = topology.model.dtype, device.choose(topology.device_of(process))
    if settings.weights == FULL:
        return WholeModels(folder, dtype=dtype, device=where, context=settings.context,
                           micro_batch_tokens=settings.turn_tokens)
    by_torch = any(entry.role == "rollout" and entry.engine == "torch" for entry in topology.process)
    return Tenants(folder, dtype=dtype, device=where, context=settings.context, max_rank=settings.max_rank,
                   micro_batch_tokens=settings.turn_tokens, of_experts=not by_torch)


def limits_of(topology: Topology) -> Limits:
    settings = topology.tinker
    return Limits(
        topology.learner.wal == "sync", settings.state_every_s, settings.session_s, settings.resident_mb << 20,
        settings.keep_answers_s, settings.snapshot_mb << 20, settings.weights == FULL,
        settings.turn_tokens // SMALL_SHARE,
    )
