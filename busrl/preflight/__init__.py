"""The checks before a run: everything that `busrl check` and the first second of `busrl launch` look at.

`load` reads a topology file and returns it checked; `rules` compares keys, `named_files` looks at files, `trial` runs
the user's code once, `memory` and `machine` look at the machine. Only the commands and launch import this package: a
role reads the topology that they have checked.
"""
