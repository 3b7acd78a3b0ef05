"""A run directory with a real ring and a real broker, but no learner: what a monitor looks at, at rest."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from commands import Forked

from busrl.bus import Endpoint
from busrl.observe.monitor.recording import FIXED, RecordedFrame, Recording
from busrl.paths import SHM, RunPaths
from busrl.ring import Fates, OfdLock, Ring

PATIENCE_S = 60.0
UUID = bytes(range(16))
SERVE = """
import signal, sys
from busrl.bus.broker import run_broker, StopRequest
from busrl.paths import RunPaths
from busrl.ring import OfdLock
paths, stop = RunPaths.of(sys.argv[1]), StopRequest()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
run_broker(paths.frontend, paths.backend, OfdLock(str(paths.lock("bus"))), stop, tap=paths.tap,
           on_ready=lambda: print("ready", flush=True), ping_s=0.05)
"""
TOPOLOGY: dict[str, Any] = {
    "run": {"name": "scene", "max_steps": 200}, "groups": {"size": 4},
    "learner": {"trigger": {"n_min": 8, "t_max_s": 2.5}},
    "weights": {"mode": "batch-async", "max_staleness": 2}, "limits": {"progress_s": 30.0}, "derived": {"slots": 16},
}


def until(what: str, condition: Callable[[], Any], limit_s: float = PATIENCE_S) -> Any:
    """What `condition` gives once it is true."""
    end = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {limit_s:.0f} s for {what}"
        time.sleep(0.01)  # a look at another process's file or memory: there is nothing to wait on
    return value


class Scene:
    """A run directory, its ring with this test registered in it, and a broker with a tap."""

    def __init__(self, root: Path) -> None:
        self.paths = RunPaths.of(root / "run")
        self.paths.root.mkdir()
        self.paths.topology.write_text(json.dumps(TOPOLOGY))
        self.paths.metrics.write_bytes(b"".join(metrics_line(step) for step in range(1, 41)))
        self.paths.errors.write_text(
            json.dumps({"time": time.time() - 60, "process": "keeper", "severity": "error", "where": "keeper",
                        "text": "sample 7 is poison", "trace": ""}) + "\n"
        )
        info = {
            "run_id": "scene-1", "uuid": UUID.hex(), "tap": self.paths.tap, "launch_pid": os.getpid(),
            "started": time.time() - 100, "frontend": self.paths.frontend, "backend": self.paths.backend,
        }
        self.paths.run_json.write_text(json.dumps(info))
        self.lock = OfdLock(str(self.paths.lock("run")))
        assert self.lock.try_acquire()
        Fates(str(self.paths.fates), create=True).reserve(1000)
        self.ring = Ring.create(self.paths.ring_name, slots=16, slot_bytes=4096, processes=8, uuid=UUID)
        self.ring.register("rollout", "rollout/0")
        self.ring.set_ready()
        self.ring.activity("compiling", 500.0)
        self.ring.set_header("step", 40)
        self.ring.set_header("version", 41)
        self.broker = Forked(["python", "-c", SERVE, str(self.paths.root)], stdout=subprocess.PIPE)
        assert self.broker.stdout is not None and self.broker.stdout.readline() == b"ready\n"
        self._open: list[Endpoint] = []

    def endpoint(self, name: str, *subscribe: str, **options: Any) -> Endpoint:
        """A ready endpoint on the broker."""
        self._open.append(Endpoint(name, self.paths.frontend, self.paths.backend, subscribe=subscribe, **options))
        self._open[-1].ready(PATIENCE_S)
        return self._open[-1]

    def beside(self, tag: str, lead: str = "solver", steps: int = 3) -> RunPaths:
        """The directory of one more model of the run, in which so many steps were made; the first is the lead."""
        self.paths.topology.write_text(json.dumps({**TOPOLOGY, "tag": lead, "models": [{"tag": lead}, {"tag": tag}]}))
        paths = self.paths.of_tag(tag)
        paths.root.mkdir(parents=True)
        paths.topology.write_text(json.dumps({**TOPOLOGY, "tag": tag}))
        paths.run_json.write_text(self.paths.run_json.read_text())
        paths.metrics.write_bytes(b"".join(metrics_line(step) for step in range(1, steps + 1)))
        return paths

    def state(self) -> dict[str, Any]:
        """Every byte and name that belongs to the run: its files with their times, the ring, the sockets."""
        files = sorted(self.paths.root.rglob("*"))
        return {
            "files": [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files],
            "content": [hashlib.sha1(path.read_bytes()).hexdigest() for path in files if path.is_file()],
            "ring": hashlib.sha1(self.paths.ring_file.read_bytes()).hexdigest(),
            "processes": [(process.index, process.label, process.pid) for process in self.ring.processes()],
            "shm": sorted(path.name for path in SHM.glob(f"*{self.paths.key}*")),
            "sockets": sorted(path.name for path in self.paths.runtime_dir.iterdir()),
        }

    def close(self) -> None:
        for endpoint in self._open:
            endpoint.close()
        self.broker.kill()
        self.broker.communicate()
        self.ring.close()
        Ring.unlink(self.paths.ring_name)
        self.lock.release()


def finished(child: subprocess.Popen[str]) -> str:
    """What a child printed; it must have ended well."""
    out, problems = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 0, problems
    return out


def entries(path: Path) -> list[RecordedFrame]:
    """What is in a recording now; it may be written still, or have only its name."""
    if path.stat().st_size < FIXED.size:
        return []
    with Recording(path) as recording:
        return list(recording.entries())


def metrics_line(step: int) -> bytes:
    """One line of metrics.jsonl."""
    row = {
        "step": step, "version": step + 1, "cause": "count", "seconds": 0.5, "groups": 8, "samples": 32, "tokens": 900,
        "reward": step / 100, "length_mean": 20.0, "length_ended": 21.0 - step / 10, "age_mean": 0.5, "age_p95": 1.0,
        "age_max": 2, "entropy": 0.7, "set_aside": {"f": 1}, "wait_s": {}, "time": 1_700_000_000.0 + 0.5 * step,
        "reward_trained": step / 200, "lr": 1e-6, "grad_norm": 0.1, "flat_share": 0.25, "cut_share": 0.0, "k3": 1e-5,
        "ess": 0.99, "mismatch": 1e-6, "n_min": 8.0, "reward_parts": {"exact": step / 100, "format": 1.0},
    }
    return json.dumps(row).encode() + b"\n"
