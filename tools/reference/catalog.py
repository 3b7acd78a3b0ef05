"""Facts that the structs of the messages do not hold: sender and readers of each, its reach, its first version; the
meaning of each field.

Read by `protocol_page` (the tables of docs/protocol.md and messages.md) and by the tests; knows nothing of sockets. A
message or field that is in the codec's `ALL` but not here makes `check` fail, which names what to add.

- Every message has one `Route`.
- Every field stands in exactly one version of `HISTORY`. A removed name stays there, so that it is never used again.
- A name of a field means the same in every message; where it does not, "MESSAGE.name" stands beside it and wins.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from msgspec import inspect as kinds

from busrl.hosts import messages as g
from busrl.protocol import messages as m
from busrl.protocol.codec import ALL, topic
from busrl.protocol.messages import Message, name_of
from busrl.service import messages as s


class Reach(enum.Enum):
    """How far one message goes; the value is how the page says it."""

    ALL = "everybody"
    ONE = "one process"


@dataclass(frozen=True)
class Route:
    """Who sends a message and who reads it, in words."""

    sent_by: str
    read_by: str
    reach: Reach = Reach.ALL


ROUTES: Final[dict[type[Message], Route]] = {
    m.TaskRequest: Route("rollout", "scheduler"),
    m.NewTask: Route("scheduler", "the worker named in the topic", Reach.ONE),
    m.DataGenerated: Route("rollout (keeper for a remote one)", "reward"),
    m.CallCancel: Route("a caller (agents)", "the worker named in the topic", Reach.ONE),
    m.CallTokens: Route("rollout", "the caller named in the topic", Reach.ONE),
    m.ProbeDrawn: Route("rollout", "learner"),
    m.ProbeRouted: Route("rollout", "learner"),
    m.RewardComputed: Route("reward (keeper for a remote one)", "monitors (the learner is woken by the ring)"),
    m.LearnerStateUpdate: Route("learner", "scheduler, validator, launch, monitors"),
    m.WeightsPublished: Route("learner", "monitors (engines look at the ring's header)"),
    m.WeightsGroup: Route("learner", "monitors"),
    m.ValidationStarted: Route("validator", "launch, monitors"),
    m.ValidationDone: Route("validator", "launch, monitors"),
    m.ValidationSetDone: Route("validator", "launch, monitors"),
    m.SchedulerState: Route("scheduler", "launch, monitors"),
    m.Hello: Route("everybody", "launch, monitors"),
    m.Heartbeat: Route("everybody", "keeper, launch, monitors"),
    m.Goodbye: Route("everybody", "monitors"),
    m.Error: Route("everybody", "launch, monitors"),
    m.Ping: Route("everybody", "the process named in the topic", Reach.ONE),
    m.Pong: Route("everybody", "the sender of the PING", Reach.ONE),
    m.Stop: Route("launch", "everybody"),
    m.Control: Route("whoever may read control.key", "launch"),
    m.ControlDone: Route("launch", "the sender of CONTROL", Reach.ONE),
    g.RemoteJoin: Route("remote worker", "keeper"),
    g.RemoteClaim: Route("remote worker", "keeper"),
    g.RemoteExtend: Route("remote worker", "keeper"),
    g.RemoteGenerated: Route("remote rollout", "keeper"),
    g.RemoteRouted: Route("remote rollout", "keeper"),
    g.RemoteRewarded: Route("remote reward", "keeper"),
    g.RemoteFail: Route("remote worker", "keeper"),
    g.RemoteBatch: Route("another host", "keeper"),
    g.RemoteLeave: Route("remote worker", "keeper"),
    g.GatewayWelcome: Route("keeper", "the sender of REMOTE_JOIN", Reach.ONE),
    g.GatewayTasks: Route("keeper", "the sender of REMOTE_CLAIM", Reach.ONE),
    g.GatewayAnswer: Route("keeper", "the sender of the request", Reach.ONE),
    g.GatewaySettled: Route("keeper", "the sender of REMOTE_BATCH", Reach.ONE),
    s.RequestsLogged: Route("tinker", "tuner"),
    s.AnswersLogged: Route("tuner", "tinker"),
}

# Version of the protocol -> message or record -> the fields that it brought. The first number is `v` of the envelope;
# the second counts additions, which need no new `v`. "" is the envelope.
HISTORY: Final[dict[str, dict[str, str]]] = {
    "1.0": {
        "": "v sender msg_seq time_ns",
        "TASK_REQUEST": "worker_id capacity",
        "NEW_TASK": "worker_id slot_id seq uid count",
        "DATA_GENERATED": "slot_id seq uid version status count",
        "REWARD_COMPUTED": "slot_id seq uid reward count",
        "LEARNER_STATE_UPDATE": "entropy version step groups reward tokens samples age_mean metrics",
        "WEIGHTS_PUBLISHED": "version step transport",
        "VALIDATION_STARTED": "round version samples",
        "VALIDATION_DONE": "round version samples mean mixed",
        "SCHEDULER_STATE": "admitted open_groups queued free credit waiting values",
        "HELLO": "role pid host index",
        "HEARTBEAT": "role activity last_seqs",
        "GOODBYE": "reason",
        "ERROR": "severity where text traceback",
        "PING": "token",
        "PONG": "token",
        "STOP": "reason drain_s",
    },
    "1.1": {
        "REMOTE_JOIN": "life req role",
        "REMOTE_CLAIM": "life req capacity holding",
        "REMOTE_EXTEND": "life req holding",
        "REMOTE_GENERATED": "life req task tokens logprobs versions text prompt_ids finish done",
        "REMOTE_REWARDED": "life req task reward parts",
        "REMOTE_FAIL": "life req task drop text",
        "REMOTE_LEAVE": "life req reason",
        "GATEWAY_WELCOME": "life req index lease_s max_capacity max_message_bytes max_prompt_tokens seed model"
        " prompt_key answer_key template",
        "GATEWAY_TASKS": "life req tasks",
        "GATEWAY_ANSWER": "code life req about task text lost",
        "Tensor": "dtype shape data",
        "Task": "task slot_id seq uid record segment attempt max_new_tokens temperature top_p version completion"
        " tensors",
    },
    "1.2": {
        "TASK_REQUEST": "rows",
        "Task": "segment_tokens",
        "WEIGHTS_GROUP": "epoch members why",
    },
    "1.3": {
        "VALIDATION_SET_DONE": "round version samples mean mixed set figures",
    },
    "1.4": {
        "CALL_CANCEL": "slot_id seq",
        "CALL_TOKENS": "slot_id seq at ids",
        "Task": "kind stream stop",
    },
    "1.5": {
        "Task": "cls priority admission",
        "REMOTE_JOIN": "ring",
    },
    "1.6": {
        "REMOTE_BATCH": "life req tasks lengths prompt_lengths finishes texts tokens logprobs versions prompt_ids"
        " rewards parts capacity steps",
        "GATEWAY_SETTLED": "life req done late refused",
        "Refusal": "task code text",
    },
    "1.7": {
        "CONTROL": "id verb key value who proof",
        "CONTROL_DONE": "id ok text waits",
        "HEARTBEAT": "control",
    },
    "1.8": {
        "REMOTE_BATCH": "episodes",
        "PROBE_DRAWN": "worker_id version lengths prompt_lengths prompt_ids tokens logprobs versions temperatures",
        "REMOTE_CLAIM": "digest",
        "GATEWAY_TASKS": "differs",
    },
    "1.9": {
        "VALIDATION_DONE": "dropped",
        "VALIDATION_SET_DONE": "dropped",
        "REQUESTS_LOGGED": "",
        "ANSWERS_LOGGED": "",
    },
    "1.10": {
        "REMOTE_JOIN": "routes",
        "REMOTE_ROUTED": "life req task tokens logprobs versions text prompt_ids finish done routes prompt_routes",
        "REMOTE_BATCH": "routes",
        "GATEWAY_WELCOME": "routes",
        "Task": "routes_from",
        "CALL_CANCEL": "model",
        "CALL_TOKENS": "model",
        "PROBE_DRAWN": "model",
        "PROBE_ROUTED":
            "worker_id version lengths prompt_lengths prompt_ids tokens logprobs versions temperatures model routes",
        "LEARNER_STATE_UPDATE": "model",
        "WEIGHTS_PUBLISHED": "model",
        "WEIGHTS_GROUP": "model",
    },
}
REMOVED: Final[frozenset[tuple[str, str]]] = frozenset()  # (message, field) that HISTORY keeps although they are gone

# Name of a field, or "MESSAGE.name" -> what it means there.
MEANINGS: Final[dict[str, str]] = {
    # the envelope
    "v": "Version of the protocol that the sender speaks.",
    "sender": "Name of the sending process, as in topics: `rollout-0`.",
    "msg_seq": "Number of this message among those of this sender on this topic, from 1.",
    "time_ns": "When it was sent: nanoseconds since 1970 on the sender's clock.",
    # a slot and its sample
    "worker_id": "Name of the worker, as in topics.",
    "capacity": "How many tasks more it could begin now.",
    "rows": "How many tasks it runs at once when it is full; 0 = unknown.",
    "model": "In a run of several models, the tag of the one that this is about; left out for the lead.",
    "slot_id": "Index of the slot in the ring.",
    "seq": "`seq` of the slot's control word when this was sent (36 bits).",
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
    "CALL_CANCEL.slot_id": "Index of the slot in the ring of model calls.",
    "CALL_CANCEL.seq": "`seq` of the control word of the claim that is to end; of any other the message means nothing.",
    "CALL_TOKENS.slot_id": "Index of the slot in the ring of model calls.",
    "CALL_TOKENS.seq": "`seq` of the control word of the claim that drew them.",
    "kind": "Empty: a sample. `\"call\"`: a model call.",
    "stream": "Of a call: which random numbers its answer is drawn with, where the engine can be told (64 bits).",
    "stop": "Of a call: token ids that end the answer beside the model's own.",
    "Task.cls": "0: for training. 1: for validation.",
    "Task.priority": "Of tasks that a worker holds and does not run, the highest is first.",
    "Task.admission": "Of tasks of one priority the lowest is first.",
    **{f"{probe}.{name}": text for probe in ("PROBE_DRAWN", "PROBE_ROUTED") for name, text in (
        ("version", "Of the weights that its engine had from the first token to the last."),
        ("prompt_ids", "int32: the prompts, one behind the other."),
        ("tokens", "int32: the answers, one behind the other."),
        ("logprobs", "float32, as many: log-probability of each token as it was sampled."),
        ("versions", "uint32, as many: the version that the engine tagged each with."),
    )},
    "PROBE_ROUTED.routes": "Ids of experts, uint8 or uint16: of every token of prompt and answer but the last, layer "
                           "by layer.",
    "temperatures": "Of each answer, the temperature that was asked for.",
    "at": "The number of the first of them in the answer.",
    "ids": "Token ids.",
    "VALIDATION_SET_DONE.samples": "How many samples were judged.",
    "VALIDATION_SET_DONE.set": "The name of the set; empty: what `[validation]` itself measures.",
    "VALIDATION_SET_DONE.figures": "Its figures as in `validation.jsonl`: `val/pass@4` and others.",
    "mean": "Mean reward of the round; of nothing where `samples` is 0.",
    "dropped": "How many samples ended without a reward.",
    "mixed": "True if weights of more than one version answered.",
    # scheduler
    "admitted": "Groups admitted so far.",
    "open_groups": "Groups in flight.",
    "queued": "Slots waiting for a worker; 0 = unknown.",
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
    "digest": "In the place of `holding`, of the same tasks; nil: `holding` counts. Blake2b of 8 bytes of each name, "
              "little-endian, added up modulo 2^64.",
    "differs": "The digest is not that of what the worker holds: nothing was renewed or claimed, name your tasks.",
    "REMOTE_JOIN.role": '`"rollout"` or `"reward"`.',
    "ring": "Of a worker that keeps claims over restarts: the ring of them (`claimed_from` of run.json); empty: any.",
    "REMOTE_GENERATED.tokens": "int32, one dimension, 1 to `max_new_tokens` ids.",
    "logprobs": "float32, as many: log-probability of each token as it was sampled, at most 0.",
    "versions": "uint32, as many: version of the weights that made each.",
    "REMOTE_GENERATED.text": "The whole completion, special tokens visible, a final end token left out.",
    "prompt_ids": "int32: the prompt as token ids. Needed in segment 0.",
    "finish": "1 = the last token ends the sequence, 2 = a limit cut it.",
    "done": "False: one segment more, and the task is queued again.",
    "REMOTE_JOIN.routes": "True: it sends routes; needed of a rollout in a run with routes.",
    "REMOTE_ROUTED.routes": "The experts of the position before each token, [tokens, layers, experts of a token].",
    "REMOTE_ROUTED.tokens": "int32, one dimension, 1 to `max_new_tokens` ids.",
    "REMOTE_ROUTED.text": "The whole completion, special tokens visible, a final end token left out.",
    "prompt_routes": "Those of the prompt but for its last id, where the task has `routes_from`.",
    "REMOTE_BATCH.routes": "In a run with routes: of each answer these two by name; none of an answer of validation.",
    "GATEWAY_WELCOME.routes": "In a run with routes: layers that have experts, experts of a token, experts.",
    "routes_from": "The position of the first row that `prompt_routes` has to have; left out where none are needed.",
    "REMOTE_REWARDED.reward": "The reward; finite.",
    "parts": "Named parts of the reward, for people; at most 64.",
    "drop": 'Empty: hand it back. Else why the sample ends: `"raised"`, `"hung"`, `"malformed"` (reward), `"prompt"`, '
    '`"too_long"`, `"malformed"` (rollout).',
    "lease_s": "Seconds of silence after which a task goes back.",
    "max_capacity": "Tasks that one worker may hold.",
    "max_message_bytes": "Largest message on this bus.",
    "max_prompt_tokens": "A longer prompt is dropped as `too_long`.",
    "seed": "Seed of the run.",
    "GATEWAY_WELCOME.model": "Folder of the model.",
    "prompt_key": "Key of the prompt in a record.",
    "answer_key": "Key of the reference answer in a record.",
    "template": '`"none"`: the prompt as it stands; `"chat"`: by the model\'s chat template, a text as a user turn, '
    "a list of messages as it is.",
    "GATEWAY_WELCOME.index": "The worker's entry in the ring's process table.",
    "tasks": "The tasks.",
    "code": "The outcome of the request, below.",
    "about": "Name of the request.",
    "GATEWAY_ANSWER.text": "Why, for a person.",
    "REMOTE_BATCH.tasks": "The tasks that these answers are to.",
    "lengths": "Of each answer, its tokens in `tokens`, `logprobs` and `versions`.",
    "prompt_lengths": "Of each answer, its ids in `prompt_ids`.",
    "finishes": "`finish` of each answer.",
    "texts": "`text` of each answer.",
    "rewards": "The reward of each answer; empty where the host does not judge.",
    "steps": "The step of the oldest weights that drew each answer, as the host knows it.",
    "episodes": "Of each answer its tensors by name, as the slot of an episode has them ([page](ring-tensors.md)).",
    "REMOTE_BATCH.parts": "Named parts of each reward; may be empty.",
    "REMOTE_BATCH.prompt_ids": "int32: the prompts of all answers, one behind the other.",
    "REMOTE_BATCH.tokens": "int32: the ids of all answers, one behind the other.",
    "REMOTE_BATCH.capacity": "How many tasks the host wants to hold when these are settled; 0 = this is no claim.",
    "GATEWAY_SETTLED.done": "Tasks whose answers count, now or since an earlier copy.",
    "late": "Tasks that were no longer the host's.",
    "refused": "Tasks that are refused, and are still the host's unless `code` is `not_yours`.",
    "lost": "Tasks of `holding` that the worker no longer holds.",
    "record": "The prompt's JSONL line as it stands.",
    "segment": "Segments that are committed already.",
    "attempt": "Tries since the last committed segment.",
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
    "pid": "Its process id on its host; 0 = unknown.",
    "host": "Name of its host.",
    "index": "Its entry in the ring's process table; 0 = it does not map the ring.",
    "activity": "What it is doing, in words.",
    "control": "Bytes of control.jsonl that the sender has taken up; 0 = none, or it cannot read the file.",
    "id": "Of what is asked: new for each, the same in each repetition.",
    "verb": "`stop`, `pause`, `resume`, `checkpoint`, `set` or `scale`.",
    "key": "`set`: a key of the topology; `scale`: a role.",
    "value": "`set`: as in a topology file; `scale`: a number; `stop`: empty, or `now`.",
    "who": "Who asks, for people: user, pid, program.",
    "proof": "64 hex digits made with control.key; see gateway.md. In the example the key is `0123456789abcdef` four"
    " times.",
    "ok": "Whether it is done; else `text` says why not.",
    "waits": "Processes that have not taken it up yet: ask again.",
    "last_seqs": "Topic -> `msg_seq` of the last message that this sender sent on it.",
    "reason": "Why, in words.",
    "severity": '`"warning"`, `"error"` or `"critical"` (the sender ends); anything else counts as `"warning"`.',
    "where": "The part of the program.",
    "text": "What happened, for a person.",
    "traceback": "Where in the code; may be empty.",
    "token": "Any text; the answer carries the same.",
    "drain_s": "Seconds that the sender will wait before it kills.",
}


def since(message: str, name: str) -> str:
    """The version that brought a field ("" = the envelope); KeyError if no version did."""
    for version, added in HISTORY.items():
        if name in added.get(message, "").split():
            return version
    raise KeyError(f"{message}.{name}")


def message_since(message: str) -> str:
    """The version that brought a message."""
    return next(version for version, added in HISTORY.items() if message in added)


def meaning(message: str, name: str) -> str:
    """The line about a field, "" for `message` = of the envelope; KeyError if there is none."""
    return MEANINGS.get(f"{message}.{name}") or MEANINGS[name]


def topic_form(kind: type[Message]) -> str:
    """The topic as the page shows it: `NAME/`, or `NAME/ADDRESSEE/` for a message to one process."""
    return topic(kind) + ("ADDRESSEE/" if ROUTES[kind].reach is Reach.ONE else "")


def records() -> list[type]:
    """Structs that stand inside messages, in order of first use."""
    found: dict[type, None] = {}
    for kind in ALL:
        for field in described(kind):
            _collect(field.type, found)
    return list(found)


def described(kind: type) -> Sequence[kinds.Field]:
    """The fields of a struct as msgspec sees them."""
    found = kinds.type_info(kind)
    assert isinstance(found, kinds.StructType)
    return found.fields


def fields_of(kind: type[Message]) -> list[str]:
    """The names of a message's own fields, in the order of the struct, without the envelope."""
    return [name for name in kind.__struct_fields__ if name not in Message.__struct_fields__]


