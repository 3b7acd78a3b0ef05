"""The models of a topology: their tags, the topology of one of them, its processes and its paths.

The base of `schema.Topology`. The run's own topology is that of the lead; `of` makes that of another tag out of it, an
ordinary topology of one model. Knows nothing of how `[[model]]` is read (`busrl/several`).

- With a plain [model] there is one tag, the empty one, and every method here answers as if tags did not exist.
- A projection holds no further models: a process of a tag sees its own model alone.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, cast

from busrl.capabilities import CALLER_ROLES, MODEL_ROLES, ROLES, SINGLE_ROLES
from busrl.topology.prompts import Validation

if TYPE_CHECKING:
    from busrl.paths import RunPaths
    from busrl.topology.schema import Model, Process, ProcessName, Run, Tag, Topology

ONLY_SEAT = "policy"  # the seat of a model that has no other name


class SeveralModels:
    """The part of a topology that is about its models."""

    if TYPE_CHECKING:  # fields of `Topology`
        run: Run
        model: Model
        process: tuple[Process, ...]
        models: tuple[Tag, ...]
        tag: str
        frozen: bool
        first: int
        apart: int

    @property
    def tags(self) -> tuple[str, ...]:
        """The models of the run, in the order of the file; of a plain [model] and of a projection itself alone."""
        return tuple(row.tag for row in self.models) or (self.tag,)

    @property
    def lead(self) -> str:
        """The tag whose run directory and names are those of the run; empty for a plain [model]."""
        return self.tag if self.models else ""

    @property
    def trained_tags(self) -> tuple[str, ...]:
        if self.models:
            return tuple(row.tag for row in self.models if row.trained)
        return () if self.frozen else (self.tag,)

    @property
    def beside(self) -> str:
        """The tag of a model beside the lead; empty for the lead and for a plain [model]. Messages and paths have it.
        """
        return "" if self.models else self.tag

    @property
    def seats(self) -> tuple[str, ...]:
        """The seats that the model plays in an episode, each with a group of its own for every draw; never empty."""
        return self.model.seats or (self.tag or ONLY_SEAT,)

    @property
    def every_entry(self) -> tuple[Process, ...]:
        """The entries of all models, and those that belong to none."""
        return (*self.process, *(entry for row in self.models for own in row.own for entry in own.process))

    @property
    def sides(self) -> dict[str, tuple[str, ...]]:
        """The seats of each trained model, by its tag: an episode has a sample for each of them."""
        return {tag: self.of(tag).seats for tag in self.trained_tags}

    @property
    def own_roles(self) -> tuple[str, ...]:
        """The roles whose processes this topology lists: beside the lead only those that belong to one model."""
        return MODEL_ROLES if self.beside else tuple(ROLES)

    def of(self, tag: str) -> Topology:
        """The topology of one model, with its processes and the entries of those that play episodes; of the lead, and
        of "", this one."""
        whole: Any = self
        row = next((row for row in self.models if row.tag == tag), None)
        if row is None and tag not in ("", self.tag):
            raise KeyError(f"no model {tag!r}: there are {', '.join(self.tags)}")
        if row is None or not row.own:
            return cast("Topology", self)
        own = dict(vars(row.own[0]))
        own["process"] += tuple(entry for entry in self.process if entry.role in CALLER_ROLES)
        run = dataclasses.replace(self.run, max_steps=row.max_steps or self.run.max_steps)
        return cast("Topology", dataclasses.replace(
            whole, **own, run=run, validation=Validation(), models=(), tag=tag, frozen=not row.trained, first=row.first,
            apart=len(self.models), follows=(row.follow,) if row.follow.model else (),
            served_by=self._served_by(tag),
        ))

    def _served_by(self, tag: str) -> tuple[str, ...]:
        """The rollout processes of other models that answer for this one too."""
        owners = [(0, self.process), *((row.first, own.process) for row in self.models for own in row.own)]
        names = list[str]()
        for first, entries in owners:
            each = [entry.model for entry in entries if entry.role == "rollout" for _ in range(entry.count)]
            numbers = zip(self._numbers(first, len(each)), each)
            names += [f"rollout/{number}" for number, models in numbers if tag in models[1:]]
        return tuple(names)

    def tag_of(self, process: str) -> str:
        """The model to which a process of this name belongs: the lead, unless it generates or learns for another."""
        role, _, rest = process.partition("/")
        for row in self.models:
            rollouts = sum(entry.count for own in row.own for entry in own.process if entry.role == "rollout")
            if role == "rollout" and rest.isdecimal() and int(rest) in self._numbers(row.first, rollouts):
                return row.tag
            if role == "learner" and row.own and rest == row.tag:
                return row.tag
        return self.tag

    def _numbers(self, first: int, count: int) -> range:
        """The numbers of a model's rollouts: those of several models take turns, so each can have more or fewer."""
        apart = self.apart or len(self.models) or 1
        return range(first, first + count * apart, apart)

    def place_of(self, rollout: str) -> int:
        """The place of the rollout of this name among those of its model."""
        return (int(rollout.partition("/")[2]) - self.first) // (self.apart or len(self.models) or 1)

    def models_of(self, process: str) -> tuple[str, ...]:
        """The models that a process of this name works for, the one it belongs to first."""
        topology = cast("Topology", self)
        found = next((each for each in topology.processes() if each.name == process), None)
        return self.tags_of(found) if found else (self.tag_of(process),)

    def tags_of(self, process: ProcessName) -> tuple[str, ...]:
        """The models of a process that is listed (`models_of`)."""
        shared = process.spec.model
        return shared if isinstance(shared, tuple) else (self.tag_of(process.name),)

    def paths_of(self, tag: str, paths: RunPaths) -> RunPaths:
        """The paths of a model; `paths`: those of the run, which are the lead's."""
        return paths if tag in ("", self.tag) else paths.of_tag(tag)

    def named(self, role: str, number: int) -> str:
        """The name of a process."""
        if role not in SINGLE_ROLES:
            return f"{role}/{number}"
        return f"{role}/{self.beside}" if self.beside else role
