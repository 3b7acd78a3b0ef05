"""The rollout role with an engine that dies of one sample: what a prompt that crashes an engine looks like."""

import os
import signal
import sys

from busrl.roles import rollout

DEADLY = int(os.environ["DEADLY_UID"])
make_engine = rollout.make_engine


def deadly(topology, process=""):
    engine = make_engine(topology, process)
    submit, step, inside = engine.submit, engine.step, set()

    def submits(requests):
        inside.update(request.uid for request in requests)
        submit(requests)

    def steps():
        if DEADLY in inside:
            print(f"dying of {DEADLY} among {engine.active}", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return step()

    engine.submit, engine.step = submits, steps
    return engine


rollout.make_engine = deadly
sys.exit(rollout.Rollout(os.environ["BUSRL_RUN_DIR"], os.environ["BUSRL_NAME"]).main())
