"""Episodes of many model calls, in exact token ids: the tree of turns, messages as ids, text as messages.

Knows nothing of slots, the bus or engines: a role gives it a function that answers a call, and takes the trajectory.
"""
