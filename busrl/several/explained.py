"""The section of `busrl check` about several models: each tag, what it plays, and the sums that are its own.

Takes the sums of the core for the topology of each tag. Prints nothing of a run with one model and one seat.
"""

from __future__ import annotations

from collections.abc import Iterator

from busrl.preflight import memory
from busrl.system import device
from busrl.topology.schema import Topology, has_model


def lines(t: Topology) -> Iterator[str]:
    """The section of the page."""
    if not t.models:
        if len(t.seats) > 1:
            yield f"seats: {', '.join(t.seats)}, a group of each for every prompt"
        return
    yield "models"
    for tag in t.tags:
        yield from _of_tag(t, t.of(tag))
    yield from _devices(t)


def _of_tag(t: Topology, own: Topology) -> Iterator[str]:
    what = "only serves" if own.frozen else "the lead" if own.tag == t.lead else f"{own.run.max_steps} steps"
    for follow in own.follows:
        back = f", {follow.back} back" if follow.back else ""
        what = f"checkpoints of {follow.model}, every {follow.every} steps{back}"
    names = ", ".join(process.name for process in t.processes()
                      if has_model(process.spec) and own.tag in t.tags_of(process)) or "no process here"
    yield f"  {own.tag} ({what}): {own.model.path}, plays {', '.join(own.seats)}, {names}"
    if not own.beside:
        return  # the rest of the page is about the lead
    calls = f"{own.derived.call_slots} calls of {own.derived.call_slot_bytes} bytes"
    if own.frozen:
        yield f"    {calls}, sequences of up to {own.longest} tokens"
        return
    yield f"    learning rate {own.learner.lr:g}, steps of {own.learner.trigger.n_min} groups; {calls}"
    yield from (f"    {line}" for line in (*own.derived.explain, *memory.lines(own)))


def _devices(t: Topology) -> Iterator[str]:
    """The learners' memory, added up for each kind of device that several of them share. One of several adapters has
    their base once."""
    sizes: dict[str, dict[str, int]] = {}
    for process in (process for process in t.processes() if process.role == "learner"):
        together = t.tags_of(process)
        kind = device.expected(t.device_of(process.name))
        sizes.setdefault(kind, {})[" and ".join(together)] = memory.together([t.of(tag) for tag in together])
    for kind, tags in sizes.items():
        if len(tags) > 1 or " " in next(iter(tags)):
            each = " + ".join(f"{tag} {size / (1 << 30):.2f}" for tag, size in tags.items())
            yield f"  learners on {kind}: {each} = {sum(tags.values()) / (1 << 30):.2f} GiB"
