"""Tells the C library to keep freed memory instead of handing it back to the kernel.

Called once by a process that trains on the CPU. Talks to glibc; does nothing elsewhere.

- A step allocates the same few megabytes again and again. Handed back each time, every page has to be mapped and zeroed
  anew: thousands of page faults and about a tenth of the time of a small model's step.
"""

from __future__ import annotations

import ctypes

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3  # of mallopt(3)
LARGEST = (1 << 31) - 1


def keep_freed_memory(slack: int = 1 << 26) -> bool:
    """True if the C library took it; `slack` bytes are asked for at a time."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((MMAP_THRESHOLD, 1 << 30), (TRIM_THRESHOLD, LARGEST), (TOP_PAD, slack))
    taken = [mallopt(option, value) == 1 for option, value in settings]
    return all(taken)
