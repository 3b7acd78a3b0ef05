"""Every message of the bus, grouped by direction: one flat msgpack map each, with its name in field `type`.

Talks to nothing; the codec turns these into bytes and `topics.py` says where they are sent. Knows nothing of sockets
or of the ring. Who sends what stands in `catalog.py`; docs/protocol.md is made from both.

- A message is a doorbell: it says "look at the ring". Losing, doubling, delaying or reordering any of them makes a
  run slower, never wrong; so no field here is the only copy of anything of value.
- Messages about a slot carry `seq` and `uid` too: a late duplicate may name a slot that has a new trajectory by then.
- `count` is how many slots a coalesced doorbell stands for (the named one is the first of them).
- The envelope (`v`, `sender`, `msg_seq`, `time_ns`) is filled by the endpoint that sends. `msg_seq` counts from 1
  per sender and topic, so that a listener can tell how many it missed.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct, field

from busrl.protocol.version import VERSION

MAX_NAME = 64
MAX_TEXT = 16_384
MAX_MAP = 4_096
MAX_ACTIVITY = 256
MAX_KEY = 256

Name = Annotated[str, Meta(max_length=MAX_NAME)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Count = Annotated[int, Meta(ge=0)]
Key = Annotated[str, Meta(max_length=MAX_KEY)]
Numbers = Annotated[dict[Key, float], Meta(max_length=MAX_MAP)]


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


# scheduler -> actor


class NewTask(Message, tag="NEW_TASK"):
    """Slots are QUEUED and offered to this worker. `prompt` is filled for workers that can not map the ring."""

    worker_id: Name
    slot_id: Count
    seq: Count
    uid: Count
    prompt: str = ""
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
    """The learner took a step: what the scheduler reacts to and a person watches."""

    entropy: float = 0.0
    version: Count = 0
    step: Count = 0
    groups: Count = 0
    reward: float = 0.0
    tokens: Count = 0
    samples: Count = 0
    age_mean: float = 0.0
    metrics: Numbers = field(default_factory=dict)


# learner -> inference


class WeightsPublished(Message, tag="WEIGHTS_PUBLISHED"):
    """Weights `version`, made at `step`, can be fetched by `transport`."""

    version: Count
    step: Count
    transport: Name = "shm"
    nbytes: Count = 0


class WeightsGroup(Message, tag="WEIGHTS_GROUP"):
    """Epoch `epoch` of the broadcast group: who is in it, and the store address where its members meet."""

    epoch: Count
    store: Text
    members: Annotated[list[Name], Meta(max_length=MAX_MAP)] = field(default_factory=list)


# actor -> learner


class WeightsJoin(Message, tag="WEIGHTS_JOIN"):
    """This worker wants to be a member of the weight group; `epoch` is the newest that it knows."""

    worker_id: Name
    epoch: Count = 0


# validator -> everybody


class ValidationStarted(Message, tag="VALIDATION_STARTED"):
    """Round `round` asks `samples` answers of the pinned `version`."""

    round: Count
    version: Count
    samples: Count


class ValidationDone(Message, tag="VALIDATION_DONE"):
    """Round `round` ended; `mixed` says that more than one version answered."""

    round: Count
    version: Count
    samples: Count
    mean: float = 0.0
    mixed: bool = False


# scheduler -> everybody


class SchedulerState(Message, tag="SCHEDULER_STATE"):
    """What the scheduler sees: counts are of groups, `queued` and `free` of slots; `waiting` says for what it waits."""

    draws: Count = 0
    admitted: Count = 0
    open_groups: Count = 0
    queued: Count = 0
    free: Count = 0
    credit: Count = 0
    waiting: Text = ""
    values: Numbers = field(default_factory=dict)


# everybody -> everybody: presence, errors, metrics


class Hello(Message, tag="HELLO"):
    """A process is on the bus; `index` is its entry in the ring's process table (0 = it does not map the ring)."""

    role: Name
    pid: Count = 0
    host: Annotated[str, Meta(max_length=255)] = ""
    index: Count = 0


