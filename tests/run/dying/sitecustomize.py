"""Loaded by a process whose PYTHONPATH names this folder: it dies in a phase of a broadcast, once.

DIE_IN names the phase (a point of the hooks of `busrl.weights.broadcast.sender` and its receiver; `@n`: the n-th time),
DIE_MARK a file that says that it has happened.
"""

import os
import signal
from pathlib import Path

from busrl.weights.broadcast.receiver import BroadcastReceiver
from busrl.weights.broadcast.sender import BroadcastSender

POINT, _, NTH = os.environ["DIE_IN"].partition("@")
MARK = Path(os.environ["DIE_MARK"])
NAME = os.environ.get("BUSRL_NAME", "")
left = [int(NTH or 1)]


def hook(self, reached):
    if reached.startswith(POINT) and not MARK.exists():
        left[0] -= 1
        if left[0] == 0:
            MARK.write_text(f"{NAME} died in {reached}")
            os.kill(os.getpid(), signal.SIGKILL)


if NAME in ("learner", "rollout/0"):
    (BroadcastSender if NAME == "learner" else BroadcastReceiver)._reached = hook
