"""Inference engines behind one interface: an embedded torch engine, and a scripted one for tests.

Used by the rollout role, which knows `Engine`, `Request` and `Finished` only. Importing this package imports no torch;
`make_engine` imports what the topology asks for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from busrl.inference.base import EOS, LENGTH, Engine, Finished, Request

if TYPE_CHECKING:
    from busrl.topology import Topology

__all__ = ["EOS", "LENGTH", "Engine", "Finished", "Request", "make_engine"]


def make_engine(topology: Topology, process: str = "") -> Engine:
    """The engine that the topology's rollout processes use."""
    from busrl.inference.torch_engine import TorchEngine

    generation = topology.generation
    return TorchEngine.load(
        topology.model.path,
        capacity=generation.max_batch,
        max_length=generation.max_prompt_tokens + generation.max_new_tokens,
        dtype=topology.model.dtype,
        chat=topology.data.template == "chat",
    )
