"""One copy of the weights on one device: the engine owns the memory, the learner's parameters are views of it.

OneCopySender in the learner, OneCopyReceiver in the engine. The *bridge*, a file, says where the engine's tensors are;
the *fence*, a page of shared memory, says when they may change. Knows nothing of models or optimisers.

    at rest (version v) --learner: begin--> to be changed --engine: paused--> being changed --learner: end--> at rest
                                                                                                     (version v + 1)
- A new version is no copy: the learner asks the engine to pause, changes the weights in place, and sets them at rest.
  The engine pauses between two decoding steps, in `fetch`, and continues with the new version.
- The learner changes no weight before the engine has confirmed that it is paused for this very change.
- Parameters of another dtype than the engine's (float32 for an engine in bfloat16) are copied inside the fence.
- If the engine dies, the learner stops with WeightsOwnerLost. If the learner dies while it changes the weights, the
  engine stops with WeightsTimeout: they are half of two versions. Whichever is started again finds the other.
- The files have mode 0600, and nothing in them is executed or unpickled.
"""

from __future__ import annotations

import json
import mmap
import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from busrl import device as devices
from busrl import files
from busrl.errors import UserError, WeightsOwnerLost, WeightsTimeout
from busrl.private import exposed
from busrl.weights.base import NOTHING, Hook

# -- which process ---------------------------------------------------------------------------------------------


STATE, STARTED = 0, 19  # fields of /proc/PID/stat after the name
ENDED = ("Z", "X")


