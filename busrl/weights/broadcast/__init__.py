"""Weights by collectives: one group of the learner and its engines. Knows nothing of what is trained."""
