"""The one table of the parts of busrl that can be left out, each a folder, and of the places where the core uses them.

Read by the core wherever an optional part takes a role, a message, a command or a step. Imports nothing of busrl but
errors: a part is imported when it is used. Knows nothing of what a part does.

- The core names an optional part here and nowhere else (tests/architecture holds it).
- A folder that is not there takes nothing from a run that does not ask for it. A topology that asks for it gets one
  sentence that names the part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from busrl.errors import UserError


@dataclass(frozen=True)
class Capability:
    """An optional part: its folder below `busrl`, what users get by it, and the objects that the core takes from it.

    `roles`: module and class of each process. `plugs`: by the name of the place in the core, module and object
    ("module:name", the module relative to `busrl`).
    """

    name: str
    purpose: str
    roles: Mapping[str, str] = field(default_factory=dict)
    plugs: Mapping[str, str] = field(default_factory=dict)

    @property
    def here(self) -> bool:
        return find_spec(f"busrl.{self.name}") is not None

    def missing(self) -> UserError:
        return UserError(
            f"{self.purpose} need busrl/{self.name}, which is not part of this installation; install all of busrl"
        )


CORE_ROLES: dict[str, str] = {
    "bus": "roles.bus:Bus", "keeper": "roles.keeper:Keeper", "scheduler": "roles.scheduler:Scheduler",
    "rollout": "roles.rollout:Rollout", "reward": "roles.reward:Reward", "learner": "roles.learner:Learner",
    "validator": "roles.validator:Validator",
}
CAPABILITIES: tuple[Capability, ...] = (
    Capability("agents", "episodes of agents", roles={
        "agent": "agents.roles.agent:Agent", "serve": "agents.roles.serve:Serve",
        "atropos": "agents.roles.atropos:Atropos",
    }),
    Capability("hosts", "other hosts and workers from outside", roles={
        "relay": "hosts.relay:Relay", "satellite": "hosts.satellite:Satellite",
    }),
    Capability("ranks", "learners of several ranks", roles={"rank": "ranks.role:Rank"}),
    Capability("observe", "monitors, reports and sinks", roles={"sinks": "observe.sinks.role:Sinks"}),
    Capability("predict", "predicted lengths and the controller of the batch size"),
    Capability("simulate", "simulations"),
)
BY_NAME = {capability.name: capability for capability in CAPABILITIES}


def role(name: str) -> Any:
    """The class of a role's process; UserError if its part is not there."""
    if name in CORE_ROLES:
        return _object(CORE_ROLES[name])
    capability = next(capability for capability in CAPABILITIES if name in capability.roles)
    if not capability.here:
        raise capability.missing()
    return _object(capability.roles[name])


def plug(name: str, place: str) -> Any:
    """What the part `name` puts into that place of the core; UserError if the part is not there."""
    capability = BY_NAME[name]
    if not capability.here:
        raise capability.missing()
    return _object(capability.plugs[place])


@cache
def plugs(place: str) -> tuple[Any, ...]:
    """What all parts that are there put into that place, in the order of the table."""
    return tuple(
        _object(capability.plugs[place]) for capability in CAPABILITIES if place in capability.plugs and capability.here
    )


def _object(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(f"busrl.{module}"), name)
