"""A real `launch` in its own process over scripted children: small programs that register in the ring like a role."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import Forked
from topologies import here, loaded  # noqa: F401

from busrl.paths import RunPaths
from busrl.ring import Fates, Ring

PATIENCE_S = 60.0

# argv: run directory, JSON of {name: mode}, JSON of limits. Builds a topology whose processes are all scripted.
DRIVER = """
import dataclasses, json, sys
from busrl.launcher import launch
from busrl.topology.schema import *
from busrl.scheduling.admission import derive
root, modes, limits, child = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]

class Scripted(Topology):
    def processes(self):
        roles = {name: name.partition("/")[0] for name in modes}
        return [ProcessName(name, roles[name], 0, Process(roles[name], command=(sys.executable, child, mode)))
                for name, mode in modes.items()]

fields = {f.name: 0 for f in dataclasses.fields(Derived) if f.default is dataclasses.MISSING}
derived = Derived(**{**fields, "limits": derive("sync", 1, 0, 2), "slots": 8, "slot_bytes": 4096})
topology = Scripted(run=Run(name="scripted", max_steps=10), model=Model(path="/none"), data=Data(train="/none"),
    groups=Groups(), generation=Generation(), bus=Bus(), ring=Ring(), scheduler=Scheduler(), learner=Learner(lr=1e-3),
    weights=Weights(), reward=Reward(), validation=Validation(), limits=Limits(**limits), process=(), derived=derived)
open(f"{root}.none", "w").close()
sys.exit(launch(topology, root))
"""

# One scripted child; what it does is in argv[1], in words joined by "+". Files in the run directory steer it.
CHILD = """
import os, signal, sys, threading, time
from pathlib import Path
root, name, does = Path(os.environ["BUSRL_RUN_DIR"]), os.environ["BUSRL_NAME"], sys.argv[1].split("+")
me = root / "seen" / name.replace("/", "-")
if "bus" in does:
    from busrl.roles.bus import Bus
    sys.exit(Bus(str(root), name).main())
me.parent.mkdir(exist_ok=True)
lives = int(me.read_text().split()[1]) + 1 if me.exists() else 1
if "dies_early" in does or ("dies_early_once" in does and lives == 1):
    me.write_text(f"{os.getpid()} {lives}")
    sys.exit("the model folder is not there")
stop = threading.Event()
ended = lambda *_: (open(root / "ended", "a").write(name + "\\n"), stop.set())
signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in does else ended)
from busrl.paths import RunPaths
from busrl.ring import Fates, Ring
if "foreign" in does:
    from busrl.bus import Endpoint
    from busrl.protocol import messages as m
    paths = RunPaths.of(root)
    bus = Endpoint(name, paths.frontend, paths.backend)
    bus.ready(60)
    me.write_text(f"{os.getpid()} {lives}")
    while not stop.wait(0.02):
        bus.send(m.Hello(role="rollout", pid=os.getpid()))
    sys.exit(0)
from busrl.ring import Ring, State
ring = Ring.attach(RunPaths.of(root).ring_name)
ring.register(name.partition("/")[0], name)
if "never_ready" not in does:
    ring.set_ready()
me.write_text(f"{os.getpid()} {lives}")
if "after_another" in does:
    while len(list(me.parent.iterdir())) < 3:
        time.sleep(0.005)
if "dies_when_ready" in does and (lives <= 4 or "always" in does):
    os.kill(os.getpid(), signal.SIGKILL)
if "dies_after_others_moved" in does:
    def moved():
        return sum(ring.stats().transitions.values())
    before = moved()
    while moved() == before:
        time.sleep(0.005)
    os._exit(1)
if "holds" in does and lives == 1:
    while not ring.take(State.QUEUED, State.GENERATING, cls=None, limit=1):
        time.sleep(0.01)
    (root / "seen" / "holding").touch()
if "leaves_a_child" in does or "leaves_a_session" in does:
    import subprocess
    made = subprocess.Popen(["sleep", "1000"], start_new_session="leaves_a_session" in does)
    (root / "seen" / "grandchild.new").write_text(str(made.pid))
    os.rename(root / "seen" / "grandchild.new", root / "seen" / "grandchild")
if "long_activity" in does:
    ring.activity("compiling", 1000.0)
while not stop.wait(0.02):
    if "learner" in does and (root / "finish").exists():
        ring.set_header("step", 10)
        ring.set_header("run_state", 1)
        break
    if "exits_zero" in does and (root / "leave").exists():
        break
    if "moves" in does:
        for slot, word in ring.take(State.QUEUED, State.GENERATING, cls=None, limit=1):
            ring.release(slot, word, State.QUEUED)
    if not ("hangs" in does and lives == 1) and "long_activity" not in does:
        ring.progress()
