"""The tables of engines, weight transports and orders of dispatch, with what others must know of each.

Used by the schema, which takes the names as choices, by the checks, and by `busrl.engines` and `busrl.weights.factory`,
which import a module when its name is asked for. Imports nothing of busrl.

- An order of dispatch is made by `make_policy` of `scheduling/dispatch.py`.
- An engine's module has `make(topology, process)`, a transport's has `make_sender` and `make_receiver` (see
  `weights/factory.py`).
- A module that is not there costs nothing until a topology names it; `busrl.capabilities` then says so in a sentence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SCRIPTED = "mock"  # the engine without a model, whose answers are scripted
ONE_COPY = "cuda_ipc"  # the transport with which the learner's weights are the engine's own tensors


@dataclass(frozen=True)
class EngineKind:
    """An inference engine: its module below `busrl`, and where its model runs: "here", in its rollout process or a
    child; "there", at an endpoint; "": nowhere."""

    module: str
    model: Literal["here", "there", ""]


@dataclass(frozen=True)
class TransportKind:
    """A weight transport: its module below `busrl`, and the engines that it can give weights to (one that is not
    busrl's own, openai, has its own rules). `version`: what a version is. `restarts`: it starts the engine again."""

    module: str
    engines: tuple[str, ...]
    version: Literal["tensors", "adapter", "folder"] = "tensors"
    restarts: bool = False


@dataclass(frozen=True)
class PolicyKind:
    """An order of dispatch. `predicts`: it goes by predicted lengths, which the part `predict` brings."""

    predicts: bool = True


ENGINES = {
    "torch": EngineKind("engines.torch.engine", "here"),
    SCRIPTED: EngineKind("engines.scripted", ""),
    "vllm": EngineKind("engines.vllm.engine", "here"),
    "openai": EngineKind("engines.openai.engine", "there"),
}
TRANSPORTS = {
    "shm": TransportKind("weights.shm", ("torch", "vllm", SCRIPTED)),
    "broadcast": TransportKind("weights.broadcast", ("torch", "vllm")),
    ONE_COPY: TransportKind("weights.one_copy", ("torch", "vllm")),
    "lora_hotswap": TransportKind("weights.folders", ("torch", "vllm"), "adapter"),
    "lora_restart": TransportKind("weights.folders", ("torch", "vllm"), "adapter", restarts=True),
    "checkpoint_restart": TransportKind("weights.folders", ("torch", "vllm"), "folder", restarts=True),
}
FIFO = "fifo"  # the order drawn
POLICIES = {FIFO: PolicyKind(predicts=False), "sjf": PolicyKind(), "ljf": PolicyKind(), "adaptive": PolicyKind()}
ADAPTERS = tuple(name for name, kind in TRANSPORTS.items() if kind.version == "adapter")
FOLDERS = tuple(name for name, kind in TRANSPORTS.items() if kind.version != "tensors")
RESTARTS = tuple(name for name, kind in TRANSPORTS.items() if kind.restarts)
