"""The rollout role with random numbers that are named by the sample alone: a model call of an episode then draws the
tokens that a plain answer of the same uid has."""

import os
import sys
from dataclasses import replace

from busrl.roles import rollout

make_engine = rollout.make_engine


def one_stream(topology, process=""):
    engine = make_engine(topology, process)
    submit = engine.submit
    engine.submit = lambda requests: submit([replace(request, segment=0) for request in requests])
    return engine


rollout.make_engine = one_stream
sys.exit(rollout.Rollout(os.environ["BUSRL_RUN_DIR"], os.environ["BUSRL_NAME"]).main())
