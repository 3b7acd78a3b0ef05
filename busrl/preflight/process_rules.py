"""Rules about processes and how they meet: the bus, entries of [[process]], episodes, scripted engines, sinks, faults.

Looks at a topology's settings, and at whether a Python that an entry names can be started.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Sequence

from busrl import faults
from busrl.capabilities import CALLER_ROLES, FOREIGN_ROLES, SINGLE_ROLES
from busrl.preflight.findings import (
    Check,
    Clash,
    EntryClash,
    Finding,
    by_path,
    clashes,
    entry_clashes,
    of_entries,
)
from busrl.preflight.prompt_rules import named_prompts
from busrl.states import CRASH_POINTS, ENVIRONMENT
from busrl.topology.declare import FUNCTION
from busrl.topology.kinds import SCRIPTED
from busrl.topology.reader import show
from busrl.topology.rewards import EXACT_MATCH, RETURNED
from busrl.topology.schema import AGENT, ATROPOS, SINKS, BusFault, Process, Topology
from busrl.topology.sizes import RESERVE_PROCESSES, count

PLAYS = 'add a [[process]] with role = "agent", "serve" or "atropos"'

TABLE = (
    Clash(("bus.keys", "bus.endpoint"), lambda t: t.bus.keys and t.bus.endpoint == "ipc",
          "sockets in a 0700 directory need no keys, so they are not used; remove it, or set endpoint", warning=True),
    # -- episodes
    Clash(("reward.kind", "process"), lambda t: t.reward.kind == RETURNED and not t.reward.part and not t.has_callers,
          f"no episode returns a reward; {PLAYS}", hidden=("reward.part",)),
    Clash(("segments.length", "process"), lambda t: t.segments.length and t.has_callers,
          "an episode is made whole; remove [segments]"),
    Clash(("weights.over_age", "process"), lambda t: t.weights.over_age == "drop" and t.has_callers,
          'an episode is as old as its oldest token, so that long ones are trained less; over_age = "wait"',
          warning=True),
)


def _read_by_agents(name: str) -> EntryClash:
    return EntryClash((f".{name}", ".role"), lambda _, entry: getattr(entry, name) and entry.role != AGENT,
                      "only an agent plays episodes; remove it")


OF_ENTRY = (
    EntryClash((".model",), lambda _, entry: entry.model,
               "the file has one [model], without tags; write [[model]] for each, or remove it"),
    EntryClash((".python", ".command"), lambda _, entry: entry.python and entry.command,
               "a command says itself what runs it; remove one of them"),
    EntryClash((".command", ".role"), lambda _, entry: entry.command and entry.role not in FOREIGN_ROLES,
               lambda _, entry: (
                   f"a {entry.role} is busrl's own; only rollout and reward may be another program; remove command"
               )),
    *(_read_by_agents(name) for name in ("function", "environment", "program", "options")),
    EntryClash((".options",), lambda _, entry: entry.options and not entry.environment and entry.role == AGENT,
               "options are those of an environment; remove it", hidden=(".environment", ".role")),
    EntryClash((".engine", "process"),
               lambda t, entry: entry.engine == "openai" and entry.role == "rollout" and t.has_callers,
               'model calls are token ids, which this engine does not take; engine = "torch", "vllm" or "mock"',
               hidden=(".role",)),
)
# In a topology with a scripted engine, of its entry.
SCRIPTED_RUNS = (
    EntryClash(("reward.extract", ".engine"), lambda t, _: t.reward.extract and t.reward.kind == EXACT_MATCH,
               "a scripted answer is bare, or wrong: the pattern would find neither; remove extract",
               hidden=("reward.kind",)),
    EntryClash((".engine",), lambda _t, _: True,
               'nothing is learnt: tokens are random, rewards are given; engine = "torch" for training', warning=True),
)


# -- the bus -----

TCP = re.compile(r"tcp://(\*|[0-9.]+|\[[0-9A-Fa-f:.]+\]|localhost):(\d{1,5})")


def _bus(t: Topology) -> Iterator[Finding]:
    address, last = TCP.fullmatch(t.bus.endpoint), 65533 if t.host_names else 65534
    if address is None and t.bus.endpoint != "ipc":
        rule = 'expected "ipc", or tcp://ADDRESS:PORT with a number of this machine, * for all of them, or localhost'
        yield Finding(("bus.endpoint",), rule, 'for example "tcp://0.0.0.0:5600"')
    elif address and not 1 <= int(address[2]) <= last:
        third = ", and one more for other hosts" if t.host_names else ""
        rule = f"two ports are used, this one to publish and the next to subscribe{third}"
        yield Finding(("bus.endpoint",), rule, f"choose a port from 1 to {last}")


# -- entries of [[process]] -----

PLACEHOLDER = re.compile(r"\{[a-z_]+\}")
FILLED_AT_START = ("{run_dir}", "{name}")


def _processes(t: Topology) -> Iterator[Finding]:
    yield from of_entries(t, OF_ENTRY, _entry, _episode_code)
    yield from _agents(t)
    here = sum(entry.count for entry in t.process if entry.is_at(""))
    total = here + t.ranks - 1 + len(t.implied) + len(t.host_names) + RESERVE_PROCESSES
    if total > t.ring.processes:
        rule = f"{total} entries are needed: the processes, {len(t.implied)} implied, {RESERVE_PROCESSES} spare"
        yield Finding(("ring.processes",), rule, f"set it to {total} or more")


def _entry(t: Topology, at: str, entry: Process) -> Iterator[Finding]:
    until = t.process[: int(at.rpartition(".")[2]) + 1]
    if entry.role in SINGLE_ROLES and sum(other.count for other in until if other.role == entry.role) > 1:
        rule = f"one {entry.role} per run: it works alone under a lock"
        yield Finding((f"{at}.count", f"{at}.role"), rule, "set count = 1 and remove the others")
    runs = os.path.isfile(entry.python) and os.access(entry.python, os.X_OK)
    if entry.python and not entry.command and not runs:
        remedy = "give the path of a Python, or the folder of a virtual environment"
        yield Finding((f"{at}.python",), "no program that can be started", remedy)
    unknown = [name for part in entry.command for name in PLACEHOLDER.findall(part) if name not in FILLED_AT_START]
    if unknown:
        rule = f"{unknown[0]} is not one of the words that are filled in: {', '.join(FILLED_AT_START)}, {{here}}"
        yield Finding((f"{at}.command",), rule, "correct it")


def _agents(t: Topology) -> Iterator[Finding]:
    if not t.has_callers:
        return
    if t.validation.mode == "dedicated" and named_prompts(t):
        rule = "episodes of validation and of training are played by the same agents"
        yield Finding(("validation.mode", "process"), rule, 'set it to "hold" or "free"')
    yield from _atropos(t)
    yield from _episode_sizes(t)


def _atropos(t: Topology) -> Iterator[Finding]:
    """Refuse players of single samples where environments of Atropos make the groups."""
    at = next((f"process.{i}.role" for i, entry in enumerate(t.process) if entry.role == ATROPOS), "")
    if not at:
        return
    for index, entry in enumerate(t.process):
        if entry.role in CALLER_ROLES and entry.role != ATROPOS:
            rule = "the samples are groups that environments post: others would take their slots"
            yield Finding((f"process.{index}.role", at), rule, "remove one of them")
    if named_prompts(t):
        rule = "environments post groups for training: nobody plays those of validation"
        yield Finding(("validation.data", at), rule, "remove [validation]")


def _episode_code(_: Topology, at: str, entry: Process) -> Iterator[Finding]:
    players = [name for name in ("environment", "function", "program") if getattr(entry, name)]
    if entry.role != AGENT:
        return
    if len(players) > 1:
        keys = tuple(f"{at}.{name}" for name in players)
        yield Finding(keys, "an agent plays a function, an environment or a program", "remove all but one")
    elif entry.environment and not ENVIRONMENT.fullmatch(entry.environment):
        rule = "an environment is its library, a colon and its name"
        yield Finding((f"{at}.environment",), rule, "gymnasium:ID, textarena:ID, openenv:URL or verifiers:NAME")
    elif not (entry.environment or entry.program) and not FUNCTION.fullmatch(entry.function):
        rule = "an agent plays episodes with a function: package.module:function or file.py:function"
        remedy = "name one, an environment or a program: see docs/agents.md"
        yield Finding((f"{at}.function", f"{at}.role"), rule, remedy)


def _episode_sizes(t: Topology) -> Iterator[Finding]:
    agents, (context, sampled, tokens) = t.agents, t.episode_limits
    if context > t.longest:
        yield Finding(("agents.context",), f"engines have room for {t.longest} ids", f"lower it to {t.longest}")
    if tokens < context:
        rule = f"a single sequence may have agents.context = {context}"
        yield Finding(("agents.tokens", "agents.context"), rule, f"set it to {context} or more")
    if agents.sampled and sampled < t.generation.max_new_tokens:
        rule = "one answer may have generation.max_new_tokens"
        yield Finding(("agents.sampled", "generation.max_new_tokens"), rule, "raise it", warning=True)
    played = agents.episodes * sum(count(t, role) for role in CALLER_ROLES)
    rows = t.generation.max_batch * count(t, "rollout")
    if 2 * played < rows and played:
        rule = f"{played} episodes at once, most with one call at a time, leave half of the engines' {rows} rows empty"
        keys = ("agents.episodes", "generation.max_batch")
        yield Finding(keys, rule, "raise agents.episodes, or lower max_batch, which takes memory", warning=True)


def _scripted(t: Topology) -> Iterator[Finding]:
    if not t.scripted:
        return
    index = next(index for index, entry in enumerate(t.process) if entry.engine == SCRIPTED)
    if count(t, "validator"):
        key, rule = f"process.{index}.engine", "scripted answers are made up, so there is nothing to validate"
        yield Finding((key, "validation.data"), rule, "remove [validation]", value=f'{key} = "mock"')
    yield from entry_clashes(t, SCRIPTED_RUNS, index)


# -- sinks and faults -----


def _sinks(t: Topology) -> Iterator[Finding]:
    for path in (name for name in t.sinks.to if name not in SINKS):
        yield from by_path(("sinks.to",), path, f"one of {', '.join(SINKS)}, or a class of yours")
    if len(set(t.sinks.to)) < len(t.sinks.to):
        yield Finding(("sinks.to",), f"a sink is named twice in {show(list(t.sinks.to))}", "name each once")


def _faults(t: Topology) -> Iterator[Finding]:
    for index, entry in enumerate(t.faults.bus):
        yield from _bus_fault(f"faults.bus.{index}", entry)
    names = [process.name for process in t.processes()]
    roles = {process.name: process.role for process in t.processes() if not process.spec.command}
    for index, crash in enumerate(t.faults.crash):
        at = f"faults.crash.{index}"
        yield from _misnamed(f"{at}.process", (crash.process,), names, "process of this topology")
        yield from _misnamed(f"{at}.point", (crash.point,), CRASH_POINTS, "crash point")
        yield from _passes(f"{at}.point", roles.get(crash.process, ""), crash.point)
    for line in faults.describe(t.faults):
        yield Finding(("faults",), f"FAULTS ARE ON: {line}", "remove [faults] for real training", True, "[faults]")


def _passes(key: str, role: str, point: str) -> Iterator[Finding]:
    """Require that a program of busrl passes the point; of other programs that is unknown."""
    passed_by = faults.PASSED_BY.get(point, ())
    if role and passed_by and role not in passed_by:
        near = [other for other, roles in faults.PASSED_BY.items() if role in roles]
        article = "an" if role == AGENT else "a"
        rule = f"{article} {role} never passes {point!r}, so it would never die there: {', '.join(passed_by)} do"
        remedy = f"for {article} {role} choose of {', '.join(near)}"
        yield Finding((key, key.replace(".point", ".process")), rule, remedy)


def _bus_fault(at: str, entry: BusFault) -> Iterator[Finding]:
    yield from _misnamed(f"{at}.types", entry.types, faults.MESSAGES, "message")
    yield from _misnamed(f"{at}.roles", entry.roles, faults.ENDS, "role with an end on the bus")
    if entry.at == faults.SENDER and (entry.duplicate or entry.delay_s or entry.reorder):
        yield Finding((f"{at}.at",), "a sender can only lose messages", 'use at = "receiver" for anything but drop')
    if not (entry.drop or entry.duplicate or entry.delay_s or entry.reorder):
        yield Finding((f"{at}.drop",), "this entry has no effect", "set drop, duplicate, delay_s or reorder")


def _misnamed(key: str, names: Iterable[str], allowed: Sequence[str], what: str) -> Iterator[Finding]:
    """Report each name that is not allowed, with the nearest one that is."""
    for name in names:
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"there are {', '.join(allowed)}"
            yield Finding((key,), f"there is no {what} {name!r}", remedy)


CHECKS: tuple[Check, ...] = (lambda t: clashes(t, TABLE), _bus, _processes, _scripted, _sinks, _faults)
