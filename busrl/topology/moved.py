"""Keys that have moved to another table or are gone, so that old files are told where and old runs are still read.

One table, used twice: `elsewhere` gives the remedy for a key of a hand-written file, `modern` brings the topology.json
of an older run into today's shape. Pure.

- A key that moved keeps its meaning; one whose unit changed says so in MOVED_MS and is converted.
"""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any

from busrl.topology.research import ControllerRules

_CONTROLLER = {
    f"learner.controller.{field.name}": f"experiments.controller.{field.name}"
    for field in fields(ControllerRules)
    if not field.name.endswith("_t_max_s")
}
MOVED_MS = {  # milliseconds became seconds
    "learner.trigger.t_max": "learner.trigger.t_max_s",
    "learner.controller.high_t_max": "experiments.controller.high_t_max_s",
    "learner.controller.low_t_max": "experiments.controller.low_t_max_s",
}
MOVED = {
    "data.validation": "validation.data",
    "run.validate_before": "validation.at_start",
    "segments.truncated": "reward.truncated",
    "segments.truncated_penalty": "reward.truncated_penalty",
    "learner.forced_age": "experiments.forced_age",
    "learner.dmmpt": "experiments.dmmpt",
    "learner.dmmpt_tau": "experiments.dmmpt_tau",
    "learner.dmmpt_sigma": "experiments.dmmpt_sigma",
    **_CONTROLLER,
    **MOVED_MS,
}
GONE = {"learner.aggregation": "the sum of the loss is always divided by the number of tokens: remove it"}


def elsewhere(key: str) -> str:
    """What to do about a key of an older file; empty for one that never was."""
    if key in MOVED_MS:
        return f"it is {MOVED_MS[key]} now, in seconds (a thousandth of the number)"
    return f"it is {MOVED[key]} now" if key in MOVED else GONE.get(key, "")


def modern(data: dict[str, Any]) -> dict[str, Any]:
    """The data of a topology.json of any age in today's shape; what is today's already stays as it is."""
    made = copy.deepcopy(data)
    without = _taken(made, "data.validation")
    for old, new in MOVED.items():
        found, value = _taken(made, old)
        if found:
            _put(made, new, _seconds(value) if old in MOVED_MS else value)
    if without[0]:  # an older run validated on the training prompts where it had no others
        rounds = made.get("derived", {}).get("val_samples", 0)
        _put(made, "validation.data", without[1] or (made["data"]["train"] if rounds else ""))
    for old in GONE:
        _taken(made, old)
    return made


def _seconds(milliseconds: Any) -> Any:
    return milliseconds if isinstance(milliseconds, str) else milliseconds / 1000


def _taken(data: dict[str, Any], key: str) -> tuple[bool, Any]:
    """Remove a dotted key; whether it was there, and its value."""
    *tables, name = key.split(".")
    for table in tables:
        data = data.get(table, {})
        if not isinstance(data, dict):
            return False, None
    return (True, data.pop(name)) if name in data else (False, None)


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    *tables, name = key.split(".")
    for table in tables:
        data = data.setdefault(table, {})
    data[name] = value
