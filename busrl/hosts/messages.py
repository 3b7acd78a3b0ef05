"""Messages between the keeper's gateway and a process that does not map the ring: requests and their answers.

Talks to nothing; `busrl.hosts.desk` decides what a request does. Unlike doorbells these messages carry results, so a
request is sent again until it is answered, and every answer repeats the number of its request.

- Every list, map and name is bounded; prompts and answers are bounded by the size of the message.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType, field

from busrl.protocol.messages import MAX_MAP, MAX_NAME, MAX_TEXT, Count, Counts, Message, Name, Text

TaskId = Annotated[str, Meta(max_length=MAX_NAME)]
TaskIds = Annotated[list[TaskId], Meta(max_length=MAX_MAP)]
Parts = Annotated[dict[Name, float], Meta(max_length=64)]
MOST_PIECES = 16  # tensors of an episode; docs/ring-tensors.md has their names


class Tensor(Struct):
    """An array inside a message: little-endian `data`, C order, `dtype` as in NumPy ("int32", "float32", "uint32").

    Routes may be compressed: with the `dtype` "uint8/zlib" or "uint16/zlib" `data` is what zlib makes of the bytes.
    """

    dtype: Name
    shape: Annotated[list[Count], Meta(max_length=4)]
    data: bytes


Pieces = Annotated[dict[Name, Tensor], Meta(max_length=MOST_PIECES)]
ZIPPED = "/zlib"  # the end of the `dtype` of a compressed tensor
ROUTES_RULE = "join with routes = true, and answer with REMOTE_ROUTED"


class Remote(Message, kw_only=True):
    """Fields of every request to the gateway besides the envelope; never sent by itself.

    `sender` is the worker's name. `life` grows with every start of that name (milliseconds since 1970 do): a newer life
    replaces an older one. `req` is a number of the worker's own choice that the answer repeats.
    """

    life: Count
    req: Count = 0


class RemoteJoin(Remote, tag="REMOTE_JOIN"):
    """A worker of `role` ("rollout", "reward", or "host": another host of the run) joins. Answered by GATEWAY_WELCOME;
    a repetition changes nothing.

    A worker that keeps claims longer than a connection names the `ring` that gave them: it joins no other, in which the
    same names may be others' claims. A rollout that can say which experts a mixture of experts chose has `routes` true:
    a run with routes needs it.
    """

    role: Name
    ring: Name = ""
    routes: bool | UnsetType = UNSET


class RemoteClaim(Remote, tag="REMOTE_CLAIM"):
    """The worker wants to hold `capacity` tasks. `holding` names those that it has: their leases are renewed, and the
    tasks that it holds by the ledger and did not name are sent again. Answered by GATEWAY_TASKS.

    In place of the names it may give their `digest`: blake2b of 8 bytes of each name, little-endian, added up modulo
    2^64. If that is the digest of the tasks that it holds by the ledger, all their leases are renewed. Any other digest
    renews nothing and claims nothing.
    """

    capacity: Count = 1
    holding: TaskIds = field(default_factory=list)
    digest: Count | None = None


class RemoteExtend(Remote, tag="REMOTE_EXTEND"):
    """The worker is still at work on these tasks: their leases are renewed. The answer names the tasks that it has
    lost."""

    holding: TaskIds = field(default_factory=list)


class RemoteGenerated(Remote, tag="REMOTE_GENERATED"):
    """The answer to a rollout task: n tokens int32, their log-probabilities float32, weight versions uint32.

    `prompt_ids` (int32) is needed in segment 0 of a sample. `text` is the whole completion, special tokens visible, a
    final end-of-sequence token left out. `finish` is 1 (the last token ends the sequence) or 2 (a limit cut it). With
    `done` false this is one segment more, and the task is queued again.
    """

    task: TaskId
    tokens: Tensor
    logprobs: Tensor
    versions: Tensor
    text: str = ""
    prompt_ids: Tensor | None = None
    finish: Count = 1
    done: bool = True


class RemoteRouted(RemoteGenerated, kw_only=True, tag="REMOTE_ROUTED"):
    """REMOTE_GENERATED in a run with routes (GATEWAY_WELCOME): with the experts of the position before each token.

    `prompt_routes` are those of the prompt but for its last id, of a call those from position `routes_from` on; needed
    where the task has `routes_from`. Both are [rows, layers, experts of a token], uint8 up to 256 experts, else uint16.
    """

    routes: Tensor
    prompt_routes: Tensor | None = None


class RemoteRewarded(Remote, tag="REMOTE_REWARDED"):
    """The answer to a reward task; `parts` are kept beside the reward, for people."""

    task: TaskId
    reward: float
    parts: Parts = field(default_factory=dict)


class RemoteFail(Remote, tag="REMOTE_FAIL"):
    """The task ends without an answer. `drop` "": it is handed back. Else the sample is given up, because the reward
    function "raised" or "hung", the prompt cannot be rendered ("prompt") or is "too_long", or the sample is "malformed"
    or ended several workers ("poison").
    """

    task: TaskId
    drop: Name = ""
    text: Text = ""


class RemoteBatch(Remote, tag="REMOTE_BATCH"):
    """Whole answers of a host to several tasks: as REMOTE_GENERATED has them, with the answers of all tasks one behind
    the other in each tensor. Each list has an item for each task; `rewards` and `parts` are empty unless the host
    judges too. `steps`: the step that made the oldest weights which drew the answer; needed where the keeper started
    after these weights. Where agents play the samples, `episodes` has the tensors of each sample by name, and the other
    tensors are empty. In a run with routes, `routes` has the tensors `routes` and `prompt_routes` of each answer, none
    where it is one of validation.

    With `capacity` it is a claim too: the host wants to hold so many tasks when these are settled, and gets the new
    ones. Answered by GATEWAY_SETTLED, and then by GATEWAY_TASKS.
    """

    tasks: TaskIds
    lengths: Counts
    prompt_lengths: Counts
    finishes: Counts
    texts: Annotated[list[str], Meta(max_length=MAX_MAP)]
    tokens: Tensor
    logprobs: Tensor
    versions: Tensor
    prompt_ids: Tensor
    rewards: Annotated[list[float], Meta(max_length=MAX_MAP)] = field(default_factory=list)
    parts: Annotated[list[Parts], Meta(max_length=MAX_MAP)] = field(default_factory=list)
    capacity: Count = 0
    steps: Counts = field(default_factory=list)
    episodes: Annotated[list[Pieces], Meta(max_length=MAX_MAP)] = field(default_factory=list)
    routes: Annotated[list[Pieces], Meta(max_length=MAX_MAP)] | UnsetType = UNSET


class RemoteLeave(Remote, tag="REMOTE_LEAVE"):
    """An orderly leave: all tasks of this worker are handed back."""

    reason: Text = ""


# keeper -> remote actor
class GatewayWelcome(Message, tag="GATEWAY_WELCOME"):
    """The worker has joined, as entry `index` of the process table. A claim lasts `lease_s` unless it is extended.
    `routes`: in a run with routes the layers of the model that have experts, the experts of a token, and all experts.
    """

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
    routes: Counts | UnsetType = UNSET


class Task(Struct):
    """A claim. `task` (slot.seq.uid) is its name for good; `record` is the prompt's line of JSON.

    A rollout task has `max_new_tokens` left to generate. If its sample has earlier segments, `segment` is above 0, and
    their tensors come along: prompt_ids, tokens, logprobs, versions. A reward task has these tensors of the whole
    answer, and `completion`. `version` is the newest weight version at the time of the claim. With `segment_tokens` the
    answer is made in segments: one that has not ended after so many tokens is sent with `done` false, and its task is
    queued again. With `kind` "call" it is a model call of an agent: prompt_ids is its only tensor, `record` is empty,
    and the answer has neither text nor prompt_ids. `cls` is 0 for training and 1 for validation. Of the tasks that a
    worker holds and does not run, the one of the highest `priority` comes first, then that of the lowest `admission`.
    In a run with routes `routes_from` is the position of the first row that the answer's `prompt_routes` need to have;
    it is left out where none are needed, as in validation.
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
    kind: Name = ""
    stream: Count = 0
    stop: Annotated[list[Count], Meta(max_length=MAX_MAP)] = field(default_factory=list)
    cls: Count = 0
    priority: int = 0
    admission: Count = 0
    routes_from: Count | UnsetType = UNSET


