"""What each field of a message means, in one line each, for docs/protocol.md.

Read by `reference.py` alone. A name means the same in every message; where it does not, "MESSAGE.name" stands beside it
and wins. A field without a meaning makes `missing` name it.
"""

from __future__ import annotations

from typing import Final

MEANINGS: Final[dict[str, str]] = {
    # the envelope
    "v": "Version of the protocol that the sender speaks.",
    "sender": "Name of the sending process, as in topics: `rollout-0`.",
    "msg_seq": "Number of this message among those of this sender on this topic, from 1.",
    "time_ns": "When it was sent: nanoseconds since 1970 on the sender's clock.",
    # a slot and its sample
    "worker_id": "Name of the worker, as in topics.",
    "capacity": "How many tasks more it could begin now.",
    "slot_id": "Index of the slot in the ring.",
    "seq": "`seq` of the slot's control word when this was said (36 bits).",
    "uid": "The sample. Bit 62 is set for validation.",
    "count": "How many slots this doorbell stands for; the named one is the first.",
    "prompt": "The prompt's line, for a worker that can not map the ring; else empty.",
    "status": '`"generated"`: the answer is whole. `"segment"`: a segment was committed. `"aborted"`: handed back.',
    "reward": "Reward of the named sample.",
    # learner
    "version": "Version of the weights.",
    "step": "Steps of the optimiser so far.",
    "entropy": "Mean entropy of the policy over the step's tokens, in nats.",
    "groups": "Groups trained in this step.",
    "LEARNER_STATE_UPDATE.reward": "Mean reward of all groups that ended since the last step.",
    "tokens": "Generated tokens trained in this step.",
    "samples": "Samples of this step.",
    "age_mean": "Mean age of the step's groups, in steps.",
    "metrics": "Every number of the step's line in `metrics.jsonl`, by name.",
    # weights
    "DATA_GENERATED.version": "Version of the weights that made the last token.",
    "transport": '`"shm"` or `"broadcast"`: how the weights travel.',
    "nbytes": "Size of the weights in bytes; 0 = not said.",
    "epoch": "Number of the group: raised whenever its members change.",
    "WEIGHTS_JOIN.epoch": "The newest epoch that the worker knows.",
    "store": "Address at which the members meet.",
    "members": "Names of the members.",
    # validation
    "round": "Number of the round: the step that it stands for.",
    "VALIDATION_STARTED.samples": "How many samples the round asks for.",
    "VALIDATION_DONE.samples": "How many samples were judged.",
    "mean": "Mean reward of the round.",
    "mixed": "True if weights of more than one version answered.",
    # scheduler
    "draws": "Prompts drawn so far; 0 = not said.",
    "admitted": "Groups admitted so far.",
    "open_groups": "Groups in flight.",
    "queued": "Slots waiting for a worker; 0 = not said.",
    "free": "Free slots.",
    "credit": "Groups that may be opened now.",
    "waiting": "What it waits for, in words.",
    "values": "Numbers by name.",
    # presence, errors, control
    "role": "What the process does: `rollout`, `reward`, ...",
    "pid": "Its process id on its host; 0 = not said.",
    "host": "Name of its host.",
    "index": "Its entry in the ring's process table; 0 = it does not map the ring.",
    "activity": "What it is doing, in words.",
    "last_seqs": "Topic -> `msg_seq` of the last message that this sender sent on it.",
    "reason": "Why, in words.",
    "severity": '`"warning"`, `"error"` or `"critical"` (the sender ends).',
    "where": "The part of the program.",
    "text": "What happened, for a person.",
    "traceback": "Where in the code; may be empty.",
    "token": "Any text; the answer carries the same.",
    "drain_s": "Seconds that the sender will wait before it kills.",
}


def meaning(message: str, name: str) -> str:
    """The line about a field ("" = of the envelope); KeyError if there is none."""
    return MEANINGS.get(f"{message}.{name}") or MEANINGS[name]


def missing(message: str, names: list[str]) -> list[str]:
    """What to add for fields that have no meaning yet."""
    return [
        f'{message}.{name} has no meaning; add "{name}" to MEANINGS in busrl/protocol/meanings.py'
        for name in names
        if f"{message}.{name}" not in MEANINGS and name not in MEANINGS
    ]
