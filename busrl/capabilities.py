"""The table of roles, and the one table of the parts of busrl that can be left out, with the places where the core uses
them.

Read by the core wherever a process is started, and where an optional part takes a message, a command or a step. Imports
nothing of busrl but errors: a role and a part are imported when they are used. Knows nothing of what they do.

- The core names an optional part here and nowhere else (tests/architecture holds it).
- A missing folder takes nothing from a run that does not ask for it. A topology that asks for it gets one sentence that
  names the part (`refuse`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from busrl.errors import UserError

if TYPE_CHECKING:
    from busrl.topology import Topology

HERE = Path(__file__).parent


# -- roles -----


class Role(NamedTuple):
    """A kind of process: its class, how many of its kind a run has, and when they end."""

    name: str
    actor: str  # its class, "module:name", the module relative to `busrl`; one in the folder of a part belongs to that
    stop: int  # stage of a stop in which it ends: producers before consumers, the bus last
    named: bool = True  # an entry of [[process]] may name it; of one that none may name, every run has one
    default: bool = False  # of one that an entry may name: a run has one where none does
    single: bool = False  # one works at a time, under a lock
    foreign: bool = False  # another program may do it, named by `command`
    caller: bool = False  # its samples are episodes of model calls
    of_model: bool = False  # each process is of one model, or of some that share it; others are the run's
    tensors: bool = False  # imports what models need, whatever its entry says
    moves: bool = True  # maps the ring and moves samples
    awaited: bool = True  # the run cannot go on, or end, without it
    listens: str = ""  # the table of the topology with the host and port at which launch listens for it
    where: str = ""  # of a role that no entry names, if only some have it: "home", other hosts ("away"), both of a run
    # that has other hosts ("both"; docs/hosts.md), or home with [sinks] ("sinks")


# In the order in which a run starts them.
ROLES: Final = {role.name: role for role in (
    Role("bus", "roles.bus:Bus", 7, named=False, moves=False),
    Role("keeper", "roles.keeper:Keeper", 6, named=False),
    Role("relay", "hosts.relay:Relay", 5, named=False, moves=False, where="both"),
    Role("satellite", "hosts.satellite:Satellite", 4, named=False, where="away"),
    Role("sinks", "observe.sinks.role:Sinks", 5, named=False, moves=False, awaited=False, where="sinks"),
    Role("scheduler", "roles.scheduler:Scheduler", 0, named=False, where="home"),
    Role("learner", "roles.learner:Learner", 4, default=True, single=True, of_model=True),
    Role("reward", "roles.reward:Reward", 2, default=True, foreign=True),
    Role("rollout", "roles.rollout:Rollout", 1, default=True, foreign=True, of_model=True),
    Role("agent", "agents.roles.agent:Agent", 1, caller=True),
    Role("serve", "agents.roles.serve:Serve", 1, caller=True),
    Role("atropos", "agents.roles.atropos:Atropos", 1, single=True, caller=True),
    Role("tinker", "service.role:Tinker", 1, single=True, caller=True, listens="tinker"),
    Role("tuner", "service.tuner:Tuner", 4, single=True, tensors=True),
    Role("validator", "roles.validator:Validator", 3, default=True, single=True),
    Role("rank", "ranks.role:Rank", 5, named=False, tensors=True, moves=False),
)}
RANK: Final = "rank"  # the learner's further processes: rank/1, rank/2, ...
IMPLIED_ROLES: Final = tuple(role.name for role in ROLES.values() if not role.named and role.name != RANK)
SINGLE_ROLES: Final = tuple(role.name for role in ROLES.values() if role.single)
CALLER_ROLES: Final = tuple(role.name for role in ROLES.values() if role.caller)
MODEL_ROLES: Final = tuple(role.name for role in ROLES.values() if role.of_model)
FOREIGN_ROLES: Final = tuple(role.name for role in ROLES.values() if role.foreign)


# -- parts that can be left out -----


@dataclass(frozen=True)
class Command:
    """A verb of `busrl`, as `busrl --help` lists it.

    `options` ("module:name") takes the parser of the verb, adds its options and returns the function to run. It is
    loaded when the verb is used, after `environment` is set.
    """

    name: str
    text: str
    options: str
    more: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    of_model: bool = False  # it looks at a run, of whose models --model names one


@dataclass(frozen=True)
class Capability:
    """An optional part: its folder or module below `busrl`, what users get by it, and what the core takes from it.

    Its roles are those whose class lies in its folder. `plugs`: by the name of the place in the core, module and object
    ("module:name", the module relative to `busrl`). `asks`: the keys by which a topology may ask for the part, each
    with whether it does; a process of one of its roles asks for it anyway. `commands`: verbs of `busrl`.
    """

    name: str
    purpose: str
    plugs: Mapping[str, str] = field(default_factory=dict)
    asks: Mapping[str, Callable[[Topology], bool]] = field(default_factory=dict)
    commands: tuple[Command, ...] = ()

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(role.name for role in ROLES.values() if role.actor.startswith(f"{self.name}."))

    @property
    def here(self) -> bool:
        return (HERE / self.name / "__init__.py").is_file() or (HERE / f"{self.name}.py").is_file()

    def asked_by(self, topology: Topology) -> str:
        """The first key of the topology that asks for this part; empty where none does."""
        roles = (entry.role for entry in topology.process if entry.role in self.roles)
        keys = (key for key, asks in self.asks.items() if asks(topology))
        return next((f'[[process]] role = "{role}"' for role in roles), next(keys, ""))

    def missing(self, key: str = "") -> UserError:
        asking = f"{key}: " if key else ""
        return UserError(
            f"{asking}{self.purpose} need busrl/{self.name}, which is not part of this installation; install all of "
            "busrl" + (", or remove the key" if key else "")
        )


def _with_engine(name: str) -> dict[str, Callable[[Topology], bool]]:
    def asks(topology: Topology) -> bool:
        return any(entry.role == "rollout" and entry.engine == name for entry in topology.process)

    return {f'[[process]] engine = "{name}"': asks}


def _with_transport(*names: str) -> dict[str, Callable[[Topology], bool]]:
    def asks(name: str) -> Callable[[Topology], bool]:
        return lambda topology: topology.weights.transport == name

    return {f'weights.transport = "{name}"': asks(name) for name in names}


def _with_reward(kind: str) -> dict[str, Callable[[Topology], bool]]:
    def asks(topology: Topology) -> bool:
        return any(part.kind == kind for part in topology.reward.part)

    return {f'[[reward.part]] kind = "{kind}"': asks}


HOST_COMMANDS = (
    Command("host", "run the processes that a run on another machine has on this one", "hosts.joining:host_options",
        "The run's topology names this host in `hosts` of a [[process]]; see docs/hosts.md."),
)
OBSERVE_COMMANDS = (
    Command("report", "write what a run did as one HTML page, during or after it", "observe.command:report_options",
        "It loads nothing: drawings, waste, problems, settings. Several runs are compared.", of_model=True),
    Command("trace", "write a run's timeline for Perfetto (Chrome trace events)", "observe.command:timeline_options",
        "Each process is a track. Also prints how much of the generation falls into training."),
    Command("monitor", "watch a run, a recording that is replayed, or any endpoint, changing nothing",
        "observe.command:monitor_options", "Keys of the live view: q quit, e errors, m next of several models.",
        of_model=True),
    Command("record", "write what passes the bus of a run into a file, changing nothing",
        "observe.command:record_options",
        "It ends with Ctrl-C, with the run, or at a limit; the file can be replayed, or read while it grows."),
    Command("replay", "publish a recording again, for a monitor or another listener", "observe.command:replay_options",
        "It begins when a listener connects. An endpoint is ipc:///path."),
)
SIMULATE_COMMANDS = (
    Command("simulate", "how a topology would run: throughput, busy shares, ages, waits, on as many actors as you like",
        "simulate.command:simulate_options",
        "Times and lengths are assumptions unless --fit or --trace say better; what was assumed is printed.",
        # Read when NumPy is loaded: the predictors' matrices are small, and a second numeric thread would only spin.
        {"OPENBLAS_NUM_THREADS": "1"}),
)
CAPABILITIES: tuple[Capability, ...] = (
    Capability("ledger/audit", "audits", plugs={
        "run_audit": "ledger.audit:audit", "audit_text": "ledger.audit:render"}),
    Capability("agents", "episodes of agents", plugs={
        "trials": "agents.trials:try_agents", "check_notes": "agents.trials:notes_on_turns"}),
    Capability("hosts", "other hosts and workers from outside", plugs={
        "messages": "hosts.messages:MESSAGES", "refusals": "hosts.messages:REFUSALS",
        "tenders": "hosts.gateway:Gateway", "host_topology": "hosts.membership:of_host",
        "host_rows": "hosts.membership:rows_of", "placement": "hosts.placement:Placement",
        "manifest": "hosts.clusters:emitted"}, commands=HOST_COMMANDS, asks={
        "[[process]] hosts": lambda topology: bool(topology.host_names)}),
    Capability("ranks", "learners of several ranks", plugs={"team": "ranks.leader:gather"}, asks={
        "[[process]] ranks": lambda topology: topology.ranks > 1}),
    Capability("observe", "monitors, reports and sinks", plugs={
        "launch_picture": "observe.monitor.screen:launch_picture", "waste": "observe.report.waste:account_of"},
        asks={"sinks.to": lambda topology: bool(topology.sinks.to)}, commands=OBSERVE_COMMANDS),
    Capability("predict", "predicted lengths and the controller of the batch size", plugs={
        "kept": "predict.kept:PredictorState", "unkept": "predict.kept:unkept",
        "checkpoint_files": "predict.kept:copy_into", "step_observers": "predict.observer:observers",
        "keyword_problems": "predict.lengths.keywords:problems_of"}, asks={
        "scheduler.policy": lambda topology: topology.scheduler.predicts,
        "learner.controller.mode": lambda topology: topology.learner.controller.mode != "off"}),
    Capability("routes", "routes of a mixture of experts", plugs={
        "routing": "routes.rules:routing", "checks": "routes.rules:CHECKS", "replay": "routes.replay:Replay",
        "capture": "routes.capture:RoutedDecoder", "step_observers": "routes.replayed:observers"}, asks={
        "learner.routes": lambda topology: topology.learner.routes == "replay",
        "learner.balance": lambda topology: topology.learner.balance > 0}),
    Capability("several", "several seats or models", plugs={
        "opening": "several.opening:Opening", "checks": "several.rules:CHECKS",
        "step_observers": "several.seat_figures:observers", "topology": "several.topologies:topology",
        "explained": "several.explained:lines",
        "audits": "several.audit:audit",
        "tenders": "several.keeping:OtherRings", "summaries": "several.summaries:summary",
        "overviews": "several.summaries:overview", "models_now": "several.summaries:models_now",
        "receiver": "several.followed:receiver",
        "rollout": "several.shared_rollout:SharedRollout", "learner": "several.shared_learner:SharedLearner",
        "final_lines": "several.summaries:lines"}, asks={
        "[[model]]": lambda topology: bool(topology.models),
        "model.seats": lambda topology: len(topology.seats) > 1}),
    Capability("service", "training and sampling as a service", plugs={
        "defaults": "service.defaults:complete", "audits": "service.audit:audit",
        "overviews": "service.overview:overview", "export": "service.export:export_saved",
        "messages": "service.messages:MESSAGES", "chapters": "service.report:chapter"}, commands=(
        Command("tinker-key", "make a key for clients of a service, and print what its topology needs",
            "service.keys:key_options", "See docs/service.md."),)),
    Capability("teachers", "several teachers, or teachers behind endpoints", plugs={
        "maker": "teachers.several:TeacherMaker", "checks": "teachers.rules:CHECKS",
        "store": "teachers.posted:Store", "posted_rows": "teachers.posted:posted_rows",
        "step_observers": "teachers.of_groups:observers"}, asks={
        "learner.teacher": lambda topology: bool(topology.learner.teacher),
        "learner.teacher_top": lambda topology: topology.learner.teacher_top == "student"}),
    Capability("simulate", "simulations", commands=SIMULATE_COMMANDS),
    Capability("rewards/box", "boxes for code that a model wrote", plugs={
        "check_facts": "rewards.box.checks:facts", "machine_looks": "rewards.box.checks:look"},
        asks=_with_reward("code")),
    Capability("rewards/judge", "rewards that ask another model", asks=_with_reward("judge")),
    Capability("rewards/model", "rewards by a model of this machine", asks=_with_reward("model")),
    Capability("engines/vllm", "rollouts with vLLM", asks=_with_engine("vllm")),
    Capability("engines/openai", "rollouts that ask an endpoint", asks=_with_engine("openai")),
    Capability("weights/broadcast", "weights that are broadcast", asks=_with_transport("broadcast")),
    Capability("weights/one_copy", "weights of which there is one copy", asks=_with_transport("cuda_ipc")),
    Capability("weights/folders", "weights that travel as folders", asks=_with_transport(
        "lora_hotswap", "lora_restart", "checkpoint_restart")),
)
BY_NAME = {capability.name: capability for capability in CAPABILITIES}


def refuse(topology: Topology) -> None:
    """UserError where the topology asks for a part that is not there: one sentence with the key and the part."""
    for capability in CAPABILITIES:
        if not capability.here and (key := capability.asked_by(topology)):
            raise capability.missing(key)


def commands() -> tuple[tuple[Capability, Command], ...]:
    """The verbs of all parts, also of those that are not there, each with its part."""
    return tuple((capability, command) for capability in CAPABILITIES for command in capability.commands)


def load(command: Command) -> Any:
    """The function that gives a verb its options."""
    for name, value in command.environment.items():
        os.environ.setdefault(name, value)
    return _object(command.options)


def role(name: str) -> Any:
    """The class of a role's process; UserError if its part is not there."""
    part = next((capability for capability in CAPABILITIES if name in capability.roles), None)
    if part is not None and not part.here:
        raise part.missing()
    return _object(ROLES[name].actor)


def plug(name: str, place: str, key: str = "") -> Any:
    """The object that the part `name` puts into that place of the core; UserError, with the key that asks for it, if
    the part is not there."""
    capability = BY_NAME[name]
    if not capability.here:
        raise capability.missing(key)
    return _object(capability.plugs[place])


@cache
def plugs(place: str) -> tuple[Any, ...]:
    """The objects that all parts that are there put into that place, in the order of the table."""
    return tuple(
        _object(capability.plugs[place]) for capability in CAPABILITIES if place in capability.plugs and capability.here
    )


def _object(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(f"busrl.{module}"), name)
