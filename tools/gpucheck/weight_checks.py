"""Weight updates between two processes on one device, for Qwen3 shapes with made-up numbers, against plain copies."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from busrl.errors import WeightsOwnerLost
from busrl.system import device as devices
from busrl.weights.factory import TransportSettings, make_sender
from busrl.weights.one_copy import OneCopySender
from gpucheck import shapes
from gpucheck.frame import GIGA, Context, Peer, Skipped, peer
from gpucheck.machine_checks import memory_of, name_of
from gpucheck.peers import sums

DTYPE = torch.bfloat16
TURNS = 3


def _paths(context: Context) -> tuple[Path, Path]:
    """A name in shared memory, and a private directory for addresses; both end with the check's."""
    return Path("/dev/shm") / f"busrl.gpucheck.{os.getpid()}.weights", context.file.parent


def _settings(context: Context, transport: str) -> TransportSettings:
    segment, folder = _paths(context)
    return TransportSettings(transport, str(segment), str(folder / "cast.sock"), timeout_s=60)


def _need(context: Context, size: str, device_copies: int, shared_copies: int) -> int:
    """Bytes of one copy of the weights; Skipped if there is no room for as many as it takes."""
    device, one = devices.choose(context.device), shapes.nbytes(shapes.checkpoint_shapes(size), DTYPE)
    spare = 0 if device.type == "cpu" else 2 << 30
    for place, needed, free in (
        (name_of(device), device_copies * one + spare, memory_of(device)[0]),
        ("/dev/shm", shared_copies * one, _shm_free()),
        ("the host", (shared_copies + 1) * one, memory_of(torch.device("cpu"))[0]),
    ):
        if needed > free:
            raise Skipped(f"{size} needs {needed / GIGA:.1f} GB of {place}, which has {free / GIGA:.1f} GB free")
    return one


def _shm_free() -> int:
    status = os.statvfs("/dev/shm")
    return status.f_bavail * status.f_frsize


def _model(context: Context, settings: TransportSettings, size: str, fused: bool) -> Any:
    return peer("model", device=context.device, size=size, dtype="bfloat16", fused=fused, weights=settings.plain())


def shm(context: Context, size: str) -> None:
    """Through shared memory of the host: device to host in the learner, host to device in the engine."""
    one = _need(context, size, 2, 2)
    _transport(context, size, "shm", one)


def broadcast(context: Context, size: str) -> None:
    """Through a group of the host (Gloo) to a model on the device."""
    one = _need(context, size, 2, 0)
    _transport(context, size, "broadcast", one)


def _transport(context: Context, size: str, transport: str, one: int) -> None:
    device, settings = devices.choose(context.device), _settings(context, transport)
    own = shapes.tensors(shapes.checkpoint_shapes(size), device, DTYPE)
    source = make_sender(settings)
    try:
        with _model(context, settings, size, False) as other:
            other.read()
            published, fetched = [], []
            for version in range(1, TURNS + 1):
                for tensor in own.values():
                    tensor.add_(0.5)
                devices.synchronize(device)
                other.tell(do="fetch", above=version - 1, within=60)
                begun = time.perf_counter()
                source.publish(version, version, own)
                published.append(time.perf_counter() - begun)
                fetched.append(other.read()[1])
            right = sums(own) == other.ask(do="sums")
    finally:
        source.close()
        _paths(context)[0].unlink(missing_ok=True)
    _figures(context, f"{size} {transport}: publish", one, min(published), "device to host, pageable")
    _figures(context, f"{size} {transport}: fetch", one, min(fetched), "host to device, pageable")
    context.bar(f"{size} {transport}: every tensor arrived", float(right), at_least=1.0)


def one_copy(context: Context, size: str) -> None:
    """The learner changes the engine's own tensors: a fence and no copy; and, for comparison, a copy inside it."""
    one = _need(context, size, 2, 1 if context.device == "cpu" else 0)
    settings = _settings(context, "cuda_ipc")
    source = make_sender(settings)
    assert isinstance(source, OneCopySender)
    try:
        with _model(context, settings, size, True) as other:
            other.read()
            other.ask(do="share")
            _one_copy(context, size, one, source, other)
    finally:
        source.close()
        for path in (_paths(context)[0], _paths(context)[1] / "weights.bridge"):
            path.unlink(missing_ok=True)


def _one_copy(context: Context, size: str, one: int, source: OneCopySender, other: Peer) -> None:
    device, names = devices.choose(context.device), shapes.checkpoint_shapes(size)
    begun = time.perf_counter()
    views = source.connect({n: torch.empty(s, dtype=DTYPE, device="meta") for n, s in names.items()}, device, 30.0)
    assert views is not None
    context.figure(f"{size} cuda_ipc: mapped s", time.perf_counter() - begun)
    fences, pauses, version = [], [], 0
    for _ in range(2 * TURNS):  # nothing changes: what a fence costs by itself
        version += 1
        other.tell(do="fetch", above=version - 1, within=60)
        begun = time.perf_counter()
        source.pause_engines(version, version)
        source.publish(version, version, views)
        fences.append(time.perf_counter() - begun)
        pauses.append(other.read()[1])
    context.figure(f"{size} cuda_ipc: fence s", min(fences))
    context.figure(f"{size} cuda_ipc: engine paused s", min(pauses))
    version = _in_place(context, size, source, other, views, version + 1)
    _copy_inside(context, size, one, source, other, version + 1)
    other.kill()
    begun = time.perf_counter()
    seen = False
    while not seen and time.perf_counter() - begun < 5:
        try:
            source.check()
        except WeightsOwnerLost:
            seen = True
    context.bar(f"{size} cuda_ipc: the owner's death is seen within s", time.perf_counter() - begun, at_most=1.0)


def _in_place(context: Context, size: str, source: OneCopySender, other: Peer, views: Any, version: int) -> int:
    """A change of every tensor by this process is what the owner has afterwards, in its fused tensors."""
    other.tell(do="fetch", above=version - 1, within=60)
    source.pause_engines(version, version)
    with torch.no_grad():
        for tensor in views.values():
            tensor.add_(0.25)
    source.publish(version, version, views)
    other.read()
    mine, theirs = sum(sums(views)), sum(other.ask(do="sums"))
    context.bar(f"{size} cuda_ipc: the owner has what was changed here", abs(mine - theirs) / max(1.0, abs(mine)),
                at_most=1e-9)
    return version


def _copy_inside(context: Context, size: str, one: int, source: OneCopySender, other: Peer, version: int) -> None:
    own = shapes.tensors(shapes.checkpoint_shapes(size), devices.choose(context.device), DTYPE, 0.03)
    seconds = []
    for turn in range(version, version + TURNS):
        other.tell(do="fetch", above=turn - 1, within=60)
        begun = time.perf_counter()
        source.publish(turn, turn, own)
        seconds.append(time.perf_counter() - begun)
        other.read()
    _figures(context, f"{size} cuda_ipc: copied inside the fence", one, min(seconds), "device to device")


def _figures(context: Context, what: str, one: int, seconds: float, copy: str) -> None:
    """Seconds, bytes per second, and the share of the plain copy of that name."""
    rate = one / seconds / GIGA
    context.figure(f"{what} s", seconds)
    context.figure(f"{what} GB/s", rate)
    if plain := context.bandwidth.get(f"{copy} GB/s"):
        context.figure(f"{what} / {copy}", rate / plain)
