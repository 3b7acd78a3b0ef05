"""Keys of a topology that may change while its run runs, and the topology with another value of one of them.

Uses the reader and the rules of `load`, so a wrong value gets the message that it gets in a file.

- Sizes of the start (ring, horizon) stay: a value that needs others is refused.
- A key is here if every process that reads it reads it again, and if its change alters no sample that exists.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from busrl.capabilities import MODEL_ROLES, ROLES
from busrl.errors import Problem, TopologyError, UserError
from busrl.preflight.derive import in_flight_limits
from busrl.preflight.findings import Finding, lookup
from busrl.preflight.load import compared, replaced
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
OF_MODEL = ("learner", "weights", "generation")
COUNT = ("process", "count")
OF_CONTROLLER = ("learner.trigger.n_min", "learner.trigger.n_floor", "learner.trigger.t_max_s")


def whole_key(topology: Topology, key: str, scales: bool = False) -> str:
    """The key as it is recorded: of one of several models with its tag, the lead's where none is named. `scales`: it
    is the name of a role whose processes are counted."""
    tag, key = _tagged(topology, key)
    key = f"process.{key}.count" if scales else key
    if not tag and (_role(key) in MODEL_ROLES or key.partition(".")[0] in OF_MODEL):
        tag = topology.lead
    return f"model.{tag}.{key}" if tag else key


def is_count(key: str) -> bool:
    return bool(_role(_untagged(key)))


def followers(key: str) -> tuple[str, ...]:
    return KEYS.get(_untagged(key), ("keeper",))


def _untagged(key: str) -> str:
    return ".".join(key.split(".")[2:]) if key.startswith("model.") else key


def value_of(topology: Topology, key: str) -> str:
    tag, key = _tagged(topology, key)
    topology, role = topology.of(tag), _role(key)
    if not role:
        return show(lookup(topology, key))
    return str(sum(entry.count for entry in topology.process if entry.role == role))


def changed(topology: Topology, key: str, text: str) -> Topology:
    """The topology with another value of this key; UserError if the key cannot change, or not to that value. A key of
    one of several models begins with `model.TAG.`."""
    tag, key = _tagged(topology, key)
    if tag not in ("", topology.tag):
        if key.partition(".")[0] not in OF_MODEL and _role(key) not in MODEL_ROLES:
            raise UserError(f"{key} is the run's, the same for all models: set it without --model")
        after = _with(topology, changed(topology.of(tag), key, text))
        _refuse(key, after, _broken(topology, after))
        return after
    _require_section(key)
    role, source = _role(key), of_overrides([f"{key}={text}"])
    reader = Reader(source)
    sections = reader.sections()
    if wrong := [problem for problem in reader.problems if problem.place.startswith("--set ")]:
        raise TopologyError(wrong)
    if role:
        after = _counted(topology, role, sections["process"][0].count)
    elif key not in KEYS:
        raise UserError(f"{key} cannot change while the run runs: set it at the next start; these can: "
                        f"{', '.join(KEYS)}, and the number of processes with `busrl scale`")
    else:
        _refuse_by_mode(topology, key)
        table, _, rest = key.partition(".")
        after = replaced(topology, key.split("."), lookup(sections[table], rest))
    derived, findings = (after.derived, list[Finding]()) if after.frozen else in_flight_limits(after)
    after = dataclasses.replace(after, derived=derived)
    _refuse(key, after, [*findings, *_broken(topology, after)])
    return after


def _refuse(key: str, after: Topology, findings: Sequence[Finding]) -> None:
    if refused := [finding for finding in findings if not finding.warning]:
        place = f"--set {key}"
        raise TopologyError(Problem(place, finding.shown(after), finding.rule, finding.remedy) for finding in refused)


def _tagged(topology: Topology, key: str) -> tuple[str, str]:
    """The tag with which a key begins, "" where it has none, and the key without it."""
    section, _, rest = key.partition(".")
    tag, _, of_tag = rest.partition(".")
    return (tag, of_tag) if section == "model" and topology.models and tag in topology.tags else ("", key)


def _with(topology: Topology, own: Topology) -> Topology:
    """The topology with what is changed in that of one of its models."""
    tables = {name: getattr(own, name) for name in (*OF_MODEL, "derived")}
    tables["process"] = tuple(entry for entry in own.process if entry.role in MODEL_ROLES)
    rows = (dataclasses.replace(row, own=(dataclasses.replace(row.own[0], **tables),)) if row.tag == own.tag else row
            for row in topology.models)
    return dataclasses.replace(topology, models=tuple(rows))


def _require_section(key: str) -> None:
    """Raise UserError for a key without its section, with the key that was probably meant."""
    if meant := [candidate for candidate in KEYS if candidate.rpartition(".")[2] == key.strip(".")]:
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
    of_role = {place: entry for place, entry in enumerate(topology.process) if entry.role == role}
    at = [place for place, entry in of_role.items() if not entry.model or entry.model[0] == topology.tag]
    if of_role and not at:
        owner = of_role[next(iter(of_role))].model[0]
        part = f"{topology.tag} has a part in that of {owner}"
        raise UserError(f"{role}: {part}: scale it with --model {owner}, or add a [[process]] for {topology.tag} alone")
    if len(at) != 1 or topology.process[at[0]].hosts:
        why = "has none" if not at else "has several entries, or has it on other hosts"
        raise UserError(f"{role}: the run {why}: its number can change where one [[process]] on this host says it")
    if role == "rollout" and topology.validation.mode == "dedicated":
        raise UserError('rollout: with validation.mode = "dedicated" some of them only validate, by their numbers')
    entries = list(topology.process)
    entries[at[0]] = dataclasses.replace(entries[at[0]], count=count)
    return dataclasses.replace(topology, process=tuple(entries))


def _broken(before: Topology, after: Topology) -> list[Finding]:
    """Findings about the new topology that the one before did not have."""
    earlier = {str(finding) for finding in compared(before)}
    return [finding for finding in compared(after) if not finding.warning and str(finding) not in earlier]


def with_sizes_of(topology: Topology, before: Topology) -> Topology:
    """The topology with the sizes of the existing rings, those of each model of `before`, where its limits fit in them;
    else with its own."""
    after = _sized_as(topology, before)
    for tag in topology.trained_tags:
        if tag != topology.tag and tag in before.tags:
            after = _with(after, _sized_as(after.of(tag), before.of(tag)))
    return after


def _sized_as(topology: Topology, before: Topology) -> Topology:
    derived, earlier, slots = topology.derived, before.derived, topology.ring.slots
    if derived.limits.train_slots > earlier.slots - earlier.val_reserve or slots not in ("auto", earlier.slots):
        return topology
    sizes = {name: getattr(earlier, name) for name in ("slots", "train_slots", "val_reserve", "call_slots")}
    return dataclasses.replace(topology, derived=dataclasses.replace(derived, **sizes))
