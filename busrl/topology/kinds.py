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
    child; "there", at an endpoint; "": nowhere. `recomputes`: left to itself, it computes the keys and values of
    running sequences again after new weights. `forks`: its process may be forked from one that has imported what it
    needs, since nothing that it imports starts threads or processes. `of_service`: its module in a service. `routes`:
    it can say which experts it chose."""

    module: str
    model: Literal["here", "there", ""]
    recomputes: bool = False
    forks: bool = True
    of_service: str = ""
    routes: bool = False


@dataclass(frozen=True)
class TransportKind:
    """A weight transport: its module below `busrl`, and the engines that it can give weights to (one that is not
    busrl's own, openai, has its own rules).

    `version`: what a version is. `restarts`: it starts the engine again. `together`: every engine takes part in each
    publication; otherwise a version lies in shared memory or in a folder, until each engine fetches it. `copies`:
    versions of all values that the learner's host holds, and `changes`: how many more where changed values are sent
    alone; 0: it cannot do that.
    """

    module: str
    engines: tuple[str, ...]
    version: Literal["tensors", "adapter", "folder"] = "tensors"
    restarts: bool = False
    together: bool = False
    copies: float = 0.0
    changes: float = 0.0


@dataclass(frozen=True)
class PolicyKind:
    """An order of dispatch. `predicts`: it goes by predicted lengths, which the part `predict` brings."""

    predicts: bool = True


ENGINES = {
    "torch": EngineKind("engines.torch.engine", "here", of_service="service.engine", routes=True),
    SCRIPTED: EngineKind("engines.scripted", ""),
    "vllm": EngineKind(
        "engines.vllm.engine", "here", recomputes=True, forks=False, of_service="service.vllm", routes=True
    ),
    "openai": EngineKind("engines.openai.engine", "there", recomputes=True),
}
TRANSPORTS = {
    "shm": TransportKind("weights.shm", ("torch", "vllm", SCRIPTED), copies=2.0, changes=1.0),
    "broadcast": TransportKind("weights.broadcast", ("torch", "vllm"), together=True, copies=2.0, changes=0.5),
    ONE_COPY: TransportKind("weights.one_copy", ("torch", "vllm"), together=True),
    "lora_hotswap": TransportKind("weights.folders", ("torch", "vllm"), "adapter"),
    "lora_restart": TransportKind("weights.folders", ("torch", "vllm"), "adapter", restarts=True),
    "checkpoint_restart": TransportKind("weights.folders", ("torch", "vllm"), "folder", restarts=True),
}
FIFO = "fifo"  # the order drawn
POLICIES = {FIFO: PolicyKind(predicts=False), "sjf": PolicyKind(), "ljf": PolicyKind(), "adaptive": PolicyKind()}
ADAPTERS = tuple(name for name, kind in TRANSPORTS.items() if kind.version == "adapter")
FOLDERS = tuple(name for name, kind in TRANSPORTS.items() if kind.version != "tensors")
TOGETHER = tuple(name for name, kind in TRANSPORTS.items() if kind.together)
SERVED = tuple(name for name, kind in ENGINES.items() if kind.model == "there")
RESTARTS = tuple(name for name, kind in TRANSPORTS.items() if kind.restarts)
