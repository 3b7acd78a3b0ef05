"""Values that follow from several keys: limits on groups in flight, slots and their bytes, the sets of a round.

`resolve` computes everything that a Topology holds as `derived`, and its sums as text; `in_flight_limits` computes the
limits again while a run runs. Pure: facts from files are arguments. Uses the formulas of `scheduling.admission` and the
sizes of `topology.sizes`.

- Explicit values are checked against the same sums that `auto` uses, and a refusal shows the sum.
- slots = G x B + the validation reserve: a dispatched sample always finds its slot free in time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from busrl.preflight.findings import Finding
from busrl.preflight.learner_rules import CONTROLLER_KEYS, explain_controller, thresholds
from busrl.preflight.named_files import FileFacts
from busrl.preflight.prompt_rules import wants_rounds
from busrl.scheduling.admission import AdmissionLimits, derive
from busrl.states import TINY, TINY_POSITIONS
from busrl.topology.kinds import FIFO
from busrl.topology.prompts import AskedSet
from busrl.topology.schema import MESSAGE_FIELD_BYTES, TENSORS_OF_SEGMENT, Derived, Topology
from busrl.topology.sizes import (
    MOST_SAMPLES,
    PER_TOKEN,
    call_ring,
    count,
    in_flight,
    only_validate,
    round_up,
    route_bytes,
    sized,
)

# -- slots and bytes -----

SLOTS_FROM = (
    "weights.mode", "weights.max_staleness", "learner.trigger.n_min", "groups.size", "generation.max_batch", "process",
    "segments.max_segments", "segments.rounds",
)
BYTES_FROM = (
    "data.train", "validation.data", "model.path", "generation.max_new_tokens", "generation.max_prompt_tokens",
    "segments.max_segments",
)
ALIGN = 64  # every tensor begins at a multiple of this
# Of an answer in one segment: task, prompt_ids, reward_parts and part_names, twice tokens, logprobs, versions and text.
TENSORS = 12
EPISODE_TENSORS = 13  # task, reward_parts, part_names and the ten of busrl.data.episodes
ROUTES_TENSORS = 3  # of an answer with routes: prompt_routes, and twice routes
REWARD_BYTES, PER_PART = 256, 5  # the value of a part and the end of its name
TEXT_PER_TOKEN, TEXT_FLOOR = 16, 1 << 16  # bound on text: whole completions of the longest token only up to here


def resolve(topology: Topology, facts: FileFacts) -> tuple[Derived, list[Finding]]:
    """Compute everything that follows from more than one key, with findings about explicit values."""
    bounds, findings = _limits(topology)
    rounds = count(topology, "validator") > 0 and wants_rounds(topology)
    sets = asked_sets(topology, facts) if rounds else ()
    val_samples = sum(asked_set.answers for asked_set in sets)
    val_reserve = min(val_samples, _validating(topology))
    slots, slots_text = _slots(topology, bounds, val_reserve, findings)
    slot_bytes, bytes_text = _slot_bytes(topology, facts, findings)
    findings.extend(_sums(topology, bounds, slots, facts))
    call_slots, call_slot_bytes = call_ring(topology) if topology.has_callers else (0, 0)
    findings.extend(_answers(topology, val_samples, slot_bytes))
    derived = replace(
        topology.derived, limits=bounds,
        horizon=topology.scheduler.horizon or 2 * bounds.n_min,
        slots=slots, train_slots=slots - val_reserve, val_reserve=val_reserve,
        slot_bytes=slot_bytes, task_bytes=facts.task_bytes,
        prompt_tokens=facts.prompt_tokens, prompt_text=facts.prompt_text, trial=facts.trial.lines,
        train_prompts=facts.train_prompts, validation_prompts=facts.validation_prompts if rounds else 0,
        ring_bytes=0, val_samples=val_samples, sets=sets,
        call_slots=call_slots, call_slot_bytes=call_slot_bytes,
        explain=(
            *bounds.explain(), _order(topology), *_segments(topology), *explain_controller(topology), slots_text,
            bytes_text, *topology.derived.explain,
        ),
    )
    return sized(topology, derived), findings


def in_flight_limits(topology: Topology) -> tuple[Derived, list[Finding]]:
    """Derive the limits again while a run runs: sizes of its start stay, so its slots must be enough."""
    bounds, findings = _limits(topology)
    derived, needed = topology.derived, bounds.train_slots
    findings.extend(_published(topology, bounds))
    reserved = derived.slots - derived.val_reserve
    if needed > reserved:
        rule = f"G x B = {needed} slots are needed, and the ring of the run has {reserved} for training"
        findings.append(Finding(("weights.max_staleness", "learner.trigger.n_min"), rule, "set it at a new start"))
    return replace(derived, limits=bounds), findings


def asked_sets(topology: Topology, facts: FileFacts) -> tuple[AskedSet, ...]:
    """List the sets that a round of validation asks: [validation] first, where it names prompts, then the named
    sets."""
    validation, limit = topology.validation, topology.generation.max_new_tokens
    base = {
        **{name: getattr(validation, name) for name in ("samples", "k", "temperature", "top_p", "max_new_tokens")},
        "every_steps": validation.every,
    }
    tables = [("", validation.data, facts.validation_prompts, base)] if validation.data else []
    for named_set, lines in zip(validation.set, facts.set_prompts):
        written = {name: value for name in base if (value := getattr(named_set, name)) != "auto"}
        tables.append((named_set.name, named_set.data, lines, base | written))
    sets: list[AskedSet] = []
    for name, data, lines, keys in tables:
        prompts = lines if keys["samples"] in (0, "all") else int(keys["samples"])
        sets.append(AskedSet(
            name, data, lines, prompts, int(keys["k"]), float(keys["temperature"]), float(keys["top_p"]),
            int(keys["max_new_tokens"]) or limit, int(keys["every_steps"]), sum(before.answers for before in sets),
        ))
    return tuple(sets)


def _validating(topology: Topology) -> int:
    if topology.validation.mode == "dedicated":
        return topology.generation.max_batch * max(1, only_validate(topology))
    return in_flight(topology)


def _answers(topology: Topology, val_samples: int, slot_bytes: int) -> Iterator[Finding]:
    most = MOST_SAMPLES // (topology.run.max_steps + 1)
    if val_samples > most:
        steps = f"with {topology.run.max_steps} steps there is room for {most} in a round"
        rule = f"a round has {val_samples} answers; {steps}"
        yield Finding(("validation.samples", "validation.k", "run.max_steps"), rule, "lower one of them, or split")
    needed = slot_bytes + MESSAGE_FIELD_BYTES
    if topology.host_names and needed > topology.bus.max_message_bytes:
        rule = f"an answer of another host may have {needed} bytes, and comes in one message"
        yield Finding(("bus.max_message_bytes",), rule, f"set it to {needed} or more", depends=BYTES_FROM)


def _limits(topology: Topology) -> tuple[AdmissionLimits, list[Finding]]:
    """B, W and the thresholds that follow from mode, n_min, max_staleness, controller and group size."""
    trigger, (low, high) = topology.learner.trigger, thresholds(topology)
    bounds = derive(
        topology.weights.mode, trigger.n_min, topology.weights.max_staleness, topology.groups.size, low, high,
        trigger.n_floor, topology.weights.window, topology.segments.waves, len(topology.seats),
    )
    window = ("weights.window",) if topology.weights.window else ()
    keys = (*window, "weights.max_staleness", "weights.mode", "learner.trigger.n_min", "learner.trigger.n_floor")
    texts = [(text, False) for text in bounds.problems()] + [(text, True) for text in bounds.warnings()]
    return bounds, [Finding(keys, text, "", warning, depends=CONTROLLER_KEYS) for text, warning in texts]


def _order(topology: Topology) -> str:
    """Explain how far the order of dispatch may depart from the order drawn."""
    scheduler, n_min = topology.scheduler, topology.learner.trigger.n_min
    if scheduler.policy == FIFO:
        return "prompts are dispatched in the order drawn (fifo)"
    horizon = scheduler.horizon or 2 * n_min
    if scheduler.policy == "adaptive" and topology.weights.mode == "sync":
        return f"adaptive: the n_min = {n_min} draws of a round, longest first"
    text = f"a prompt waits for at most 2H - 2 = {2 * horizon - 2} others"
    return f"{scheduler.policy} reorders within H = {horizon} draws: {text}"


def _slots(topology: Topology, bounds: AdmissionLimits, reserve: int, findings: list[Finding]) -> tuple[int, str]:
    needed = bounds.train_slots + reserve
    text = f"G x B + validation reserve = {bounds.group_size} x {bounds.B} + {reserve} = {needed}"
    short = Finding(("ring.slots",), "fewer than the groups in flight need", "", depends=SLOTS_FROM)
    return _at_least(needed, topology.ring.slots, text, short, findings)


def _at_least(needed: int, value: int | str, text: str, short: Finding, findings: list[Finding]) -> tuple[int, str]:
    """The value of a key that may be "auto", and its sum as text; `short`: the finding where it is below `needed`."""
    key = short.keys[0]
    if not isinstance(value, int):
        return needed, f"{key} = {text}"
    if value < needed:
        findings.append(replace(short, rule=f"{short.rule}: {text}", remedy=f'set it to {needed} or more, or "auto"'))
    return value, f"{key} = {value} (auto: {text})"


def _segments(topology: Topology) -> Iterator[str]:
    segments, limit = topology.segments, topology.generation.max_new_tokens
    if segments.on:
        most, least = segments.max_segments, -(-limit // segments.max_segments)
        fixed = isinstance(segments.length, int)
        how = f"of {segments.length} tokens" if fixed else f"of {least} or more, by lengths seen"
        yield f"segments: an answer of up to {limit} tokens in at most {most} {how}; loss = {segments.loss}"


def _slot_bytes(topology: Topology, facts: FileFacts, findings: list[Finding]) -> tuple[int, str]:
    tokens, segments = topology.generation.max_new_tokens, topology.segments.max_segments if topology.segments.on else 1
    routes = route_bytes(topology)
    text_bytes = min(facts.token_bytes * tokens, max(TEXT_PER_TOKEN * tokens, TEXT_FLOOR))
    common = {
        "longest line": facts.task_bytes,
        "reward parts": REWARD_BYTES + sum(len(part.name) + PER_PART for part in topology.reward.part),
    }
    agents, (_, sampled, most) = topology.agents, topology.episode_limits
    parts = common | (
        episode_bytes(most, sampled, agents.max_turns, agents.max_sequences, agents.transcript_bytes, text_bytes)
        if topology.has_callers else {
            "prompt ids": 4 * topology.max_prompt_tokens,
            f"{tokens} tokens x {PER_TOKEN}": PER_TOKEN * tokens,
            "text": text_bytes,
            "alignment": ALIGN * (TENSORS + TENSORS_OF_SEGMENT * (segments - 1)),
        }
    ) | ({"routes": routes + ALIGN * (ROUTES_TENSORS + segments - 1)} if routes else {})
    needed = round_up(sum(parts.values()), 256)
    text = " + ".join(f"{size} ({name})" for name, size in parts.items()) + f" = {needed} after rounding up to 256"
    short = Finding(("ring.slot_bytes",), "smaller than the longest sample", "", depends=BYTES_FROM)
    return _at_least(needed, topology.ring.slot_bytes, text, short, findings)


def episode_bytes(tokens: int, sampled: int, turns: int, sequences: int, transcript: int, text: int) -> dict[str, int]:
    """Bytes of an episode in its slot, by what they are for: at most so many ids in all its sequences, sampled ids,
    turns, sequences, bytes of messages and of the last text."""
    return {
        f"{tokens} ids": 4 * tokens, f"{sampled} sampled": 8 * sampled, f"{turns} turns": 36 * turns,
        f"{sequences} sequences": 4 * sequences, "messages": transcript, "text": max(1, text),
        "counts": 40, "alignment": ALIGN * EPISODE_TENSORS,
    }


def _published(topology: Topology, bounds: AdmissionLimits) -> Iterator[Finding]:
    every, most = topology.publish_every, bounds.step_room
    if every * most > bounds.B:
        name = "n_min" if most == bounds.n_min else "n_hi" if most == bounds.n_hi else "a step with its last draw"
        rule = f"credit returns when a step is published: {every} x {name} = {every * most} > B = {bounds.B}"
        keys: tuple[str, ...] = ("learner.publish_every", "learner.trigger.n_min", "weights.mode")
        remedy = f"publish_every <= {bounds.max_publish_every}"
        if every > topology.learner.publish_every:
            keys = ("weights.restart_every", *keys)
            remedy = f"publish_every x restart_every <= {bounds.max_publish_every}"
        more = ", or a higher weights.max_staleness" if bounds.mode == "batch-async" else ""
        yield Finding(keys, rule, f"{remedy}{more}")


def _positions(topology: Topology, context: int) -> Iterator[Finding]:
    """Report sequences that are longer than the model takes (`context`, 0: not known before it is made)."""
    if topology.is_service:
        takes = context or (TINY_POSITIONS if topology.model.path.startswith(TINY) else 0)
        if takes and topology.tinker.context > takes:
            rule = f"a sequence may have {topology.tinker.context} tokens, and the model takes {takes}"
            yield Finding(("tinker.context",), rule, f"set it to {takes} or less", depends=("model.path",))
            return
    if context and topology.longest > context:
        rule = f"prompt and completion have {topology.longest} tokens, the model takes {context}"
        keys = ("generation.max_new_tokens", "generation.max_prompt_tokens")
        yield Finding(keys, rule, "lower one of them", depends=("model.path",))


def _sums(topology: Topology, bounds: AdmissionLimits, slots: int, facts: FileFacts) -> Iterator[Finding]:
    yield from _published(topology, bounds)
    yield from _positions(topology, facts.context)
    room = topology.bus.max_message_bytes - 1024
    if facts.task_bytes > room:
        rule = f"the longest prompt line ({facts.task_bytes} bytes) and 1024 bytes of fields do not fit"
        remedy = f"set it to {facts.task_bytes + 1024} or more"
        yield Finding(("bus.max_message_bytes",), rule, remedy, depends=BYTES_FROM)
    if in_flight(topology) > slots:
        rule = f"the engines have {in_flight(topology)} rows for {slots} slots, so some rows stay empty"
        yield Finding(("generation.max_batch",), rule, f"{slots} in all are enough", warning=True, depends=SLOTS_FROM)
