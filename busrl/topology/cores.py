"""Which cores of the machine the processes of a run may use: `cpus` of a [[process]] entry.

Used by the rules, by `busrl check` and by launch, which binds what it starts. Pure but for the cores that this machine
has, which the caller looks up.

- A process whose entry names cores runs on those. All others share the cores that no entry names, or all if none is
  left. Where no entry names any, nobody is bound.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from busrl.errors import UserError
from busrl.topology.rules import Finding

if TYPE_CHECKING:
    from busrl.topology.schema import Process, Topology

LIST = re.compile(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*")


def parse(text: str) -> frozenset[int]:
    """ "0-2,7" is {0, 1, 2, 7}; ValueError for anything else."""
    if not LIST.fullmatch(text):
        raise ValueError(f"{text!r} is no list of cores")
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if int(last or first) < int(first):
            raise ValueError(f"{part!r} ends before it begins")
        found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found)


def findings(t: Topology) -> Iterator[Finding]:
    """Entries that can not be meant as they stand."""
    for index, entry in enumerate(t.process):
        if not entry.cpus:
            continue
        at = f"process.{index}"
        try:
            named = parse(entry.cpus)
        except ValueError as problem:
            yield Finding((f"{at}.cpus",), str(problem), 'numbers and ranges with commas, for example "0-2,7"')
            continue
        if len(named) < entry.threads * max(1, entry.count):
            rule = f"{entry.count} x {entry.threads} threads share {len(named)} cores"
            yield Finding((f"{at}.cpus", f"{at}.threads"), rule, "more cores, or fewer threads", warning=True)


def of(t: Topology, entry: Process, here: frozenset[int]) -> frozenset[int]:
    """The cores for processes of that entry, out of those that this machine gives us; empty: they are not bound."""
    if entry.cpus:
        return parse(entry.cpus)
    return here - named if (named := _named(t)) else named


def require(t: Topology, here: frozenset[int]) -> None:
    """UserError if an entry names cores that are not there."""
    for index, entry in enumerate(t.process):
        if entry.cpus and (missing := sorted(parse(entry.cpus) - here)):
            raise UserError(
                f'process.{index}.cpus = "{entry.cpus}": core {missing[0]} is not there, or not for this process, '
                f"which may use {sorted(here)}; name others, or remove cpus"
            )


def _named(t: Topology) -> frozenset[int]:
    return frozenset().union(*(parse(entry.cpus) for entry in t.process if entry.cpus))
