"""Training of a causal language model on finished groups: loading, batches, the optimiser step, checkpoints.

Used by the learner and by the maker of the quickstart's model. Knows nothing of rings and buses: samples
come in as plain arrays, weights go out as named tensors.
"""
