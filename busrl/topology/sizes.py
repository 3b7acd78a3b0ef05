"""Numbers that follow from several keys and that more than one process computes: rows, rings and versions of weights.

Used by the preflight, which checks explicit values against these sums, and by every role that makes what it sizes.
Pure; knows nothing of files or the machine.

- A call ring and a host's ring are sized here alone, so home and the host agree.
- A transport keeps as many versions as its engines may still ask for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from busrl.capabilities import CALLER_ROLES, SINGLE_ROLES
from busrl.topology.kinds import ADAPTERS, RESTARTS
from busrl.topology.schema import (
    TABLE_TENSORS,
    TENSORS_OF_SEGMENT,
    TENSORS_OF_SLOT,
    Derived,
    Process,
    Topology,
)

# -- processes, and what they work on at once -----

RESERVE_PROCESSES = 5  # table entries for entry 0, launch, a monitor, `busrl ring`, and one being replaced
MOST_SAMPLES = 1 << 32  # that a table of fates has room for: uids beyond it cannot be dispatched


def count(topology: Topology, role: str) -> int:
    """Processes of a role that are started, on all hosts."""
    each = (1 if role in SINGLE_ROLES else max(1, len(entry.hosts)) for entry in topology.process)
    return sum(entry.count * times for entry, times in zip(topology.process, each, strict=True) if entry.role == role)


def only_validate(topology: Topology) -> int:
    """Rollout processes that serve validation alone."""
    return sum(entry.count for entry in topology.process if entry.role == "rollout" and entry.serves == "validation")


def on_host(topology: Topology, host: str, *roles: str) -> int:
    """Processes of these roles that a host starts; "" = home."""
    return sum(entry.count for entry in topology.process if entry.role in roles and entry.is_at(host))


def in_flight(topology: Topology) -> int:
    """Samples in flight at most: rows of all rollout processes that train, or episodes of all agents; processes that
    join from outside count as one."""
    if topology.has_callers:
        return topology.agents.episodes * max(1, sum(count(topology, role) for role in CALLER_ROLES))
    return topology.generation.max_batch * max(1, count(topology, "rollout") - only_validate(topology))


def rollouts(topology: Topology) -> Iterator[tuple[int, Process]]:
    """The entries of rollout processes that run an engine of busrl's, with their positions."""
    return ((i, entry) for i, entry in enumerate(topology.process) if entry.role == "rollout" and not entry.command)


def vllm_entries(topology: Topology) -> list[int]:
    """Positions of the entries whose engine is vLLM."""
    return [i for i, entry in rollouts(topology) if entry.engine == "vllm"]


# -- bytes of the rings -----

PER_TOKEN = 12  # id, log-probability, version: 4 bytes each
LINE_BYTES, TABLE_BYTES, PROCESS_BYTES = 128, 128 + TABLE_TENSORS * 128, 512  # per slot, slot, process-table entry
MORE_CALLS, ID_BYTES = 16, 4
CALL_BYTES = 1024  # details of a call, and alignment to multiples of 64
PAGE = 4096
KEPT, LOOSE_FROM = 64 << 10, 256 << 10  # of a slot always in memory; smaller slots are so whole (docs/ring-memory.md)
LOGGED_BYTES = 64 << 20  # of routes in one record of the write-ahead log that need no word of the user's
USUAL_SHARE = 4  # an answer is expected to have such a part of the most tokens


def call_ring(topology: Topology, host: str = "") -> tuple[int, int]:
    """Slots and bytes per slot of a host's ring of model calls: a call for every row and some that wait, each with the
    longest prompt and answer."""
    rows = topology.generation.max_batch * max(1, on_host(topology, host, "rollout"))
    routing = topology.derived.routing
    read = (ID_BYTES + (routing.bytes_per_token if routing else 0)) * topology.longest
    answer = PER_TOKEN * topology.generation.max_new_tokens
    return rows + rows // 4 + MORE_CALLS, round_up(read + answer + CALL_BYTES, 256)


def most_segments(topology: Topology) -> int:
    """Segments that the table of a slot has room for."""
    return segments_in(topology.derived.routing is not None)


