"""Inference engines behind one interface (`base`): an embedded torch engine, vLLM, one behind an OpenAI-compatible
endpoint, and a scripted one without a model.

Used by the rollout role, which knows `Engine`, `Request` and `Finished` only. Importing this package imports no torch;
`make_engine` imports what the topology asks for. A new engine is its own module, with a function `make(topology,
process)`, and its lines in the tables of `busrl.topology.kinds`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from busrl.engines.base import Engine, Finished, Request, Statistics
from busrl.system.imports import uncollected
from busrl.topology.kinds import ENGINES

if TYPE_CHECKING:
    from busrl.topology import Topology

__all__ = ["Engine", "Finished", "Request", "Statistics", "engine_of", "make_engine", "warm_engine"]


def warm_engine(topology: Topology, process: str) -> None:
    """Import what the engine of that process needs: its module, and what the module's `warm` imports, if it has one."""
    if warm := getattr(_module_of(topology, process), "warm", None):
        warm(topology)


def make_engine(topology: Topology, process: str = "") -> Engine:
    """Make the engine of that rollout process. A process that the topology does not list gets the first one's kind."""
    with uncollected():
        module = _module_of(topology, process)
    engine: Engine = module.make(topology, process)
    return engine


def _module_of(topology: Topology, process: str) -> Any:
    kind, served = ENGINES[engine_of(topology, process)], topology.is_service
    return import_module(f"busrl.{(served and kind.of_service) or kind.module}")


def engine_of(topology: Topology, process: str) -> str:
    """The kind of that process's engine; of the first rollout process if the topology does not list it."""
    of_process = (entry.spec.engine for entry in topology.processes() if entry.name == process)
    entries = (entry.engine for entry in topology.process if entry.role == "rollout")
    return next(of_process, next(entries, "torch"))