"""


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for something that other processes do; names what did not happen."""
    deadline, pause = time.monotonic() + PATIENCE_S, threading.Event()
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:g} s for: {what}"
        pause.wait(0.02)
    return value


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Scripted:
    """Runs of `launch` in one directory."""

    alive = staticmethod(alive)
    until = staticmethod(until)

    def __init__(self, root: Path, runtime: Path) -> None:
        self.root, self._runtime = root, runtime
        self.paths = RunPaths.of(root)
        self.child = runtime / "child.py"
        self.child.write_text(CHILD)
        self.output = ""
        self.pids: set[int] = set()

    def start(
        self, modes: dict[str, str], stdout: int = subprocess.PIPE, cold: bool = False, **limits: float
    ) -> subprocess.Popen[str]:
        """Start a launch; `cold`: it inherits what this process has, such as signals that are ignored."""
        limits = {"ready_s": 60.0, "progress_s": 60.0, "stop_s": 30.0, "restart_attempts": 3, **limits}
        command = ["-c", DRIVER, str(self.root), json.dumps(modes), json.dumps(limits), str(self.child)]
        program, made = (sys.executable, subprocess.Popen) if cold else ("python", Forked)
        self.launch = made([program, *command], stdout=stdout, stderr=subprocess.STDOUT, text=True)
        self.pids.add(self.launch.pid)
        return self.launch

    def wait(self) -> int:
        self.output = self.launch.communicate(timeout=PATIENCE_S)[0]
        return self.launch.returncode

    def lives(self, name: str) -> tuple[int, int]:
        """Pid and number of the newest life of a child, (0, 0) before its first."""
        try:
            pid, lives = (self.root / "seen" / name.replace("/", "-")).read_text().split()
        except (FileNotFoundError, ValueError):
            return 0, 0
        self.pids.add(int(pid))
        return int(pid), int(lives)

    def life(self, name: str, number: int = 1) -> int:
        """Pid of a child in a given life; waits for it."""
        until(lambda: self.lives(name)[1] >= number, f"life {number} of {name}")
        return self.lives(name)[0]

    def ready(self, name: str, number: int = 1) -> int:
        """Pid of a child in a given life, once launch has seen that it is ready."""
        pid = self.life(name, number)
        self.said(f"{name} (pid {pid}) is ready")
        return pid

    def dispatch_one(self, uid: int) -> None:
        """What a scheduler does, in short: one sample becomes QUEUED."""
        ring = Ring.attach(self.paths.ring_name)
        ring.register("scheduler", "test")
        ring.bind_fates(Fates(str(self.paths.fates)), Fates(str(self.paths.validate_fates)))
        assert ring.dispatch(
            uid=uid, group=uid // 16, admission=0, member=uid % 8, group_size=8, cls=0, task=b"{}", prompt_crc=0,
            max_new_tokens=4, temperature=1.0,
        )
        ring.close()

    def kill_launch(self, children: Iterable[str]) -> None:
        """SIGKILL launch, once these children were ready; they end with it."""
        pids = [self.ready(name) for name in children]
        self.launch.kill()
        self.launch.communicate()
        until(lambda: not any(alive(pid) for pid in pids), f"children {pids} to end with launch")

    def grandchild(self) -> int:
        """Pid of what a child that leaves one has started."""
        path = self.root / "seen" / "grandchild"
        until(path.exists, "the grandchild's pid")
        self.pids.add(pid := int(path.read_text()))
        return pid

    def finish(self) -> None:
        (self.root / "finish").touch()

    def log(self) -> str:
        return (self.paths.logs / "launch.log").read_text() if (self.paths.logs / "launch.log").exists() else ""

    def said(self, text: str) -> None:
        until(lambda: text in self.log(), f"launch to say {text!r}")

    def summary(self) -> dict[str, Any]:
        return json.loads(self.paths.summary.read_text())

    def leftovers(self) -> list[Path]:
        shared = [*Path("/dev/shm").glob(f"busrl.*.{self.paths.key}.*")]
        return shared + ([self.paths.runtime_dir] if self.paths.runtime_dir.exists() else [])

    def clean(self) -> None:
        for pid in self.pids:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        for path in self.leftovers():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripted]:
    runtime = Path(tempfile.mkdtemp(prefix="brl"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    run = Scripted(tmp_path / "run", runtime)
    yield run
    run.clean()
    shutil.rmtree(runtime, ignore_errors=True)
