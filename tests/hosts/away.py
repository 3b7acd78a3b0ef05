"""A host beside a keeper on a ring: what its satellite exchanges with home, without a bus, at a time of the test's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from on_a_ring import Keeper

from busrl.hosts import messages as g
from busrl.hosts.holdings import AnswerReader, Holdings
from busrl.hosts.membership import HostSource
from busrl.hosts.satellite import NAME_AFTER, PRESENT_S, Exchange, reader_for
from busrl.preflight.load import load
from busrl.protocol import messages as m
from busrl.ring import Fates, Ring
from busrl.topology import Topology

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.toml"
ROWS = 4


class Wire:
    """The bus of the run: home answers a request at once, unless a cable is out."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper, self.requests, self.replies = keeper, list[g.Remote](), list[m.Message]()
        self.exchange: Exchange | None = None
        self._requests_arrive = self._replies_arrive = True

    def send(self, message: m.Message) -> None:
        if not isinstance(message, g.Remote):
            return
        self.requests.append(message)
        for reply in self.keeper.ask("gpu-0", message) if self._requests_arrive else ():
            self.replies.append(reply)
            if self._replies_arrive and self.exchange is not None:
                self.exchange.receive(reply)

    @contextlib.contextmanager
    def losing_requests(self) -> Iterator[None]:
        self._requests_arrive = False
        yield
        self._requests_arrive = True

    @contextlib.contextmanager
    def losing_replies(self) -> Iterator[None]:
        self._replies_arrive = False
        yield
        self._replies_arrive = True


class Away:
    """A host that has joined and named its claims; `now` is the time there."""

    def __init__(self, folder: Path, keeper: Keeper, topology: Topology, judges: bool) -> None:
        self.keeper, self.wire, self.now, self.problems = keeper, Wire(keeper), 0.0, list[str]()
        self.ring = Ring.create(str(folder / "away"), slots=16, slot_bytes=4096, processes=8, uuid=bytes(16))
        self.ring.register("satellite", "satellite")
        fates, validate_fates = (
            Fates(str(folder / name), create=True, capacity=1 << 16) for name in ("away.f", "away.v")
        )
        self.ring.bind_fates(fates, validate_fates)
        self.tasks = Holdings(self.ring, fates, validate_fates)
        self.exchange = self.wire.exchange = Exchange(
            topology, HostSource("", "", "gpu-0", "", 1), self.tasks,
            AnswerReader(self.ring, reader_for(topology, self.ring).plays, judges), self.wire, self._warn,
            lambda: self.problems.append("replaced"), clock=lambda: self.now,
        )
        self.beat()

    @classmethod
    def of(cls, folder: Path, keeper: Keeper, config: Path = QUICKSTART, here: str = "", *more: str) -> Away:
        """A host of this topology, which judges its answers if they are episodes."""
        topology = load(config, [f"generation.max_batch={ROWS}", "groups.size=2", *more])
        return cls(folder, keeper, replace(topology, here=here), judges=topology.has_callers)

    def claim(self, wanted: int) -> int:
        """Name all claims and ask for so many more; how many slots are queued here then."""
        names = self.tasks.names()
        self.exchange.ask(g.RemoteClaim(life=1, capacity=len(names) + wanted, holding=names))
        self.exchange.dispatch()
        return self.queued()

    def queued(self) -> int:
        return self.ring.stats().occupancy["QUEUED"]

    def beat(self) -> None:
        """As many rounds of the timers as it takes to be sure of what home has."""
        for _ in range(NAME_AFTER + 1):
            self.now += PRESENT_S
            self.exchange.send_due()

    def close(self) -> None:
        self.ring.close()

    def _warn(self, where: str, text: str, severity: str = "", kind: str = "", uids: object = ()) -> None:
        self.problems.append(text)
