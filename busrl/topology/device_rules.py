"""Rules between the keys that say where models run: `model.device`, and `device` and `devices` of a process, and what
shares or sends weights between devices: `cuda_ipc`, and a broadcast by NCCL or HCCL.

Used by `resolve`. Pure: what the machine really has is seen when a process starts, by the other half of `busrl.device`,
of which only the table of kinds is used here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from busrl.device import BACKEND
from busrl.topology.rules import Finding
from busrl.topology.schema import Process, Topology
from busrl.topology.weight_rules import ENGINES, rollouts

BETWEEN = {backend: kind for kind, backend in BACKEND.items() if kind != "cpu"}  # what a broadcast connects
WITH_MODEL = ("rollout", "learner")
DEVICES = re.compile(r"(\d+|(GPU|MIG)-[0-9a-f-]+)(,(\d+|(GPU|MIG)-[0-9a-f-]+))*")


def findings(t: Topology) -> Iterator[Finding]:
    """What contradicts itself, in the order of the processes."""
    for index, entry in enumerate(t.process):
        yield from _entry(t, index, entry)
    if t.weights.transport == "cuda_ipc":
        yield from _one_copy(t)
    if t.weights.backend in BETWEEN:
        yield from _between_devices(t, t.weights.backend)


def _between_devices(t: Topology, backend: str) -> Iterator[Finding]:
    """weights.backend = "nccl" or "hccl": a broadcast from the learner's device to each engine's."""
    key, other = "weights.backend", 'or backend = "gloo"'
    if t.weights.transport != "broadcast":
        rule = f"{t.weights.transport} forms no groups"
        yield Finding((key, "weights.transport"), rule, 'transport = "broadcast", or remove it', warning=True)
        return
    if t.weights.sparse.enabled:
        rule = "changes are found and packed in the host's memory"
        yield Finding((key, "weights.sparse.enabled"), rule, f"enabled = false, {other}")
    if t.weights.checksum:
        rule = "a digest is made in the host's memory, which takes longer than a phase may for a large model"
        yield Finding((key, "weights.checksum"), rule, f"checksum = false, {other}")
    for index, entry in rollouts(t):
        if entry.engine == "vllm":
            rule = "vLLM is given its weights through the host's memory"
            yield Finding((f"process.{index}.engine", key), rule, f'engine = "torch", {other}')
    yield from _a_device_each(t, backend, key, other)


def _a_device_each(t: Topology, backend: str, key: str, other: str) -> Iterator[Finding]:
    """Two ranks of such a group can not be on one device."""
    kind, shown = BETWEEN[backend], dict[str, str]()
    for process in (p for p in t.processes() if _takes_part(p.spec)):
        if (device := t.device_of(process.name)) != kind:
            rule = f"{backend} connects {kind} devices, and {process.name} works on {device}"
            yield Finding((key, "model.device"), rule, f'device = "{kind}", {other}', depends=("process",))
        first = process.devices.partition(",")[0]
        if first.startswith("MIG"):
            rule = f"{process.name} works on a part of a GPU, and {backend} refuses two parts of one"
            yield Finding((key,), rule, f"whole devices, {other}", depends=("process",))
        elif not first:
            rule = f"{process.name} sees all devices and would work on the first, as others do: each needs its own"
            yield Finding((key,), rule, f'devices = ["0"] in its entry, {other}', depends=("process",))
        elif first in shown:
            rule = f"{shown[first]} and {process.name} work on device {first}: each needs its own"
            yield Finding((key,), rule, f"other devices, {other}", depends=("process",))
        shown.setdefault(first, process.name)


def _takes_part(entry: Process) -> bool:
    """Whether processes of this entry are in the group of a broadcast."""
    return not entry.command and (entry.role == "learner" or (entry.role == "rollout" and entry.engine == "torch"))


def _entry(t: Topology, index: int, entry: Process) -> Iterator[Finding]:
    at = f"process.{index}"
    if entry.device and entry.role not in WITH_MODEL:
        rule = f"a {entry.role} of busrl's own runs no model"
        yield Finding((f"{at}.device", f"{at}.role"), rule, "remove device; devices may stay, for what it loads itself")
    elif entry.device and entry.role == "rollout" and entry.engine == "mock":
        rule = "a scripted engine runs no model"
        yield Finding((f"{at}.device", f"{at}.engine"), rule, "remove device")
    for item in entry.devices:
        if not DEVICES.fullmatch(item):
            rule = f"{item!r} is no list of devices: numbers, or UUIDs as nvidia-smi -L prints them, and commas"
            yield Finding((f"{at}.devices",), rule, 'for example devices = ["0", "1"], an item per process')
    if entry.devices and (entry.device or t.model.device) == "cpu" and entry.role in WITH_MODEL:
        named = f"{at}.device" if entry.device else "model.device"
        rule = "its model runs on the CPU, so nothing is shown or hidden"
        yield Finding((f"{at}.devices", named), rule, "remove devices, or choose another device", warning=True)
    if len(entry.devices) > max(1, entry.count):
        rule = f"{len(entry.devices)} items for {entry.count} processes: each process gets one of them"
        yield Finding((f"{at}.devices", f"{at}.count"), rule, 'one process that sees both is ["0,1"]', warning=True)


def _one_copy(t: Topology) -> Iterator[Finding]:
    """weights.transport = "cuda_ipc": the learner's parameters are the engine's tensors."""
    key, other = "weights.transport", 'or transport = "shm"'
    engines = [(i, entry) for i, entry in enumerate(t.process) if entry.role == "rollout"]
    started = sum(entry.count for _, entry in engines)
    if started != 1 or any(entry.command for _, entry in engines):
        rule = f"one engine on this host owns the weights that the learner trains, and {started} are started here"
        yield Finding((key,), rule, f"one rollout process of busrl's own, {other}", depends=("process",))
    yield from _one_copy_engine(t, key, other)
    here, there = t.device_of("learner"), t.device_of("rollout/0")
    if here != there:
        rule = f"one copy is on one device: the learner works on {here}, the engine on {there}"
        yield Finding((key, "model.device"), rule, f"give both the same device, {other}", depends=("process",))
    if here == "npu":
        rule = "memory of an NPU is not shared between processes here"
        yield Finding((key, "model.device"), rule, 'transport = "broadcast"')
    shown = {p.devices for p in t.processes() if p.role in WITH_MODEL}
    if len(shown) > 1:
        rule = f"engine and learner see other devices ({' and '.join(sorted(map(repr, shown)))})"
        yield Finding((key,), rule, f"the same devices in both entries, {other}", depends=("process",))
    yield from _one_copy_learner(t, key, other)


def _one_copy_engine(t: Topology, key: str, other: str) -> Iterator[Finding]:
    fit = ENGINES["cuda_ipc"]
    for index, entry in rollouts(t):
        at = f"process.{index}.engine"
        if entry.engine not in fit:
            rule = f"it has no tensors that a learner could train; those of {' and '.join(fit)} can be shared"
            yield Finding((at, key), rule, f"engine = one of {', '.join(fit)}, or another transport")
        elif entry.engine == "vllm" and t.vllm.tensor_parallel > 1:
            rule = "each device has a part of every tensor, and the learner trains whole ones"
            yield Finding((key, "vllm.tensor_parallel", at), rule, f"tensor_parallel = 1, {other}")


def _one_copy_learner(t: Topology, key: str, other: str) -> Iterator[Finding]:
    learner = t.learner
    if learner.publish_every > 1:
        rule = "the engine has the weights of every step at once: there are none that wait to be published"
        yield Finding((key, "learner.publish_every"), rule, f"publish_every = 1, {other}")
    if t.experiments.forced_age:
        rule = "the engine has the newest weights at once, and older ones are nowhere"
        yield Finding((key, "experiments.forced_age"), rule, f"forced_age = 0, {other}")
    if learner.updates_per_batch > 1:
        rule = "the engine would see the weights between two updates of one step"
        yield Finding((key, "learner.updates_per_batch"), rule, f"updates_per_batch = 1, {other}")
    if t.lora.on:
        rule = "an adapter is small: the base is the engine's alone, and there is nothing to share"
        yield Finding((key, "lora.rank"), rule, 'transport = "lora_hotswap", or rank = 0')
    if t.model.dtype != "float32":
        rule = f"the learner keeps float32 weights of its own and copies them into the engine's {t.model.dtype} ones"
        yield Finding((key, "model.dtype"), rule, "float32 for a single copy", warning=True)
