"""The topology that a run keeps: topology.json read back, and the files of prompts that were made for it.

Used by whoever looks at a run or continues it. Reads that one file; knows nothing of how prompts are made.

- The file names of prompts are kept, and their folder is the run directory's: a run may be moved.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from busrl.errors import UserError
from busrl.topology.schema import Topology

TRAIN, VALIDATION, SET = "data.train", "validation.data", "validation.set "  # files that are made, the last by its name


def recorded(path: Path) -> Topology:
    """The one that a run keeps in its topology.json, for whoever looks at the run; UserError if it is damaged."""
    try:
        return placed(Topology.from_json(path.read_text()), path.resolve().parent / "data")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path}: not what busrl wrote ({type(error).__name__}: {error}); was it edited? Restore it, or take "
            "another run"
        ) from None


def placed(t: Topology, folder: Path) -> Topology:
    """The topology with the files that were made in this folder."""
    for which, path in made_files(t).items():
        t = with_file(t, which, str(folder / path.name))
    return t


def made_files(t: Topology) -> dict[str, Path]:
    """The files of prompts that were made, by which they are."""
    found = {TRAIN: Path(t.data.train)} if t.derived.sources else {}
    for one in t.derived.made:
        data = [own.data for own in t.validation.set if own.name == one.name] if one.name else [t.validation.data]
        found |= {SET + one.name if one.name else VALIDATION: Path(data[0])} if data else {}
    return found


def with_file(t: Topology, which: str, path: str) -> Topology:
    if which == TRAIN:
        return dataclasses.replace(t, data=dataclasses.replace(t.data, train=path))
    name, own = set_name(which), t.validation

    def moved(one: Any) -> Any:
        return dataclasses.replace(one, data=path) if one.name == name else one

    changed: dict[str, Any] = {"set": tuple(map(moved, own.set))} if name else {"data": path}
    derived = dataclasses.replace(t.derived, sets=tuple(map(moved, t.derived.sets)))
    return dataclasses.replace(t, validation=dataclasses.replace(own, **changed), derived=derived)


def set_name(which: str) -> str:
    """The name of a set; "" of [validation] itself."""
    return which.removeprefix(SET) if which.startswith(SET) else ""
