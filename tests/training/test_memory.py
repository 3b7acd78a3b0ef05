"""Kept memory: a second round of large allocations costs no page faults."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

CHILD = """
import resource
from busrl.system.device import keep_freed_memory
assert keep_freed_memory()
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytearray(1 << 22) for _ in range(8)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) < 1000  # 32 MiB are 8192 pages
