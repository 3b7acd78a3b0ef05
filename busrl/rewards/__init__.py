"""Rewards: what users extend most. A function judges one completion; a pool runs it in children that may be killed.

`pool.RewardPool` is for the reward role; `base` is what runs inside a child. Knows nothing of the ring, groups or the
bus. No module of it imports NumPy or torch but `model`, which runs in a child.
"""
