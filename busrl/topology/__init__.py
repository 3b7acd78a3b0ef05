"""A run's topology: what `topology.toml` says, checked and frozen.

`load(path, overrides)` reads a hand-written file with line numbers in its errors; `Topology.from_json` reads the
resolved one of a run directory; `materialise` replaces `tiny:` names by paths. Knows nothing of the roles or of torch.
"""

from busrl.topology.load import load
from busrl.topology.schema import (
    IMPLIED_ROLES,
    SINGLE_ROLES,
    SPAWNED_ROLES,
    TINY,
    Bus,
    BusFault,
    CrashFault,
    Data,
    Derived,
    Faults,
    Generation,
    Groups,
    Learner,
    Limits,
    Model,
    Process,
    ProcessName,
    Reward,
    Ring,
    Run,
    Scheduler,
    Sparse,
    Topology,
    Trigger,
    Validation,
    Weights,
)
from busrl.topology.tiny import materialise

__all__ = [
    "IMPLIED_ROLES",
    "SINGLE_ROLES",
    "SPAWNED_ROLES",
    "TINY",
    "Bus",
    "BusFault",
    "CrashFault",
    "Data",
    "Derived",
    "Faults",
    "Generation",
    "Groups",
    "Learner",
    "Limits",
    "Model",
    "Process",
    "ProcessName",
    "Reward",
    "Ring",
    "Run",
    "Scheduler",
    "Sparse",
    "Topology",
    "Trigger",
    "Validation",
    "Weights",
    "load",
    "materialise",
]
