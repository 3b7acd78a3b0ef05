"""Rewards, the part that users extend most: a function judges a completion, and a pool runs it in child processes.

The reward role uses `pool.RewardPool`; the other modules run inside a child. Knows nothing of the ring, groups or the
bus. Only `model`, which runs in a child, imports NumPy or torch.
"""
