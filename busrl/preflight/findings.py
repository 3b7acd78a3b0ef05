"""Findings about keys and files, the report that collects them, and the rows of tables of rules that yield them.

A `Clash` is a row about the topology, an `EntryClash` one about an entry of [[process]]: the keys, when their values
clash, why, and what to do. A rule that needs more is a function that yields findings. Used by every module of rules;
looks at nothing but a topology.

- A finding names every key it depends on, so that none is reported for a key whose own value is wrong already.
- Refused is what trains something else than was asked for, or can never make progress; the rest warns.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from busrl.errors import Problem
from busrl.topology.declare import FUNCTION, items
from busrl.topology.reader import show
from busrl.topology.schema import Process, Topology


@dataclass(frozen=True)
class Finding:
    """A problem of some keys together; the message stands at the first of them."""

    keys: tuple[str, ...]
    rule: str
    remedy: str
    warning: bool = False
    value: str = ""
    depends: tuple[str, ...] = ()  # further keys that the finding was computed from
    place: str = ""  # in the file that the key names, where the cause is there and not the key

    def shown(self, topology: Topology) -> str:
        """The keys with their values, unless the finding brings its own text."""
        return self.value or ", ".join(f"{key} = {show(lookup(topology, key))}" for key in self.keys)


class Report:
    """Collects the findings of an inspection, and the keys that are left out of it.

    `left_out`: keys that have a problem already; whatever depends on one of them is skipped.
    """

    def __init__(self, left_out: Collection[str]) -> None:
        self.findings: list[Finding] = []
        self._left_out = set(left_out)

    def sound(self, *keys: str) -> bool:
        """Tell whether none of these keys is left out."""
        return self._left_out.isdisjoint(keys)

    def sound_below(self, prefix: str) -> bool:
        """Tell whether no key that begins so is left out."""
        return not any(key.startswith(prefix) for key in self._left_out)

    def leave_out(self, key: str) -> None:
        self._left_out.add(key)

    def blames(self, *keys: str) -> bool:
        """Tell whether a finding stands at one of these keys."""
        return any(finding.keys[0] in keys for finding in self.findings)

    def add(self, key: str, rule: str, remedy: str) -> None:
        self.findings.append(Finding((key,), rule, remedy))

    def add_problem(self, key: str, problem: Problem) -> None:
        """Report a problem in the file that `key` names."""
        self.findings.append(Finding((key,), problem.rule, problem.remedy, value=problem.value, place=problem.place))


Check = Callable[[Topology], Iterator[Finding]]
EntryCheck = Callable[[Topology, str, Process], Iterator[Finding]]  # with the key of the entry of [[process]]


def lookup(table: object, key: str) -> object:
    """The value of a dotted key; `process.0.count` counts entries."""
    value = table
    for part in key.split("."):
        value = value[int(part)] if isinstance(value, tuple) else getattr(value, part)
    return value


# -- rows of a table of rules -----


@dataclass(frozen=True)
class Clash:
    """Values of a topology that do not go together.

    `when` tells whether they clash, `text` is the rule and, after the last semicolon, the remedy. The finding shows
    `keys` in their order; it depends on those that are `hidden` without showing them.
    """

    keys: tuple[str, ...]
    when: Callable[[Topology], object]
    text: str | Callable[[Topology], str]
    hidden: tuple[str, ...] = ()
    warning: bool = False

    def finding(self, t: Topology) -> Finding | None:
        """The finding to report; None where the values go together."""
        if not self.when(t):
            return None
        rule, _, remedy = (self.text if isinstance(self.text, str) else self.text(t)).rpartition("; ")
        return Finding(self.keys, rule, remedy, self.warning, depends=self.hidden)


@dataclass(frozen=True)
class EntryClash:
    """Values of an entry of [[process]] that do not go together, or do not fit the topology.

    As a `Clash`; keys that begin with a dot are the entry's.
    """

    keys: tuple[str, ...]
    when: Callable[[Topology, Process], object]
    text: str | Callable[[Topology, Process], str]
    hidden: tuple[str, ...] = ()
    warning: bool = False

    def finding(self, t: Topology, index: int) -> Finding | None:
        """The finding about the entry at `index`; None where its values go together."""
        entry = t.process[index]
        if not self.when(t, entry):
            return None
        rule, _, remedy = (self.text if isinstance(self.text, str) else self.text(t, entry)).rpartition("; ")
        shown, depends = (
            tuple(f"process.{index}{key}" if key.startswith(".") else key for key in keys)
            for keys in (self.keys, self.hidden)
        )
        return Finding(shown, rule, remedy, self.warning, depends=depends)


def clashes(t: Topology, table: Iterable[Clash]) -> Iterator[Finding]:
    """The findings of a table of rules."""
    return (finding for row in table if (finding := row.finding(t)))


def entry_clashes(t: Topology, table: Iterable[EntryClash], index: int) -> Iterator[Finding]:
    """The findings of a table of rules about the entry of [[process]] at `index`."""
    return (finding for row in table if (finding := row.finding(t, index)))


def of_entries(t: Topology, table: Iterable[EntryClash], *checks: EntryCheck) -> Iterator[Finding]:
    """The findings of a table of rules and of functions about each entry of [[process]]."""
    for index, entry in enumerate(t.process):
        yield from entry_clashes(t, table, index)
        for check in checks:
            yield from check(t, f"process.{index}", entry)


def unlike(at: str, cls: type) -> Iterator[tuple[str, Callable[[Topology], bool]]]:
    """Every key of the table at `at`, and the predicate that its value is not its default."""
    for name, item in items(cls).items():
        yield f"{at}.{name}", partial(_is_unlike, f"{at}.{name}", item.default)


def _is_unlike(key: str, default: object, t: Topology) -> bool:
    return lookup(t, key) != default


def by_path(keys: tuple[str, ...], path: str, example: str, who: str = "") -> Iterator[Finding]:
    """Report a value that is no import path of a function; `who` names what needs one, where the keys do not."""
    if not FUNCTION.fullmatch(path):
        rule = f"{who} needs a function" if who else "expected a function"
        yield Finding(keys, f"{rule} as package.module:name or file.py:name, got {show(path)}", example)


def is_url(text: str) -> bool:
    """Tell whether this is the address of an endpoint."""
    try:
        parts = urllib.parse.urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False
