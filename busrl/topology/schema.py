"""A topology as frozen dataclasses: its tables (`experiment.py`, `machinery.py`) together, and what follows from them.

Made by `load` (from TOML, checked) or by `Topology.from_json` (from the run directory, already checked). Every role
reads its settings from here. Knows nothing of files, rules between keys, torch or NumPy.

- Frozen: what `launch` checked is what every process sees.
- `Derived` holds everything computed from more than one key, so that no two processes can compute it differently.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any

from busrl.topology.experiment import (
    Controller,
    Data,
    Generation,
    Groups,
    Learner,
    Lora,
    Model,
    Reward,
    Run,
    Segments,
    Sparse,
    Trigger,
    Validation,
    Weights,
)
from busrl.topology.machinery import (
    SPAWNED_ROLES,
    Bus,
    BusFault,
    CrashFault,
    Faults,
    Limits,
    Log,
    Mock,
    Openai,
    Process,
    Ring,
    Scheduler,
    Simulate,
)
from busrl.topology.research import ControllerRules, Experiments
from busrl.topology.vllm import Vllm

__all__ = [
    "FOREIGN_ROLES",
    "IMPLIED_ROLES",
    "MESSAGE_FIELD_BYTES",
    "RESTARTS",
    "SINGLE_ROLES",
    "SPAWNED_ROLES",
    "TINY",
    "Bus",
    "BusFault",
    "Controller",
    "ControllerRules",
    "CrashFault",
    "Data",
    "Derived",
    "Experiments",
    "Faults",
    "Generation",
    "Groups",
    "Learner",
    "Limits",
    "Log",
    "Lora",
    "Mock",
    "Model",
    "Openai",
    "Process",
    "ProcessName",
    "Reward",
    "Ring",
    "Run",
    "Scheduler",
    "Segments",
    "Simulate",
    "Sparse",
    "Topology",
    "Trigger",
    "Validation",
    "Vllm",
    "Weights",
]

RESTARTS = ("lora_restart", "checkpoint_restart")  # transports that end the engine and start it again
TINY = "tiny:"  # model.path and data.* may name one of the quickstart's own tasks instead of a file
IMPLIED_ROLES = ("bus", "keeper", "scheduler")  # one each, always
SINGLE_ROLES = ("learner", "validator")
FOREIGN_ROLES = ("rollout", "reward")  # what another program may be, named by `command`
MESSAGE_FIELD_BYTES = 4096  # of a message that carries a sample, besides the bytes of its slot


@dataclass(frozen=True)
class Derived:
    """What follows from several keys together; `explain` holds the sums as text. Counts B and W are in groups."""

    B: int  # admitted groups that may be unfinished
    W: int  # admission indices that the learner looks at
    n_lo: int  # smallest count threshold
    n_hi: int  # largest count threshold
    eta_min: int  # smallest admission bound that a controller may choose, in steps
    n_floor: int  # fewest groups that a step by time may have
    g_min: int  # survivors that a group needs to be trained
    horizon: int  # drawn groups among which the policy may reorder
    slots: int  # slots of the ring: train_slots + val_reserve
    train_slots: int
    val_reserve: int  # slots that only validation may take
    slot_bytes: int  # payload bytes per slot
    task_bytes: int  # longest JSONL line
    train_prompts: int  # lines of data.train
    validation_prompts: int  # lines of the file that validation uses, 0 if there is no validation
    ring_bytes: int  # size of the shared-memory file
    val_samples: int  # samples of one validation round, 0 = validation is off
    prompt_tokens: int = 0  # the limit on prompts, "auto" worked out; 0 in run directories of before
    prompt_text: str = ""  # how the tokens of the prompts were counted
    trial: tuple[str, ...] = ()  # the first prompt, and what the reward said of two answers to it
    explain: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProcessName:
    """One process to start: its name ("rollout/0", "learner"), role, index, and the entry it comes from."""

    name: str
    role: str
    index: int
    spec: Process
    place: int = 0  # which of the processes of its entry it is

    @property
    def devices(self) -> str:
        """The devices that it sees; empty = all."""
        return self.spec.devices[self.place % len(self.spec.devices)] if self.spec.devices else ""


def has_model(entry: Process) -> bool:
    """Whether processes of this entry load the model: the learner, and rollouts with an engine that has one here."""
    engines = entry.role == "rollout" and entry.engine in ("torch", "vllm")
    return not entry.command and (entry.role == "learner" or engines)


@dataclass(frozen=True)
class Topology:
    """A checked topology. `source` is the file it was read from, `overrides` the --set arguments."""

    run: Run
    model: Model
    data: Data
    groups: Groups
    generation: Generation
    bus: Bus
    ring: Ring
    scheduler: Scheduler
    learner: Learner
    weights: Weights
    reward: Reward
    validation: Validation
    limits: Limits
    process: tuple[Process, ...]
    derived: Derived
    faults: Faults = field(default_factory=Faults)
    mock: Mock = field(default_factory=Mock)
    openai: Openai = field(default_factory=Openai)
    vllm: Vllm = field(default_factory=Vllm)
    segments: Segments = field(default_factory=Segments)
    lora: Lora = field(default_factory=Lora)
    log: Log = field(default_factory=Log)
    simulate: Simulate = field(default_factory=Simulate)
    experiments: Experiments = field(default_factory=Experiments)
    source: str = ""
    overrides: tuple[str, ...] = ()

    @property
    def max_prompt_tokens(self) -> int:
        """A prompt with more tokens is set aside: the key, or what "auto" came to."""
        given = self.generation.max_prompt_tokens
        return given if isinstance(given, int) else self.derived.prompt_tokens

    @property
    def task_message_bytes(self) -> int:
        """Most bytes of a message that carries one sample: what its slot holds, and the fields."""
        return self.derived.slot_bytes + MESSAGE_FIELD_BYTES

    @property
    def scripted(self) -> bool:
        """Whether any engine is scripted: then data.train is a trace, and nothing is learnt from its answers."""
        return any(entry.role == "rollout" and entry.engine == "mock" and not entry.command for entry in self.process)

    @property
    def publish_every(self) -> int:
        """Steps between two publications, as long as groups do not wait for one."""
        restarts = self.weights.transport in RESTARTS
        return self.learner.publish_every * (self.weights.restart_every if restarts else 1)

    @property
    def validates(self) -> bool:
        """Whether any validation round takes place."""
        return self.derived.val_samples > 0

    def processes(self) -> list[ProcessName]:
        """Every process of the run in starting order; several entries of one role are numbered through."""
        names = [ProcessName(role, role, 0, Process(role)) for role in IMPLIED_ROLES]
        for role in ("learner", "reward", "rollout", "validator"):
            specs = [(spec, place) for spec in self.process if spec.role == role for place in range(spec.count)]
            for index, (spec, place) in enumerate(specs):
                name = role if role in SINGLE_ROLES else f"{role}/{index}"
                names.append(ProcessName(name, role, index, spec, place))
        return names

    def device_of(self, name: str) -> str:
        """The device key of a process; one that joins from outside is as the first of its role."""
        role = name.partition("/")[0]
        named = (process.spec.device for process in self.processes() if process.name == name)
        entries = (entry.device for entry in self.process if entry.role == role)
        return next(named, next(entries, "")) or self.model.device

    def to_dict(self) -> dict[str, Any]:
        """Plain data, infinity as the word "inf"."""
        return {name: _plain(value) for name, value in dataclasses.asdict(self).items()}

    def to_json(self) -> str:
        """The text of topology.json; `from_json` gives an equal object back."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str) -> Topology:
        """Read a topology.json. It was checked when it was written: only its shape is looked at here."""
        from busrl.topology.moved import modern
        from busrl.topology.plain import build

        return build(Topology, modern(json.loads(text)), "topology.json")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    return value
