"""Small corners of the roles that a whole run meets seldom: they are put there on purpose."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from role_parts import parts

from busrl.engines import Finished
from busrl.errors import WeightsTimeout
from busrl.paths import RunPaths
from busrl.ring import State
from busrl.roles.intake import ClaimedSlot, SampleIntake
from busrl.roles.rollout import Rollout
from busrl.roles.scheduler import Scheduler
from busrl.scheduling.admission import derive
from busrl.states import Fate
from busrl.topology.schema import Segments

ROOT = Path(__file__).resolve().parents[2]


class Called:
    """Stands for a part of the role: notes the calls, and gives what it is told to give."""

    def __init__(self, **gives: Any) -> None:
        self.gives, self.calls = gives, []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **_: Any) -> Any:
            self.calls.append((name, *arguments))
            answer = self.gives.get(name)
            return answer() if callable(answer) else answer

        return call


def bare_rollout(run: Path) -> Any:
    """A rollout role that was never attached to anything."""
    return Rollout(run, "rollout/0", parts(SimpleNamespace(limits=SimpleNamespace(ready_s=1000.0)), Called()))


def test_a_sequence_without_a_token_is_set_aside_and_the_worker_lives(tmp_path: Path) -> None:
    topology: Any = SimpleNamespace(
        model=SimpleNamespace(path=tmp_path), process=(), processes=list, dedicated=False, segments=Segments(),
        generation=SimpleNamespace(max_new_tokens=8), derived=SimpleNamespace(limits=derive("sync", 8, 0, 4)),
    )
    ring: Any = Called(line=lambda: {"uid": 5})
    engine: Any = SimpleNamespace(max_length=16)
    intake = SampleIntake(ring, topology, "rollout/0", engine, lambda where, text, **_: None)
    intake.claimed = {3: ClaimedSlot(word=77, uid=5, version=0, step=0)}
    nothing = np.empty(0, np.int32)
    intake.commit(Finished(3, nothing, np.empty(0, np.float32), np.empty(0, np.uint32), 2))
    assert ("drop", 3, 77, Fate.LONG) in ring.calls and intake.claimed == {}


def test_a_new_scheduler_waits_until_the_death_of_its_predecessor_is_proven(tmp_path: Path) -> None:
    left = [State.RESERVED, State.RESERVED, State.QUEUED]  # what a look at the predecessor's slot finds
    looks: list[float] = []

    def lines() -> Any:
        rows = np.zeros(2, [("state", np.uint8), ("owner", np.uint16)])
        rows[0] = (State.RESERVED, 4)  # a validator at work is nobody's predecessor
        rows[1] = (left.pop(0), 2)
        return rows

    processes = [SimpleNamespace(index=2, pid=77, role="scheduler"), SimpleNamespace(index=4, pid=78, role="validator")]
    ring = Called(lines=lines, processes=lambda: processes)
    ring.index = 3
    role: Any = Scheduler(
        tmp_path, "scheduler", parts(SimpleNamespace(limits=SimpleNamespace(ready_s=10.0)), ring)
    )
    role.idle = looks.append
    role.reap_predecessor(ring)
    assert left == [] and len(looks) == 2 and [name for name, *_ in role.ring.calls].count("reap") == 3


def test_a_worker_awaiting_its_first_weights_ends_when_asked(tmp_path: Path) -> None:
    role = bare_rollout(tmp_path)

    def late() -> None:
        role.stop("SIGTERM")
        raise WeightsTimeout("no version")

    role.receiver = Called(wait_for=late)
    role.wait_for_weights(9)
    assert role.stopping == "SIGTERM" and len(role.receiver.calls) == 1


ENDING = """
import atexit, os, signal, sys, types
role = types.ModuleType("busrl.roles.keeper")
role.Keeper = lambda run_dir, name: types.SimpleNamespace(main=lambda: 0)
sys.modules["busrl.roles.keeper"] = role
class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), write=os.write):  # when the interpreter is already ending
        write(1, b"late")
        kill(pid, 15)
        write(1, b"r")
from busrl.roles.__main__ import main
sys.argv = ["roles", sys.argv[1], "keeper"]
signal.signal(signal.SIGTERM, lambda *_: None)
sys.late = Late()  # in a module of its own it would be in a cycle: these are not looked for at the end of a role
sys.exit(main()[0])
"""


def test_a_signal_to_a_role_already_ending_does_not_kill_it(tmp_path: Path) -> None:
    (tmp_path / "topology.json").touch()
    done = subprocess.run(
        [sys.executable, "-c", ENDING, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "later"), done.stderr


WAITING = """
import os, sys
from busrl.paths import RunPaths
from busrl.ring import Ring
from busrl.roles import process
process.PREDECESSOR_S = 0.0
paths = RunPaths.of(os.path.dirname(sys.argv[1]))
role, ring = process.RoleLock(paths, "bus"), Ring.attach(sys.argv[2])
ring.register("bus", "bus")
print("waiting", role.lock.try_acquire(), flush=True)
mine = role.acquire(ring, lambda: False)
print("got it", mine, role.lock.holder() == os.getpid(), flush=True)
"""


def test_a_broker_says_it_awaits_the_lock_of_its_dying_predecessor(tmp_path: Path) -> None:
    from busrl.ring import OfdLock, Ring

    path = RunPaths.of(tmp_path).lock("bus")
    lock = OfdLock(str(path))
    assert lock.try_acquire() and lock.holder() == os.getpid()
    ring = Ring.create(str(tmp_path / "ring"), slots=4, slot_bytes=1024, processes=4, uuid=bytes(16))
    child = subprocess.Popen(
        [sys.executable, "-c", WAITING, str(path), ring.name], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "waiting False\n"
    end, said = time.monotonic() + 30, f"waits for pid {os.getpid()}"
    while not any(process.activity == said and process.deadline_s > 1e8 for process in ring.processes()):
        assert time.monotonic() < end, ring.processes()
    while not RunPaths.of(tmp_path).errors.exists():
        assert time.monotonic() < end
    assert f"another bus serves this run (pid {os.getpid()} holds {path})" in RunPaths.of(tmp_path).errors.read_text()
    lock.release()
    assert child.communicate(timeout=60)[0] == "got it True True\n"
    ring.close()
