"""Episodes of many model calls, in exact token ids: the tree of turns, messages as ids, text as messages.

The role `agent` (`busrl.agents.roles.agent`) plays the user's functions with it, in children (`pool`).
`Episode.answer_once` waits for its user: a role that answers clients over HTTP, which may ask again.

Knows nothing of slots, the bus or engines: a role gives it a function that answers a call, and takes the trajectory.
"""
