"""Rewards, the part that users extend most: a function judges a completion, and a pool runs it in child processes.

The reward role uses `pool.RewardPool`; the other modules run inside a child. Knows nothing of the ring, groups or the
bus. A child does without the topology; only `model` imports torch there.
"""
