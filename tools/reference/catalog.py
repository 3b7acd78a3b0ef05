"""What the structs of the messages do not say: sender and readers of each, its reach, its first version.

Read by `protocol_page` (the tables of docs/protocol.md and messages.md) and by the tests; knows nothing of sockets. A
message or field that is in the codec's `ALL` but not here makes `check` fail, which names what to add.

- Every message has one `Route`.
- Every field stands in exactly one version of `HISTORY`. A removed name stays there, so that it is never used again.
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
    g.RemoteRewarded: Route("remote reward", "keeper"),
    g.RemoteFail: Route("remote worker", "keeper"),
    g.RemoteBatch: Route("another host", "keeper"),
    g.RemoteLeave: Route("remote worker", "keeper"),
    g.GatewayWelcome: Route("keeper", "the sender of REMOTE_JOIN", Reach.ONE),
    g.GatewayTasks: Route("keeper", "the sender of REMOTE_CLAIM", Reach.ONE),
    g.GatewayAnswer: Route("keeper", "the sender of the request", Reach.ONE),
    g.GatewaySettled: Route("keeper", "the sender of REMOTE_BATCH", Reach.ONE),
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
    },
}
REMOVED: Final[frozenset[tuple[str, str]]] = frozenset()  # (message, field) that HISTORY keeps although they are gone


def since(message: str, name: str) -> str:
    """The version that brought a field ("" = the envelope); KeyError if no version did."""
    for version, added in HISTORY.items():
        if name in added.get(message, "").split():
            return version
    raise KeyError(f"{message}.{name}")


def message_since(message: str) -> str:
    """The version that brought a message."""
    return next(version for version, added in HISTORY.items() if message in added)


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
