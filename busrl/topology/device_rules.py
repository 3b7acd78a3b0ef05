"""Rules between the keys that say where models run: `model.device`, and `device` and `devices` of a process.

Used by `resolve`. Pure: what the machine really has is seen when a process starts (`busrl.device`), never here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from busrl.topology.rules import Finding
from busrl.topology.schema import Process, Topology

WITH_MODEL = ("rollout", "learner")
DEVICES = re.compile(r"(\d+|(GPU|MIG)-[0-9a-f-]+)(,(\d+|(GPU|MIG)-[0-9a-f-]+))*")


def findings(t: Topology) -> Iterator[Finding]:
    """What contradicts itself, in the order of the processes."""
    for index, entry in enumerate(t.process):
        yield from _entry(t, index, entry)


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
