"""Reports on a run from its files: its waste, a page of charts, a timeline. The run may go on, have ended or died.

Knows nothing of processes, rings or the bus, and changes nothing of a run.
"""
