"""Accelerators that several processes of a run share, and what these need of their memory together.

Looks at a topology, at config.json of its models and at the driver; nothing is loaded. Of a run of several models each
process is counted with its own model.

- A learner counts with its sum in `memory`, vLLM with its share of the device, any other engine with its weights, which
  is the least that it needs. So what is refused cannot work: a sum above the memory, shares of vLLM above 0.95.
- A process without `devices` works on the first. A device with one process is looked at by that process's own rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from busrl.data import pretrained
from busrl.errors import UserError
from busrl.preflight import memory
from busrl.system import device
from busrl.topology.kinds import ONE_COPY
from busrl.topology.schema import ProcessName, Topology, has_model

MOST_SHARE = 0.95  # of a device that engines of vLLM reserve together
FIRST = "0"


@dataclass(frozen=True)
class Tenant:
    """A process on a device: `share` of it that vLLM reserves, and bytes, 0 where they are not known. `several`: it is
    the learner of several models, whose own rules count one."""

    name: str
    share: float = 0.0
    nbytes: int = 0
    several: bool = False

    def shown(self) -> str:
        size = memory.gib(self.nbytes) if self.nbytes else "an unknown size"
        return f"{self.name} {size}" + (f" (share {self.share:g})" if self.share else "")


def shared(t: Topology) -> dict[str, list[Tenant]]:
    """The devices on this host on which there is more than one process or learner."""
    found: dict[str, list[Tenant]] = {}
    for process in t.processes():
        own = t.of(t.tag_of(process.name))
        kind = device.expected(own.device_of(process.name)) if has_model(process.spec) else "cpu"
        for number in process.devices.split(",") if kind != "cpu" and process.devices else [FIRST]:
            if kind != "cpu":
                found.setdefault(f"{kind} {number.strip()}", []).append(_tenant(t, own, process, kind))
    return {where: tenants for where, tenants in found.items() if len(tenants) > 1 or tenants[0].several}


def _tenant(t: Topology, own: Topology, process: ProcessName, kind: str) -> Tenant:
    if process.role == "learner" and isinstance(process.spec.model, tuple):
        return Tenant(process.name, nbytes=memory.together([t.of(tag) for tag in process.spec.model]), several=True)
    if process.role != "rollout":
        parts = memory.of_topology(own)
        engines_have = parts.get("weights", 0) if own.weights.transport == ONE_COPY else 0
        return Tenant(process.name, nbytes=sum(parts.values()) - engines_have)
    weights = pretrained.parameters(own.model.path) * pretrained.BYTES_OF[own.model.dtype]
    if process.spec.engine != "vllm":
        return Tenant(process.name, nbytes=weights)
    settings = own.vllm
    if isinstance(settings.kv_cache_mb, int):  # it reserves this, whatever its share is
        return Tenant(process.name, nbytes=weights // settings.tensor_parallel + (settings.kv_cache_mb << 20))
    share = settings.gpu_memory_utilization
    return Tenant(process.name, share, int(share * memory.memory_of(kind)))


def faults(where: str, tenants: Sequence[Tenant], limit: int) -> Iterator[str]:
    """Reasons why these cannot work on a device of `limit` bytes (0: unknown), each with its remedy."""
    each, apart = " + ".join(tenant.shown() for tenant in tenants), "give them other `devices`"
    sharing = [tenant for tenant in tenants if tenant.share]
    if len(sharing) > 1 and (together := sum(tenant.share for tenant in sharing)) > MOST_SHARE:
        yield (
            f"{where}: engines of vLLM reserve {together:g} of it ({each}), at most {MOST_SHARE:g} are there; set "
            f"vllm.gpu_memory_utilization = {int(100 * MOST_SHARE / len(sharing)) / 100:g} or less, or {apart}"
        )
    elif (needed := sum(tenant.nbytes for tenant in tenants)) > limit > 0:
        lower = ", lower vllm.gpu_memory_utilization" if sharing else ""
        yield (
            f"{where} has {memory.gib(limit)}, its processes need at least {each} = {memory.gib(needed)}; {apart}"
            f"{lower}, or choose a smaller model.path"
        )


def require(t: Topology) -> None:
    """Raise UserError where processes cannot share a device."""
    for where, tenants in shared(t).items():
        if fault := next(faults(where, tenants, memory.memory_of(where.split()[0])), ""):
            raise UserError(fault)


def lines(t: Topology) -> list[str]:
    """The sum of each device that is shared."""
    found = []
    for where, tenants in shared(t).items():
        limit = memory.memory_of(where.split()[0])
        of = f" of {memory.gib(limit)}" if limit else ""
        needed = memory.gib(sum(tenant.nbytes for tenant in tenants))
        found.append(f"{where}: {' + '.join(tenant.shown() for tenant in tenants)} = at least {needed}{of}")
    return found
