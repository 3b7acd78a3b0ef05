"""What a run was, from its files: what it wasted, a page of charts, a timeline. For a run that goes on, ended or died.

Knows nothing of processes, rings or the bus, and changes nothing of a run.
"""
