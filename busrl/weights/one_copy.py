"""A single copy of the weights on one device: the engine owns the memory, the learner's parameters are views of it.

OneCopySender is the learner's side, OneCopyReceiver the engine's. The *bridge*, a file, holds where the engine's
tensors are; the *fence*, a page of shared memory, holds whether they may change. Knows nothing of models or optimisers.

    at rest (version v) --learner: begin--> to be changed --engine: paused--> being changed --learner: end--> at rest
                                                                                                     (version v + 1)
- A new version is no copy: the learner requests a pause, changes the weights in place, and sets them at rest. The
  engine pauses between two decoding steps, in `fetch`, and continues with the new version.
- The learner changes no weight before the engine has confirmed that it is paused for this very change.
- Parameters of another dtype than the engine's (float32 for an engine in bfloat16) are copied inside the fence.
- If the engine dies, the learner stops with WeightsOwnerLost. If the learner dies while it changes the weights, which
  are then half of two versions, the engine stops with WeightsTimeout. A process that starts again finds the other.
- The files have mode 0600, and nothing in them is executed or unpickled.
"""

from __future__ import annotations

import mmap
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from busrl.errors import UserError, WeightsOwnerLost, WeightsTimeout
from busrl.system import device as devices
from busrl.system import files
from busrl.system.guardian import born, stat_of
from busrl.system.private import exposed
from busrl.weights.base import (
    NOTHING,
    GroupCallbacks,
    SharedReceiver,
    SharedSender,
    Write,
    is_named,
    open_own,
    poll,
)

if TYPE_CHECKING:
    from busrl.weights.factory import TransportSettings

# -- identity of a process -------------------------------------------------------------------------------------


class ProcessIdentity(msgspec.Struct, frozen=True, array_like=True):
    """A pid and the start of its process (`started`, clock ticks since boot), which a later process with the same pid
    does not share. (0, 0) is nobody."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """The process that has the pid now; nobody if there is none."""
        began = born(pid)
        return cls(pid, began) if began else NOBODY

    @classmethod
    def mine(cls) -> ProcessIdentity:
        return cls.of(os.getpid())

    @property
    def alive(self) -> bool:
        """True while it runs or is stopped; False for a zombie."""
        fields = stat_of(self.pid) if self.pid else []
        return bool(fields) and fields[0] not in "ZX" and born(self.pid) == self.started

    def __str__(self) -> str:
        return f"pid {self.pid}, {'alive' if self.alive else 'dead'}" if self.pid else "nobody"


NOBODY = ProcessIdentity(0, 0)


# -- handles of memory -----------------------------------------------------------------------------------------
# A handle is numbers and bytes (as hex digits): a process that reads it can name memory, nothing more.
# CPU: a file without a name, reached through the exporter's descriptor. The kernel frees it with its last mapping, so
# a mapping outlives the exporter. CUDA: the memory belongs to the exporter; after its death a mapping is undefined.
# torch's counter of a handle's users stays at one however often it is mapped. So the owner must keep the memory for as
# long as a process maps it.


Handle = dict[str, Any]
CUDA_FIELDS = ("handle", "nbytes", "offset", "counter", "counter_offset", "event", "event_sync")  # in torch's order


def export_handle(storage: Any) -> Handle:
    """A handle of the storage, exported in place: every tensor that is a view of it stays one, and shares it too."""
    handle: Handle = {"kind": storage.device.type, "nbytes": storage.nbytes()}
    if handle["kind"] == "cpu":
        descriptor, _ = storage._share_fd_cpu_()  # moves it into a file, if it is in none
        return handle | {"descriptor": int(descriptor), "inode": os.fstat(descriptor).st_ino}
    if handle["kind"] == "cuda":
        _, *values = storage._share_cuda_()
        return handle | dict(zip(CUDA_FIELDS, (value.hex() if isinstance(value, bytes) else value for value in values)))
    raise UserError(f"processes cannot share weights on a {handle['kind']} device; use another weights.transport")


def map_handle(handle: Handle, device: torch.device, owner: ProcessIdentity) -> torch.UntypedStorage:
    """The memory behind a handle, writable. WeightsOwnerLost if its owner is gone, UserError if it is no handle."""
    kind = handle.get("kind")
    if kind != device.type:
        raise UserError(f"the weights are on a {kind} device, this process works on {device.type}; both must use one")
    if not owner.alive:
        raise WeightsOwnerLost(f"the process that owns the weights is gone ({owner})")
    if kind == "cpu":
        return _map_file(handle, owner)
    if missing := [name for name in CUDA_FIELDS if name not in handle]:
        raise UserError(f"no handle of CUDA memory: {missing[0]} is missing; both sides must run one version of busrl")
    fields = (handle[name] for name in CUDA_FIELDS)
    arguments = (bytes.fromhex(field) if isinstance(field, str) else field for field in fields)
    torch.empty(0, device=device)  # the device's context has to be there before memory is mapped
    mapped: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *arguments)
    return mapped


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


# -- the rows of fused tensors ---------------------------------------------------------------------------------
# Engines fuse projections with equal inputs, in the order q, k, v and gate, up. Every name of the checkpoint has its
# rows, and every tensor of the engine is covered: a tensor that training never changes would be a silent bug. Rows
# beyond the vocabulary are padding.


Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
REMEDY = 'this architecture cannot share its weights: use weights.transport = "shm"'
PADDED = ("embed_tokens.weight", "lm_head.weight", "wte.weight")  # engines round the vocabulary up


class FusedRows(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of the checkpoint: rows `start` to `stop` of the engine's `tensor`; a scalar has 0 to 0."""

    name: str
    tensor: str
    start: int
    stop: int


