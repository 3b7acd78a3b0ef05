"""From a topology and the command line to what a simulated run needs: service times and answers.

Puts together what `pacing` knows of times and `sources` of answers. Says of everything where it came from. Knows
nothing of events or tables.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from busrl.errors import UserError
from busrl.simulate import pacing, shipped, sources
from busrl.simulate.answers import Answers
from busrl.simulate.control import refuse
from busrl.simulate.fit import Fitted
from busrl.simulate.times import Times
from busrl.topology import Topology

MAX_ACTORS = 1 << 20
STEPS = 60  # of a run are played unless more are asked for: enough to be past its beginning, and done in seconds


@dataclass(frozen=True)
class Setting:
    """All that `World` takes besides the topology."""

    times: Times
    answers: Answers
    actors: int
    steps: int
    seed: int
    answers_note: str


@dataclass(frozen=True)
class Asked:
    """What the command line says; None or "" where it says nothing."""

    trace: Path | None = None
    actors: int | None = None
    steps: int | None = None
    seed: int | None = None


def make(
    topology: Topology, asked: Asked, fitted: Fitted | None = None, written: Collection[str] = frozenset()
) -> Setting:
    """The setting of one simulated run; `UserError` for what can not be. `written`: keys that the topology gives."""
    refuse(topology)
    seed = topology.run.seed if asked.seed is None else asked.seed
    if seed < 0:
        raise UserError(f"--seed {seed}: must be >= 0; give another")
    steps = min(STEPS, topology.run.max_steps) if asked.steps is None else asked.steps
    if steps < 1:
        raise UserError(f"--steps {steps}: must be >= 1; leave it out for the first {STEPS}")
    known = shipped.find(topology)
    times = pacing.times_of(topology, written, None if fitted is None else fitted.times, known)
    answers, note = sources.answers_of(topology, asked.trace, fitted, known, seed)
    return Setting(times, answers, actors_of(topology, asked.actors), steps, seed, note)


def actors_of(topology: Topology, asked: int | None) -> int:
    """How many rollout processes to simulate."""
    if asked is not None:
        if not 1 <= asked <= MAX_ACTORS:
            raise UserError(f"--actors {asked}: must be 1 to {MAX_ACTORS}; leave it out for those of the topology")
        return asked
    counted = sum(process.count for process in topology.process if process.role == "rollout")
    return topology.simulate.actors or max(1, counted)
