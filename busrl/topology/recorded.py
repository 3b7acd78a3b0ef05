"""The topology that a run keeps: topology.json read back, and the files of prompts that were made for it.

Used by the commands that look at a run, and by what continues it. Reads that one file; knows nothing of how prompts are
made.

- The file names of prompts are kept, and their folder is the run directory's: a run may be moved.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from busrl.errors import UserError
from busrl.topology.schema import Topology

# The files of prompts that may be made for a run; the name of a set follows the last.
TRAIN, VALIDATION, SET = "data.train", "validation.data", "validation.set "


def recorded(path: Path) -> Topology:
    """The topology that a run keeps in its topology.json; UserError if the file is damaged."""
    try:
        return placed(Topology.from_json(path.read_text()), path.resolve().parent / "data")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path}: not what busrl wrote ({type(error).__name__}: {error}); was it edited? Restore it, or take "
            "another run"
        ) from None


def placed(t: Topology, folder: Path) -> Topology:
    """The topology with the paths of its made files in this folder."""
    for which, path in made_files(t).items():
        t = with_file(t, which, str(folder / path.name))
    return t


def made_files(t: Topology) -> dict[str, Path]:
    """The files of prompts that were made for the run, by `TRAIN`, `VALIDATION` or `SET` and a name."""
    files = {TRAIN: t.data.train} if t.derived.sources else {}
    of_sets = {SET + named_set.name: named_set.data for named_set in t.validation.set}
    for made_set in t.derived.made:
        if not made_set.name:
            files[VALIDATION] = t.validation.data
        elif (which := SET + made_set.name) in of_sets:
            files[which] = of_sets[which]
    return {which: Path(path) for which, path in files.items()}


def with_file(t: Topology, which: str, path: str) -> Topology:
    if which == TRAIN:
        return dataclasses.replace(t, data=dataclasses.replace(t.data, train=path))
    name, validation = set_name(which), t.validation

    def moved(table: Any) -> Any:
        return dataclasses.replace(table, data=path) if table.name == name else table

    changed: dict[str, Any] = {"set": tuple(map(moved, validation.set))} if name else {"data": path}
    derived = dataclasses.replace(t.derived, sets=tuple(map(moved, t.derived.sets)))
    return dataclasses.replace(t, validation=dataclasses.replace(validation, **changed), derived=derived)


def set_name(which: str) -> str:
    """The name of a set; "" of [validation] itself."""
    return which.removeprefix(SET) if which.startswith(SET) else ""