def fused_rows(engine: Shapes, wanted: Shapes) -> list[FusedRows]:
    """The place of each wanted tensor among the engine's. UserError names the first that has no place."""
    parts = [_place(name, engine, wanted) for name in wanted]
    if left := engine.keys() - {part.tensor for part in parts}:
        more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
        raise UserError(f"weights: {min(left)}{more} of the engine is no tensor of the checkpoint; {REMEDY}")
    return parts


def _place(name: str, engine: Shapes, wanted: Shapes) -> FusedRows:
    shape = wanted[name]
    if (same := engine.get(name)) is not None:
        padded = name.endswith(PADDED) and same[1:] == shape[1:] and same[0] >= shape[0]
        if same != shape and not padded:
            raise UserError(f"weights: {name} is {list(same)} in the engine and {list(shape)} in the checkpoint")
        return FusedRows(name, name, 0, shape[0] if shape else 0)
    for fused, pieces in FUSED.items():
        for piece in pieces:
            tensor = name.replace(f".{piece}.", f".{fused}.")
            if tensor in engine:
                siblings = [name.replace(f".{piece}.", f".{other}.") for other in pieces]
                return _slice(name, tensor, siblings, engine[tensor], wanted)
    raise UserError(f"weights: the engine has no {name}, alone or fused; {REMEDY}")


def _slice(name: str, tensor: str, siblings: list[str], fused: Shape, wanted: Shapes) -> FusedRows:
    if missing := [sibling for sibling in siblings if sibling not in wanted]:
        raise UserError(f"weights: {tensor} of the engine holds {missing[0]} too, which the checkpoint does not have")
    rows = [wanted[sibling][0] for sibling in siblings]
    if sum(rows) != fused[0] or any(wanted[sibling][1:] != fused[1:] for sibling in siblings):
        raise UserError(
            f"weights: {tensor} is {list(fused)} in the engine; {' + '.join(siblings)} make {sum(rows)} rows in the "
            "checkpoint (is the engine split over several devices?)"
        )
    start = sum(rows[: siblings.index(name)])
    return FusedRows(name, tensor, start, start + wanted[name][0])


# -- the fence -------------------------------------------------------------------------------------------------


FENCE_MAGIC = int.from_bytes(b"busrlfnc", "little")
FENCE_LAYOUT, SIZE = 1, 4096
W_OWNER, W_LEARNER, W_STATE, W_PAUSED = 2, 4, 8, 16
MOST = (1 << 31) - 1  # of a version


@dataclass(frozen=True)
class FenceState:
    """Version and step of the weights, and whether they are at rest. Version 0 is the weights that the engine loaded.
    """

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


