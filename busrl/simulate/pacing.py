"""Which service time comes from where: [simulate] as written, a fitted run, [mock], shipped figures, or an assumption.

Pure: a topology and what is known goes in, `Times` with a source for every number come out. Knows nothing of answers,
events or files.

- The first of these that knows a time gives it: `simulate.*` keys of the topology, --fit, `[mock]` (scripted engines),
  the shipped figures of the quickstart, and last the defaults of [simulate], which are assumed.
- The learner takes at least `mock.learner_s_per_token` for a token, as a real one does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping

from busrl.errors import UserError
from busrl.simulate.actors import PACE_S
from busrl.simulate.shipped import Shipped
from busrl.simulate.times import STATED, Times
from busrl.topology import Topology
from busrl.topology.schema import Simulate

SET, MOCK = "set in [simulate]", "stated in [mock]"
SLICE_S = 0.05  # a scripted engine draws its jitter anew for each stretch of at most so long
NAMES = tuple(one.name for one in dataclasses.fields(Times) if one.name not in ("source", "busy_share"))


def times_of(
    topology: Topology, written: Collection[str] = (), fitted: Times | None = None, shipped: Shipped | None = None
) -> Times:
    """The times of one simulated run. `written`: dotted keys that topology file and overrides give."""
    own = dataclasses.asdict(topology.simulate)
    values, sources = {name: float(own[name]) for name in NAMES}, dict.fromkeys(NAMES, STATED)
    for source, known in reversed([*_known(topology, written, fitted, shipped)]):
        values.update(known)
        sources.update(dict.fromkeys(known, source))
    floor = topology.mock.learner_s_per_token
    if floor > values["learner_token_s"] and sources["learner_token_s"] != SET:
        values["learner_token_s"], sources["learner_token_s"] = floor, MOCK
    if values["step_s"] + values["row_s"] <= 0:
        raise UserError("simulate.step_s = 0 and simulate.row_s = 0: a decoding step must take some time; raise one")
    return Times().with_source(sources, **values)


def _known(
    topology: Topology, written: Collection[str], fitted: Times | None, shipped: Shipped | None
) -> Iterator[tuple[str, Mapping[str, float]]]:
    """Every source with what it knows, the one that counts most first."""
    own, default = dataclasses.asdict(topology.simulate), dataclasses.asdict(Simulate())
    given = {name: float(own[name]) for name in NAMES if f"simulate.{name}" in written or own[name] != default[name]}
    yield SET, given
    if fitted is not None:
        yield next(iter(fitted.source.values())), {name: getattr(fitted, name) for name in fitted.source}
        return
    if topology.scripted:
        yield MOCK, scripted(topology)
    elif shipped is not None:
        yield shipped.source, shipped.times


def scripted(topology: Topology) -> dict[str, float]:
    """What [mock] says of engines. A scripted engine counts its deadlines on, so joining and new weights cost it
    nothing; its jitter evens out over the interval for which a simulated actor keeps its pace."""
    mock = topology.mock
    return {
        "step_s": mock.token_s,
        "row_s": mock.per_sequence_s,
        "prefill_token_s": mock.prefill_s_per_token,
        "sequence_s": 0.0,
        "weights_s": 0.0,
        "speed_spread": 0.0,
        "step_spread": mock.jitter * float((SLICE_S / (3 * PACE_S)) ** 0.5),
    }
