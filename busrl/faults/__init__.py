"""Faults on purpose: messages that get lost, doubled, late or out of order, and processes that die at a named step.

    topology [faults] -> trouble_for (an endpoint's messages), crash_environment (a child's environment)

Used by the roles and by `launch`; off unless a topology asks for it. Imports `protocol` for the message names that it
accepts. Knows nothing of what messages mean or of when a process is restarted.
"""

from busrl.faults.plan import CrashWatch, crash_environment, describe
from busrl.faults.trouble import Trouble, trouble_for

__all__ = ["CrashWatch", "Trouble", "crash_environment", "describe", "trouble_for"]
