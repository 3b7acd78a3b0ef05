"""Keys of a topology that may change while its run runs, and the topology with another value of one of them.

Asks the same reader and the same rules as `load`, so that a wrong value gets the message that it gets in a file.

- Sizes that were made at the start (ring, horizon) stay: a value that needs others is refused.
- A key is here if every process that reads it does so again, and if no sample is another one by it.
"""

from __future__ import annotations

import dataclasses

from busrl.errors import Problem, TopologyError, UserError
from busrl.preflight.derive import in_flight_limits
from busrl.preflight.findings import Finding, lookup
from busrl.preflight.load import CHECKS, replaced
from busrl.states import ROLES
from busrl.topology.reader import Reader, of_overrides, show
from busrl.topology.schema import Topology

LIMITS = ("learner", "scheduler", "rollout", "keeper")
# Key -> the roles that follow it.
KEYS: dict[str, tuple[str, ...]] = {
    "learner.lr": ("learner",), "learner.checkpoint_every": ("learner", "scheduler"),
    "learner.trigger.n_min": LIMITS, "learner.trigger.n_floor": LIMITS, "learner.trigger.t_max_s": ("learner",),
    "weights.max_staleness": LIMITS, "weights.over_age": LIMITS,
    "scheduler.policy": ("scheduler",), "generation.temperature": ("scheduler",), "log.samples": ("learner",),
}
LIMIT_KEYS = tuple(key for key, roles in KEYS.items() if roles is LIMITS)
COUNT = ("process", "count")
OF_CONTROLLER = ("learner.trigger.n_min", "learner.trigger.n_floor", "learner.trigger.t_max_s")


def count_key(role: str) -> str:
    return f"process.{role}.count"


def is_count(key: str) -> bool:
    return bool(_role(key))


def followers(key: str) -> tuple[str, ...]:
    return KEYS.get(key, ("keeper",))


def value_of(topology: Topology, key: str) -> str:
    role = _role(key)
    return str(sum(one.count for one in topology.process if one.role == role)) if role else show(lookup(topology, key))


def changed(topology: Topology, key: str, text: str) -> Topology:
    """The topology with another value of this key; a UserError says why it cannot be."""
    _require_section(key)
    role, source = _role(key), of_overrides([f"{key}={text}"])
    reader = Reader(source)
    sections = reader.sections()
    if wrong := [one for one in reader.problems if one.place.startswith("--set ")]:
        raise TopologyError(wrong)
    if role:
        made = _counted(topology, role, sections["process"][0].count)
    elif key not in KEYS:
        raise UserError(f"{key} cannot change while the run runs: set it at the next start; these can: "
                        f"{', '.join(KEYS)}, and the number of processes with `busrl scale`")
    else:
        _refuse_by_mode(topology, key)
        table, _, rest = key.partition(".")
        made = replaced(topology, key.split("."), lookup(sections[table], rest))
    derived, found = in_flight_limits(made)
    made = dataclasses.replace(made, derived=derived)
    found += _broken(topology, made)
    if broken := [Problem(f"--set {key}", one.shown(made), one.rule, one.remedy) for one in found if not one.warning]:
        raise TopologyError(broken)
    return made


def _require_section(key: str) -> None:
    """UserError for a key that lacks its section alone; it names the one that was meant."""
    if meant := [one for one in KEYS if one.rpartition(".")[2] == key.strip(".")]:
        rule = f"what is set is section.key=value, and {key} has no section"
        raise UserError(f"{rule}; did you mean {' or '.join(meant)}?")


def _role(key: str) -> str:
    """The role whose count a key is; "" for any other."""
    parts = key.split(".")
    return parts[1] if len(parts) == 3 and (parts[0], parts[2]) == COUNT else ""


def _refuse_by_mode(topology: Topology, key: str) -> None:
    if topology.weights.mode == "sync" and key in LIMIT_KEYS:
        raise UserError(f'{key} cannot change in flight with weights.mode = "sync": rounds are counted by it')
    if topology.segments.waves and key in LIMIT_KEYS:
        raise UserError(f"{key} cannot change in flight with segments.rounds: waves are counted by it")
    if topology.learner.controller.mode != "off" and key in OF_CONTROLLER:
        raise UserError(f"{key} is what the controller moves: learner.controller.mode = "
                        f"{show(topology.learner.controller.mode)}")


def _counted(topology: Topology, role: str, count: int) -> Topology:
    if ROLES[role].single:
        raise UserError(f"{role}: a run has one of them")
    at = [place for place, one in enumerate(topology.process) if one.role == role]
    if len(at) != 1 or topology.process[at[0]].hosts:
        why = "has none" if not at else "has several entries, or has it on other hosts"
        raise UserError(f"{role}: the run {why}: its number can change where one [[process]] on this host says it")
    if role == "rollout" and topology.validation.mode == "dedicated":
        raise UserError('rollout: with validation.mode = "dedicated" some of them only validate, by their numbers')
    entries = list(topology.process)
    entries[at[0]] = dataclasses.replace(entries[at[0]], count=count)
    return dataclasses.replace(topology, process=tuple(entries))


def _broken(before: Topology, made: Topology) -> list[Finding]:
    """Findings about the new topology that the one before did not have."""
    known = {str(finding) for check in CHECKS for finding in check(before)}
    return [one for check in CHECKS for one in check(made) if not one.warning and str(one) not in known]


def with_sizes_of(topology: Topology, before: Topology) -> Topology:
    """For a ring that is there: with the sizes that it was made with, where the limits still fit in them."""
    own, made, asked = topology.derived, before.derived, topology.ring.slots
    if own.limits.train_slots > made.slots - made.val_reserve or asked not in ("auto", made.slots):
        return topology
    sizes = {name: getattr(made, name) for name in ("slots", "train_slots", "val_reserve", "call_slots")}
    return dataclasses.replace(topology, derived=dataclasses.replace(own, **sizes))
