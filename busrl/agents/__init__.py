"""Episodes of many model calls, in exact token ids: the tree of turns, messages as ids, and text as messages.

Three roles stand on it (`busrl.agents.roles`): `agent` plays the user's functions and programs in processes of their
own (`pool`), `serve` lets clients claim samples over HTTP (`http`), and `atropos` takes groups that environments scored
(`scored_groups`).

All but `roles`, `samples` and `trials` knows nothing of slots, the bus or engines: a role passes in a function that
answers a model call, and takes the trajectory.
"""
