"""Inference engines behind one interface (`base`): an embedded torch engine, vLLM, one behind an OpenAI-compatible
endpoint, and a scripted one without a model.

Used by the rollout role, which knows `Engine`, `Request` and `Finished` only. Importing this package imports no torch;
`make_engine` imports what the topology asks for. A new engine is its own module, a line in `MAKERS`, and its name in
`ENGINES` and `TRANSPORTS` of `busrl.topology.schema`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from busrl.engines.base import Engine, Finished, Request, Statistics
from busrl.system.imports import uncollected

if TYPE_CHECKING:
    from busrl.topology import Topology

__all__ = ["Engine", "Finished", "Request", "Statistics", "engine_of", "make_engine"]

MAKERS = {  # each module has a function `make(topology, process)`
    "torch": "busrl.engines.torch.engine",
    "vllm": "busrl.engines.vllm.engine",
    "openai": "busrl.engines.openai.engine",
    "mock": "busrl.engines.scripted",
}


def make_engine(topology: Topology, process: str = "") -> Engine:
    """The engine of that rollout process; one that joins from outside is as the first of its role."""
    with uncollected():
        maker = import_module(MAKERS[engine_of(topology, process)])
    engine: Engine = maker.make(topology, process)
    return engine


def engine_of(topology: Topology, process: str) -> str:
    """The kind of that process's engine."""
    named = (one.spec.engine for one in topology.processes() if one.name == process)
    entries = (entry.engine for entry in topology.process if entry.role == "rollout")
    return next(named, next(entries, "torch"))