@dataclass(frozen=True)
class ProcessIdentity:
    """A pid with the moment at which that process began (`started`, clock ticks since boot), so that a later process
    with the same number is not taken for it. (0, 0) is nobody."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """The process that has the number now; nobody if there is none."""
        fields = _stat(pid)
        return cls(pid, int(fields[STARTED])) if fields else NOBODY

    @classmethod
    def mine(cls) -> ProcessIdentity:
        return cls.of(os.getpid())

    @property
    def alive(self) -> bool:
        """Whether it runs or is stopped; False for a zombie."""
        fields = _stat(self.pid) if self.pid else []
        return bool(fields) and fields[STATE] not in ENDED and int(fields[STARTED]) == self.started

    def __str__(self) -> str:
        return f"pid {self.pid}, {'alive' if self.alive else 'dead'}" if self.pid else "nobody"


NOBODY = ProcessIdentity(0, 0)


def _stat(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


# -- handles of memory -----------------------------------------------------------------------------------------
# A handle is numbers and bytes (as hex digits): a process that reads it can name memory, nothing more.
# CPU: a file without a name, reached through the exporter's descriptor. The kernel frees it with its last mapping, so
# a mapping outlives the exporter. CUDA: the memory belongs to the exporter; after its death a mapping is undefined.


Handle = dict[str, Any]
CUDA_FIELDS = ("handle", "nbytes", "offset", "counter", "counter_offset", "event", "event_sync")


def export_handle(storage: torch.UntypedStorage) -> Handle:
    """A handle of the storage, exported in place: every tensor that is a view of it stays one, and shares it too."""
    kind = storage.device.type
    if kind not in ("cpu", "cuda"):
        raise UserError(f"processes cannot share weights on a {kind} device; use another weights.transport")
    return {"kind": kind, "nbytes": storage.nbytes(), **(_export_file if kind == "cpu" else _export_cuda)(storage)}


def map_handle(handle: Handle, device: torch.device, owner: ProcessIdentity) -> torch.UntypedStorage:
    """The memory behind a handle, writable. WeightsOwnerLost if its owner is gone, UserError if it is no handle."""
    kind = handle.get("kind")
    if kind != device.type:
        raise UserError(f"the weights are on a {kind} device, this process works on {device.type}; both must use one")
    if not owner.alive:
        raise WeightsOwnerLost(f"the process that owns the weights is gone ({owner})")
    return _map_file(handle, owner) if kind == "cpu" else _map_cuda(handle, device)


def _export_file(storage: torch.UntypedStorage) -> Handle:
    descriptor, _ = storage._share_fd_cpu_()  # moves it into a file, if it is in none
    return {"descriptor": int(descriptor), "inode": os.fstat(descriptor).st_ino}


def _map_file(handle: Handle, owner: ProcessIdentity) -> torch.UntypedStorage:
    path = f"/proc/{owner.pid}/fd/{int(handle['descriptor'])}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as problem:
        raise WeightsOwnerLost(f"{path} cannot be opened ({problem.strerror}): weights of {owner}") from None
    try:
        status = os.fstat(descriptor)
        if status.st_ino != handle["inode"] or status.st_size < handle["nbytes"]:
            raise WeightsOwnerLost(f"{path} is another file now: weights of {owner}")
        mapping = mmap.mmap(descriptor, handle["nbytes"])
    finally:
        os.close(descriptor)
    return torch.frombuffer(mapping, dtype=torch.uint8).untyped_storage()


def _export_cuda(storage: torch.UntypedStorage) -> Handle:
    """torch's handle for another process. Its counter of users stays at one however often the handle is mapped: the
    owner keeps the memory, and outlives the processes that map it or ends them."""
    share: Any = storage._share_cuda_
    _, handle, nbytes, offset, counter, counter_offset, event, sync = share()
    return {
        "handle": handle.hex(), "nbytes": int(nbytes), "offset": int(offset), "counter": counter.hex(),
        "counter_offset": int(counter_offset), "event": event.hex(), "event_sync": bool(sync),
    }


def _map_cuda(handle: Handle, device: torch.device) -> torch.UntypedStorage:
    missing = [name for name in CUDA_FIELDS if name not in handle]
    if missing:
        raise UserError(f"no handle of CUDA memory: {missing[0]} is missing; both sides must run one version of busrl")
    given = (bytes.fromhex(value) if isinstance(value, str) else value for value in (handle[n] for n in CUDA_FIELDS))
    torch.empty(0, device=device)  # the device's context has to be there before memory is mapped
    mapped: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *given)
    return mapped


# -- the rows of fused tensors ---------------------------------------------------------------------------------
# Engines fuse projections with equal inputs, in the order q, k, v and gate, up. Every name of the checkpoint has its
# rows, and every tensor of the engine is covered: one that stayed as it was while others train would be a silent bug.
# Rows beyond the vocabulary are padding and belong to nobody.


Shape = tuple[int, ...]
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
REMEDY = 'this architecture cannot share its weights: use weights.transport = "shm"'
PADDED = ("embed_tokens.weight", "lm_head.weight", "wte.weight")  # engines round the vocabulary up


@dataclass(frozen=True)
class FusedRows:
    """A tensor of the checkpoint: rows `start` to `stop` of the engine's `tensor`; a scalar has 0 to 0."""

    name: str
    tensor: str
    start: int
    stop: int


