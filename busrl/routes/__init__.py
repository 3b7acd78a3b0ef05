"""Routes of a mixture of experts: the engine's choices of experts, carried to the learner and trained with.

`rules` decides whether a run carries routes and refuses what cannot. An optional part: without it a mixture of experts
is trained with the learner's own choices. The shape of routes and their faults are `busrl.data.routing`.
"""
