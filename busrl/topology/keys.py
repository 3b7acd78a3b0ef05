"""How one key of a topology is declared: default, one line of documentation, and the rule its value has to keep.

The declarations in `experiment.py` and `machinery.py` are the only list of keys: the loader, the error messages,
`configs/reference.toml` and the tests read the same metadata. Knows nothing of files.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

REQUIRED = object()  # a key without a default


@dataclass(frozen=True)
class Rule:
    """What a value must be beyond its type. `low`/`high` are inclusive unless `open_low`/`open_high`."""

    doc: str
    low: float | None = None
    high: float | None = None
    open_low: bool = False
    open_high: bool = False
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] = ()  # words allowed where a number is expected ("auto", "inf")
    path: bool = False  # a file or folder: made absolute, relative to the file that names it
    finite: bool = True
    required: bool = False

    def text(self) -> str:
        """The rule as a reader of the reference sees it, empty if every value of the type is allowed."""
        if self.choices:
            return "one of " + ", ".join(f'"{choice}"' for choice in self.choices)
        words = [f'"{word}"' for word in self.words]
        return " or ".join(part for part in (self._bounds(), *words) if part)

    def _bounds(self) -> str:
        parts = []
        if self.low is not None:
            parts.append(f"{'>' if self.open_low else '>='} {_number(self.low)}")
        if self.high is not None:
            parts.append(f"{'<' if self.open_high else '<='} {_number(self.high)}")
        return " and ".join(parts)

    def allows(self, number: float) -> bool:
        """Whether a number keeps the bounds."""
        if math.isnan(number) or (self.finite and math.isinf(number)):
            return False
        if self.low is not None and (number < self.low or (self.open_low and number == self.low)):
            return False
        return not (self.high is not None and (number > self.high or (self.open_high and number == self.high)))


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"


def key(default: Any, doc: str, **rule: Any) -> Any:
    """A dataclass field with its documentation and rule; `REQUIRED` for one without a default."""
    if default is REQUIRED:
        return dataclasses.field(metadata={"rule": Rule(doc, required=True, **rule)})
    return dataclasses.field(default=default, metadata=describe(doc, **rule))


def describe(doc: str, **rule: Any) -> dict[str, Rule]:
    """The metadata of a field that needs a factory for its default."""
    return {"rule": Rule(doc, **rule)}


def rule_of(field: dataclasses.Field[Any]) -> Rule:
    """The rule that `key` attached; sections that nest other sections have none."""
    rule = field.metadata.get("rule")
    if not isinstance(rule, Rule):
        raise TypeError(f"{field.name} was declared without key()")
    return rule
