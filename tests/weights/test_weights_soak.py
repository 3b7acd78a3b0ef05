"""Hundreds of updates in a row while engines join, leave and are killed: nothing leaks, no version goes backwards."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from members import PATIENCE_S, Child, descendants, open_files, resident_kb, soldier, write_folder

from busrl.weights.factory import TransportSettings, make_sender
from busrl.weights.tensors import Manifest

SIZES = {f"w{k}": (64, 1 + 30 * k) for k in range(20)}  # 1.5 MB in all
ENGINES = 4
FOLDERS = "checkpoint_restart"
Start = Callable[..., Child]


class Crowd:
    """Engines that come and go; `check` reads what each has said."""

    def __init__(self, start: Start, settings: TransportSettings, seed: int) -> None:
        self._start, self._settings = start, settings
        self._chance = random.Random(seed)
        self._living: list[Child] = []
        self._born = 0
        self._names: dict[Child, str] = {}
        self.truth: dict[int, int] = {}  # digest of each version
        self.files: dict[int, list[int]] = {}
        self.memory: dict[int, list[int]] = {}
        self.grown = (0, 0, 0)
        self.seen = self.deaths = self.leaves = 0
        for _ in range(ENGINES):
            self.join()

    def join(self, name: str = "") -> None:
        """A new engine. What is left of a killed one's folders its successor of the same name clears, as in a run."""
        self._born += 1
        name = name or f"engine/{self._born}"
        self._living.append(self._start(soldier, self._settings.plain(), name, SIZES))
        self._names[self._living[-1]] = name

    def come_or_go(self) -> None:
        """One in twenty updates: a leave, a death or a stop of some other's; then another engine joins."""
        if self._chance.random() > 0.05:
            return
        child = self._living.pop(self._chance.randrange(len(self._living)))
        how, name = self._chance.choice(["leave", "kill", "stop"]), ""
        if how == "leave":
            assert child.told_to_end(PATIENCE_S) == 0
            child.end()
            self.leaves += 1
        elif how == "kill":
            child.end()
            self.deaths += 1
            name = self._names[child] if self._settings.folders else ""
        else:  # for a moment, as when its machine is busy
            os.kill(child.process.pid, signal.SIGSTOP)
            time.sleep(0.05)
            child.go_on()
            self._living.append(child)
            return
        self.join(name)

    def check(self) -> None:
        for child in self._living:
            while child.pipe.poll(0):
                version, digest, files, memory = child.pipe.recv()
                assert version > child.last, (version, child.last)
                assert digest == self.truth[version], f"version {version} is not what was published"
                child.last = version
                self.seen += 1
                self.files.setdefault(child.process.name, []).append(files)
                self.memory.setdefault(child.process.name, []).append(memory)

    def settle(self, version: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while any(child.last < version for child in self._living):
            assert time.monotonic() < deadline, [child.last for child in self._living]
            time.sleep(0.01)
            self.check()


def settings_of(tmp_path: Path, transport: str, sparse: bool) -> TransportSettings:
    segment = f"/dev/shm/busrl.test.{os.getpid()}.{os.urandom(4).hex()}.weights"
    folders = str(tmp_path / "published") if transport == FOLDERS else ""
    return TransportSettings(
        transport, segment, str(tmp_path / "store"), 6.0, threshold=0.1 * sparse, key_every=8, checksum=sparse,
        folders=folders,
    )


def held() -> tuple[int, int, int]:
    """Open files and private memory (kB) of this process, and processes that it has."""
    return open_files(), resident_kb(), len(descendants())


def soak(tmp_path: Path, start: Start, transport: str, sparse: bool, updates: int, seed: int = 5) -> Crowd:
    settings = settings_of(tmp_path, transport, sparse)
    sends = make_sender(settings, write=write_folder if transport == FOLDERS else None)
    tensors = {name: torch.zeros(shape) for name, shape in SIZES.items()}
    manifest, generator = Manifest.of(tensors), torch.Generator().manual_seed(seed)
    crowd = Crowd(start, settings, seed)
    before = (0, 0, 0)
    for version in range(1, updates + 1):
        for tensor in tensors.values():
            flat = tensor.view(-1)
            flat[torch.randint(len(flat), (1 + len(flat) // 50,), generator=generator)] = float(version)
        crowd.truth[version] = manifest.digest(tensors, version, 0)
        sends.publish(version, version, tensors)
        crowd.come_or_go()
        crowd.check()
        time.sleep(0.01)
        if version % 20 == 0:
            crowd.settle(version)
        if version == max(20, updates // 5) // 20 * 20:
            before = held()
    crowd.settle(updates)
    # As many engines are alive as there were then.
    files, memory, processes = (now - then for now, then in zip(held(), before))
    assert files <= 8, f"{files} more open files than after a fifth of the updates"
    assert memory <= 20_000, f"{memory} kB more than after a fifth of the updates"
    assert processes == 0, f"{processes} more processes than after a fifth of the updates"
    crowd.grown = files, memory, processes
    if transport == FOLDERS:  # an engine may be changing one for the next; a successor that took none cleared none
        left = list((tmp_path / "published").rglob("model.safetensors"))
        assert len(left) <= settings.kept + 2 * ENGINES, left
    sends.close()
    Path(settings.segment).unlink(missing_ok=True)
    return crowd


def nothing_leaks(crowd: Crowd) -> None:
    """In the engines: a hundred updates later a process has no more files or memory than it had."""
    for files in crowd.files.values():
        early, late = files[len(files) // 4 : len(files) // 2], files[-5:]
        assert not early or min(late) <= max(early) + 3, files
    for memory in crowd.memory.values():
        early, late = memory[len(memory) // 4 : len(memory) // 2], memory[-5:]
        assert len(memory) < 40 or min(late) <= max(early) + 15_000, memory


WAYS = pytest.mark.parametrize(
    ("transport", "sparse"),
    [("shm", False), ("shm", True), ("broadcast", False), ("broadcast", True), (FOLDERS, False)],
)


@pytest.mark.slow
@WAYS
def test_sixty_updates_with_four_engines_that_come_and_go(
    tmp_path: Path, start: Start, transport: str, sparse: bool
) -> None:
    nothing_leaks(soak(tmp_path, start, transport, sparse, 60))


@pytest.mark.soak
@WAYS
def test_a_thousand_updates_with_four_engines_that_come_and_go(
    tmp_path: Path, start: Start, transport: str, sparse: bool
) -> None:
    crowd = soak(tmp_path, start, transport, sparse, 1000)
    nothing_leaks(crowd)
    print(f"{crowd.seen} versions arrived, {crowd.deaths} engines killed, {crowd.leaves} left")
    print(f"files, kB and processes more than after a fifth of it: {crowd.grown}")
    assert crowd.deaths > 5 and crowd.leaves > 5
