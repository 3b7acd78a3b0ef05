"""The relays of a run and of its hosts as real processes, without anybody else: for tests and `benchmarks/hosts.py`.

The caller is the learner that publishes, and reads the hosts' segments as engines do.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from busrl import curve
from busrl.hosts.joining import open_host
from busrl.hosts.membership import HostSource, claimed_from, of_host
from busrl.launcher.rundir import OpenRun, open_run, remove_runtime_dir, unlink_segments
from busrl.preflight.load import load
from busrl.states import HeaderWord
from busrl.weights.base import Sender
from busrl.weights.factory import TransportSettings
from busrl.weights.folders import FolderReceiver, FolderSender
from busrl.weights.shm import ShmSender, VersionReceiver

ROOT = Path(__file__).resolve().parents[2]
HOME = "home"
LIMIT_S = 120.0
LOOK_S = 0.005
FETCHED = re.compile(r"version (\d+): [\d.]+ MB in ([\d.]+) s from (\S+)")


class Relays:
    """`before`: what the command of a host's relay stands behind, by its name (`home` too)."""

    def __init__(
        self, folder: Path, names: Sequence[str], megabytes: float, *settings: str, address: str = "127.0.0.1",
        before: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.names, self._before = tuple(names), before or {}
        self.count = int(megabytes * 1e6) // 4
        endpoint = f"tcp://{address}:{_free_port()}"
        curve.init(folder / "keys")
        for name in names:
            curve.add(folder / "keys", name)
        own = [f'bus.endpoint="{endpoint}"', f'bus.keys="{folder / "keys"}"', *settings]
        listed = ", ".join(f'"{name}"' for name in names)
        topology = load(ROOT / "configs" / "quickstart.toml", [*own, f"process.rollout.hosts=[{listed}]"])
        self.runs: dict[str, OpenRun] = {HOME: open_run(folder / HOME, topology)}
        ring = claimed_from(self.runs[HOME].paths.run_json).hex()
        for name in names:
            own_keys = str(curve.client_file(folder / "keys", name))
            source = HostSource(endpoint, own_keys, name, ring, time.time_ns() // 1000)
            self.runs[name] = open_host(folder / name, of_host(topology, name), source)
        settings_of = {name: TransportSettings.of(topology, run.paths) for name, run in self.runs.items()}
        self.folders = {name: Path(one.folders) for name, one in settings_of.items() if one.folders}
        self._engines: dict[str, VersionReceiver | FolderReceiver]
        self.sender: Sender
        if self.folders:
            self.sender = FolderSender(self.folders[HOME], self._write, kind="checkpoint", kept=2)
            self._engines = {name: FolderReceiver(self.folders[name], "seen", kind="folder") for name in names}
        else:
            self.sender = ShmSender(self.runs[HOME].paths.weights_file, threshold=settings_of[HOME].threshold)
            self._engines = {name: VersionReceiver(self.runs[name].paths.weights_file) for name in names}
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self._values = torch.empty(self.count)

    def __enter__(self) -> Relays:
        for name in self.runs:
            self.start(name)
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children.values():
            child.send_signal(signal.SIGTERM)
        for child in self.children.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(5)
            child.kill()
            child.wait()
        self.sender.close()
        for run in self.runs.values():
            unlink_segments(run.paths.ring_name)
            remove_runtime_dir(run.paths)
            run.release()

    def start(self, name: str) -> None:
        run = self.runs[name]
        command = [*self._before.get(name, ()), sys.executable, "-m", "busrl.roles", str(run.paths.root), "relay"]
        with open(run.paths.log("relay"), "ab") as out:
            self.children[name] = subprocess.Popen(
                command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            )

    def kill(self, name: str) -> None:
        """SIGKILL its relay, and start another one in its place."""
        self.children[name].kill()
        self.children[name].wait()
        self.start(name)

    def _write(self, folder: Path, named: object) -> None:
        for number in range(3):
            (folder / f"part-{number}").write_bytes(self._values.numpy().tobytes())

    def publish(self, version: int, values: slice = slice(None)) -> None:
        """Weights whose every value is the version; with `values` only those are changed."""
        self._values[values] = float(version)
        self.sender.publish(version, version, {"w": self._values})
        ring = self.runs[HOME].ring
        for word in (HeaderWord.STEP, HeaderWord.VERSION_STEP, HeaderWord.VERSION):
            ring.set_header(word, version)

    def newest(self, name: str) -> int:
        return self._engines[name].newest()[0]

    def until_all_have(self, version: int) -> None:
        self.until(f"version {version} everywhere", lambda: all(self.newest(name) >= version for name in self.names))

    def until(self, what: str, condition: Callable[[], Any], limit_s: float = LIMIT_S) -> None:
        end = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"waited {limit_s:.0f} s for {what}\n{self.logs()}")
            time.sleep(LOOK_S)

    def log(self, name: str) -> str:
        return self.runs[name].paths.log("relay").read_text(errors="replace")

    def logs(self) -> str:
        return "\n".join(f"--- {name}\n{self.log(name)[-3000:]}" for name in self.runs)

    def fetched(self, name: str) -> dict[int, tuple[float, str]]:
        """Versions that a host has fetched: in which seconds, and from where at last."""
        return {int(one[0]): (float(one[1]), one[2]) for one in FETCHED.findall(self.log(name))}


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return min(int(one.getsockname()[1]), 65000)


class Net:
    """A network namespace per host and one for home, each with a cable to one bridge in a namespace of its own.
    `apart`: hosts reach home alone. Skips the test where the kernel or the user's rights do not give them."""

    home = "10.78.0.1"

    def __init__(self, names: Sequence[str], apart: bool = False) -> None:
        self.names, self.apart = (HOME, *names), apart
        self._own = {name: f"busrl{os.getpid()}{number}" for number, name in enumerate(["bridge", *self.names])}
        self.before = {name: ("ip", "netns", "exec", self._own[name]) for name in self.names}

    def __enter__(self) -> Net:
        try:
            self._lay()
        except (OSError, subprocess.CalledProcessError) as problem:
            self.__exit__()
            pytest.skip(f"no network namespaces here, which need ip, tc and the rights of root: {problem}")
        return self

    def _lay(self) -> None:
        bridge = self._own["bridge"]
        for name in self._own.values():
            _run("ip", "netns", "add", name)
        _run("ip", "-n", bridge, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", bridge, "link", "set", "bridge", "up")
        for number, name in enumerate(self.names, 1):
            own, end = self._own[name], f"to{number}"
            _run("ip", "-n", bridge, "link", "add", end, "type", "veth", "peer", "name", "cable", "netns", own)
            _run("ip", "-n", bridge, "link", "set", end, "master", "bridge")
            if self.apart and name != HOME:
                _run("ip", "-n", bridge, "link", "set", end, "type", "bridge_slave", "isolated", "on")
            _run("ip", "-n", bridge, "link", "set", end, "up")
            _run("ip", "-n", own, "addr", "add", f"10.78.0.{number}/24", "dev", "cable")
            for link in ("lo", "cable"):
                _run("ip", "-n", own, "link", "set", link, "up")
        self.limit("10gbit")

    def limit(self, rate: str, *names: str) -> None:
        """What each of `names` (else all) sends and receives in a second."""
        for number, name in enumerate(self.names, 1):
            if not names or name in names:
                for place, link in ((self._own[name], "cable"), (self._own["bridge"], f"to{number}")):
                    shape = ("root", "tbf", "rate", rate, "burst", "64k", "latency", "50ms")
                    _run("tc", "-n", place, "qdisc", "replace", "dev", link, *shape)

    def sent(self) -> int:
        """Bytes that have left home."""
        shown = _run(*self.before[HOME], "cat", "/sys/class/net/cable/statistics/tx_bytes")
        return int(shown)

    def __exit__(self, *_: object) -> None:
        for name in self._own.values():
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout
