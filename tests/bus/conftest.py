"""Real brokers in child processes, endpoints that are closed again, and a directory short enough for socket paths."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import Forked

from busrl.bus import Endpoint
from busrl.bus.endpoint import KIND, PlainWire

SERVE = """
import signal, sys
from busrl.bus.broker import run_broker, StopRequest
from busrl.ring import OfdLock
directory, max_bytes = sys.argv[1], int(sys.argv[2])
stop = StopRequest()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
run_broker(f"ipc://{directory}/pub.sock", f"ipc://{directory}/sub.sock", OfdLock(f"{directory}/bus.lock"), stop,
           on_ready=lambda: print("ready", flush=True), on_progress=lambda: print("progress", flush=True),
           max_bytes=max_bytes, ping_s=0.05)
print("ended", flush=True)
"""
PATIENCE_S = 30.0


class BrokerProcess:
    """A broker of its own process, which can be killed and started again."""

    def __init__(self, directory: Path, max_bytes: int = 1 << 20) -> None:
        self.frontend, self.backend = f"ipc://{directory}/pub.sock", f"ipc://{directory}/sub.sock"
        self._directory, self._max_bytes = directory, max_bytes
        self.process: subprocess.Popen[str] | None = None

    def spawn(self) -> subprocess.Popen[str]:
        return Forked(
            ["python", "-c", SERVE, str(self._directory), str(self._max_bytes)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def start(self) -> None:
        self.process = self.spawn()
        assert self.next_line() == "ready", self.process.communicate(timeout=PATIENCE_S)[1]

    def next_line(self) -> str:
        assert self.process is not None and self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate(timeout=PATIENCE_S)


@pytest.fixture
def short_dir() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="brl"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def broker(short_dir: Path) -> Iterator[BrokerProcess]:
    process = BrokerProcess(short_dir)
    process.start()
    yield process
    process.kill()


@pytest.fixture(params=["reached", "plain"])
def each_wire(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Endpoints of this test speak through pyzmq's libzmq, and once more as where that can not be reached."""
    if request.param == "plain":
        monkeypatch.setattr("busrl.bus.endpoint.open_wire", PlainWire)
    else:
        assert KIND != "pyzmq", "the fixture would test one wire twice"


@pytest.fixture
def endpoint(broker: BrokerProcess) -> Iterator[Callable[..., Endpoint]]:
    """Opens ready endpoints on the broker; closes them after the test."""
    opened: list[Endpoint] = []

    def open_one(name: str, *subscribe: str, **options: object) -> Endpoint:
        opened.append(Endpoint(name, broker.frontend, broker.backend, subscribe=subscribe, **options))  # type: ignore[arg-type]
        opened[-1].ready(PATIENCE_S)
        return opened[-1]

    yield open_one
    for end in opened:
        end.close()
