"""A sweep: the same simulation for every combination of some values of topology keys.

Loads and checks every topology before the first run, so that a wrong key costs nothing. Knows nothing of tables.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from busrl.errors import TopologyError, UserError
from busrl.topology import Topology, sketch

MAX_POINTS = 1000


@dataclass(frozen=True)
class Axis:
    """One key and its values, as text."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Point:
    """One combination, in the order of the axes."""

    values: tuple[str, ...]
    topology: Topology
    written: frozenset[str]  # the keys that topology file, --set and --sweep give


def axis(text: str) -> Axis:
    """`key=a,b,c` of the command line."""
    key, equals, values = text.partition("=")
    found = tuple(value.strip() for value in values.split(","))
    if not equals or not key.strip() or not all(found):
        raise UserError(f"--sweep {text}: must be key=a,b,c, for example --sweep learner.trigger.n_min=16,32,64")
    return Axis(key.strip(), found)


def points(file: Path, overrides: Sequence[str], axes: Sequence[Axis]) -> list[Point]:
    """Every combination, loaded and checked; the first that is wrong is reported with its values."""
    twice = {one.key for one in axes if sum(other.key == one.key for other in axes) > 1}
    if twice:
        raise UserError(f"--sweep {twice.pop()}: given twice; give all its values at once, separated by commas")
    combinations = list(itertools.product(*(one.values for one in axes)))
    if len(combinations) > MAX_POINTS:
        raise UserError(f"--sweep: {len(combinations)} combinations, at most {MAX_POINTS}; give fewer values")
    return [_load(file, overrides, axes, values) for values in combinations]


def _load(file: Path, overrides: Sequence[str], axes: Sequence[Axis], values: tuple[str, ...]) -> Point:
    chosen = [f"{one.key}={value}" for one, value in zip(axes, values)]
    try:
        found = sketch(file, [*overrides, *chosen])
        return Point(values, found.topology, found.written)
    except TopologyError as error:
        if not axes:
            raise
        keys = {one.key for one in axes}
        renamed = (
            dataclasses.replace(problem, place=problem.place.replace("--set", "--sweep", 1))
            if any(key in problem.place for key in keys)
            else problem
            for problem in error.problems
        )
        raise TopologyError(renamed) from None
