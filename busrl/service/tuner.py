"""The role tuner: trains the adapters of a service as its clients drive it, in the place of a learner.

Talks to the door through the two logs of `requests`, to a model through `tenants`. Knows nothing of HTTP, of engines or
of rewards.

- Whatever kills it costs time alone: its next life runs the requests again that are in no state (`driver`).
- A pause of the run holds execution; requests are still logged.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import ClassVar

from busrl.data.pretrained import import_classes
from busrl.protocol import messages as m
from busrl.roles.actor import Actor
from busrl.service.driver import Driver
from busrl.service.figures import Course
from busrl.service.folders import ServiceFolders
from busrl.service.messages import AnswersLogged, RequestsLogged
from busrl.service.tenants import Tenants
from busrl.states import PAUSE_STARTING, HeaderWord
from busrl.system import device
from busrl.topology import Topology

log = logging.getLogger("busrl")


def import_all(topology: Topology, name: str) -> None:
    import_classes(topology.model.path)


class Tuner(Actor):
    role = "tuner"
    warm = staticmethod(import_all)
    singleton = True
    tick_s = 0.1  # without a message
    subscribe: ClassVar[tuple[type[m.Message], ...]] = (RequestsLogged,)

    def setup(self) -> None:
        topology = self.topology
        with self.activity("load", topology.limits.work_s):
            where = ServiceFolders(self.paths.root)
            where.root.mkdir(exist_ok=True)
            tenants = Tenants(Path(topology.model.path), dtype=topology.model.dtype,
                              device=device.choose(topology.device_of(self.role)), context=topology.tinker.context,
                              max_rank=topology.tinker.max_rank)
            warn = partial(self.warn, self.role)
            self.course = Course(self.paths.metrics, where, warn, topology.log.keep)
            self.driver = Driver(tenants, where, self.course, warn, topology.learner.wal == "sync",
                                 topology.tinker.state_every_s)
            self.driver.follow()
        if replays := self.driver.replays:
            log.info("%d requests that were answered are run again", replays)
        pause = self.ring.header(HeaderWord.GENERATION_PAUSE)
        self.ring.set_header(HeaderWord.GENERATION_PAUSE, pause & ~PAUSE_STARTING)

    def work(self) -> bool:
        news = self.driver.follow()
        if self.course.due:
            self._show()
        if self.paused or self.driver.next_line is None:
            return news
        with self.activity("request", self.topology.limits.work_s):
            advanced = self.driver.advance()
        if advanced:
            self.bus.send(AnswersLogged())
        return advanced

    def teardown(self) -> None:
        with self.activity("states", self.topology.limits.work_s):
            self.driver.write_states()
        self._show()
        self.driver.close()
        self.course.close()

    def _show(self) -> None:
        self.course.show({name: line.loaded for name, line in self.driver.lines.items()}, self.driver.replays)
