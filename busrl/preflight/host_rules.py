"""Rules about where processes run: devices, ranks of the learner, cores, and other hosts.

Looks at a topology's settings, at the device that this machine is expected to use, and at the version of torch.

- Each other host is whole: engines there answer the calls of episodes that are played there alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from busrl.capabilities import CALLER_ROLES
from busrl.engines.vllm_versions import numbers_of, version_of
from busrl.preflight.engine_rules import WITH_MODEL
from busrl.preflight.findings import Check, Clash, EntryClash, Finding, clashes, of_entries, unlike
from busrl.preflight.process_rules import PLACEHOLDER
from busrl.states import HOST_NAME
from busrl.system.device import expected
from busrl.topology import schema
from busrl.topology.kinds import ONE_COPY, SCRIPTED, TOGETHER
from busrl.topology.learner import ON_GPUS, Parallel
from busrl.topology.rewards import REWARD_KINDS
from busrl.topology.schema import Process, Topology

ALONE = "or ranks = 1"


def _read_by_ranks(key: str, changed: Callable[[Topology], bool]) -> Clash:
    return Clash((key,), lambda t: changed(t) and t.ranks == 1,
                 "the learner is one process; set ranks in its [[process]], or remove it", warning=True)


TABLE = (
    Clash(("bus.endpoint",), lambda t: t.bus.endpoint == "ipc" and t.host_names,
          'other hosts reach the bus over TCP; set bus.endpoint = "tcp://ADDRESS:PORT", of this host, and make keys '
          "with `busrl keys`", hidden=("process",)),
    Clash(("weights.transport",),
          lambda t: t.weights.transport in TOGETHER and t.host_names,
          'other hosts get what lies in shared memory or in folders; set weights.transport = "shm"',
          hidden=("process",)),
    Clash(("segments.rounds",), lambda t: t.segments.rounds == "segments" and t.segments.length and t.host_names,
          'a round of segments needs every answer at home after each; set segments.rounds = "answers"',
          hidden=("segments.length", "process")),
    Clash(("segments.loss",), lambda t: t.segments.loss == "last_segment" and t.segments.length and t.host_names,
          "an answer of another host comes whole, and where its last segment began is not known here; "
          'set segments.loss = "behaviour"', hidden=("segments.length", "process")),
    Clash(("hosts.start",), lambda t: t.hosts.start and not t.host_names,
          "no [[process]] names a host in hosts; name them, or remove start"),
    # -- a learner of one process
    *(_read_by_ranks(key, changed) for key, changed in unlike("learner.parallel", Parallel)),
)
OF_ENTRY = (
    EntryClash((".device", ".engine"),
               lambda _, entry: entry.device and entry.engine == SCRIPTED and entry.role == "rollout",
               "a scripted engine runs no model; remove device", hidden=(".role",)),
    EntryClash(
        (".ranks", ".role"),
        lambda _, entry: entry.ranks > 1 and entry.role != "learner",
        lambda _, entry: (
            f"ranks train one model together, and a {entry.role} trains none; use count for more processes of the role"
        ),
    ),
    EntryClash((".ranks", "weights.transport"),
               lambda t, entry: entry.ranks > 1 and t.weights.transport == ONE_COPY and entry.role == "learner",
               f'an engine\'s own tensors cannot be in parts on several ranks; transport = "shm", {ALONE}',
               hidden=(".role",)),
    EntryClash((".ranks", "weights.backend"),
               lambda t, entry: (
                   entry.ranks > 1 and t.weights.backend != "gloo" and t.weights.transport == "broadcast"
                   and entry.role == "learner"
               ),
               f'from device to device only one rank was ever tried; backend = "gloo", {ALONE}',
               hidden=("weights.transport", ".role")),
    EntryClash((".ranks", "learner.memory.attention"),
               lambda t, entry: (
                   entry.ranks > 1 and t.learner.memory.attention in ("flash_attention_2", "flash_attention_3")
                   and entry.role == "learner"
               ),
               f'this attention takes no float32, which a self-test in shards needs; attention = "auto", {ALONE}',
               hidden=(".role",)),
    EntryClash(("learner.checkpoint_mode", ".hosts"),
               lambda t, entry: t.learner.checkpoint_mode == "async" and entry.hosts and entry.role == "learner",
               "home alone has the folder of checkpoints, so parts of other hosts are gathered there; "
               'checkpoint_mode = "auto"', hidden=(".role",)),
    EntryClash((".hosts", ".serves"), lambda _, entry: entry.hosts and entry.serves == "validation",
               "rollouts that only validate run on this host; remove hosts"),
)


# -- devices -----

DEVICES = re.compile(r"(\d+|(GPU|MIG)-[0-9a-f-]+)(,(\d+|(GPU|MIG)-[0-9a-f-]+))*")


def _devices(t: Topology, at: str, entry: Process) -> Iterator[Finding]:
    kinds = [REWARD_KINDS[part.kind] for part in t.reward.part if part.kind in REWARD_KINDS]
    judges = entry.role == "reward" and any(kind.has_model for kind in kinds)
    if entry.device and entry.role not in WITH_MODEL and not judges:
        rule = f"a {entry.role} of busrl's own runs no model"
        yield Finding((f"{at}.device", f"{at}.role"), rule, "remove device; devices may stay, for what it loads itself")
    for item in entry.devices:
        if not DEVICES.fullmatch(item):
            rule = f"{item!r} is not a list of devices: numbers, or UUIDs as nvidia-smi -L prints them, and commas"
            yield Finding((f"{at}.devices",), rule, 'for example devices = ["0", "1"], an item per process')
    if entry.devices and (entry.device or t.model.device) == "cpu" and entry.role in WITH_MODEL:
        key = f"{at}.device" if entry.device else "model.device"
        rule = "its model runs on the CPU, so nothing is shown or hidden"
        yield Finding((f"{at}.devices", key), rule, "remove devices, or choose another device", warning=True)
    if len(entry.devices) > max(1, entry.count) and entry.ranks == 1:
        rule = f"{len(entry.devices)} items for {entry.count} processes: each process gets one of them"
        yield Finding((f"{at}.devices", f"{at}.count"), rule, 'one process that sees both is ["0,1"]', warning=True)


def _attention(t: Topology) -> Iterator[Finding]:
    name, key = t.learner.memory.attention, "learner.memory.attention"
    if name in ON_GPUS and expected(t.device_of("learner")) == "cpu":
        rule = f"{name} runs on a GPU alone, and the learner is on the CPU"
        yield Finding((key,), rule, 'attention = "auto", or "sdpa"', depends=("model.device", "process"))
    elif name.startswith("flash") and t.model.dtype == "float32":
        yield Finding((key, "model.dtype"), f"{name} takes no float32", 'dtype = "bfloat16", or attention = "auto"')


# -- several ranks of the learner -----

OLDEST_TORCH = (2, 8)  # FSDP2 sums instead of dividing by the number of ranks from this one on


def _of_a_team(t: Topology, entry_at: str, entry: Process) -> Iterator[Finding]:
    at = f"{entry_at}.ranks"
    if entry.role != "learner" or entry.ranks == 1:
        return
    yield from _axes(t, at, entry.ranks)
    here = max(1, entry.ranks // (1 + len(entry.hosts)))
    if entry.devices and len(entry.devices) != here:
        where = " on each host" if entry.hosts else ""
        rule = f"{len(entry.devices)} items for {here} ranks{where}: each rank works on a device of its own"
        yield Finding((at, f"{entry_at}.devices"), rule, f"one item per rank{where}, {ALONE}")
    version = numbers_of(version_of("torch"))
    if version and version < OLDEST_TORCH:
        rule = "torch {}.{} cannot sum gradients over ranks; 2.8 can".format(*version)
        yield Finding((at,), rule, f"install torch 2.8 or later, {ALONE}")


REACHABLE = re.compile(r"tcp://(localhost|[1-9][0-9.]*):")  # by ranks of other hosts


def _over_hosts(t: Topology, at: str, entry: Process) -> Iterator[Finding]:
    places, tensor = 1 + len(entry.hosts), t.learner.parallel.tensor
    if entry.role != "learner" or not entry.hosts:
        return
    if entry.ranks % places:
        rule = f"{entry.ranks} ranks cannot be dealt out evenly over home and {len(entry.hosts)} other hosts"
        yield Finding((f"{at}.ranks", f"{at}.hosts"), rule, f"set ranks to a multiple of {places}, or remove hosts")
    elif (entry.ranks // places) % tensor:
        rule = f"{entry.ranks // places} ranks of a host are no groups of {tensor}: a layer is computed on one host"
        yield Finding(("learner.parallel.tensor", f"{at}.hosts"), rule, "set a divisor of that")
    if t.bus.endpoint != "ipc" and not REACHABLE.match(t.bus.endpoint):
        rule = "ranks of other hosts meet at the address of this endpoint, which has to be one of IPv4"
        yield Finding(("bus.endpoint", f"{at}.hosts"), rule, "name the address of this host that they see")


def _axes(t: Topology, at: str, ranks: int) -> Iterator[Finding]:
    """ranks = replicate x fsdp x tensor; expert divides fsdp x tensor."""
    parallel = t.learner.parallel
    tensor, expert, replicate = ("learner.parallel." + name for name in ("tensor", "expert", "replicate"))
    if ranks % (parallel.replicate * parallel.tensor):
        rule = f"ranks are replicate x fsdp x tensor: {parallel.replicate} x {parallel.tensor} does not divide {ranks}"
        yield Finding((at, replicate, tensor), rule, "set ranks to a multiple of their product")
    elif (ranks // parallel.replicate) % parallel.expert:
        rule = f"experts are dealt out within a replica, which has {ranks // parallel.replicate} ranks"
        yield Finding((expert, replicate), rule, "set a divisor of that")


# -- cores -----

LIST = re.compile(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*")


def parse_cores(text: str) -> frozenset[int]:
    """ "0-2,7" is {0, 1, 2, 7}; ValueError for anything else."""
    if not LIST.fullmatch(text):
        raise ValueError(f"{text!r} is not a list of cores")
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if int(last or first) < int(first):
            raise ValueError(f"{part!r} ends before it begins")
        cores |= set(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def _cores(_: Topology, at: str, entry: Process) -> Iterator[Finding]:
    if not entry.cpus:
        return
    try:
        cores = parse_cores(entry.cpus)
    except ValueError as problem:
        yield Finding((f"{at}.cpus",), str(problem), 'numbers and ranges with commas, for example "0-2,7"')
        return
    started = max(1, entry.count) * entry.ranks
    if len(cores) < entry.threads * started:
        rule = f"{started} x {entry.threads} threads share {len(cores)} cores"
        yield Finding((f"{at}.cpus", f"{at}.threads"), rule, "more cores, or fewer threads", warning=True)


# -- other hosts, each of which is whole: engines there answer the calls of episodes that are played there alone -----

MAY_BE_AWAY = ("rollout", "reward", schema.AGENT, schema.SERVE, "learner")


def _judges(t: Topology) -> Iterator[Finding]:
    """A reward on another host judges what is generated there, one at home everything else."""
    judging, generating = _places(t, "reward"), _places(t, "rollout")
    away = [f"process.{index}.hosts" for index, entry in enumerate(t.process) if entry.role == "reward" and entry.hosts]
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
    unknown = [name for part in start for name in PLACEHOLDER.findall(part) if name != "{host}"]
    if unknown or not any("{host}" in part for part in start):
        rule = f"{unknown[0]} is not filled in, {{host}} is" if unknown else "{host} is nowhere in it"
        yield Finding(("hosts.start",), rule, 'for example ["ssh", "{host}", "busrl host -"]')
    if re.match(r"tcp://(\*|0\.0\.0\.0|\[::\]):", t.bus.endpoint):
        rule = "hosts are told this endpoint, and it is no address that they could reach"
        yield Finding(("bus.endpoint", "hosts.start"), rule, "name the address of this host that they see")


def _hosts_of_entry(_: Topology, entry_at: str, entry: Process) -> Iterator[Finding]:
    at = f"{entry_at}.hosts"
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
        yield Finding((at, f"{entry_at}.role"), rule, "remove hosts")


CHECKS: tuple[Check, ...] = (
    lambda t: clashes(t, TABLE),
    lambda t: of_entries(t, OF_ENTRY, _devices, _of_a_team, _over_hosts, _cores, _hosts_of_entry),
    _attention, _judges, _players, _start_of_hosts,
)
