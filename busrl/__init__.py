"""busrl: a message-bus actor runtime for asynchronous reinforcement-learning post-training of language models.

Plain OS processes meet on a ZeroMQ bus (small messages), in a shared-memory slot ring (tensors, and the ledger of
every sample) and in the weight plane. Importing this package imports nothing heavy.
"""

__version__ = "0.1.0"
