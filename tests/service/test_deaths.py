"""Tuner and door killed at each of their calls to the file system, and half way through each write.

A child does the work and gets SIGKILL at its first chance, another one at its second, until one comes to its end:
append, execution, answer, state and rename are all among them. A model is a number here.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_driver import Service, service  # noqa: F401  (a fixture: models are numbers)

from busrl.service.audit import audit
from busrl.service.requests import Answer, LogReader, LogWriter, Request

pytestmark = pytest.mark.long

WRITES = ("pwrite", "pwritev")
CALLS = ("open", "ftruncate", "fdatasync", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir", *WRITES)
STRIDE = 4  # tests that share the chances of a tuner


class Chances:
    """Chances to die: each call to the file system, before it, and for a write also half way through it."""

    def __init__(self, at: int) -> None:
        self._left = at
        for name in CALLS:
            setattr(os, name, self._deadly(getattr(os, name), name in WRITES))

    def _deadly(self, call: Callable[..., Any], writes: bool) -> Callable[..., Any]:
        def deadly(*arguments: Any, **named: Any) -> Any:
            self._pass()
            if writes:
                file, data, offset = arguments
                whole = data if isinstance(data, bytes) else b"".join(data)
                self._pass(lambda: os.lseek(file, offset, os.SEEK_SET) + os.write(file, whole[: len(whole) // 2]))
            return call(*arguments, **named)

        return deadly

    def _pass(self, last_act: Callable[[], Any] = lambda: None) -> None:
        self._left -= 1
        if self._left == 0:
            last_act()
            os.kill(os.getpid(), signal.SIGKILL)


def outlives(work: Callable[[], Any], at: int) -> bool:
    """Tell whether a child does the work before it has its `at`-th chance to die."""
    child = os.fork()
    if child == 0:
        try:
            Chances(at)
            work()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), f"the child ended otherwise: {status}"
    return status == 0


# -- the tuner -----


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait for the disk: SIGKILL loses nothing that was written."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda file: None)


def asked(root: Path) -> Service:
    """A service of which much was asked, and nothing done."""
    service = Service(root)  # noqa: F811
    service.forward(1, 1)
    service.step(2)
    service.ask(3, "save_weights_for_sampler", sampling_session_seq_id=0)
    service.ask(4, "save_weights", path="one")
    service.forward(5, -1)  # is refused, and the step too
    service.step(6)
    service.forward(7, 2)
    service.step(8)
    service.ask(9, "save_weights", path="one", overwrite=True)
    service.ask(10, "load_weights", path="tinker://m/weights/one", optimizer=True)
    service.forward(11, 4)
    service.step(12)
    return service


def life(service: Service) -> Callable[[], None]:  # noqa: F811
    def work() -> None:
        service.restart(state_every_s=0.0)
        service.run()

    return work


def outcome(service: Service) -> tuple[list[Answer], dict[str, str]]:  # noqa: F811
    """All answers, and what every folder of weights holds, after a life that was not disturbed."""
    service.ask(13, "save_weights", path="end")
    life(service)()
    weights = [*service.where.saved.glob("*/*/*/value"), *service.where.snapshots.glob("*/value")]
    return service.answers(), {str(path.relative_to(service.where.root)): path.read_text() for path in weights}


@pytest.mark.parametrize("first", range(1, STRIDE + 1))
def test_a_tuner_that_dies_anywhere_changes_no_answer(
    tmp_path: Path, service: Service, first: int,  # noqa: F811
) -> None:
    calm = outcome(asked(tmp_path / "calm"))
    assert [answer.state for answer in calm[0]].count("user") == 2
    at, ended = first, False
    while not ended:
        rough = asked(tmp_path / str(at))
        ended = outlives(life(rough), at)
        assert outcome(rough) == calm, f"killed at chance {at}"
        assert rough.warned == []
        audited = audit(rough.where.root.parent)
        assert audited is not None and audited.errors == [], f"killed at chance {at}"
        at += STRIDE
    assert at > 100


def test_tuners_that_die_again_and_again_answer_all_once(tmp_path: Path, service: Service) -> None:  # noqa: F811
    """A request that two of them died of in a row is given up, and its answer differs then."""
    chance = random.Random(0)
    for number in range(20):
        rough = asked(tmp_path / str(number))
        for _ in range(6):
            outlives(life(rough), chance.randrange(1, 60))
        answers, _ = outcome(rough)
        assert [answer.seq for answer in answers] == list(range(1, 14))
        audited = audit(rough.where.root.parent)
        assert audited is not None and audited.errors == []


# -- the log of the door -----


def test_a_writer_that_dies_anywhere_keeps_what_it_promised(tmp_path: Path) -> None:
    """Segments are short; a reader follows all the time, as the tuner does."""
    decode = msgspec.msgpack.Decoder(Request).decode
    at, ended = 0, False
    while not ended:
        at += 1
        folder, (promised, promises) = tmp_path / str(at), os.pipe()

        def work(folder: Path = folder, promises: int = promises) -> None:
            log = LogWriter(folder, segment_bytes=100)
            for number in range(6):
                log.write(Request("session", str(number), about={"key": "k" * 20}))
                log.sync()
                os.write(promises, b".")

        ended = outlives(work, at)
        os.close(promises)
        with os.fdopen(promised, "rb") as pipe:
            count = len(pipe.read())
        reader = LogReader(folder)
        seen = [decode(payload).id for payload, _ in reader.read()]
        assert seen == [str(number) for number in range(len(seen))] and len(seen) in (count, count + 1)
        successor = LogWriter(folder, segment_bytes=100)
        assert list(reader.read()) == []
        successor.write(Request("session", "next", about={"key": "k"}))
        successor.close()
        assert [decode(payload).id for payload, _ in reader.read()] == ["next"], f"killed at chance {at}"
        assert [decode(payload).id for payload, _ in LogReader(folder).read()] == [*seen, "next"]
    assert at > 20
