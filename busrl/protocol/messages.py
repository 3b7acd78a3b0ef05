"""The envelope of every message, and the messages between processes that map the ring, grouped by direction.

Each is one flat msgpack map with its name in field `type`; the codec turns them into bytes. Talks to nothing, and knows
nothing of sockets or of the ring. Other parts have messages of their own (`codec.ALL`); docs/protocol.md lists the
senders of each.

- A message is a doorbell: it says "look at the ring". Losing, doubling, delaying or reordering any of them makes a
  run slower, never wrong; so no field here is the only copy of anything of value.
- Messages about a slot carry `seq` and `uid` too: a late duplicate may name a slot that has a new trajectory by then.
- `count` is how many slots a coalesced doorbell stands for (the named one is the first of them).
- The envelope (`v`, `sender`, `msg_seq`, `time_ns`) is filled by the endpoint that sends. `msg_seq` counts from 1
  per sender and topic, so that a listener can tell how many it missed.

Rules of evolution, so that old and new programs can share a bus:

- A new field has a default, so that a message without it still decodes.
- A field never changes its type or its meaning, and a removed name is never used again.
- A message type is never renamed, and its topic always follows from its name.
- What cannot be done within these rules raises `VERSION`; a receiver drops and counts messages of another version.
"""

from __future__ import annotations

import hmac
from typing import Annotated, Any, Final

from msgspec import UNSET, Meta, Struct, UnsetType, field

VERSION: Final = 1
MAX_NAME = 64
MAX_TEXT = 16_384
MAX_MAP = 4_096
MAX_ACTIVITY = 256
MAX_KEY = 256
NOTE = "note"  # what is no trouble, but a person should know
SEVERITIES = ("warning", "error", "critical", NOTE)  # of ERROR; any other word counts as the first