class Heartbeat(Message, tag="HEARTBEAT"):
    """Still here, doing `activity`. `last_seqs` (topic -> last msg_seq) shows the loss of a topic's newest messages."""

    role: Name = ""
    activity: Annotated[str, Meta(max_length=MAX_ACTIVITY)] = ""
    last_seqs: Annotated[dict[Key, Count], Meta(max_length=MAX_MAP)] = field(default_factory=dict)


class Goodbye(Message, tag="GOODBYE"):
    """An orderly leave."""

    reason: Text = ""


class Error(Message, tag="ERROR"):
    """Something went wrong in the sender; `severity` is "warning", "error" or "critical"."""

    severity: Name
    where: Text = ""
    text: Text = ""
    traceback: Text = ""

    def __post_init__(self) -> None:
        """Cut what is too long for a receiver: the head of a text says most, and the tail of a traceback."""
        self.where, self.text = self.where[:MAX_TEXT], self.text[:MAX_TEXT]
        self.traceback = self.traceback[-MAX_TEXT:]


class Metrics(Message, tag="METRICS"):
    """Named numbers of one process."""

    role: Name = ""
    values: Numbers = field(default_factory=dict)


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


# remote actor -> keeper: a process that does not map the ring works through the keeper's gateway (busrl/gateway)

TaskId = Annotated[str, Meta(max_length=MAX_NAME)]
TaskIds = Annotated[list[TaskId], Meta(max_length=MAX_MAP)]


class Tensor(Struct):
    """An array inside a message: little-endian `data`, C order, `dtype` as in NumPy ("int32", "float32", "uint32")."""

    dtype: Name
    shape: Annotated[list[Count], Meta(max_length=4)]
    data: bytes


class Remote(Message, kw_only=True):
    """What every request to the gateway carries besides the envelope; never sent by itself.

    `sender` is the worker's name. `life` grows with every start of that name (milliseconds since 1970 do): a newer life
    replaces an older one. `req` is a number of the worker's own choice that the answer repeats.
    """

    life: Count
    req: Count = 0


class RemoteJoin(Remote, tag="REMOTE_JOIN"):
    """A worker of `role` ("rollout" or "reward") is here. Answered by GATEWAY_WELCOME; again, it changes nothing."""

    role: Name


class RemoteClaim(Remote, tag="REMOTE_CLAIM"):
    """Fill me up to `capacity` tasks. `holding` names all tasks that I know of: their leases begin anew, and what the
    ledger says I hold beyond them is sent again. Answered by GATEWAY_TASKS.
    """

    capacity: Count = 1
    holding: TaskIds = field(default_factory=list)


class RemoteExtend(Remote, tag="REMOTE_EXTEND"):
    """Still at work on these tasks: their leases begin anew. The answer names those that are lost to this worker."""

    holding: TaskIds = field(default_factory=list)


class RemoteGenerated(Remote, tag="REMOTE_GENERATED"):
    """The answer to a rollout task: n tokens int32, their log-probabilities float32, weight versions uint32.

    `prompt_ids` (int32) is needed in segment 0. `text` is the whole completion, special tokens visible, a final
    end-of-sequence token left out. `finish` is 1 (the last token ends the sequence) or 2 (a limit cut it). With
    `done` false this is one segment more, and the task is queued again.
    """

    task: TaskId
    tokens: Tensor
    logprobs: Tensor
    versions: Tensor
    text: str
    prompt_ids: Tensor | None = None
    finish: Count = 1
    done: bool = True


class RemoteRewarded(Remote, tag="REMOTE_REWARDED"):
    """The answer to a reward task; `parts` are kept beside the reward, for people."""

    task: TaskId
    reward: float
    parts: Annotated[dict[Name, float], Meta(max_length=64)] = field(default_factory=dict)


class RemoteFail(Remote, tag="REMOTE_FAIL"):
    """No answer to this task. `drop` "": hand it back; else give the sample up, because the reward function "raised"
    or "hung", the prompt can not be rendered ("prompt") or is "too_long", or the sample is "malformed".
    """

    task: TaskId
    drop: Name = ""
    text: Text = ""


