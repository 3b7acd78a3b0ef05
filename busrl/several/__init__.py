"""Several seats of one model, and several models, in one run: what only such runs need.

A model plays one seat of an episode or more, and each seat has a group for every draw. `draws` decides what is opened
and in which order, `opening` does it for the scheduler; `ledgers` is what a process needs of each model's ring and
fates; `seat_rules` refuses what does not go together. Knows nothing of tokens, engines or weights.
"""
