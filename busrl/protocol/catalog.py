"""What the structs of the messages do not say: who sends and hears each, to whom it is addressed, since when.

Read by `reference.py` (the tables of docs/protocol.md) and by the tests; knows nothing of sockets. A message or a field
that stands in `messages.py` but not here makes `check` fail, and says what to add.

- Every message has one `Route`.
- Every field stands in exactly one version of `HISTORY`. A removed name stays there, so that it is never used again.
"""

from __future__ import annotations

import enum
import inspect
from dataclasses import dataclass
from typing import Final

from busrl.protocol import messages as m
from busrl.protocol.messages import ALL, Message, name_of
from busrl.protocol.topics import topic


class Reach(enum.Enum):
    """How far one message goes; the value is how the page says it."""

    ALL = "everybody"
    ONE = "one process"


@dataclass(frozen=True)
class Route:
    """`sent_by` and `read_by` in words; empty means: by nobody in this version."""

    sent_by: str
    read_by: str
    reach: Reach = Reach.ALL


ROUTES: Final[dict[type[Message], Route]] = {
    m.TaskRequest: Route("rollout", "scheduler"),
    m.NewTask: Route("scheduler", "the worker named in the topic", Reach.ONE),
    m.DataGenerated: Route("rollout", "reward"),
    m.RewardComputed: Route("reward", "monitors (the learner is woken by the ring)"),
    m.LearnerStateUpdate: Route("learner", "scheduler, launch, monitors"),
    m.WeightsPublished: Route("learner", "monitors (engines look at the ring's header)"),
    m.WeightsGroup: Route("", ""),
    m.WeightsJoin: Route("", ""),
    m.ValidationStarted: Route("validator", "launch, monitors"),
    m.ValidationDone: Route("validator", "launch, monitors"),
    m.SchedulerState: Route("scheduler", "launch, monitors"),
    m.Hello: Route("everybody", "launch, monitors"),
    m.Heartbeat: Route("everybody", "monitors"),
    m.Goodbye: Route("everybody", "monitors"),
    m.Error: Route("everybody", "launch, monitors"),
    m.Metrics: Route("", "monitors"),
    m.Ping: Route("everybody", "the process named in the topic", Reach.ONE),
    m.Pong: Route("everybody", "the sender of the PING", Reach.ONE),
    m.Stop: Route("launch", "everybody"),
}

# Version of the protocol -> message -> the fields that it brought. The first number is `v` of the envelope; the second
# counts additions, which need no new `v`. "" is the envelope.
HISTORY: Final[dict[str, dict[str, str]]] = {
    "1.0": {
        "": "v sender msg_seq time_ns",
        "TASK_REQUEST": "worker_id capacity",
        "NEW_TASK": "worker_id slot_id seq uid prompt count",
        "DATA_GENERATED": "slot_id seq uid version status count",
        "REWARD_COMPUTED": "slot_id seq uid reward count",
        "LEARNER_STATE_UPDATE": "entropy version step groups reward tokens samples age_mean metrics",
        "WEIGHTS_PUBLISHED": "version step transport nbytes",
        "WEIGHTS_GROUP": "epoch store members",
        "WEIGHTS_JOIN": "worker_id epoch",
        "VALIDATION_STARTED": "round version samples",
        "VALIDATION_DONE": "round version samples mean mixed",
        "SCHEDULER_STATE": "draws admitted open_groups queued free credit waiting values",
        "HELLO": "role pid host index",
        "HEARTBEAT": "role activity last_seqs",
        "GOODBYE": "reason",
        "ERROR": "severity where text traceback",
        "METRICS": "role values",
        "PING": "token",
        "PONG": "token",
        "STOP": "reason drain_s",
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


def check() -> list[str]:
    """What is missing or left over, each with its remedy; empty when structs and catalog agree."""
    problems = [problem for kind in ALL for problem in _check_kind(kind)]
    known = {name_of(kind): set(fields_of(kind)) for kind in ALL} | {"": set(Message.__struct_fields__)}
    seen: set[tuple[str, str]] = set()
    for version, added in HISTORY.items():
        for message, names in added.items():
            for name in names.split():
                place = f"HISTORY[{version!r}] in busrl/protocol/catalog.py: {message or 'the envelope'}.{name}"
                if (message, name) in seen:
                    problems.append(f"{place} stands there twice; keep the older one")
                seen.add((message, name))
                if name not in known.get(message, set()) and (message, name) not in REMOVED:
                    problems.append(f"{place} is in no struct; remove it, or add it to REMOVED if it was ever released")
    return problems


def fields_of(kind: type[Message]) -> list[str]:
    """The names of a message's own fields, in the order of the struct, without the envelope."""
    return [name for name in kind.__struct_fields__ if name not in Message.__struct_fields__]


def _check_kind(kind: type[Message]) -> list[str]:
    name, problems = name_of(kind), []
    if not inspect.cleandoc(kind.__doc__ or ""):
        problems.append(f"{kind.__name__} in busrl/protocol/messages.py has no docstring; say in a line what it means")
    if kind not in ROUTES:
        problems.append(f"{name} has no route; add {kind.__name__} to ROUTES in busrl/protocol/catalog.py")
    missing = [field for field in fields_of(kind) if not _dated(name, field)]
    if missing or not any(name in added for added in HISTORY.values()):
        problems.append(
            f"{name}: no version brought {' '.join(missing) or 'it'}; add "
            f'"{name}": "{" ".join(missing)}" to the newest version of HISTORY in busrl/protocol/catalog.py'
        )
    return problems


def _dated(message: str, name: str) -> bool:
    return any(name in added.get(message, "").split() for added in HISTORY.values())
