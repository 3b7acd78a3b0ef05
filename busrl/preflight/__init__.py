"""The checks before a run: everything that `busrl check` and the first second of `busrl launch` look at.

`load` reads a topology file and returns it checked; the modules `..._rules` compare keys, `named_files`, `prompt_files`
and `model_folders` look at files, `trial` runs the user's code once, `memory` and `machine` look at the machine. The
commands, launch and the trials of optional parts import this package; no role does: it reads the checked topology.
"""
