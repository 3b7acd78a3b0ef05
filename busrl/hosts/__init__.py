"""Workers on other hosts, and workers in other languages: the keeper's gateway at home, satellite and relay there.

An optional part of busrl: `busrl.capabilities` names it, nothing else of the core imports it.
"""
