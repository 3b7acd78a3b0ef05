"""Code that a model wrote, run in a box (`boxes`), and the kind of rewards that judges it by tests (`programs`).

An optional part. Functions of users import this module; the core names the kind in its table of rewards alone. Knows
nothing of rings, agents or the pool that calls the kind.
"""

from busrl.rewards.box.boxes import PYTHON, BoxRefused, Limits, Result, parts, refusal, run, run_async, run_tests

__all__ = ["PYTHON", "BoxRefused", "Limits", "Result", "parts", "refusal", "run", "run_async", "run_tests"]