Name = Annotated[str, Meta(max_length=MAX_NAME)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Count = Annotated[int, Meta(ge=0)]
Key = Annotated[str, Meta(max_length=MAX_KEY)]
Counts = Annotated[list[Count], Meta(max_length=MAX_MAP)]
Names = Annotated[list[Name], Meta(max_length=MAX_MAP)]
Numbers = Annotated[dict[Key, float], Meta(max_length=MAX_MAP)]
ModelTag = Name | UnsetType  # of a run of several models, the one that a message is about; the lead is left out


class Message(Struct, tag_field="type", kw_only=True, omit_defaults=False):
    """The envelope that every message carries; never sent by itself. The order of a map's keys means nothing."""

    v: int = VERSION
    sender: Name = ""
    msg_seq: Count = 0
    time_ns: Count = 0


# actor -> scheduler
class TaskRequest(Message, tag="TASK_REQUEST"):
    """This worker has room for `capacity` more tasks."""

    worker_id: Name
    capacity: Count = 1
    rows: Count = 0


# scheduler -> actor
class NewTask(Message, tag="NEW_TASK"):
    """Slots are QUEUED and offered to this worker."""

    worker_id: Name
    slot_id: Count
    seq: Count
    uid: Count
    count: Count = 1


# rollout -> reward, scheduler
class DataGenerated(Message, tag="DATA_GENERATED"):
    """Slots hold a finished segment or answer; `status` is "generated", "segment" or "aborted"."""

    slot_id: Count
    seq: Count
    uid: Count
    version: Count = 0
    status: Name = "generated"
    count: Count = 1


# caller -> rollout
class CallCancel(Message, tag="CALL_CANCEL"):
    """Nobody waits for this model call any more. `seq` is that of the claim under which the worker has it."""

    slot_id: Count
    seq: Count
    model: ModelTag = UNSET


# rollout -> caller
class CallTokens(Message, tag="CALL_TOKENS"):
    """The answer to a model call so far, from token number `at` on; the whole of it comes in its slot."""

    slot_id: Count
    seq: Count
    at: Count
    ids: Annotated[list[Count], Meta(max_length=MAX_MAP)] = field(default_factory=list)
    model: ModelTag = UNSET


# rollout -> learner
class ProbeDrawn(Message, tag="PROBE_DRAWN"):
    """Answers that an engine drew for fixed prompts under the weights of `version`, one behind the other; arrays are
    little-endian bytes."""

    worker_id: Name
    version: Count
    lengths: Counts
    prompt_lengths: Counts
    prompt_ids: bytes
    tokens: bytes
    logprobs: bytes
    versions: bytes
    temperatures: Annotated[list[float], Meta(max_length=MAX_MAP)]
    model: ModelTag = UNSET


class ProbeRouted(ProbeDrawn, kw_only=True, tag="PROBE_ROUTED"):
    """PROBE_DRAWN of an engine that says which experts it chose; it comes in its place."""

    routes: bytes


# reward -> learner
class RewardComputed(Message, tag="REWARD_COMPUTED"):
    """Slots are REWARDED; `reward` is that of the named slot."""

    slot_id: Count
    seq: Count
    uid: Count
    reward: float = 0.0
    count: Count = 1


# learner -> everybody
class LearnerStateUpdate(Message, tag="LEARNER_STATE_UPDATE"):
    """The learner took a step: what the scheduler reacts to, and what a person watches."""

    entropy: float = 0.0
    version: Count = 0
    step: Count = 0
    groups: Count = 0
    reward: float = 0.0
    tokens: Count = 0
    samples: Count = 0
    age_mean: float = 0.0
    metrics: Numbers = field(default_factory=dict)
    model: ModelTag = UNSET


# learner -> engines
class WeightsPublished(Message, tag="WEIGHTS_PUBLISHED"):
    """Weights `version`, made at `step`, can be fetched by `transport`."""

    version: Count
    step: Count
    transport: Name = "shm"
    model: ModelTag = UNSET


class WeightsGroup(Message, tag="WEIGHTS_GROUP"):
    """The engines that get weights by broadcast were put into a new group: its `epoch`, and `why` it was formed."""

    epoch: Count
    members: Names = field(default_factory=list)
    why: Text = ""
    model: ModelTag = UNSET


# validator -> everybody
class ValidationStarted(Message, tag="VALIDATION_STARTED"):
    """Round `round` asks `samples` answers of the pinned `version`."""

    round: Count
    version: Count
    samples: Count


class ValidationDone(Message, tag="VALIDATION_DONE"):
    """Round `round` ended; `mixed` says that more than one version answered. With `samples` 0 nothing was measured."""

    round: Count
    version: Count
    samples: Count
    mean: float = 0.0
    mixed: bool = False
    dropped: Count = 0


class ValidationSetDone(Message, tag="VALIDATION_SET_DONE"):
    """Round `round` of the named set ended; `figures` are what its line of validation.jsonl says (val/...)."""

    round: Count
    version: Count
    samples: Count
    mean: float = 0.0
    mixed: bool = False
    set: Name = ""
    figures: Numbers = field(default_factory=dict)
    dropped: Count = 0


# scheduler -> everybody
class SchedulerState(Message, tag="SCHEDULER_STATE"):
    """The scheduler's view: counts are of groups, `queued` and `free` of slots; `waiting` is what it waits for."""

    admitted: Count = 0
    open_groups: Count = 0
    queued: Count = 0
    free: Count = 0
    credit: Count = 0
    waiting: Text = ""
    values: Numbers = field(default_factory=dict)


# everybody -> everybody: presence, errors
class Hello(Message, tag="HELLO"):
    """A process is on the bus; `index` is its entry in the ring's process table (0 = it does not map the ring)."""

    role: Name
    pid: Count = 0
    host: Annotated[str, Meta(max_length=255)] = ""
    index: Count = 0


class Heartbeat(Message, tag="HEARTBEAT"):
    """Still here, doing `activity`. `last_seqs` (topic -> last msg_seq) shows the loss of a topic's newest messages;
    `control` is how many bytes of control.jsonl the sender follows."""

    role: Name = ""
    activity: Annotated[str, Meta(max_length=MAX_ACTIVITY)] = ""
    last_seqs: Annotated[dict[Key, Count], Meta(max_length=MAX_MAP)] = field(default_factory=dict)
    control: Count = 0


class Goodbye(Message, tag="GOODBYE"):
    """An orderly leave."""

    reason: Text = ""


class Error(Message, tag="ERROR"):
    """Something went wrong in the sender; `severity` is "warning", "error", "critical" or "note" (for nothing wrong),
    and anything else counts as "warning"."""

    severity: Name
    where: Text = ""
    text: Text = ""
    traceback: Text = ""

    def __post_init__(self) -> None:
        """Cut what is too long for a receiver: the head of a text says most, and the tail of a traceback."""
        self.where, self.text = self.where[:MAX_TEXT], self.text[:MAX_TEXT]
        self.traceback = self.traceback[-MAX_TEXT:]


class Ping(Message, tag="PING"):
    """Addressed to one endpoint, which answers PONG with the same token. Readiness is a PING to oneself."""

    token: Name


class Pong(Message, tag="PONG"):
    """The answer to a PING."""

    token: Name


# launch -> everybody
class Stop(Message, tag="STOP"):
    """The run ends: finish what is in hand within `drain_s` seconds and exit."""

    reason: Text = ""
    drain_s: float = 0.0


# whoever may read control.key -> launch, and back
class Control(Message, tag="CONTROL"):
    """A request to the run by the program `who`: the `verb`, with its `key` and `value`. Sent until it is answered; a
    request of one `id` is done once. `proof` shows that the sender may ask."""

    id: Name
    verb: Name
    key: Name = ""
    value: Text = ""
    who: Text = ""
    proof: Name = ""

    def proof_with(self, secret: bytes) -> str:
        """HMAC-SHA256 over the other fields, each in UTF-8 and ended by a zero byte, as 64 hex digits."""
        fields = (self.id, self.verb, self.key, self.value, self.who)
        return hmac.new(secret, b"".join(text.encode() + b"\0" for text in fields), "sha256").hexdigest()

    def is_proved(self, secret: bytes) -> bool:
        """Check that the sender had the secret; a zero byte in a field would let two requests have one proof."""
        zero = "\0" in f"{self.id}{self.verb}{self.key}{self.value}{self.who}"
        return not zero and hmac.compare_digest(self.proof.encode(), self.proof_with(secret).encode())


class ControlDone(Message, tag="CONTROL_DONE"):
    """The answer to the CONTROL of this `id`: done if `ok`, else refused, and why; `waits` names the processes that
    have not taken it up yet."""

    id: Name
    ok: bool
    text: Text = ""
    waits: Names = field(default_factory=list)


def name_of(kind: type[Message]) -> str:
    """The wire name of a message class: `name_of(NewTask) == "NEW_TASK"`."""
    tag: Any = kind.__struct_config__.tag
    return str(tag)


CORE: tuple[type[Message], ...] = (  # in the order of docs/protocol.md
    TaskRequest, NewTask, DataGenerated, CallCancel, CallTokens, ProbeDrawn, ProbeRouted, RewardComputed,
    LearnerStateUpdate, WeightsPublished, WeightsGroup, ValidationStarted, ValidationDone, ValidationSetDone,
    SchedulerState, Hello, Heartbeat, Goodbye, Error, Ping, Pong, Stop, Control, ControlDone,
)
OF_ONE_MODEL = (ProbeDrawn, ProbeRouted, LearnerStateUpdate, WeightsPublished, WeightsGroup)  # sent to everybody
# Messages that only one process sends, of a run or of a model. Names are not proved: this stops mistakes, not malice.
ONLY_FROM: dict[type[Message], str] = {
    LearnerStateUpdate: "learner", SchedulerState: "scheduler", Stop: "launch", ControlDone: "launch",
    **dict.fromkeys((ValidationStarted, ValidationDone, ValidationSetDone), "validator"),
}


def is_from_another(message: Message) -> bool:
    """Tell whether this message came from a process that does not send its kind."""
    only = ONLY_FROM.get(type(message))
    if only is None:  # most messages
        return False
    model = model_of(message)
    return message.sender != (f"{only}-{model}" if model else only)


def model_of(message: Message) -> str:
    """The model that a message is about; empty for the lead."""
    return getattr(message, "model", UNSET) or ""


def of_model(tag: str) -> ModelTag:
    """The field `model` of a message; `tag` is empty for the lead."""
    return tag or UNSET


def is_of_another_model(message: Message, tag: str) -> bool:
    """Tell whether a message to everybody is about another model than that of `tag`, empty for the lead."""
    return isinstance(message, OF_ONE_MODEL) and model_of(message) != tag
