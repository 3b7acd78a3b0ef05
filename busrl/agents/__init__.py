"""Episodes of many model calls, in exact token ids: the tree of turns, messages as ids, text as messages.

**Not wired to a role yet: no run plays episodes.** Two roles will use it: `agent`, which plays the user's functions in
children (`pool`), and `serve`, which answers any client over HTTP. Nothing in the package calls these, which are there
for them: `Tree.transcript` (what reward functions and people read), `parsers.parser_of` (`agents.tools`),
`renderer.report` (`busrl check`), and `Episode.answer_once` (clients of `serve` that ask again).

Knows nothing of slots, the bus or engines: a role gives it a function that answers a call, and takes the trajectory.
"""
