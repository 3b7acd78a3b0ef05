"""The way of a claim at home, traced: the files that it visits from a host's request to the answer that ends it."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest
from in_memory import batch_of

import busrl
from busrl.bus import Endpoint
from busrl.bus.broker import StopRequest, run_broker
from busrl.hosts import messages as g
from busrl.paths import CLAIMED_FROM, RunPaths
from busrl.preflight.load import load
from busrl.protocol import messages as m
from busrl.ring import Fates, OfdLock, Ring
from busrl.roles.actor import Parts
from busrl.roles.keeper import Keeper

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.toml"
PACKAGE = f"{Path(busrl.__file__).parent}/"
PATIENCE_S = 30.0
MOST_FILES = 12


def home_keeper(folder: Path, bus: Endpoint) -> Keeper:
    """A keeper on a ring and a bus of this process, without its loop."""
    model = folder / "model"
    model.mkdir()
    words = {str(number): number for number in range(16)}
    (model / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}}))
    topology = load(QUICKSTART)
    RunPaths.of(folder).run_json.write_text(json.dumps({CLAIMED_FROM: "a1" * 16}))
    ring = Ring.create(str(folder / "ring"), slots=8, slot_bytes=4096, processes=8, uuid=bytes(16))
    ring.register("keeper", "keeper")
    fates, validate_fates = (Fates(str(folder / name), create=True, capacity=1 << 16) for name in ("f", "v"))
    ring.bind_fates(fates, validate_fates)
    topology = replace(topology, model=replace(topology.model, path=str(model)))
    keeper = Keeper(folder, "keeper", Parts(topology, ring, bus, fates, validate_fates))
    keeper.setup()
    return keeper


@pytest.fixture
def endpoint() -> Iterator[Callable[..., Endpoint]]:
    """Endpoints of one bus."""
    folder, stop, opened = Path(tempfile.mkdtemp(prefix="busrl.")), StopRequest(), list[Endpoint]()
    places = [f"ipc://{folder}/{name}.sock" for name in ("pub", "sub")]
    ready = threading.Event()
    thread = threading.Thread(target=run_broker, args=(*places, OfdLock(str(folder / "lock")), stop), kwargs={
        "on_ready": ready.set})
    thread.start()
    assert ready.wait(PATIENCE_S)

    def make(name: str, *topics: str) -> Endpoint:
        opened.append(Endpoint(name, *places, subscribe=topics))
        opened[-1].ready(PATIENCE_S)
        return opened[-1]

    yield make
    for end in opened:
        end.close()
    stop.set()
    thread.join(PATIENCE_S)
    shutil.rmtree(folder)


@pytest.fixture
def keeper(endpoint: Callable[..., Endpoint]) -> Iterator[Keeper]:
    folder = Path(tempfile.mkdtemp(prefix="busrl.test.", dir="/dev/shm"))
    keeper = home_keeper(folder, endpoint("keeper", *(f"{m.name_of(kind)}/" for kind in g.REMOTE)))
    for uid in range(4):
        assert keeper.ring.dispatch(
            uid=uid, group=0, admission=0, member=uid, group_size=4, cls=0, task=b'{"prompt": "1"}', prompt_crc=uid,
            max_new_tokens=8, temperature=1.0, version=0, step=0,
        )
    yield keeper
    keeper.ring.close()
    shutil.rmtree(folder)


class Trace:
    """The files of busrl that `run` visits in this thread."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def run(self, work: Callable[[], None]) -> None:
        sys.setprofile(self._note)
        try:
            work()
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and (file := frame.f_code.co_filename).startswith(PACKAGE):
            self.files.add(file.removeprefix(PACKAGE))


def test_a_claim_visits_few_files_at_home(endpoint: Callable[..., Endpoint], keeper: Keeper) -> None:
    host = endpoint("gpu-0", *(f"{m.name_of(kind)}/gpu-0/" for kind in g.MESSAGES if kind not in g.REMOTE))

    def answer_to(message: g.Remote) -> tuple[m.Message, set[str]]:
        trace, answer = Trace(), None
        host.send(message)
        for _ in range(100):
            trace.run(lambda: keeper.idle(0.1))
            if (answer := host.recv(0.1)) is not None:
                return answer, trace.files
        raise AssertionError(f"the keeper did not answer {message}")

    answer_to(g.RemoteJoin(life=1, role="host"))
    for req in (1, 2):  # the first time topics are made too
        tasks, claimed = answer_to(g.RemoteClaim(life=1, req=req, capacity=2))
        assert isinstance(tasks, g.GatewayTasks) and len(tasks.tasks) == 2
        names = [task.task for task in tasks.tasks]
        settled, answered = answer_to(batch_of(names))
        assert isinstance(settled, g.GatewaySettled) and settled.done == names
    assert keeper.ring.stats().occupancy["GENERATED"] == 4
    assert len(claimed | answered) <= MOST_FILES, sorted(claimed | answered)
