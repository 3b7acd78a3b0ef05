"""What a signal handler may do to a process that waits."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import signal
from busrl.bus.broker import StopRequest

stop, calls = StopRequest(), 0
assert not stop.wait(0.01) and not stop.is_set()


def asked(*_):
    global calls
    calls += 1
    stop.set()


signal.signal(signal.SIGALRM, asked)
signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
while calls < 2000:  # some of them come in the middle of a wait
    stop.wait(1e-4)
signal.setitimer(signal.ITIMER_REAL, 0)
assert stop.wait(60) and stop.is_set()
print("ended")
"""


def test_a_stop_that_comes_in_the_middle_of_a_wait_ends_it() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.stdout == "ended\n", done.stderr
