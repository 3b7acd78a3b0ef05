"""Episodes of other hosts: the tensors that travel, and the checks of an episode before it is written into a slot here.

Talks to the ring of the host that sends one. Knows nothing of connections and tasks, nor of how an episode is played.

- An episode is checked whole before anything of it is written: its own rules, and the limits of the run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from busrl.data.episodes import (
    CONTEXT,
    FINISH,
    GENERATED,
    NEEDED,
    TYPES,
    WAITED,
    Array,
    EpisodeArrays,
    EpisodeLimits,
    fault_of,
    listed,
)
from busrl.errors import NoSuchTensor
from busrl.hosts import messages as g
from busrl.hosts.desk import Refused, read_tensor, tensor
from busrl.ring import Ring
from busrl.states import Finish
from busrl.topology import Topology

LEAST_MESSAGES = 2  # bytes: [] where agents.transcript_bytes leaves no room


@dataclass(frozen=True)
class Bounds:
    """Limits of an episode of another host. `vocabulary` 0: not known."""

    limits: EpisodeLimits
    transcript_bytes: int
    vocabulary: int

    @classmethod
    def of(cls, topology: Topology, vocabulary: int) -> Bounds | None:
        """None in a run whose samples are answers of one call."""
        if not topology.has_callers:
            return None
        return cls(EpisodeLimits.of(topology), topology.agents.transcript_bytes, vocabulary)


def tensors_of(ring: Ring, slot: int) -> dict[str, g.Tensor]:
    """The tensors of the episode in a slot that we hold, as they travel; whoever gets them checks them."""
    arrays = {name: ring.get(slot, name, 0) for name in NEEDED}
    for name in TYPES.keys() - arrays.keys():
        with contextlib.suppress(NoSuchTensor):
            arrays[name] = ring.get(slot, name, 0)
    return {name: tensor(array) for name, array in arrays.items()}


def received(tensors: Mapping[str, g.Tensor], bounds: Bounds, newest: int) -> tuple[EpisodeArrays, dict[str, Array]]:
    """An episode that another host sent, and all its tensors; `Refused` if it breaks a rule. `newest`: the version."""
    if unknown := sorted(tensors.keys() - TYPES.keys()):
        raise Refused(f"tensor {unknown[0]!r}: an episode has {', '.join(TYPES)}")
    if missing := [name for name in NEEDED if name not in tensors]:
        raise Refused(f"tensor {missing[0]} is missing: an episode has {', '.join(NEEDED)}")
    arrays = {name: read_tensor(tensors[name], name, *TYPES[name]) for name in TYPES if name in tensors}
    episode = EpisodeArrays(**{name: arrays[name] for name in NEEDED}, turn_rewards=arrays.get("turn_rewards"))
    if fault := fault_of(episode) or _over(episode, bounds, newest) or _fault_of_rest(arrays, bounds):
        raise Refused(fault)
    return episode, arrays


def _over(episode: EpisodeArrays, bounds: Bounds, newest: int) -> str:
    """The bound of the run that a sound episode is beyond; "" if none."""
    limits, turns = bounds.limits, episode.turns
    for what, value, most in (
        ("ids in its longest sequence", int(episode.seqs.max()), limits.context),
        ("sampled ids", len(episode.logprobs), limits.sampled), ("ids", len(episode.ids), limits.tokens),
        ("turns", len(turns), limits.turns), ("sequences", len(episode.seqs), limits.sequences),
    ):
        if value > most:
            return f"{value} {what}: [agents] allows {most}"
    low, high = int(episode.ids.min()), int(episode.ids.max())
    if low < 0 or (bounds.vocabulary and high >= bounds.vocabulary):
        return f"ids from {low} to {high}: the model knows {bounds.vocabulary or 'none below 0'}"
    if int(episode.versions.max()) > newest:
        return f"versions has {int(episode.versions.max())}: the newest version that was published is {newest}"
    if not np.isin(turns[:, FINISH], (Finish.EOS, Finish.LENGTH)).all():
        return f"turns end by {listed(turns[:, FINISH])}: {Finish.EOS:d} (by itself) or {Finish.LENGTH:d} (a limit)"
    if int(turns[:, [WAITED, GENERATED]].min()) < 0:
        return "a turn has a time below 0"
    return ""


def _fault_of_rest(arrays: Mapping[str, Array], bounds: Bounds) -> str:
    """A fault of the tensors that an episode need not have; "" if nothing."""
    reward, context, messages = (arrays.get(name) for name in ("reward", "context", "messages"))
    if reward is not None and (not len(reward) or not np.isfinite(reward).all()):
        return f"the reward is {listed(reward)}: must be finite numbers, at least one"
    if context is not None and len(context) != len(CONTEXT):
        return f"context has {len(context)} numbers: must be {len(CONTEXT)}"
    if messages is not None and not 1 <= len(messages) <= max(LEAST_MESSAGES, bounds.transcript_bytes):
        return f"messages has {len(messages)} bytes: agents.transcript_bytes allows {bounds.transcript_bytes}"
    return ""
