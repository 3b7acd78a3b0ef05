"""Functions that launch asks of a template process (`system/template.py`): to import for roles, and to be one.

Talks to the table of capabilities, for the roles' classes. `roles/__main__.py` does the same for a process that starts
as a program of its own. Knows nothing of forking.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from busrl import capabilities
from busrl.paths import RunPaths
from busrl.roles.__main__ import whole
from busrl.system.imports import uncollected
from busrl.topology.recorded import recorded


def warm(run_dir: str, names: Sequence[str]) -> None:
    """Import what these processes of the run import, at once or while they are set up."""
    topology = recorded(RunPaths.of(run_dir).topology)
    with uncollected():
        for name in names:
            capabilities.role(name.partition("/")[0]).warm(topology, name)


def run(descriptors: Sequence[int], run_dir: str, name: str) -> int:
    """Be that process; its exit code. `descriptors`: for the verdict, then the run's lock, which children inherit."""
    listener, *locks = descriptors
    for lock in locks:
        os.set_inheritable(lock, True)
    sys.argv[1:] = [run_dir, name]
    return whole(listener)
