"""Several seats of one model, and several models, in one run: what only such runs need.

A model plays one seat of an episode or more, and each seat has a group for every draw. `topologies` reads `[[model]]`,
`rules` and `seat_rules` refuse what does not go together, `explained` prints the sums. `draws` decides what is opened
and in which order, `opening` does it for the scheduler; `ledgers` is what a process needs of each model's ring and
fates. The core works on one model at a time and knows this part by the table of parts alone.
"""