class RemoteLeave(Remote, tag="REMOTE_LEAVE"):
    """An orderly leave: all that this worker holds is handed back."""

    reason: Text = ""


# keeper -> remote actor


class GatewayWelcome(Message, tag="GATEWAY_WELCOME"):
    """The worker is known, as entry `index` of the process table. A claim lasts `lease_s` unless it is extended."""

    life: Count
    req: Count = 0
    index: Count = 0
    lease_s: float = 0.0
    max_capacity: Count = 0
    max_message_bytes: Count = 0
    max_prompt_tokens: Count = 0
    seed: Count = 0
    model: Text = ""
    prompt_key: Name = ""
    answer_key: Name = ""
    template: Name = ""


class Task(Struct):
    """One claim. `task` (slot.seq.uid) names it for ever; `record` is the prompt's JSONL line as it stands.

    A rollout task has `max_new_tokens` left to generate, and of a sample with earlier segments `segment` > 0 and the
    tensors prompt_ids, tokens, logprobs, versions. A reward task has these tensors of the whole answer, and
    `completion`. `version` is the newest weight version when it was claimed. With `segment_tokens` the answer is made
    in segments: one that is not over after so many tokens is sent with `done` false, and its task is queued again.
    """

    task: TaskId
    slot_id: Count
    seq: Count
    uid: Count
    record: str
    segment: Count = 0
    attempt: Count = 0
    max_new_tokens: Count = 0
    temperature: float = 1.0
    top_p: float = 1.0
    version: Count = 0
    completion: str = ""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    segment_tokens: Count = 0


class GatewayTasks(Message, tag="GATEWAY_TASKS"):
    """Tasks that the worker holds now and did not name; none is an answer too. Long lists come in several messages."""

    life: Count
    req: Count = 0
    tasks: Annotated[list[Task], Meta(max_length=MAX_MAP)] = field(default_factory=list)


class GatewayAnswer(Message, tag="GATEWAY_ANSWER"):
    """What became of the request of type `about`. Codes, and what they ask of the worker:

    "done", "already": it counts (now, or since an earlier copy). "late": the task is no longer yours, forget it.
    "unknown": join first, then send again. "replaced": a newer life has your name, exit. "refused": the content breaks
    a rule, see `text`; the task is still yours. "not_yours": another worker's task. "malformed", "version": the bytes
    could not be read. "full", "too_large": this run has no room for you. `lost` answers REMOTE_EXTEND.
    """

    code: Name
    life: Count = 0
    req: Count = 0
    about: Name = ""
    task: TaskId = ""
    text: Text = ""
    lost: TaskIds = field(default_factory=list)

    def __post_init__(self) -> None:
        """Cut what is too long for a receiver."""
        self.text = self.text[:MAX_TEXT]


REMOTE: tuple[type[Remote], ...] = (
    RemoteJoin,
    RemoteClaim,
    RemoteExtend,
    RemoteGenerated,
    RemoteRewarded,
    RemoteFail,
    RemoteLeave,
)
GATEWAY: tuple[type[Message], ...] = (GatewayWelcome, GatewayTasks, GatewayAnswer)

ALL: tuple[type[Message], ...] = (
    TaskRequest,
    NewTask,
    DataGenerated,
    RewardComputed,
    LearnerStateUpdate,
    WeightsPublished,
    WeightsGroup,
    WeightsJoin,
    ValidationStarted,
    ValidationDone,
    SchedulerState,
    Hello,
    Heartbeat,
    Goodbye,
    Error,
    Metrics,
    Ping,
    Pong,
    Stop,
    *REMOTE,
    *GATEWAY,
)


def name_of(kind: type[Message]) -> str:
    """The wire name of a message class: `name_of(NewTask) == "NEW_TASK"`."""
    tag: Any = kind.__struct_config__.tag
    return str(tag)


BY_NAME: dict[str, type[Message]] = {name_of(kind): kind for kind in ALL}
