"""Engines and learners of the weight tests, as functions that run in processes of their own."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from busrl.errors import WeightsTimeout
from busrl.weights.broadcast.receiver import BroadcastReceiver
from busrl.weights.broadcast.sender import BroadcastSender
from busrl.weights.factory import TransportSettings, make_receiver

ROWS, TENSORS = 300, 5
PATIENCE_S = 60.0
BUCKET = 4096


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {f"t{k}": torch.full((ROWS, 7), float(value)) for k in range(TENSORS)}


class Trap:
    """Kills or stops its own process when a point is reached, once it is armed; `point@2`: when for the second time.
    "" is never reached."""

    def __init__(self, point: str, armed: bool, how: int) -> None:
        self.point, _, count = point.partition("@")
        self.left, self.armed, self.how = int(count or 1), armed, how

    def __call__(self, reached: str) -> None:
        if self.armed and self.point and reached.startswith(self.point):
            self.left -= 1
            if self.left == 0:
                self.armed = False
                os.kill(os.getpid(), self.how)


def engine(
    pipe: Any, file: str, name: str, timeout_s: float, point: str = "", armed: bool = True, how: int = signal.SIGKILL
) -> None:
    """Sends every version that it got, after a check that it is of one piece; "arm" sets the trap, None is the end."""
    receiver = BroadcastReceiver(file, name, timeout_s=timeout_s)
    receiver.hook = trap = Trap(point, armed, how)
    here, newest = tensors(0), 0
    while True:
        if pipe.poll(0):
            if pipe.recv() is None:
                break
            trap.armed = True
            pipe.send("armed")
        with suppress(WeightsTimeout):
            receiver.wait_for(newest + 1, 0.1)
            newest, step = receiver.fetch(here)
            consistent = all(bool((tensor == newest).all()) for tensor in here.values()) and step == newest * 10
            pipe.send((newest if consistent else -1, time.monotonic()))
    receiver.close()


def learner(
    pipe: Any, file: str, version: int, timeout_s: float, point: str = "", how: int = signal.SIGKILL
) -> None:
    """Publishes a version, and one more each time anything is said to it; ends at None."""
    sender = BroadcastSender(file, timeout_s=timeout_s, bucket_bytes=BUCKET)
    sender.hook = Trap(point, True, how)
    while True:
        sender.publish(version, version * 10, tensors(version))
        if not pipe.poll(2 * PATIENCE_S) or pipe.recv() is None:
            break
        version += 1
    sender.close()


def soldier(pipe: Any, plain: dict[str, Any], name: str, sizes: dict[str, tuple[int, ...]]) -> None:
    """Of the soak: follows versions and sends (version, digest of the values, open files, resident kB) for each."""
    from busrl.weights.tensors import Manifest

    receiver: Any = make_receiver(TransportSettings.from_plain(plain), name)
    fetch = receiver.fetch if receiver.kind == "tensors" else lambda into: load_folder(receiver, into)
    here = {key: torch.zeros(shape, dtype=torch.float32) for key, shape in sizes.items()}
    manifest, newest = Manifest.of(here), 0
    while not pipe.poll(0):
        with suppress(WeightsTimeout):
            receiver.wait_for(newest + 1, 0.05)
            newest, _ = fetch(here)
            pipe.send((newest, manifest.digest(here, newest, 0), open_files(), resident_kb()))
    receiver.close()


def write_folder(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """A version as a folder, as a checkpoint's."""
    safetensors.torch.save_file(dict(tensors), folder / "model.safetensors")


def load_folder(receiver: Any, into: dict[str, torch.Tensor]) -> tuple[int, int]:
    """What an engine does with such a version."""
    version, step, folder = receiver.take()
    for name, tensor in safetensors.torch.load_file(folder / "model.safetensors").items():
        into[name].copy_(tensor)
    return int(version), int(step)


def descendants() -> set[int]:
    """Processes that this one has started, and those that these have; zombies count."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    pids, last = {os.getpid()}, set[int]()
    while pids != last:
        last, pids = pids, pids | {pid for pid, parent in parents.items() if parent in pids}
    return pids - {os.getpid()}


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_kb() -> int:
    """Memory of this process alone: pages of shared files come and go with the segment."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))


def settle(sender: BroadcastSender) -> list[str]:
    """Wait until the newest version has arrived at all members of a group; returns their names."""
    deadline = time.monotonic() + PATIENCE_S
    while sender.due():
        assert time.monotonic() < deadline, sender.phase
        threading.Event().wait(0.01)
    return sender.group_members


class Child:
    """A process of a test and the pipe to it."""

    def __init__(self, process: Any, pipe: Any) -> None:
        self.process, self.pipe = process, pipe
        self.last = 0

    def until(self, version: int, patience_s: float = PATIENCE_S) -> float:
        """When it had this version or a later one (monotonic seconds); versions come in order and of one piece."""
        deadline = time.monotonic() + patience_s
        while self.pipe.poll(max(0.0, deadline - time.monotonic())):
            got, when = self.pipe.recv()
            assert got > self.last, (got, self.last)
            self.last = got
            if got >= version:
                return float(when)
        raise AssertionError(f"no version {version} within {patience_s:g} s, last {self.last}")

    def fell(self, how: int, patience_s: float = PATIENCE_S) -> float:
        """Wait until it was killed or stopped; when that was seen."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            state = state_of(self.process.pid)
            if (how == signal.SIGKILL and state in "ZX") or (how == signal.SIGSTOP and state == "T"):
                return time.monotonic()
            time.sleep(0.002)
        raise AssertionError("it lives on")

    def arm(self) -> None:
        self.pipe.send("arm")
        assert self.pipe.poll(PATIENCE_S) and self.pipe.recv() == "armed"

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def told_to_end(self, patience_s: float) -> int | None:
        """Its exit code after being asked to end; None if it has not within the time."""
        with suppress(OSError):
            self.pipe.send(None)
        self.process.join(patience_s)
        return self.process.exitcode  # type: ignore[no-any-return]

    def end(self) -> None:
        """Kill it, and give back the files that lead to it. May be called again."""
        if self.pipe.closed:
            return
        self.process.kill()
        self.process.join(PATIENCE_S)
        self.process.close()
        self.pipe.close()


def state_of(pid: int) -> str:
    """The letter of /proc: T stopped, Z dead and not yet waited for; X if it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
