"""Inference engines behind one interface: an embedded torch engine, and a scripted one without a model.

Used by the rollout role, which knows `Engine`, `Request` and `Finished` only. Importing this package imports no torch;
`make_engine` imports what the topology asks for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from busrl.inference.base import ABORTED, EOS, LENGTH, Engine, Event, Finished, Request, Statistics

if TYPE_CHECKING:
    from busrl.topology import Topology

__all__ = ["ABORTED", "EOS", "LENGTH", "Engine", "Event", "Finished", "Request", "Statistics", "make_engine"]


def make_engine(topology: Topology, process: str = "") -> Engine:
    """The engine of that rollout process."""
    if _kind(topology, process) == "mock":
        from busrl.inference.scripted import make

        return make(topology, process)
    from busrl.inference.torch_engine import TorchEngine

    generation = topology.generation
    return TorchEngine.load(
        topology.model.path,
        capacity=generation.max_batch,
        max_length=generation.max_prompt_tokens + generation.max_new_tokens,
        dtype=topology.model.dtype,
        chat=topology.data.template == "chat",
    )


def _kind(topology: Topology, process: str) -> str:
    """What generates in that process; one that joins from outside is as the first of its role."""
    named = (one.spec.engine for one in topology.processes() if one.name == process)
    entries = (entry.engine for entry in topology.process if entry.role == "rollout")
    return next(named, next(entries, "torch"))
