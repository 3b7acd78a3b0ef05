"""What follows from several keys: limits on groups in flight, slots and their bytes, when a checkpoint is due.

`resolve` computes everything that a Topology holds as `derived`, and its sums as text; the other functions give the
roles, and the simulator in their place, the objects that `scheduling` decides with. Pure: what the files say is passed
in. Uses the formulas of `scheduling.admission` and the sizes of the ring's layout.

- Explicit values are checked against the same sums that `auto` uses, and a refusal shows the sum.
- slots = G x B + the validation reserve: a dispatched sample always finds its slot free in time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from busrl.algorithms import catalog
from busrl.preflight import rules
from busrl.preflight.named_files import FileFacts
from busrl.preflight.rules import Finding, batch_varies, count, due, only_validate, thresholds, wants_rounds
from busrl.scheduling.admission import AdmissionLimits, Staleness, derive
from busrl.scheduling.dispatch import UNPREDICTED, Policy, make_policy
from busrl.scheduling.predictor import Predictor
from busrl.scheduling.trigger import LearnerPlan, Trigger
from busrl.states import CALLER_ROLES
from busrl.topology.prompts import AskedSet
from busrl.topology.schema import MESSAGE_FIELD_BYTES, TABLE_TENSORS, TENSORS_OF_SEGMENT, Derived, Topology

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
PER_TOKEN = 12  # id, log-probability, version: 4 bytes each
REWARD_BYTES, PER_PART = 256, 5  # the value of a part and the end of its name
TEXT_PER_TOKEN, TEXT_FLOOR = 16, 1 << 16  # bound on text: whole completions of the longest token only up to here
LINE_BYTES, TABLE_BYTES, PROCESS_BYTES = 128, 128 + TABLE_TENSORS * 128, 512  # per slot, slot, process-table entry
MORE_CALLS, ID_BYTES, CALL_BYTES = 16, 4, 1024  # the last: details, and what begins at a multiple of ALIGN
PAGE = 4096
KEPT, LOOSE_FROM = 64 << 10, 256 << 10  # of a slot always in memory; slots of less are in memory whole (docs/ring.md)
USUAL_SHARE = 4  # an answer is expected to have such a part of the most tokens


def resolve(topology: Topology, facts: FileFacts) -> tuple[Derived, list[Finding]]:
    """Everything that is computed from more than one key, and what is wrong with explicit values."""
    bounds, found = _limits(topology)
    rounds = count(topology, "validator") > 0 and wants_rounds(topology)
    sets = asked_sets(topology, facts) if rounds else ()
    val_samples = sum(one.answers for one in sets)
    val_reserve = min(val_samples, _validating(topology))
    slots, slots_text = _slots(topology, bounds, val_reserve, found)
    slot_bytes, bytes_text = _slot_bytes(topology, facts, found)
    found.extend(_sums(topology, bounds, slots, facts))
    call_slots, call_slot_bytes = call_ring(topology) if topology.has_callers else (0, 0)
    found.extend(_answers(topology, val_samples, slot_bytes))
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
            *bounds.explain(), _order(topology), *_segments(topology), *rules.explain_control(topology), slots_text,
            bytes_text,
        ),
    )
    return sized(topology, derived), found


def in_flight_limits(topology: Topology) -> tuple[Derived, list[Finding]]:
    """The same in a run that runs, where what was made at its start stays: other limits, if its slots are enough."""
    bounds, found = _limits(topology)
    derived, needed = topology.derived, bounds.train_slots
    found.extend(_published(topology, bounds))
    reserved = derived.slots - derived.val_reserve
    if needed > reserved:
        rule = f"G x B = {needed} slots are needed, and the ring of the run has {reserved} for training"
        found.append(Finding(("weights.max_staleness", "learner.trigger.n_min"), rule, "set it at a new start"))
    return replace(derived, limits=bounds), found


def asked_sets(topology: Topology, facts: FileFacts) -> tuple[AskedSet, ...]:
    """What a round of validation asks: [validation] first, where it names prompts, then the named sets."""
    own, limit = topology.validation, topology.generation.max_new_tokens
    base = {
        "samples": own.samples, "k": own.k, "temperature": own.temperature, "top_p": own.top_p,
        "max_new_tokens": own.max_new_tokens, "every_steps": own.every,
    }
    tables = [("", own.data, facts.validation_prompts, base)] if own.data else []
    for one, lines in zip(own.set, facts.set_prompts):
        given = {name: value for name in base if (value := getattr(one, name)) != "auto"}
        tables.append((one.name, one.data, lines, base | given))
    sets: list[AskedSet] = []
    for name, data, lines, keys in tables:
        prompts = lines if keys["samples"] in (0, "all") else int(keys["samples"])
        sets.append(AskedSet(
            name, data, lines, prompts, int(keys["k"]), float(keys["temperature"]), float(keys["top_p"]),
            int(keys["max_new_tokens"]) or limit, int(keys["every_steps"]), sum(before.answers for before in sets),
        ))
    return tuple(sets)


def in_flight(topology: Topology) -> int:
    """Samples that are worked on at once: sequences that all rollout processes which train generate, or episodes that
    agents play; processes that join from outside count as one."""
    if topology.has_callers:
        return topology.agents.episodes * max(1, sum(count(topology, role) for role in CALLER_ROLES))
    return topology.generation.max_batch * max(1, count(topology, "rollout") - only_validate(topology))


def call_ring(topology: Topology, host: str = "") -> tuple[int, int]:
    """Slots and bytes per slot of a host's ring of model calls: a call for every row and some that wait, each with the
    longest prompt and answer."""
    rows = topology.generation.max_batch * max(1, on_host(topology, host, "rollout"))
    answer = PER_TOKEN * topology.generation.max_new_tokens
    return rows + rows // 4 + MORE_CALLS, _up(ID_BYTES * topology.longest + answer + CALL_BYTES, 256)


def on_host(topology: Topology, host: str, *roles: str) -> int:
    """How many processes of these roles a host starts; "" = home."""
    return sum(entry.count for entry in topology.process if entry.role in roles and entry.is_at(host))


def _validating(topology: Topology) -> int:
    if topology.validation.mode == "dedicated":
        return topology.generation.max_batch * max(1, only_validate(topology))
    return in_flight(topology)


def _answers(topology: Topology, val_samples: int, slot_bytes: int) -> Iterator[Finding]:
    most = rules.MOST_SAMPLES // (topology.run.max_steps + 1)
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
        trigger.n_floor, topology.weights.window, topology.segments.waves,
    )
    window = ("weights.window",) if topology.weights.window else ()
    keys = (*window, "weights.max_staleness", "weights.mode", "learner.trigger.n_min", "learner.trigger.n_floor")
    told = [(text, False) for text in bounds.problems()] + [(text, True) for text in bounds.warnings()]
    return bounds, [Finding(keys, text, "", warning, depends=rules.CONTROL_KEYS) for text, warning in told]


def _order(topology: Topology) -> str:
    """How far the order of dispatch may depart from the order drawn."""
    scheduler, n_min = topology.scheduler, topology.learner.trigger.n_min
    if scheduler.policy == UNPREDICTED:
        return "prompts are dispatched in the order drawn (fifo)"
    horizon = scheduler.horizon or 2 * n_min
    if scheduler.policy == "adaptive" and topology.weights.mode == "sync":
        return f"adaptive: the n_min = {n_min} draws of a round, longest first"
    text = f"a prompt waits for at most 2H - 2 = {2 * horizon - 2} others"
    return f"{scheduler.policy} reorders within H = {horizon} draws: {text}"


def _slots(topology: Topology, bounds: AdmissionLimits, reserve: int, found: list[Finding]) -> tuple[int, str]:
    needed = bounds.train_slots + reserve
    text = f"G x B + validation reserve = {bounds.group_size} x {bounds.B} + {reserve} = {needed}"
    short = Finding(("ring.slots",), "fewer than the groups in flight need", "", depends=SLOTS_FROM)
    return _at_least(needed, topology.ring.slots, text, short, found)


def _at_least(needed: int, given: int | str, text: str, short: Finding, found: list[Finding]) -> tuple[int, str]:
    """The value of a key that may be "auto", and its sum as text; `short` is what is wrong with one below `needed`."""
    key = short.keys[0]
    if not isinstance(given, int):
        return needed, f"{key} = {text}"
    if given < needed:
        found.append(replace(short, rule=f"{short.rule}: {text}", remedy=f'set it to {needed} or more, or "auto"'))
    return given, f"{key} = {given} (auto: {text})"


def _segments(topology: Topology) -> Iterator[str]:
    own, limit = topology.segments, topology.generation.max_new_tokens
    if own.on:
        least = -(-limit // own.max_segments)
        how = f"of {own.length} tokens" if isinstance(own.length, int) else f"of {least} or more, by lengths seen"
        yield f"segments: an answer of up to {limit} tokens in at most {own.max_segments} {how}; loss = {own.loss}"


def _slot_bytes(topology: Topology, facts: FileFacts, found: list[Finding]) -> tuple[int, str]:
    tokens, segments = topology.generation.max_new_tokens, topology.segments.max_segments if topology.segments.on else 1
    text_bytes = min(facts.token_bytes * tokens, max(TEXT_PER_TOKEN * tokens, TEXT_FLOOR))
    common = {
        "longest line": facts.task_bytes,
        "reward parts": REWARD_BYTES + sum(len(part.name) + PER_PART for part in topology.reward.part),
    }
    own, (_, sampled, most) = topology.agents, topology.episode_limits
    parts = common | (
        episode_bytes(most, sampled, own.max_turns, own.max_sequences, own.transcript_bytes, text_bytes)
        if topology.has_callers else {
            "prompt ids": 4 * topology.max_prompt_tokens,
            f"{tokens} tokens x {PER_TOKEN}": PER_TOKEN * tokens,
            "text": text_bytes,
            "alignment": ALIGN * (TENSORS + TENSORS_OF_SEGMENT * (segments - 1)),
        }
    )
    needed = _up(sum(parts.values()), 256)
    text = " + ".join(f"{size} ({name})" for name, size in parts.items()) + f" = {needed} after rounding up to 256"
    short = Finding(("ring.slot_bytes",), "smaller than the longest sample", "", depends=BYTES_FROM)
    return _at_least(needed, topology.ring.slot_bytes, text, short, found)


def episode_bytes(tokens: int, sampled: int, turns: int, sequences: int, transcript: int, text: int) -> dict[str, int]:
    """Bytes of an episode in its slot, by what they are for: at most so many ids in all its sequences, sampled ids,
    turns, sequences, bytes of messages and of the last text."""
    return {
        f"{tokens} ids": 4 * tokens, f"{sampled} sampled": 8 * sampled, f"{turns} turns": 36 * turns,
        f"{sequences} sequences": 4 * sequences, "messages": transcript, "text": max(1, text),
        "counts": 40, "alignment": ALIGN * EPISODE_TENSORS,
    }


def _published(topology: Topology, bounds: AdmissionLimits) -> Iterator[Finding]:
    every, most = topology.publish_every, bounds.n_hi
    if every * most > bounds.B:
        name = "n_min" if most == bounds.n_min else "n_hi"
        rule = f"credit returns when a step is published: {every} x {name} = {every * most} > B = {bounds.B}"
        keys: tuple[str, ...] = ("learner.publish_every", "learner.trigger.n_min", "weights.mode")
        remedy = f"publish_every <= {bounds.max_publish_every}"
        if every > topology.learner.publish_every:
            keys = ("weights.restart_every", *keys)
            remedy = f"publish_every x restart_every <= {bounds.max_publish_every}"
        more = ", or a higher weights.max_staleness" if bounds.mode == "batch-async" else ""
        yield Finding(keys, rule, f"{remedy}{more}")


def _sums(topology: Topology, bounds: AdmissionLimits, slots: int, facts: FileFacts) -> Iterator[Finding]:
    yield from _published(topology, bounds)
    if facts.context and topology.longest > facts.context:
        rule = f"prompt and completion have {topology.longest} tokens, the model takes {facts.context}"
        keys = ("generation.max_new_tokens", "generation.max_prompt_tokens")
        yield Finding(keys, rule, "lower one of them", depends=("model.path",))
    room = topology.bus.max_message_bytes - 1024
    if facts.task_bytes > room:
        rule = f"the longest prompt line ({facts.task_bytes} bytes) and 1024 bytes of fields do not fit"
        remedy = f"set it to {facts.task_bytes + 1024} or more"
        yield Finding(("bus.max_message_bytes",), rule, remedy, depends=BYTES_FROM)
    if in_flight(topology) > slots:
        rule = f"the engines have {in_flight(topology)} rows for {slots} slots, so some rows stay empty"
        yield Finding(("generation.max_batch",), rule, f"{slots} in all are enough", warning=True, depends=SLOTS_FROM)


def ring_bytes(slots: int, slot_bytes: int, processes: int, held: int | None = None) -> int:
    """What the ring's file takes: header, process table, and per slot its line, its tensor table and its payload, where
    each slot holds so many bytes (None: all that it can)."""
    stride = _up(slot_bytes, 256)
    payload = stride if held is None or stride < LOOSE_FROM else min(stride, max(_up(held, PAGE), KEPT) + PAGE)
    per_slot = LINE_BYTES + TABLE_BYTES + payload
    return _up(2 * PAGE + processes * PROCESS_BYTES + slots * per_slot, PAGE) + 3 * PAGE


def sized(topology: Topology, derived: Derived) -> Derived:
    """With the bytes of its rings: at most, and where each slot holds a usual answer, whose share of a slot is that of
    its tokens. A call is counted whole."""
    processes, given, most = topology.ring.processes, topology.ring.expected_tokens, topology.generation.max_new_tokens
    tokens = min(most, given if isinstance(given, int) else -(-most // USUAL_SHARE))
    usual = derived.slot_bytes * tokens // most
    calls = ring_bytes(derived.call_slots, derived.call_slot_bytes, processes) if derived.call_slots else 0
    return replace(
        derived, ring_bytes=ring_bytes(derived.slots, derived.slot_bytes, processes) + calls,
        ring_held=ring_bytes(derived.slots, derived.slot_bytes, processes, usual) + calls,
        usual_tokens=tokens,
    )


def _up(value: int, to: int) -> int:
    return -(-value // to) * to


# -- what the roles decide with -----


def policy_of(topology: Topology, predictor: Predictor) -> Policy:
    scheduler, derived = topology.scheduler, topology.derived
    return make_policy(
        scheduler.policy, derived.horizon, predictor, scheduler.aging, tail_share=scheduler.tail_share,
        window=derived.limits.W, group_size=topology.groups.size,
        round_groups=topology.learner.trigger.n_min if topology.weights.mode == "sync" else 0,
    )


def make_plan(topology: Topology, *, streamable: bool = True) -> LearnerPlan:
    """With `forced_age` the age of a batch is the experiment, and no rule bounds it. `streamable`: a loss of the user's
    own, if there is one, may run on parts of a step."""
    config = topology.learner
    trigger, limits = config.trigger, topology.derived.limits
    fires = Trigger(
        trigger.n_min, limits.n_floor, trigger.t_max_s, sync=limits.sync, count_ended=trigger.count == "ended"
    )
    bound = None if topology.experiments.forced_age else limits.max_staleness
    return LearnerPlan(
        limits, fires, Staleness(bound, topology.weights.over_age),
        streaming=streamable and not config.deterministic and not catalog.held_back(config),
        trains_flat=catalog.trains_flat(config),
    )


def checkpoint_is_due(topology: Topology, step: int, total: int, groups: int) -> bool:
    """After step `step` of `groups` groups, `total` in all. Where the batch can vary n_min groups count as a step."""
    every = topology.learner.checkpoint_every
    if batch_varies(topology):
        return due(every * topology.learner.trigger.n_min, total - groups, total)
    return due(every, step - 1, step)


def checkpoint_may_follow(topology: Topology, step: int, total: int) -> bool:
    """Whether the step after `step` may be the run's last or one with a checkpoint; `total`: groups trained so far."""
    run, most = topology.run, topology.derived.limits.n_hi
    if step + 1 >= run.max_steps or 0 < run.max_groups <= total + most:
        return True
    return checkpoint_is_due(topology, step + 1, total + most, most)
