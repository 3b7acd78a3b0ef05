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
    "rows": "How many tasks it runs at once when it is full; 0 = not said.",
    "slot_id": "Index of the slot in the ring.",
    "seq": "`seq` of the slot's control word when this was said (36 bits).",
    "uid": "The sample. Bit 62 is set for validation.",
    "count": "How many slots this doorbell stands for; the named one is the first.",
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
    "transport": 'How the weights travel: a value of `weights.transport`, such as `"shm"`.',
    "epoch": "Number of the group, from 1; a restarted learner begins again.",
    "members": "Names of the processes in it, sorted.",
    "why": "Who joined, left or was left out since the group before, and in which phase.",
    # validation
    "round": "Number of the round: the step that it stands for.",
    "VALIDATION_STARTED.samples": "How many samples the round asks for.",
    "VALIDATION_DONE.samples": "How many samples were judged.",
    "mean": "Mean reward of the round.",
    "mixed": "True if weights of more than one version answered.",
    # scheduler
    "admitted": "Groups admitted so far.",
    "open_groups": "Groups in flight.",
    "queued": "Slots waiting for a worker; 0 = not said.",
    "free": "Free slots.",
    "credit": "Groups that may be opened now.",
    "waiting": "What it waits for, in words.",
    "values": "Numbers by name.",
    # a worker that does not map the ring
    "life": "Number of the worker's life: grows with every start of its name (milliseconds since 1970).",
    "req": "A number of the sender's choice; the answer repeats it.",
    "REMOTE_CLAIM.req": "As everywhere; and a REMOTE_CLAIM with a lower one than an earlier of this life is ignored.",
    "Task.seq": "`seq` of the control word that the claim made.",
    "task": "Name of a claim, `slot.seq.uid`: compare it, send it back, do not take it apart.",
    "REMOTE_CLAIM.capacity": "How many tasks the worker wants to hold in all.",
    "holding": "Every task that the worker holds and has no final answer for.",
    "REMOTE_JOIN.role": '`"rollout"` or `"reward"`.',
    "REMOTE_GENERATED.tokens": "int32, one dimension, 1 to `max_new_tokens` ids.",
    "logprobs": "float32, as many: log-probability of each token as it was sampled, at most 0.",
    "versions": "uint32, as many: version of the weights that made each.",
    "REMOTE_GENERATED.text": "The whole completion, special tokens visible, a final end token left out.",
    "prompt_ids": "int32: the prompt as token ids. Needed in segment 0.",
    "finish": "1 = the last token ends the sequence, 2 = a limit cut it.",
    "done": "False: one segment more, and the task is queued again.",
    "REMOTE_REWARDED.reward": "The reward; finite.",
    "parts": "Named parts of the reward, for people; at most 64.",
    "drop": 'Empty: hand it back. Else why the sample ends: `"raised"`, `"hung"`, `"malformed"` (reward), `"prompt"`, '
    '`"too_long"`, `"malformed"` (rollout).',
    "lease_s": "Seconds of silence after which a task goes back.",
    "max_capacity": "Tasks that one worker may hold.",
    "max_message_bytes": "Largest message on this bus.",
    "max_prompt_tokens": "A longer prompt is dropped as `too_long`.",
    "seed": "Seed of the run.",
    "model": "Folder of the model.",
    "prompt_key": "Key of the prompt in a record.",
    "answer_key": "Key of the reference answer in a record.",
    "template": '`"none"`: the prompt as it stands; `"chat"`: by the model\'s chat template, a text as a user turn, '
    "a list of messages as it is.",
    "GATEWAY_WELCOME.index": "The worker's entry in the ring's process table.",
    "tasks": "The tasks.",
    "code": "What became of the request, below.",
    "about": "Name of the request.",
    "GATEWAY_ANSWER.text": "Why, for a person.",
    "lost": "Tasks of `holding` that are not the worker's any more.",
    "record": "The prompt's JSONL line as it stands.",
    "segment": "Segments that are committed already.",
    "attempt": "How often it was tried since the last committed segment.",
    "max_new_tokens": "Tokens that may still be generated.",
    "segment_tokens": "Tokens after which this segment ends, with `done` false; 0: none, make the answer whole.",
    "temperature": "For sampling.",
    "top_p": "For sampling.",
    "Task.version": "Newest version of the weights when it was claimed.",
    "completion": "The answer as text (reward tasks).",
    "tensors": "Arrays by name: `prompt_ids`, `tokens`, `logprobs`, `versions`.",
    "dtype": '`"int32"`, `"float32"` or `"uint32"`, as in NumPy.',
    "shape": "In elements, C order.",
    "data": "The elements, little endian.",
    # presence, errors, control
    "role": "What the process does: `rollout`, `reward`, ...",
    "pid": "Its process id on its host; 0 = not said.",
    "host": "Name of its host.",
    "index": "Its entry in the ring's process table; 0 = it does not map the ring.",
    "activity": "What it is doing, in words.",
    "last_seqs": "Topic -> `msg_seq` of the last message that this sender sent on it.",
    "reason": "Why, in words.",
    "severity": '`"warning"`, `"error"` or `"critical"` (the sender ends); anything else counts as `"warning"`.',
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
