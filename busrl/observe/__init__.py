"""Views of a run that take no part in it: the monitor, reports, sinks of other trackers, notebooks.

An optional part of busrl: `busrl.capabilities` names it, nothing else of the core imports it.
"""
