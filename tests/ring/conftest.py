"""Rings and fate tables in folders of their own, and real child processes that work on them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from busrl.ring import Fates, Ring, State

ROOT = Path(__file__).resolve().parents[2]

# Every child begins with this: it attaches by path like any stranger would.
PRELUDE = """
import os, sys
import numpy as np
from busrl.ring import Fates, Ring, State
folder = sys.argv[1]
ring = Ring.attach(folder + "/ring")
train = Fates(folder + "/fates.bin", create=True, capacity=1 << 20)
validate = Fates(folder + "/fates.validate.bin", create=True, capacity=1 << 20)
ring.bind_fates(train, validate)

def say(*words):
    print(*words, flush=True)

def hear():
    return sys.stdin.readline().strip()

def dispatch(uid, ring=ring):
    done = ring.dispatch(uid=uid, group=uid // 8, admission=uid // 8, member=uid % 8, group_size=8, cls=0,
                         task=b'{"prompt": "%d"}' % uid, prompt_crc=uid, max_new_tokens=64, temperature=1.0)
    return done[0] if done else None

def take(frm, to, limit=1):
    return ring.take(frm, to, cls=None, limit=limit, max_attempt=255)
"""


class Child:
    """A python process that runs a script on the ring; `hear` and `tell` are its pipe."""

    def __init__(self, folder: Path, script: str, crash_point: str = "", prefix: Sequence[str] = ()) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        if crash_point:
            env["BUSRL_CRASH_POINT"] = crash_point
        code = PRELUDE + textwrap.dedent(script)
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", code, str(folder)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the child said nothing and ended: {self.process.communicate(timeout=30)[1]}")
        return line.strip()

    def tell(self, text: str = "go") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)

    def end(self) -> int:
        """Wait for its own end; the exit status, negative for a signal."""
        self.errors = self.process.communicate(timeout=60)[1]
        return self.process.returncode

    def dies_by_sigkill(self) -> None:
        status = self.end()
        assert status == -signal.SIGKILL, f"exit status {status}: {self.errors}"


class World:
    """A ring with fates, this process registered as "parent"."""

    def __init__(self, folder: Path, slots: int = 8, slot_bytes: int = 4096, processes: int = 16) -> None:
        self.folder = folder
        self.path = str(folder / "ring")
        self.ring = Ring.create(
            self.path, slots=slots, slot_bytes=slot_bytes, processes=processes, uuid=bytes(range(16))
        )
        self.train = Fates(str(folder / "fates.bin"), create=True, capacity=1 << 20)
        self.validate = Fates(str(folder / "fates.validate.bin"), create=True, capacity=1 << 20)
        self.ring.bind_fates(self.train, self.validate)
        self.ring.register("parent", "parent")
        self.children: list[Child] = []

    def child(self, script: str, crash_point: str = "", prefix: Sequence[str] = ()) -> Child:
        self.children.append(Child(self.folder, script, crash_point, prefix))
        return self.children[-1]

    def dispatch(self, uid: int, ring: Ring | None = None) -> tuple[int, int] | None:
        done = (ring or self.ring).dispatch(
            uid=uid,
            group=uid // 8,
            admission=uid // 8,
            member=uid % 8,
            group_size=8,
            cls=0,
            task=b'{"prompt": "%d"}' % uid,
            prompt_crc=uid,
            max_new_tokens=64,
            temperature=1.0,
        )
        return done[0] if done else None

    def take(self, frm: State, to: State, limit: int = 64) -> list[tuple[int, int]]:
        return self.ring.take(frm, to, cls=None, limit=limit, max_attempt=255)

    def states(self) -> dict[str, int]:
        return {name: n for name, n in self.ring.stats().occupancy.items() if n}

    def fate(self, uid: int) -> str:
        return chr(self.train.get(uid)) if self.train.get(uid) else ""

    def generate(self, slot: int, word: int, done: bool = True) -> int:
        segment = (word >> 36) & 0xFF
        self.ring.put(slot, word, "tokens", np.arange(8, dtype=np.int32), segment)
        return self.ring.commit_segment(slot, word, done)

    def finish_everything(self) -> None:
        """Recovery and the rest of the ordinary path, as a run would do it."""
        self.ring.reap()
        self.ring.finish_drops()
        for slot, word in self.take(State.QUEUED, State.GENERATING):
            assert self.generate(slot, word)
        for slot, word in self.take(State.GENERATED, State.REWARDING):
            assert self.ring.release(slot, word, State.REWARDED)
        for slot, word in self.take(State.REWARDED, State.TRAINING):
            assert self.ring.finish(slot, word, "T")

    def close(self) -> None:
        for child in self.children:
            if child.process.poll() is None:
                child.kill()
        self.ring.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="busrl.test.", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    world = World(folder)
    yield world
    world.close()
