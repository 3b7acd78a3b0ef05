"""A role that dies in a phase of a broadcast, once: of the learner the sender, of a rollout process the receiver.

DIE_IN names the phase (a point of the hooks of `busrl.weights.broadcast` and its receiver), DIE_MARK a file that says
that it has happened.
"""

import os
import signal
import sys
from pathlib import Path

from busrl.roles import learner, rollout
from busrl.weights.broadcast import BroadcastSender
from busrl.weights.broadcast_receiver import BroadcastReceiver

POINT, _, NTH = os.environ["DIE_IN"].partition("@")
MARK = Path(os.environ["DIE_MARK"])
NAME = os.environ["BUSRL_NAME"]
left = [int(NTH or 1)]


def hook(reached):
    if reached.startswith(POINT) and not MARK.exists():
        left[0] -= 1
        if left[0] == 0:
            MARK.write_text(f"{NAME} died in {reached}")
            os.kill(os.getpid(), signal.SIGKILL)


role = learner if NAME == "learner" else rollout
side = BroadcastSender if NAME == "learner" else BroadcastReceiver
if NAME in ("learner", "rollout/0"):
    side._call_hook = lambda self, point: hook(point)
sys.exit(role.main(os.environ["BUSRL_RUN_DIR"], NAME))
