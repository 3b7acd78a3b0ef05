"""A broker with a TCP side in a process of its own, and a key directory for it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Forked

from busrl import curve
from busrl.bus import tcp_pair

SERVE = """
import signal, sys
from pathlib import Path
from busrl.bus.broker import CurveListener, run_broker, StopRequest
from busrl.ring import OfdLock
directory, endpoint, files = sys.argv[1:4]
stop = StopRequest()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
say = lambda text: print(text, flush=True)
run_broker(f"ipc://{directory}/pub.sock", f"ipc://{directory}/sub.sock", OfdLock(f"{directory}/bus.lock"), stop,
           on_ready=lambda: say("ready"), on_progress=lambda: say("progress"), ping_s=0.05,
           listener=CurveListener(endpoint, Path(files)) if endpoint else None, on_refused=say)
"""
PATIENCE_S = 30.0


def free_port() -> int:
    """A port that nobody has now, nor the next one."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


class Broker:
    """A broker process; what it says is read by a thread, so that it never waits for us."""

    def __init__(self, directory: Path, key_directory: Path | None = None, endpoint: str = "") -> None:
        self.directory, self.keys, self.endpoint = directory, key_directory, endpoint
        self.ipc = (f"ipc://{directory}/pub.sock", f"ipc://{directory}/sub.sock")
        self.tcp = tcp_pair(endpoint) if endpoint else ("", "")
        self.said: list[str] = []
        self.heard = threading.Condition()
        self.process: subprocess.Popen[str] | None = None

    def spawn(self, *before: str) -> subprocess.Popen[str]:
        command = ["-c", SERVE, str(self.directory), self.endpoint, str(self.keys or "")]
        program, made = ([*before, sys.executable], subprocess.Popen) if before else (["python"], Forked)
        return made([*program, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def start(self, *before: str) -> Broker:
        with self.heard:  # between the two the listener of a broker before could note its end
            self.said.clear()
            self.process = self.spawn(*before)
        self.listener = threading.Thread(target=self._listen, args=(self.process,), daemon=True)
        self.listener.start()
        self.until("ready")
        return self

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self.heard:
                self.said.append(line.strip())
                self.heard.notify_all()
        with self.heard:
            if process is self.process:  # the end of a killed one may be read after its successor's start
                self.said.append("ended")
            self.heard.notify_all()

    def until(self, text: str) -> str:
        """The first line that holds `text`."""
        with self.heard:
            heard = self.heard.wait_for(
                lambda: next((line for line in self.said if text in line or line == "ended"), None), PATIENCE_S
            )
        assert heard is not None and heard != "ended", f"never heard {text!r}: {self.said[-5:]}"
        return heard

    def beat(self) -> None:
        """Return after two more round trips through the proxy: it lives, and passes messages on."""
        before = len(self.said)
        with self.heard:
            assert self.heard.wait_for(lambda: self.said[before:].count("progress") >= 2, PATIENCE_S)
        assert self.alive

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(PATIENCE_S)
            self.listener.join(PATIENCE_S)  # or what it says of this end is heard as the end of the next one


@pytest.fixture
def short_dir() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="brl"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def key_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "keys"
    curve.init(directory)
    curve.add(directory, "laptop")
    return directory


@pytest.fixture
def broker(short_dir: Path, key_directory: Path) -> Iterator[Broker]:
    broker = Broker(short_dir, key_directory, f"tcp://127.0.0.1:{free_port()}").start()
    yield broker
    broker.kill()
