"""The rollout role with an engine that has one of the faults that the parity gate names, from a version on."""

import dataclasses
import os
import sys

import numpy as np
import torch

from busrl.engines.torch.engine import TorchEngine
from busrl.roles import rollout

FAULT, SINCE = os.environ["FAULT"], int(os.environ["FAULT_SINCE"])
make_engine = rollout.make_engine


def asked_wrongly(engine):
    """The engine is asked for another temperature than the request says."""
    submit = engine.submit

    def submits(requests):
        factor = 1.5 if engine.version >= SINCE else 1.0
        submit([dataclasses.replace(request, temperature=request.temperature * factor) for request in requests])

    engine.submit = submits


def rounded(topology, process):
    """An engine in bfloat16, whose weights come in float32 as declared, and are rounded."""
    declared = make_engine(topology, process)
    engine = make_engine(dataclasses.replace(topology, model=dataclasses.replace(topology.model, dtype="bfloat16")))
    target, weights = declared.parameters(), engine.parameters()

    def updates(receiver):
        taken = receiver.fetch(target)
        with torch.no_grad():
            for name, value in target.items():
                weights[name].copy_(value)
        return taken

    engine._update = updates
    return engine


def told_wrongly(engine, tell):
    """The engine's answers come back changed by `tell`."""
    step = engine.step
    engine.step = lambda: [tell(answer) if engine.version >= SINCE else answer for answer in step()]


def updated_wrongly(engine, left_out):
    """The parameters that `left_out` picks keep their values."""
    update = engine._update

    def updates(receiver):
        weights = engine.parameters()
        before = {name: weights[name].clone() for name in weights if left_out(name)}
        taken = update(receiver)
        if taken[0] >= SINCE:
            with torch.no_grad():
                for name, value in before.items():
                    weights[name].copy_(value)
        return taken

    engine._update = updates


def cached_for_ever(engine):
    """Keys and values of all prompts but their last token are kept, and no update drops them."""
    kept, submit, park, prompts = engine._kept, engine.submit, engine._kept.park, set()

    def submits(requests):
        prompts.update(tuple(request.prompt_ids.tolist()) for request in requests)
        submit(requests)

    def parks(row, ids):
        prefixes = [prompt for prompt in prompts if tuple(ids[: len(prompt)].tolist()) == prompt]
        if prefixes:
            park(row, ids[: len(max(prefixes, key=len)) - 1])

    engine.submit, kept.park, kept.clear = submits, parks, lambda: None


def planted(topology, process=""):
    if FAULT == "dtype":
        return rounded(topology, process)
    engine = make_engine(topology, process)
    assert isinstance(engine, TorchEngine)
    if FAULT == "temperature":
        asked_wrongly(engine)
    elif FAULT == "shift":
        told_wrongly(engine, lambda answer: dataclasses.replace(answer, logprobs=np.roll(answer.logprobs, 1)))
    elif FAULT == "version tag":
        told_wrongly(engine, lambda answer: dataclasses.replace(answer, versions=answer.versions - 1))
    elif FAULT == "old weights":
        updated_wrongly(engine, lambda name: True)
    elif FAULT == "layer":
        updated_wrongly(engine, lambda name: ".layers.1." in name)
    elif FAULT == "prefix cache":
        cached_for_ever(engine)
    return engine


rollout.make_engine = planted
sys.exit(rollout.Rollout(os.environ["BUSRL_RUN_DIR"], os.environ["BUSRL_NAME"]).main())
