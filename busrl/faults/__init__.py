"""Faults on purpose: messages that get lost, doubled, late or out of order, and processes that die at a named step.

    topology [faults] -> message_faults (an endpoint's messages), crash_environment (a child's environment)

Used by the roles and by `launch`; off unless a topology asks for it. Imports `protocol` for the message names that it
accepts. Knows nothing of what messages mean or of when a process is restarted.
"""

from busrl.faults.messages import MessageFaults, message_faults
from busrl.faults.plan import CrashWatch, crash_environment, describe

__all__ = ["CrashWatch", "MessageFaults", "crash_environment", "describe", "message_faults"]
