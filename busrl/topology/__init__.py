"""A run's topology: the frozen tables that `topology.toml` fills, and how such a file is read.

`schema` declares the tables, `reader` reads a file into them with the line of each key. Imports no preflight:
`busrl.preflight` checks for the commands that named files are there and that the values fit together. Knows nothing of
the roles or of torch.
"""

from busrl.topology.schema import Process, ProcessName, Topology

__all__ = ["Process", "ProcessName", "Topology"]
