"""Rewards: what users extend most. A function judges one completion; a pool runs it in children that may be killed.

`RewardPool` is the face for the reward role; `load` and `ExactMatch` are what runs inside a child. Knows nothing of the
ring, groups or the bus. Importing it imports neither NumPy nor torch.
"""

from busrl.rewards.base import ExactMatch, MalformedReward, RewardFunction, RewardSettings, build, load, settle
from busrl.rewards.pool import Item, Outcome, PoolStats, RewardPool

__all__ = [
    "ExactMatch",
    "Item",
    "MalformedReward",
    "Outcome",
    "PoolStats",
    "RewardFunction",
    "RewardPool",
    "RewardSettings",
    "build",
    "load",
    "settle",
]