# -- what is missing -----


def check() -> list[str]:
    """What is missing or left over, each with its remedy; empty when structs and catalog agree."""
    known = {"": list(Message.__struct_fields__)}
    known |= {record.__name__: [field.name for field in described(record)] for record in records()}
    known |= {name_of(kind): fields_of(kind) for kind in ALL}
    problems = [problem for kind in (*ALL, *records()) for problem in _check_kind(kind)]
    problems += [problem for name, names in known.items() for problem in _check_dates(name, names)]
    problems += [problem for name, names in known.items() for problem in _check_meanings(name, names)]
    return problems + _check_history(known)


def _check_kind(kind: type) -> list[str]:
    problems = []
    if not inspect.cleandoc(kind.__doc__ or ""):
        problems.append(f"{kind.__name__} in busrl/protocol has no docstring; say in a line what it means")
    if issubclass(kind, Message) and kind not in ROUTES:
        problems.append(f"{kind.__name__} has no route; add it to ROUTES in tools/reference/catalog.py")
    return problems


def _check_dates(name: str, names: list[str]) -> list[str]:
    dated = [one for added in HISTORY.values() for one in added.get(name, "").split()]
    missing = " ".join(one for one in names if one not in dated)
    if not missing and any(name in added for added in HISTORY.values()):
        return []
    line = f'"{name}": "{missing}"'
    return [f"{name}: no version brought {missing or 'it'}; add {line} to the newest of HISTORY in catalog.py"]