LOADED = FenceState(0, 0, False)


class Fence:
    """A mapping of the page. State, version and step share one 64-bit word, so that they are read together.
    Little-endian words: 0 magic, 1 layout, 2-3 the engine's pid and start, 4-5 the learner's, 8 the state (step << 32 |
    version << 1 | 1 while it is to be changed), 16 the state word that the engine is paused for."""

    def __init__(self, descriptor: int) -> None:
        self.inode = os.fstat(descriptor).st_ino
        self._map = mmap.mmap(descriptor, SIZE)
        self._words: npt.NDArray[np.uint64] = np.frombuffer(self._map, np.uint64)

    @classmethod
    def create(cls, path: Path) -> Fence:
        """Make a page of this process under that name, at rest with version 0; readable by this user only."""
        with files.replacing(path, durable=False) as descriptor:
            os.posix_fallocate(descriptor, 0, SIZE)
            fence, process = cls(descriptor), ProcessIdentity.mine()
            fence._words[: W_OWNER + 2] = FENCE_MAGIC, FENCE_LAYOUT, process.pid, process.started
        return fence

    @classmethod
    def attach(cls, path: Path) -> Fence | None:
        """The page of that name, None if there is no file; UserError if it is no fence, or another user's."""
        descriptor = open_own(path, os.O_RDWR)
        if descriptor is None:
            return None
        try:
            head = os.pread(descriptor, 16, 0), os.fstat(descriptor).st_size
            if head != (np.array([FENCE_MAGIC, FENCE_LAYOUT], np.uint64).tobytes(), SIZE):
                raise UserError(f"{path}: no fence of shared weights, or one of another version of busrl")
            return cls(descriptor)
        finally:
            os.close(descriptor)

    @property
    def state(self) -> FenceState:
        return FenceState.of(int(self._words[W_STATE]))

    @state.setter
    def state(self, state: FenceState) -> None:
        self._words[W_STATE] = state.word

    @property
    def paused(self) -> FenceState:
        """The change for which the engine is paused until the weights are at rest again; LOADED: none."""
        return FenceState.of(int(self._words[W_PAUSED]))

    @paused.setter
    def paused(self, state: FenceState) -> None:
        self._words[W_PAUSED] = state.word

    @property
    def owner(self) -> ProcessIdentity:
        return ProcessIdentity(*map(int, self._words[W_OWNER : W_OWNER + 2]))

    @property
    def learner(self) -> ProcessIdentity:
        return ProcessIdentity(*map(int, self._words[W_LEARNER : W_LEARNER + 2]))

    @learner.setter
    def learner(self, process: ProcessIdentity) -> None:
        self._words[W_LEARNER : W_LEARNER + 2] = process.pid, process.started

    def close(self) -> None:
        self._words = np.zeros(SIZE // 8, np.uint64)
        self._map.close()


# -- the bridge ------------------------------------------------------------------------------------------------


Named = Mapping[str, torch.Tensor]


class SharedTensor(msgspec.Struct, frozen=True):
    """A tensor of the engine and its place in a storage; `offset` and `strides` count values."""

    name: str
    storage: int
    offset: int
    shape: list[int]
    strides: list[int]
    dtype: str


class Bridge(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file, which appears whole. `parts`: rows of `tensors` by the checkpoint's names."""

    magic: Literal["busrl-bridge"] = "busrl-bridge"
    layout: Literal[1] = 1
    id: str
    name: str  # of the process that wrote it
    owner: ProcessIdentity
    device: str  # identity of the device
    storages: list[Handle]
    tensors: list[SharedTensor]
    parts: list[FusedRows]


def describe_bridge(name: str, tensors: Named, wanted: Shapes | None = None) -> Bridge:
    """Export the tensors of this process's model, in place. `wanted`: the checkpoint's names and shapes, if the engine
    has fused its tensors; None: the names are the checkpoint's."""
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    parts = fused_rows(shapes, wanted if wanted is not None else shapes)
    places: dict[int, int] = {}  # address of a storage -> its number
    storages: list[Handle] = []
    shared: list[SharedTensor] = []
    for key, tensor in tensors.items():
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in places:
            storages.append(export_handle(storage))
            places[storage.data_ptr()] = len(storages) - 1  # by its new address: on a CPU it has moved into a file
        at, dtype = places[storage.data_ptr()], str(tensor.dtype).removeprefix("torch.")
        shape, strides = list(tensor.shape), list(tensor.stride())
        shared.append(SharedTensor(key, at, int(tensor.storage_offset()), shape, strides, dtype))
    device = devices.identity(next(iter(tensors.values())).device)
    owner = ProcessIdentity.mine()
    return Bridge(
        id=uuid.uuid4().hex, name=name, owner=owner, device=device, storages=storages, tensors=shared, parts=parts
    )


def read_bridge(path: Path) -> Bridge | None:
    """The bridge in the file; None if there is none. UserError if it is damaged, another user's or open to others."""
    descriptor = open_own(path, os.O_RDONLY)
    if descriptor is None:
        return None
    with os.fdopen(descriptor, "rb") as file:
        if why := exposed(Path(f"/proc/self/fd/{descriptor}")):
            raise UserError(f"{path}: {why}; it names memory that others could change, have it removed")
        try:
            return msgspec.json.decode(file.read(), type=Bridge)
        except msgspec.DecodeError as problem:
            raise UserError(f"{path}: not a bridge of this version of busrl ({problem}); have it removed") from None


def map_parts(bridge: Bridge, device: torch.device) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors, by name, as views of the owner's memory on this device."""
    if bridge.device != devices.identity(device):
        raise UserError(
            f"{bridge.name} has the weights on {bridge.device}, this process works on {devices.identity(device)}: "
            "one copy needs one device; give both processes the same devices in [[process]]"
        )
    storages = [map_handle(handle, device, bridge.owner) for handle in bridge.storages]
    tensors = {shared.name: _view(storages[shared.storage], shared, device) for shared in bridge.tensors}
    parts = {p.name: tensors[p.tensor][p.start : p.stop] if p.stop else tensors[p.tensor] for p in bridge.parts}
    if not bridge.owner.alive:
        raise WeightsOwnerLost(f"{bridge.name} ({bridge.owner}) ended while its weights were mapped")
    return parts


def _view(storage: torch.UntypedStorage, shared: SharedTensor, device: torch.device) -> torch.Tensor:
    dtype = getattr(torch, shared.dtype)
    last = shared.offset + sum((n - 1) * stride for n, stride in zip(shared.shape, shared.strides))
    if (last + 1) * dtype.itemsize > storage.nbytes():
        raise UserError(f"weights: {shared.name} does not fit into its memory; the bridge is damaged")
    return torch.empty(0, dtype=dtype, device=device).set_(storage, shared.offset, shared.shape, shared.strides)


def _check_views(views: Named, ours: Named) -> None:
    """UserError with the first difference between the engine's weights and this model's; dtypes may differ."""
    for missing, text in ((ours.keys() - views.keys(), "not among the engine's weights"),
                          (views.keys() - ours.keys(), "in the engine, and not in this model")):
        if missing:
            raise UserError(f"weights: {min(missing)!r} is {text}; both sides must run the same model.path")
    for name, tensor in ours.items():
        other = views[name]
        if other.shape != tensor.shape:
            raise UserError(
                f"weights: {name!r} is {other.dtype}{list(other.shape)} in the engine and "
                f"{tensor.dtype}{list(tensor.shape)} here; both sides must run the same model.path and model.dtype"
            )


# -- engine and learner ----------------------------------------------------------------------------------------


PAUSE_LOOK_S = 0.0005  # an engine is paused for this long at least, because no process can wake another here
SEARCH_EVERY_S = 0.02


class OneCopyReceiver(SharedReceiver):
    """The engine's side. Call `share` before any other method of a receiver."""

    def __init__(self, bridge_file: str | Path, fence_file: str | Path, name: str, *, timeout_s: float = 10.0) -> None:
        self.bridge_file, self.fence_file = Path(bridge_file), Path(fence_file)
        self.name = name
        self._timeout_s = timeout_s
        self._fence: Fence | None = None
        self._kept: list[torch.Tensor] = []

    def share(self, tensors: Named, wanted: Shapes | None = None) -> None:
        """Share the parameters of this process's model with the learner, each once. `wanted`: the checkpoint's names
        and shapes, if the engine has fused its tensors."""
        self._kept = list(tensors.values())  # shared memory has to outlive the model
        described = describe_bridge(self.name, tensors, wanted)
        self._fence = Fence.create(self.fence_file)
        files.replace(self.bridge_file, msgspec.json.encode(described))

    def newest(self) -> tuple[int, int]:
        """The version at rest, or the version that the learner requests a pause for: `fetch` waits until it is at rest.
        """
        return NOTHING if self._fence is None else self._fence.state.stamp

    def wait_for(self, version: int, timeout_s: float) -> tuple[int, int]:
        """Wait without running requests: pauses for every change until the version is at rest."""
        if state := poll(lambda: self._at_rest(version), timeout_s, PAUSE_LOOK_S):
            return state.stamp
        raise WeightsTimeout(f"{self.name}: no version {version} after {timeout_s:g} s: {self._status()}")

    def fetch(self, params: dict[str, torch.Tensor]) -> tuple[int, int]:
        """Pause until the weights are at rest; returns their (version, step). Copies nothing into `params`."""
        if state := poll(self._at_rest, self._timeout_s, PAUSE_LOOK_S):
            return state.version, state.step
        raise WeightsTimeout(f"{self.name}: paused for {self._timeout_s:g} s: {self._status()}")

    def close(self) -> None:
        """Remove the shared weights, once the learner has released them: it may be writing its last checkpoint."""
        if (fence := self._fence) is None:
            return

        def released() -> bool:
            self._at_rest()
            return not fence.learner.alive

        poll(released, self._timeout_s, SEARCH_EVERY_S)
        if is_named(self.fence_file, fence.inode):  # not that of a successor
            self.bridge_file.unlink(missing_ok=True)
            self.fence_file.unlink(missing_ok=True)
        fence.close()
        self._fence, self._kept = None, []

    def _at_rest(self, version: int = 0) -> FenceState | None:
        """The state of the weights if they are at rest and of that version at least. For a change it confirms, once,
        that this engine is paused."""
        fence = self._shared()
        state = fence.state
        if state.changing and fence.paused != state:
            devices.synchronize(self._kept[0].device)
            fence.paused = state
        return None if state.changing or state.version < version else state

    def _shared(self) -> Fence:
        if self._fence is None:
            raise UserError(f"{self.name}: its weights are not shared yet")
        return self._fence

    def _status(self) -> str:
        state, learner = self._shared().state, self._shared().learner
        if not state.changing:
            return f"the learner ({learner}) has published nothing beyond version {state.version}"
        half = "" if learner.alive else "; the weights are half of two versions, this engine has to load its own again"
        return f"the learner ({learner}) changes the weights to version {state.version} (step {state.step}){half}"


class OneCopySender(SharedSender):
    """The learner's side: `connect` once, then `pause_engines`, the change and `publish` for each new version."""

    def __init__(self, bridge_file: str | Path, fence_file: str | Path, *, timeout_s: float = 10.0) -> None:
        self.bridge_file, self.fence_file = Path(bridge_file), Path(fence_file)
        self._timeout_s = timeout_s
        self._fence: Fence | None = None
        self._bridge: Bridge | None = None
        self._views: dict[str, torch.Tensor] = {}
        self._device = torch.device("cpu")

    def newest(self) -> tuple[int, int]:
        return NOTHING if self._fence is None or self.engines_paused else self._fence.state.stamp

    def connect(
        self, loaded: Named, device: torch.device, wait_s: float, stopping: Callable[[], object] = lambda: False
    ) -> dict[str, torch.Tensor] | None:
        """The engine's weights, by the checkpoint's names; None if `stopping()` became true meanwhile. Names and shapes
        of what this process has loaded must be equal. WeightsTimeout after `wait_s`."""
        attached = poll(lambda: "stopping" if stopping() else self._attach(), wait_s, SEARCH_EVERY_S)
        if isinstance(attached, str):
            return None
        if attached is None:
            bridge = read_bridge(self.bridge_file)
            why = "no engine has shared its weights" if bridge is None else f"{bridge.name} is {bridge.owner}"
            raise WeightsTimeout(f"{self.bridge_file}: {why} after {wait_s:g} s; is the rollout process up?")
        self._views = map_parts(attached, device)
        _check_views(self._views, loaded)
        self._bridge, self._device = attached, device
        return self._views

    def _attach(self) -> Bridge | None:
        """The bridge of an engine that lives, once its fence is attached; an engine makes the fence first."""
        bridge = read_bridge(self.bridge_file)
        if bridge is None or not bridge.owner.alive or (fence := Fence.attach(self.fence_file)) is None:
            return None
        if fence.owner != bridge.owner:
            fence.close()
            return None
        if fence.learner not in (NOBODY, ProcessIdentity.mine()) and fence.learner.alive:
            raise UserError(f"{self.fence_file}: another learner ({fence.learner}) has these weights already")
        fence.learner = ProcessIdentity.mine()
        self._fence = fence
        return bridge

    def check(self) -> None:
        """WeightsOwnerLost if the engine is gone: the memory behind the parameters is no longer valid."""
        if self._bridge is not None and not self._bridge.owner.alive:
            raise WeightsOwnerLost(
                f"{self._bridge.name} ({self._bridge.owner}) held the weights and is gone, and the weights with it; "
                "this learner has to restart from its checkpoint and log, with the weights of the engine's successor"
            )

    def pause_engines(self, version: int, step: int) -> None:
        """Ask the engine to pause for this version and wait until it has. No weight may change before."""
        fence, bridge = self._connected()
        before, wanted = fence.state, FenceState(version, step, True)
        fence.paused = LOADED  # forget the pause for an earlier change, perhaps of an earlier learner
        fence.state = wanted

        def paused() -> bool:
            self.check()
            return fence.paused == wanted

        if not poll(paused, self._timeout_s, PAUSE_LOOK_S):
            fence.state = before
            raise WeightsTimeout(
                f"{bridge.name} ({bridge.owner}) did not pause for version {version} within {self._timeout_s:g} s; "
                "nothing changed"
            )

    @property
    def engines_paused(self) -> bool:
        """True while the engine is paused for a version that is not published yet."""
        return self._fence is not None and self._fence.state.changing

    def publish(self, version: int, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Set the weights at rest, as `version`. Copies tensors that are not views of the engine's into them."""
        fence, _ = self._connected()
        if not fence.state.changing:
            if version <= fence.state.version:
                raise UserError(f"version {version} is not above {fence.state.version}, which is published")
            self.pause_engines(version, step)
        elif fence.state.version != version:
            raise UserError(f"the fence was begun for version {fence.state.version}, not for {version}")
        self.write(tensors)
        self.check()
        fence.state = FenceState(version, step, False)

    def write(self, tensors: Named) -> int:
        """While the engine is paused: copy tensors that are no views of its weights, and wait for the copies. Returns
        the bytes copied."""
        copied = 0
        with torch.no_grad():
            for name, view in self._views.items():
                if tensors[name].data_ptr() != view.data_ptr():
                    view.copy_(tensors[name])
                    copied += view.nbytes
        devices.synchronize(self._device)
        return copied

    def close(self) -> None:
        """Release the weights: the engine may remove them, and the views must not be used any more."""
        self._views, self._bridge = {}, None
        fence, self._fence = self._fence, None
        if fence is not None:
            fence.learner = NOBODY
            fence.close()

    def _connected(self) -> tuple[Fence, Bridge]:
        if self._fence is None or self._bridge is None:
            raise UserError(f"{self.bridge_file}: the engine's weights are not mapped yet")
        return self._fence, self._bridge


# -- as a transport --------------------------------------------------------------------------------------------


def make_sender(settings: TransportSettings, callbacks: GroupCallbacks | None, write: Write | None) -> OneCopySender:
    return OneCopySender(settings.bridge_file, settings.segment, timeout_s=settings.timeout_s)


def make_receiver(settings: TransportSettings, name: str) -> OneCopyReceiver:
    return OneCopyReceiver(settings.bridge_file, settings.segment, name, timeout_s=settings.timeout_s)
