"""Loaded by processes whose PYTHONPATH names this folder: a template process then does what TEMPLATE_FAULT says."""

import os
import signal
import sys
import threading

if "busrl.system.template" in sys.orig_argv:
    fault = os.environ["TEMPLATE_FAULT"]
    if fault == "thread":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    elif fault == "exit":
        os._exit(3)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
