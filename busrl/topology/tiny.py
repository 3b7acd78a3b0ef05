"""From `tiny:` names to real paths: the quickstart's model and prompts, made on first use.

Called by `launch` once a topology is accepted. Talks to `busrl.quickstart`, which makes them in a child process. Knows
nothing of what they contain.

- Nothing else of the topology changes; sizes were derived without looking, so the first start equals the later ones.
"""

from __future__ import annotations

import dataclasses

from busrl import quickstart
from busrl.topology.schema import TINY, Topology


def materialise(topology: Topology) -> Topology:
    """The same topology with every `tiny:` name replaced by the path of what it stands for."""
    model, data, validation = topology.model, topology.data, topology.validation
    if model.path.startswith(TINY):
        model = dataclasses.replace(model, path=str(quickstart.ensure(model.path).model))
    if data.train.startswith(TINY):
        data = dataclasses.replace(data, train=str(quickstart.ensure(data.train).train))
    if validation.data.startswith(TINY):
        validation = dataclasses.replace(validation, data=str(quickstart.ensure(validation.data).validation))
    return dataclasses.replace(topology, model=model, data=data, validation=validation)
