"""Parameters that a run trains, by `learner.train_layers`: numbers of layers, and parts of names. `lora.layers` has the
numbers alone.

Also read by the configuration: works on names alone, without a model, and imports nothing but the standard library.

- "20-31, lm_head": commas between items; each is a number, a range with both ends, or a part of a name between dots
  (`mlp`, `self_attn.q_proj`, `*norm`; `*` stands for anything).
- The number of a layer is the first whole number between the dots of a parameter's name; layers count from 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

_RANGE = re.compile(r"(\d+)(?:\s*-\s*(\d+))?")
_NAME = re.compile(r"[\w.*\[\]?]+")
_NUMBER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class Item:
    """An item of the key: layers from `first` to `last`, or a part of a name."""

    text: str
    first: int = -1
    last: int = -1

    def takes(self, name: str) -> bool:
        """True if it means the parameter of that name."""
        if self.first < 0:
            return fnmatchcase(f".{name}.", f"*.{self.text}.*")
        number = _NUMBER.search(name)
        return number is not None and self.first <= int(number[1]) <= self.last


def parsed(text: str) -> list[Item]:
    """The items; none of an empty text. ValueError with the item that is none, and why."""
    items = []
    for part in (piece.strip() for piece in text.split(",") if text.strip()):
        ends = _RANGE.fullmatch(part)
        if ends is None and not _NAME.fullmatch(part):
            raise ValueError(f"{part!r} is no number, no range such as 20-31 and no part of a parameter's name")
        first, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (-1, -1)
        if last < first:
            raise ValueError(f"{part!r} begins after its end")
        items.append(Item(part, first, last))
    return items


def highest(text: str) -> int:
    """The highest number of a layer that is named; -1 where none is."""
    return max((item.last for item in parsed(text)), default=-1)


def chosen(text: str, names: Iterable[str]) -> tuple[set[str], list[str]]:
    """Names of the parameters that are trained (all, by an empty text), and the items that mean none."""
    items, every = parsed(text), set(names)
    by_item = {item.text: {name for name in every if item.takes(name)} for item in items}
    empty = [item for item, names_of in by_item.items() if not names_of]
    return (set().union(*by_item.values()) if items else every), empty


def layers(text: str, count: int) -> set[int]:
    """Numbers of the layers that are trained as a whole, of `count`; empty if items name parts, or there are none."""
    items = parsed(text)
    if any(item.first < 0 for item in items):
        return set()
    return {number for item in items for number in range(item.first, min(item.last, count - 1) + 1)}