class GatewayTasks(Message, tag="GATEWAY_TASKS"):
    """Tasks that the worker holds and did not name; an empty list is an answer too. Long lists come in several
    messages. With `differs` the digest of REMOTE_CLAIM was another than home's: if messages on their way do not explain
    it, name the tasks.
    """

    life: Count
    req: Count = 0
    tasks: Annotated[list[Task], Meta(max_length=MAX_MAP)] = field(default_factory=list)
    differs: bool = False


class GatewayAnswer(Message, tag="GATEWAY_ANSWER"):
    """The outcome of the request of type `about`. Codes, and what they ask of the worker:

    "done", "already": the result counts (now, or since an earlier copy). "late": the task is no longer yours, forget
    it. "unknown": join first, then send again. "replaced": a newer life has your name, exit. "refused": the content
    breaks a rule, see `text`; the task is still yours. "not_yours": another worker's task. "malformed", "version": the
    bytes could not be read. "full", "too_large": this run has no room for you. `lost` answers REMOTE_EXTEND.
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


class Refusal(Struct):
    """The reason why one task of a batch is not settled, by the code and text that GATEWAY_ANSWER would have."""

    task: TaskId
    code: Name
    text: Text = ""


class GatewaySettled(Message, tag="GATEWAY_SETTLED"):
    """The outcome of REMOTE_BATCH: tasks whose answers count, now or since an earlier copy (`done`); tasks that were no
    longer the host's (`late`); and those that are refused."""

    life: Count
    req: Count = 0
    done: TaskIds = field(default_factory=list)
    late: TaskIds = field(default_factory=list)
    refused: Annotated[list[Refusal], Meta(max_length=MAX_MAP)] = field(default_factory=list)


# In the order of docs/protocol.md: requests, then answers.
REMOTE: tuple[type[Remote], ...] = (
    RemoteJoin, RemoteClaim, RemoteExtend, RemoteGenerated, RemoteRewarded, RemoteFail, RemoteBatch, RemoteLeave,
    RemoteRouted,
)
MESSAGES: tuple[type[Message], ...] = (*REMOTE, GatewayWelcome, GatewayTasks, GatewayAnswer, GatewaySettled)
# Codes of GATEWAY_ANSWER that a person should look at.
REFUSALS = ("malformed", "version", "oversize", "refused", "not_yours", "full", "too_large")