def segments_in(routed: bool) -> int:
    """Segments that the table of a slot has room for, which has routes of each, and those of the prompt, or none."""
    return (TABLE_TENSORS - TENSORS_OF_SLOT - routed) // (TENSORS_OF_SEGMENT + routed)


def route_bytes(topology: Topology) -> int:
    """Bytes of the routes of one sample, at most; 0 in a run without."""
    if (routing := topology.derived.routing) is None:
        return 0
    if topology.has_callers:
        return routing.bytes_per_token * topology.episode_limits[2]
    prompt = topology.max_prompt_tokens if topology.learner.routes_of == "all" else 0
    return routing.bytes_per_token * (prompt + topology.generation.max_new_tokens)


def route_bytes_of_step(topology: Topology) -> int:
    """Bytes of the routes of all samples of a step, at most."""
    learner = topology.learner
    groups = learner.n_range[1] if learner.controller.mode == "act" else learner.trigger.n_min
    return route_bytes(topology) * groups * topology.groups.size


def logs_routes(topology: Topology) -> bool:
    """True if the write-ahead log keeps routes: left to itself, where a record is not made too large by them."""
    said = topology.learner.log_routes
    return said == "on" or (said == "auto" and route_bytes_of_step(topology) <= LOGGED_BYTES)


def ring_bytes(slots: int, slot_bytes: int, processes: int, held: int | None = None) -> int:
    """Bytes of a ring's file: header, process table, and per slot its line, its tensor table and its payload, where
    each slot holds so many bytes (None: all that it can)."""
    stride = round_up(slot_bytes, 256)
    payload = stride if held is None or stride < LOOSE_FROM else min(stride, max(round_up(held, PAGE), KEPT) + PAGE)
    per_slot = LINE_BYTES + TABLE_BYTES + payload
    return round_up(2 * PAGE + processes * PROCESS_BYTES + slots * per_slot, PAGE) + 3 * PAGE


def sized(topology: Topology, derived: Derived) -> Derived:
    """`derived` with the bytes of its rings: at most, and where each slot holds a usual answer, whose share of a slot
    is that of its tokens. A call is counted whole."""
    processes, expected = topology.ring.processes, topology.ring.expected_tokens
    most = topology.generation.max_new_tokens
    tokens = min(most, expected if isinstance(expected, int) else -(-most // USUAL_SHARE))
    usual = derived.slot_bytes * tokens // most
    calls = ring_bytes(derived.call_slots, derived.call_slot_bytes, processes) if derived.call_slots else 0
    return replace(
        derived, ring_bytes=ring_bytes(derived.slots, derived.slot_bytes, processes) + calls,
        ring_held=ring_bytes(derived.slots, derived.slot_bytes, processes, usual) + calls,
        usual_tokens=tokens,
    )


def round_up(value: int, to: int) -> int:
    return -(-value // to) * to


# -- published versions of the weights -----

UNBOUNDED = 8  # versions of an adapter that vLLM may need at a time where nothing bounds their age


def kept_versions(topology: Topology) -> int:
    """Versions that stay in the place of publication. An adapter may be asked for as long as a sample of it counts."""
    kept = topology.weights.transport in ADAPTERS and topology.weights.transport not in RESTARTS
    if kept and topology.weights.mode == "batch-async":
        return max(2, topology.weights.max_staleness + 1)
    return 2  # the newest, and the one that an engine may be reading


def adapter_slots(topology: Topology) -> int:
    """Adapters that one vLLM holds at a time: those that its running answers may be of, and the newest."""
    if topology.weights.mode == "sync" or topology.weights.transport in RESTARTS:
        return 2
    return (topology.weights.max_staleness if topology.weights.mode == "batch-async" else UNBOUNDED) + 2


def held_versions(topology: Topology) -> int:
    """Versions that one engine holds on to: those that its running sequences may be of."""
    if topology.weights.transport in ADAPTERS and vllm_entries(topology):
        return adapter_slots(topology)  # it reads an adapter from its folder as long as it has a place for it
    return 1 if topology.weights.transport in RESTARTS else kept_versions(topology)