def _check_meanings(message: str, names: list[str]) -> list[str]:
    return [
        f'{message}.{name} has no meaning; add "{name}" to MEANINGS in tools/reference/catalog.py'
        for name in names
        if f"{message}.{name}" not in MEANINGS and name not in MEANINGS
    ]


def _check_history(known: dict[str, list[str]]) -> list[str]:
    problems: list[str] = []
    seen: set[tuple[str, str]] = set()
    for version, added in HISTORY.items():
        for message, names in added.items():
            for name in names.split():
                place = f"HISTORY[{version!r}] in tools/reference/catalog.py: {message or 'the envelope'}.{name}"
                if (message, name) in seen:
                    problems.append(f"{place} stands there twice; keep the older one")
                seen.add((message, name))
                if name not in known.get(message, []) and (message, name) not in REMOVED:
                    problems.append(f"{place} is in no struct; remove it, or add it to REMOVED if it was ever released")
    return problems


def _collect(kind: kinds.Type, found: dict[type, None]) -> None:
    if isinstance(kind, kinds.StructType):
        found[kind.cls] = None
        for field in kind.fields:
            _collect(field.type, found)
    for name in ("type", "item_type", "value_type"):
        inner = getattr(kind, name, None)
        if isinstance(inner, kinds.Type):
            _collect(inner, found)
    for inner in getattr(kind, "types", ()):
        _collect(inner, found)
