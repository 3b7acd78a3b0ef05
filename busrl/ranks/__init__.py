"""The ranks of a learner: rank 0 (`leader`) plans, the others (`follower`) hold a shard and compute what it says."""
