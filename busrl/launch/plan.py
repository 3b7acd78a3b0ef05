"""What a launch is going to do, as text: the sums, the processes, their commands and threads. Starts nothing.

Reads a topology; knows nothing of rings or children. `busrl launch --dry-run` prints it.
"""

from __future__ import annotations

import os

from busrl import device
from busrl.launch.children import command_of
from busrl.paths import RunPaths
from busrl.topology import Topology


def plan_lines(topology: Topology, paths: RunPaths) -> list[str]:
    """One line per process, and the values that follow from several keys."""
    size = topology.derived
    megabytes = size.slots * size.slot_bytes / 1e6
    lines = [f"run {topology.run.name} in {paths.root}"]
    lines.append(f"ring: {size.slots} slots of {size.slot_bytes} bytes ({megabytes:.1f} MB) as {paths.ring_file}")
    lines += [f"  {line}" for line in size.explain]
    lines.append("processes:")
    for process in topology.processes():
        spec = process.spec
        engine = f" engine={spec.engine}" if process.role == "rollout" and not spec.command else ""
        kind = topology.device_of(process.name)
        shown = {**spec.env, **device.environment(kind, process.devices, {**os.environ, **spec.env})}
        extra = "".join(f" {name}={value}" for name, value in shown.items())
        lines.append(
            f"  {process.name:<14} threads={spec.threads}{engine}{extra}  {' '.join(command_of(process, paths))}"
        )
    lines += [f"warning: {warning}" for warning in size.warnings]
    return lines
