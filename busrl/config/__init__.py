"""A run's topology: what `topology.toml` says, checked and frozen.

`load(path, overrides)` reads a hand-written file with line numbers in its errors, `load_for_simulation` one that is
only simulated; `recorded` reads the resolved one of a run directory; `materialise` replaces `tiny:` names by paths. The
tables and their keys are declared in `schema`. Knows nothing of the roles or of torch.
"""

from busrl.config.hosts import HostSource, of_host
from busrl.config.load import load, load_for_simulation, materialise, recorded
from busrl.config.named_files import model_folder
from busrl.config.schema import Process, ProcessName, Topology

__all__ = [
    "HostSource", "Process", "ProcessName", "Topology", "load", "load_for_simulation", "materialise", "model_folder",
    "of_host", "recorded",
]
