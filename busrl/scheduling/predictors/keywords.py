"""Tables of weighted words and tags for the predictor `rules`: what one must look like, and the one that is shipped.

Talks to the package's own `keywords.toml`, read once when first asked for. Knows nothing of users' files: whoever reads
one gives `check` the tables, and gets a place for each finding.

- A weight is a finite number of tokens of at most LARGEST either way; a word is not blank; none is there twice in
  different cases.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LARGEST = 1e6
TABLES = ("words", "tags")


@dataclass(frozen=True)
class Keywords:
    """Tokens that a word in the prompt, or the tag of its task, adds to the expected answer; all in lower case."""

    words: Mapping[str, float]
    tags: Mapping[str, float]


class Fault(NamedTuple):
    """What is wrong at one key of a table."""

    path: tuple[str, ...]
    value: str
    rule: str
    remedy: str


def check(tables: Mapping[str, Any]) -> tuple[Keywords, list[Fault]]:
    """The table that a parsed TOML text holds, without what is wrong in it, and all that is wrong."""
    rule, remedy = "a table of keywords has [words] and [tags], nothing else", "remove it, or correct its name"
    faults = [Fault((name,), name, rule, remedy) for name in tables if name not in TABLES]
    words, tags = (_weights(name, tables.get(name, {}), faults) for name in TABLES)
    if not words and not tags and not faults:
        faults.append(Fault((), "", "there is no word and no tag in it", 'write "prove" = 300 or the like in [words]'))
    return Keywords(words, tags), faults


def _weights(table: str, given: Any, faults: list[Fault]) -> dict[str, float]:
    if not isinstance(given, Mapping):
        faults.append(Fault((table,), f"{table} = {given!r}", "must be a table", f"write [{table}] and lines below it"))
        return {}
    found: dict[str, float] = {}
    for word, weight in given.items():
        fault = _fault(table, word, weight, found)
        if fault is None:
            found[word.strip().lower()] = float(weight)
        else:
            faults.append(fault)
    return found


def _fault(table: str, word: str, weight: Any, found: Mapping[str, float]) -> Fault | None:
    path, shown = (table, word), f"{word!r} = {repr(weight)[:40]}"
    if not word.strip():
        return Fault(path, shown, "an empty word is in every prompt", "remove the line")
    if word.strip().lower() in found:
        return Fault(path, shown, "the same word is there already (case does not matter)", "remove one of the two")
    if isinstance(weight, Mapping):
        return Fault(path, repr(word), "must be a number of tokens, not a table", "put a word with a dot in quotes")
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        return Fault(path, shown, "a weight must be a number of tokens", f'for example "{word}" = 100')
    if isinstance(weight, float) and not math.isfinite(weight):
        return Fault(path, shown, "a weight must be finite", f'for example "{word}" = 100')
    if abs(weight) > LARGEST:
        return Fault(path, shown, f"a weight must be within {LARGEST:.0f} tokens either way", "use a smaller one")
    return None


@functools.cache
def shipped() -> Keywords:
    """The table of busrl itself, Chinese and English."""
    text = resources.files(__package__).joinpath("keywords.toml").read_text("utf-8")
    keywords, faults = check(tomllib.loads(text))
    if faults:
        raise AssertionError(f"keywords.toml: {faults[0]}")
    return keywords
