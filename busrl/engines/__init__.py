"""Inference engines behind one interface (`base`): an embedded torch engine, vLLM, one behind an OpenAI-compatible
endpoint, and a scripted one without a model.

Used by the rollout role, which knows `Engine`, `Request` and `Finished` only. Importing this package imports no torch;
`make_engine` imports what the topology asks for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from busrl.engines.base import ABORTED, EOS, LENGTH, Engine, Event, Finished, Request, Statistics

if TYPE_CHECKING:
    from busrl.config import Topology

__all__ = ["ABORTED", "EOS", "LENGTH", "Engine", "Event", "Finished", "Request", "Statistics", "make_engine"]


def make_engine(topology: Topology, process: str = "") -> Engine:
    """The engine of that rollout process."""
    kind = _kind(topology, process)
    if kind == "mock":
        from busrl.engines.scripted import make

        return make(topology, process)
    if kind == "vllm":
        from busrl.engines.vllm.engine import VllmEngine

        return VllmEngine.of(topology)
    if kind == "openai":
        from busrl.engines.openai.engine import make as make_served

        return make_served(topology)
    from busrl.engines.torch.engine import make as make_torch

    return make_torch(topology, process)


def _kind(topology: Topology, process: str) -> str:
    """What generates in that process; one that joins from outside is as the first of its role."""
    named = (one.spec.engine for one in topology.processes() if one.name == process)
    entries = (entry.engine for entry in topology.process if entry.role == "rollout")
    return next(named, next(entries, "torch"))
