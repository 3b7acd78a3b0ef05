"""The checks before a run: everything that `busrl check` and the first second of `busrl launch` look at.

`load` reads a topology file and returns it checked; the modules `..._rules` compare keys, `named_files` looks at files,
`trial` runs the user's code once, `memory` and `machine` look at the machine. Commands, launch and what parts do before
a run import this package; no role does: it reads the topology that was checked.
"""