def fused_rows(engine: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> list[FusedRows]:
    """Where each wanted tensor lies among the engine's. UserError names the first that has no place."""
    found = [_place(name, shape, engine, wanted) for name, shape in wanted.items()]
    if left := engine.keys() - {part.tensor for part in found}:
        more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
        raise UserError(f"weights: {min(left)}{more} of the engine is no tensor of the checkpoint; {REMEDY}")
    return found


def _place(name: str, shape: Shape, engine: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> FusedRows:
    if name in engine:
        _check_whole(name, shape, engine[name])
        return FusedRows(name, name, 0, shape[0] if shape else 0)
    for fused, pieces in FUSED.items():
        for piece in pieces:
            tensor = name.replace(f".{piece}.", f".{fused}.")
            if tensor != name and tensor in engine:
                siblings = [name.replace(f".{piece}.", f".{other}.") for other in pieces]
                return _slice(name, tensor, siblings, engine, wanted)
    raise UserError(f"weights: the engine has no {name}, alone or fused; {REMEDY}")


def _check_whole(name: str, shape: Shape, own: Shape) -> None:
    padded = name.endswith(PADDED) and own[1:] == shape[1:] and own[0] >= shape[0]
    if own != shape and not padded:
        raise UserError(f"weights: {name} is {list(own)} in the engine and {list(shape)} in the checkpoint")


def _slice(
    name: str, tensor: str, siblings: list[str], engine: Mapping[str, Shape], wanted: Mapping[str, Shape]
) -> FusedRows:
    missing = [sibling for sibling in siblings if sibling not in wanted]
    if missing:
        raise UserError(f"weights: {tensor} of the engine holds {missing[0]} too, which the checkpoint does not have")
    rows = [wanted[sibling][0] for sibling in siblings]
    same = all(wanted[sibling][1:] == engine[tensor][1:] for sibling in siblings)
    if sum(rows) != engine[tensor][0] or not same:
        raise UserError(
            f"weights: {tensor} is {list(engine[tensor])} in the engine; {' + '.join(siblings)} make {sum(rows)} rows "
            "in the checkpoint (is the engine split over several devices?)"
        )
    start = sum(rows[: siblings.index(name)])
    return FusedRows(name, tensor, start, start + wanted[name][0])


# -- the fence -------------------------------------------------------------------------------------------------


FENCE_MAGIC = int.from_bytes(b"busrlfnc", "little")
FENCE_LAYOUT, SIZE = 1, 4096
W_MAGIC, W_LAYOUT, W_OWNER, W_LEARNER, W_STATE, W_PAUSED = 0, 1, 2, 4, 8, 16
MOST = (1 << 31) - 1  # of a version


@dataclass(frozen=True)
class FenceState:
    """Version and step of the weights, and whether they are at rest. Version 0 is what the engine loaded."""

    version: int
    step: int
    changing: bool

    @property
    def word(self) -> int:
        if not (0 <= self.version <= MOST and 0 <= self.step < 1 << 32):
            raise UserError(f"version {self.version} of step {self.step}: the fence counts to {MOST}")
        return self.step << 32 | self.version << 1 | self.changing

    @classmethod
    def of(cls, word: int) -> FenceState:
        return cls(word >> 1 & MOST, word >> 32, bool(word & 1))

    @property
    def stamp(self) -> tuple[int, int]:
        """(version, step), NOTHING before the first publication."""
        return (self.version, self.step) if self.version else NOTHING


class Fence:
    """A mapping of the page. State, version and step share one 64-bit word, so nobody reads one without the others.

    Little-endian words: 0 magic, 1 layout, 2-3 the engine's pid and start, 4-5 the learner's, 8 the state
    (step << 32 | version << 1 | 1 while it is to be changed), 16 the state word that the engine is paused for.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.inode = os.fstat(descriptor).st_ino
        self._map = mmap.mmap(descriptor, SIZE)
        self._words: npt.NDArray[np.uint64] = np.frombuffer(self._map, np.uint64)

    @classmethod
    def create(cls, path: Path) -> Fence:
        """A new page of this process under that name, at rest with version 0; readable by this user only."""
        with files.replacing(path, durable=False) as descriptor:
            os.posix_fallocate(descriptor, 0, SIZE)
            made = cls(path, descriptor)
            made._words[:2] = FENCE_MAGIC, FENCE_LAYOUT
            made._set_identity(W_OWNER, ProcessIdentity.mine())
        return made

    @classmethod
    def attach(cls, path: Path) -> Fence | None:
        """The page of that name, None if there is no such file; UserError if it is no fence, or another user's."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        except OSError as problem:
            raise UserError(f"{path}: no fence of shared weights there ({problem.strerror})") from None
        try:
            status = os.fstat(descriptor)
            head = np.frombuffer(os.pread(descriptor, 16, 0).ljust(16, b"\0"), np.uint64)
            if (int(head[0]), int(head[1]), status.st_size) != (FENCE_MAGIC, FENCE_LAYOUT, SIZE):
                raise UserError(f"{path}: no fence of shared weights, or one of another version of busrl")
            if status.st_uid != os.geteuid():
                raise UserError(f"{path} belongs to user {status.st_uid}, not to you ({os.geteuid()}): have it removed")
            return cls(path, descriptor)
        finally:
            os.close(descriptor)

    @property
    def state(self) -> FenceState:
        return FenceState.of(int(self._words[W_STATE]))

    @state.setter
    def state(self, state: FenceState) -> None:
        self._words[W_STATE] = state.word

    @property
    def owner(self) -> ProcessIdentity:
        """The engine's process."""
        return self._identity(W_OWNER)

    @property
    def learner(self) -> ProcessIdentity:
        return self._identity(W_LEARNER)

    @learner.setter
    def learner(self, process: ProcessIdentity) -> None:
        self._set_identity(W_LEARNER, process)

    def pause_for(self, state: FenceState) -> None:
        """The engine reads no weights until they are at rest again."""
        self._words[W_PAUSED] = state.word

    def paused_for(self, state: FenceState) -> bool:
        return int(self._words[W_PAUSED]) == state.word

    def forget_pause(self) -> None:
        """A pause for an earlier change, perhaps of an earlier learner, does not count."""
        self._words[W_PAUSED] = 0

    def still_named(self) -> bool:
        """Whether the path still leads to this page (a restarted engine replaces it)."""
        try:
            return os.stat(self.path).st_ino == self.inode
        except FileNotFoundError:
            return False

    def close(self) -> None:
        self._words = np.zeros(SIZE // 8, np.uint64)
        self._map.close()

    def _identity(self, at: int) -> ProcessIdentity:
        return ProcessIdentity(int(self._words[at]), int(self._words[at + 1]))

    def _set_identity(self, at: int, process: ProcessIdentity) -> None:
        self._words[at : at + 2] = process.pid, process.started


# -- the bridge ------------------------------------------------------------------------------------------------


BRIDGE_MAGIC, BRIDGE_LAYOUT = "busrl-bridge", 1
Named = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Bridge:
    """What the file holds. `tensors`: name, storage, offset in items, shape, strides, dtype; `parts`: their rows by the
    checkpoint's names. It appears whole, so a reader never sees half of it."""

    id: str
    name: str  # of the process that wrote it
    owner: ProcessIdentity
    device: str  # identity of the device
    storages: list[Handle]
    tensors: list[dict[str, Any]]
    parts: list[FusedRows]

    def to_json(self) -> str:
        return json.dumps(
            {
                "magic": BRIDGE_MAGIC, "layout": BRIDGE_LAYOUT, "id": self.id, "name": self.name,
                "owner": [self.owner.pid, self.owner.started], "device": self.device, "storages": self.storages,
                "tensors": self.tensors, "parts": [[p.name, p.tensor, p.start, p.stop] for p in self.parts],
            },
            separators=(",", ":"),
        )


def describe_bridge(name: str, named: Named, wanted: Mapping[str, Shape] | None = None) -> Bridge:
    """Export the tensors of this process's model, in place. `wanted`: the checkpoint's names and shapes, where the
    engine has fused its own; None: the names are the checkpoint's."""
    shapes = {key: tuple(tensor.shape) for key, tensor in named.items()}
    parts = fused_rows(shapes, wanted if wanted is not None else shapes)
    storages: dict[int, int] = {}
    handles: list[Handle] = []
    tensors: list[dict[str, Any]] = []
    for key, tensor in named.items():
        storage = tensor.untyped_storage()
        at = storage.data_ptr()
        if at not in storages:
            handles.append(export_handle(storage))
            at = storage.data_ptr()  # on a CPU it has moved into a file
            storages[at] = len(handles) - 1
        tensors.append(
            {
                "name": key, "storage": storages[at], "offset": tensor.storage_offset(), "shape": list(tensor.shape),
                "strides": list(tensor.stride()), "dtype": str(tensor.dtype).removeprefix("torch."),
            }
        )
    where = next(iter(named.values())).device
    return Bridge(uuid.uuid4().hex, name, ProcessIdentity.mine(), devices.identity(where), handles, tensors, parts)


def read_bridge(path: Path) -> Bridge | None:
    """The bridge in the file; None if there is none. UserError if it is damaged, another user's or open to others."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise UserError(f"{path}: {problem.strerror}; it is no bridge of this run, have it removed") from None
    with os.fdopen(descriptor, encoding="ascii") as file:
        if why := exposed(Path(f"/proc/self/fd/{descriptor}")):
            raise UserError(f"{path}: {why}; it names memory that others could change, have it removed")
        try:
            return _parse(json.load(file))
        except (ValueError, KeyError, TypeError) as problem:
            raise UserError(f"{path}: not a bridge of this version of busrl ({problem!r}); have it removed") from None


def _parse(data: dict[str, Any]) -> Bridge:
    if (data["magic"], data["layout"]) != (BRIDGE_MAGIC, BRIDGE_LAYOUT):
        raise ValueError(f"magic {data['magic']!r}, layout {data['layout']!r}")
    pid, started = data["owner"]
    parts = [FusedRows(str(n), str(t), int(a), int(b)) for n, t, a, b in data["parts"]]
    return Bridge(str(data["id"]), str(data["name"]), ProcessIdentity(int(pid), int(started)), str(data["device"]),
                  list(data["storages"]), list(data["tensors"]), parts)


def map_parts(bridge: Bridge, device: torch.device) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors, by name, as views of the owner's memory on this device."""
    if bridge.device != devices.identity(device):
        raise UserError(
            f"{bridge.name} has the weights on {bridge.device}, this process works on {devices.identity(device)}: "
            "one copy needs one device; give both processes the same devices in [[process]]"
        )
    storages = [map_handle(handle, device, bridge.owner) for handle in bridge.storages]
    whole = {entry["name"]: _view(storages[entry["storage"]], entry, device) for entry in bridge.tensors}
    found = {p.name: whole[p.tensor][p.start : p.stop] if p.stop else whole[p.tensor] for p in bridge.parts}
    if not bridge.owner.alive:
        raise WeightsOwnerLost(f"{bridge.name} ({bridge.owner}) ended while its weights were mapped")
    return found


def _view(storage: torch.UntypedStorage, entry: dict[str, Any], device: torch.device) -> torch.Tensor:
    dtype = getattr(torch, entry["dtype"])
    last = entry["offset"] + sum((n - 1) * stride for n, stride in zip(entry["shape"], entry["strides"]))
    if (last + 1) * dtype.itemsize > storage.nbytes():
        raise UserError(f"weights: {entry['name']} does not fit into its memory; the bridge is damaged")
    made = torch.empty(0, dtype=dtype, device=device)
    return made.set_(storage, entry["offset"], entry["shape"], entry["strides"])


def check_bridge(views: Named, own: Named, *, same_dtype: bool) -> None:
    """UserError with the first difference between the engine's weights and this model's."""
    for missing, text in ((own.keys() - views.keys(), "not among the engine's weights"),
                          (views.keys() - own.keys(), "in the engine, and not in this model")):
        if missing:
            raise UserError(f"weights: {min(missing)!r} is {text}; both sides must run the same model.path")
    for name, tensor in own.items():
        other = views[name]
        if other.shape != tensor.shape or (same_dtype and other.dtype != tensor.dtype):
            raise UserError(
                f"weights: {name!r} is {other.dtype}{list(other.shape)} in the engine and "
                f"{tensor.dtype}{list(tensor.shape)} here; both sides must run the same model.path and model.dtype"
            )


# -- engine and learner ----------------------------------------------------------------------------------------


LOOK_EVERY_S = 0.0005  # an engine is paused at least that long: no process can wake another here
SEARCH_EVERY_S = 0.02


class OneCopyReceiver:
    """The engine's side. Call `share` first; then it is a receiver like the others."""

    kind: Literal["tensors"] = "tensors"

    def __init__(self, bridge_file: str | Path, fence_file: str | Path, name: str, *, timeout_s: float = 10.0) -> None:
        self.bridge_file, self.fence_file = Path(bridge_file), Path(fence_file)
        self.name = name
        self._timeout_s = timeout_s
        self._fence: Fence | None = None
        self._kept: list[torch.Tensor] = []
        self._device: torch.device | None = None

    def share(self, named: Mapping[str, torch.Tensor], wanted: Mapping[str, Shape] | None = None) -> None:
        """Share the tensors of this process's model with the learner (its parameters, by name, each once).

        `wanted`: the checkpoint's names and shapes, for an engine that has fused its own.
        """
        self._kept = list(named.values())  # shared memory has to outlive the model
        self._device = self._kept[0].device
        described = describe_bridge(self.name, named, wanted)
        self._fence = Fence.create(self.fence_file)
        files.replace(self.bridge_file, described.to_json().encode())

    def newest(self) -> tuple[int, int]:
        """The version at rest, or the one that the learner asks to pause for: `fetch` waits until it is complete."""
        return NOTHING if self._fence is None else self._fence.state.stamp

    def wait_for(self, version: int, timeout_s: float) -> tuple[int, int]:
        """For an engine without running requests: it pauses for every change."""
        deadline, pause = time.monotonic() + timeout_s, Event()
        while True:
            state = self._shared().state
            if not state.changing and state.version >= version:
                return state.stamp
            self._pause_for(state)
            if time.monotonic() > deadline:
                raise WeightsTimeout(f"{self.name}: no version {version} after {timeout_s:g} s: {self._status(state)}")
            pause.wait(LOOK_EVERY_S)

    def fetch(self, params: dict[str, torch.Tensor]) -> tuple[int, int]:
        """Pause until the weights are at rest; returns their (version, step). Copies nothing into `params`."""
        deadline, pause = time.monotonic() + self._timeout_s, Event()
        while (state := self._shared().state).changing:
            self._pause_for(state)
            if time.monotonic() > deadline:
                raise WeightsTimeout(f"{self.name}: paused for {self._timeout_s:g} s: {self._status(state)}")
            pause.wait(LOOK_EVERY_S)
        return state.version, state.step

    def close(self) -> None:
        """Remove the shared weights, once the learner has released them: it may be writing its last checkpoint."""
        if self._fence is None:
            return
        deadline, pause = time.monotonic() + self._timeout_s, Event()
        while self._fence.learner.alive and time.monotonic() < deadline:
            self._pause_for(self._fence.state)
            pause.wait(SEARCH_EVERY_S)
        if self._fence.still_named():
            self.bridge_file.unlink(missing_ok=True)
            self.fence_file.unlink(missing_ok=True)
        self._fence.close()
        self._fence, self._kept = None, []

    def _pause_for(self, state: FenceState) -> None:
        """Tell the learner, once for each change, that this engine reads no weights from here on."""
        fence = self._shared()
        if state.changing and not fence.paused_for(state):
            if self._device is not None:
                devices.synchronize(self._device)
            fence.pause_for(state)

    def _shared(self) -> Fence:
        if self._fence is None:
            raise UserError(f"{self.name}: its weights are not shared yet")
        return self._fence

    def _status(self, state: FenceState) -> str:
        learner = self._shared().learner
        if not state.changing:
            return f"the learner ({learner}) has published nothing beyond version {state.version}"
        half = "" if learner.alive else "; the weights are half of two versions, this engine has to load its own again"
        return f"the learner ({learner}) changes the weights to version {state.version} (step {state.step}){half}"


class OneCopySender:
    """The learner's side. Call `connect`; then a fence (`begin` ... `publish`) around every change of the weights."""

    hook: Hook | None = None  # nothing is copied, so there is no point to report

    def __init__(self, bridge_file: str | Path, fence_file: str | Path, *, timeout_s: float = 10.0) -> None:
        self.bridge_file, self.fence_file = Path(bridge_file), Path(fence_file)
        self._timeout_s = timeout_s
        self._fence: Fence | None = None
        self._bridge: Bridge | None = None
        self._views: dict[str, torch.Tensor] = {}
        self._device: torch.device | None = None

    def newest(self) -> tuple[int, int]:
        state = None if self._fence is None else self._fence.state
        return NOTHING if state is None or state.changing else state.stamp

    def connect(
        self, own: Mapping[str, torch.Tensor], device: torch.device, wait_s: float,
        stopping: Callable[[], object] = lambda: False,
    ) -> dict[str, torch.Tensor] | None:
        """The engine's weights, by the checkpoint's names; None if `stopping()` became true meanwhile.

        `own` are the weights that this process has loaded: names and shapes must be equal. WeightsTimeout after
        `wait_s`.
        """
        deadline, pause = time.monotonic() + wait_s, Event()
        while not stopping():
            found = read_bridge(self.bridge_file)
            if found is not None and found.owner.alive and self._attach(found):
                self._views = map_parts(found, device)
                check_bridge(self._views, own, same_dtype=False)
                self._bridge, self._device = found, device
                return self._views
            if time.monotonic() > deadline:
                why = "no engine has shared its weights" if found is None else f"{found.name} is {found.owner}"
                raise WeightsTimeout(f"{self.bridge_file}: {why} after {wait_s:g} s; is the rollout process up?")
            pause.wait(SEARCH_EVERY_S)
        return None

    def _attach(self, found: Bridge) -> bool:
        """Whether the fence of that bridge exists; a restarted engine makes its fence before its bridge."""
        fence = Fence.attach(self.fence_file)
        if fence is None:
            return False
        if fence.owner != found.owner:
            fence.close()
            return False
        if fence.learner not in (NOBODY, ProcessIdentity.mine()) and fence.learner.alive:
            raise UserError(f"{self.fence_file}: another learner ({fence.learner}) has these weights already")
        fence.learner = ProcessIdentity.mine()
        self._fence = fence
        return True

    def check(self) -> None:
        """WeightsOwnerLost if the engine is gone: the memory behind the parameters is no longer valid."""
        if self._bridge is not None and not self._bridge.owner.alive:
            raise WeightsOwnerLost(
                f"{self._bridge.name} ({self._bridge.owner}) held the weights and is gone, and the weights with it; "
                "this learner has to restart from its checkpoint and log, with the weights of the engine's successor"
            )

    def begin(self, version: int, step: int) -> None:
        """Ask the engine to pause for this version and wait until it has. No weight may change before."""
        fence = self._connected()
        before, state = fence.state, FenceState(version, step, True)
        fence.forget_pause()
        fence.state = state
        deadline, pause = time.monotonic() + self._timeout_s, Event()
        while not fence.paused_for(state):
            self.check()
            if time.monotonic() > deadline:
                fence.state = before
                raise WeightsTimeout(
                    f"{self._owner()} did not pause for version {version} within {self._timeout_s:g} s; nothing changed"
                )
            pause.wait(LOOK_EVERY_S)

    @property
    def begun(self) -> bool:
        """Whether the engine is paused for a version that is not published yet."""
        return self._fence is not None and self._fence.state.changing

    def publish(self, version: int, step: int, named: dict[str, torch.Tensor]) -> None:
        """Set the weights at rest, as `version`. Copies tensors that are not views of the engine's into them."""
        fence = self._connected()
        if not fence.state.changing:
            if version <= fence.state.version:
                raise UserError(f"version {version} is not above {fence.state.version}, which is published")
            self.begin(version, step)
        elif fence.state.version != version:
            raise UserError(f"the fence was begun for version {fence.state.version}, not for {version}")
        self.write(named)
        self.check()
        fence.state = FenceState(version, step, False)

    def write(self, named: Mapping[str, torch.Tensor]) -> int:
        """Copy tensors that are not views of the engine's weights into them, and wait for the device; returns the bytes
        copied. Inside the fence only."""
        copied = 0
        with torch.no_grad():
            for name, view in self._views.items():
                if named[name].data_ptr() != view.data_ptr():
                    view.copy_(named[name])
                    copied += view.nbytes
        if self._device is not None:
            devices.synchronize(self._device)
        return copied

    def close(self) -> None:
        """Release the weights: the engine may remove them, and the views must not be used any more."""
        self._views, self._bridge = {}, None
        if self._fence is not None:
            self._fence.learner = NOBODY
            self._fence.close()
            self._fence = None

    def _connected(self) -> Fence:
        if self._fence is None or self._bridge is None:
            raise UserError(f"{self.bridge_file}: the engine's weights are not mapped yet")
        return self._fence

    def _owner(self) -> str:
        return f"{self._bridge.name} ({self._bridge.owner})" if self._bridge is not None else "the engine"
