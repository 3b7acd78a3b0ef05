"""Training and sampling as a service: programs that speak Tinker's interface drive a model of this run.

An optional part of busrl: `busrl.capabilities` names it, nothing else of the core imports it.
"""
