"""Rules about other hosts: what may run there, and with what a run of several hosts does not go yet.

Looks at a topology's settings only. Findings come back; `load` gives them places. What each host gets of the topology
is in `hosts`.

- A host is whole: engines there answer the calls of episodes that are played there, and no others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from busrl.config.rules import PLACEHOLDER, Check, Finding
from busrl.config.schema import AGENT, FOLDERS, SERVE, Process, Topology
from busrl.states import CALLER_ROLES, HOST_NAME

MAY_BE_AWAY = ("rollout", "reward", AGENT, SERVE, "learner")
OVER_HOSTS = (  # key, whether it is as several hosts need it, rule and remedy
    ("bus.endpoint", lambda t: t.bus.endpoint != "ipc", "other hosts reach the bus over TCP",
     'set bus.endpoint = "tcp://ADDRESS:PORT", of this host, and make keys with `busrl keys`'),
    ("weights.transport", lambda t: t.weights.transport in ("shm", *FOLDERS),
     "other hosts get what lies in shared memory or in folders", 'set weights.transport = "shm"'),
    ("segments.rounds", lambda t: not t.segments.waves, "a round of segments needs every answer at home after each",
     'set segments.rounds = "answers"'),
    ("segments.loss", lambda t: not t.segments.on or t.segments.loss != "last_segment",
     "an answer of another host comes whole, and where its last segment began is not known here",
     'set segments.loss = "behaviour"'),
)


def _hosts(t: Topology) -> Iterator[Finding]:
    """What runs on other hosts, and what they cannot do yet."""
    for index, entry in enumerate(t.process):
        yield from _hosts_of_entry(t, index, entry)
    for key, suits, rule, remedy in OVER_HOSTS:
        if t.host_names and not suits(t):
            yield Finding((key,), rule, remedy, depends=("process",))
    yield from _judges(t)
    yield from _players(t)
    yield from _start_of_hosts(t)


def _judges(t: Topology) -> Iterator[Finding]:
    """A reward on another host judges what is generated there, one at home everything else."""
    judging, generating = _places(t, "reward"), _places(t, "rollout")
    away = [f"process.{index}.hosts" for index, one in enumerate(t.process) if one.role == "reward" and one.hosts]
    if not away:
        return
    at = away[0]
    if idle := sorted(judging - generating - {""}):
        rule = f"a reward on another host judges what rollouts generate there, and {idle[0]} has none"
        yield Finding((at,), rule, f"remove {idle[0]}, or name it in hosts of a rollout", depends=("process",))
    if "" not in judging and (left := sorted(generating - judging)):
        where = left[0] or "this host"
        rule = f"nobody judges what is generated on {where}: rewards on other hosts judge what is generated there"
        yield Finding((at,), rule, "add a [[process]] of role reward without hosts", depends=("process",))


def _players(t: Topology) -> Iterator[Finding]:
    """A model call is answered where it was made: episodes and engines go together, on each host."""
    if not (t.has_callers and t.host_names):
        return
    playing, generating = _places(t, *CALLER_ROLES), _places(t, "rollout")
    for roles, idle, missing, remedy in (
        (CALLER_ROLES, playing - generating, "no rollout", "add a rollout there"),
        (("rollout",), generating - playing, "nobody who plays episodes", "add an agent or a server there"),
    ):
        for index, entry in enumerate(t.process):
            if entry.role in roles and (there := sorted({*(entry.hosts or ("",))} & idle)):
                where = there[0] or "this host"
                rule = f"model calls do not travel between hosts, and {where} has {missing}"
                yield Finding((f"process.{index}.hosts",), rule, f"{remedy}, or name other hosts", depends=("process",))


def _places(t: Topology, *roles: str) -> set[str]:
    """The hosts that have a process of these roles; "" = this one."""
    return {host for entry in t.process if entry.role in roles for host in entry.hosts or ("",)}


def _start_of_hosts(t: Topology) -> Iterator[Finding]:
    start = t.hosts.start
    if not start:
        return
    if not t.host_names:
        yield Finding(("hosts.start",), "no [[process]] names a host in hosts", "name them, or remove start")
    unknown = [name for part in start for name in PLACEHOLDER.findall(part) if name != "{host}"]
    if unknown or not any("{host}" in part for part in start):
        rule = f"{unknown[0]} is not filled in, {{host}} is" if unknown else "{host} is nowhere in it"
        yield Finding(("hosts.start",), rule, 'for example ["ssh", "{host}", "busrl host -"]')
    if re.match(r"tcp://(\*|0\.0\.0\.0|\[::\]):", t.bus.endpoint):
        rule = "hosts are told this endpoint, and it is no address that they could reach"
        yield Finding(("bus.endpoint", "hosts.start"), rule, "name the address of this host that they see")


def _hosts_of_entry(t: Topology, index: int, entry: Process) -> Iterator[Finding]:
    at = f"process.{index}.hosts"
    if not entry.hosts:
        return
    wrong = next((name for name in entry.hosts if not HOST_NAME.fullmatch(name)), None)
    if wrong is not None:
        rule = f"{wrong!r} is no name of a host: 1 to 39 letters, digits, dots, dashes or underscores"
        yield Finding((at,), rule, "name it as `busrl host --name` there does")
    if len(set(entry.hosts)) < len(entry.hosts):
        yield Finding((at,), "a host is named twice", "name each once; count says how many processes it runs")
    if entry.role not in MAY_BE_AWAY or entry.command:
        rule = "only busrl's own rollouts, rewards, agents, servers and ranks of the learner run on other hosts yet"
        yield Finding((at, f"process.{index}.role"), rule, "remove hosts")
    if entry.serves == "validation":
        yield Finding((at, f"process.{index}.serves"), "rollouts that only validate run on this host", "remove hosts")


CHECKS: tuple[Check, ...] = (_hosts,)
